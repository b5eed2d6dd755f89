"""Random numbers of the forward pass over resumes: dropout, and a loss that draws from all three generators."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from support.runs import REPO, checkpoint, differences, metrics, opened, samples, sft
from trainer.checkpoint.tables import read_tables
from trainer.train.cross_entropy import cross_entropy
from trainer.train.loop import fit

TINY = REPO / "configs/debug/assets/tiny-llama"

# Ten batches of two documents in an epoch, and a validation at its end.
FLAGS = ["--model.impl", "hf", "--data.sources=[]", "--data.fake.vocab-size=384", "--data.fake.documents=20"]
FLAGS += ["--data.val-documents=0", "--data.batch-size=2", "--data.micro-batch-size=1", "--data.no-pack"]
FLAGS += ["--val.interval=10", "--ckpt.interval=0", "--max-steps=14", "--scheduler.warmup-steps=0", "--log.level=error"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny model of the debug config with dropout."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return directory


@pytest.mark.parametrize("world_size", [1, 2])
def test_d11_losses_are_bit_equal_after_a_save_in_and_at_the_end_of_an_epoch(model, world_size, tmp_path):
    flags = [*FLAGS, "--model.name", str(model)]
    whole, run_dir, dry = tmp_path / "whole", tmp_path / "run", tmp_path / "dry"
    sft(whole, *flags, world_size=world_size)
    for stop in (7, 10, 14):
        random.seed(stop), np.random.seed(stop)  # what the process did before is of no account
        sft(run_dir, *flags, "--stop-step", str(stop), "--resume.if-exists", world_size=world_size)
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)
    assert differences(checkpoint(run_dir, 14), checkpoint(whole, 14)) == ""
    if world_size == 1:
        sft(dry, *FLAGS, "--model.name", str(TINY), "--max-steps", "1")
        assert metrics(dry)[1]["loss"] != metrics(whole)[1]["loss"]  # there is dropout in it


def test_d11_draws_from_all_three_generators_are_those_of_the_run_that_never_stopped(tmp_path):
    """A loss that reads Python's, numpy's and torch's default generators; saved within an epoch and at its end."""
    seen: list[tuple[float, ...]] = []

    def noisy(model, micro_batch):
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        if torch.is_grad_enabled():
            seen.append(draws)
        return cross_entropy(model, micro_batch) * (1 + sum(draws))

    def train(run_dir: Path, *flags: str) -> None:
        with opened(run_dir, *FLAGS, "--model.impl", "native", *flags, loss=noisy) as run:
            fit(run)

    train(tmp_path / "whole")
    expected = seen.copy()
    seen.clear()
    for stop in (7, 10, 14):
        random.seed(stop), np.random.seed(stop), torch.manual_seed(stop)
        train(tmp_path / "run", "--stop-step", str(stop), "--resume.if-exists")
    assert seen == expected and len({draw for draws in seen for draw in draws}) == 3 * len(seen) == 3 * 28
    losses = [[row["loss"] for row in metrics(tmp_path / name) if row["step"]] for name in ("whole", "run")]
    assert losses[0] == losses[1]
    assert differences(checkpoint(tmp_path / "run", 14), checkpoint(tmp_path / "whole", 14)) == ""


def test_d12_no_state_of_a_generator_has_to_be_read_back(model, tmp_path):
    """Draws are addressed by seed, step, micro-step and rank: a checkpoint holds nothing that a loader could refuse or skip."""
    sft(tmp_path / "run", *FLAGS, "--model.name", str(model), "--max-steps", "1")
    directory = checkpoint(tmp_path / "run", 1)
    layout, leaves = read_tables(directory)
    assert set(leaves) == {"model", "optimizer", "schedule", "progress", "data"}
    assert not [name for name in [*layout, *leaves["progress"], *leaves["data"]] if "rng" in name or "random" in name]
