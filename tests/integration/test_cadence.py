"""When a run saves: by step, by micro-step, at named steps, at its end; on data with a known number of batches."""

import os
from pathlib import Path

import pytest

from support.runs import DEBUG, REPO, checkpoint, differences, metrics, samples, sft

FAKE = ["--data.sources=[]", "--data.val-documents=0", "--data.fake.vocab-size=384", "--data.no-pack"]
FAKE += ["--val.interval=0", "--ckpt.interval=0"]


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir() if path.name != "superseded")


TEN = [*FAKE, "--data.fake.documents=10", "--data.batch-size=4", "--data.micro-batch-size=1", "--max-steps=6"]
"""Ten micro-batches in an epoch, four in a cycle."""


def test_c1_the_arithmetic_is_that_of_the_loader(tmp_path):
    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.sft.loss import cross_entropy
    from trainer.sft.supply import supply
    from trainer.train import setup

    os.chdir(REPO)
    for epoch_end, expected in (("flush", [4, 8, 10, 14, 18, 20]), ("carry", [4, 8, 12, 16, 20, 24])):
        argv = [*DEBUG, *TEN, "--data.epoch-end", epoch_end, "--output-dir", str(tmp_path / epoch_end)]
        with setup.start(load_config(SFTConfig, argv), supply(cross_entropy)) as run:
            done = [len(run.loader.next_batch().micro_batches) for _ in expected]
            assert [sum(done[: step + 1]) for step in range(6)] == expected
            assert [run.boundaries.after(step) for step in range(1, 7)] == expected


@pytest.mark.parametrize("epoch_end, saved", [("flush", [2, 3, 5, 6]), ("carry", [2, 3, 4, 5])])
def test_c1_micro_interval(epoch_end, saved, tmp_path):
    """Requests at micro-steps 5, 10, 15, 20: served at 8, 10, 18, 20 with flush, at 8, 12, 16, 20 with carry."""
    run_dir = tmp_path / "run"
    sft(run_dir, *TEN, "--data.epoch-end", epoch_end, "--ckpt.micro-interval", "5", "--ckpt.no-at-end")
    assert steps(run_dir) == saved


def test_named_steps_and_time(tmp_path):
    sft(tmp_path / "at", *TEN, "--ckpt.at", "2,3", "--ckpt.no-at-end")
    assert steps(tmp_path / "at") == [2, 3]
    sft(tmp_path / "minutes", *TEN, "--ckpt.minutes", "1e-9", "--ckpt.no-at-end")
    assert steps(tmp_path / "minutes") == [0, 1, 2, 3, 4, 5, 6]


def test_e13_the_last_step_is_saved_once(tmp_path):
    """interval 4, 15 steps, 10 batches in an epoch; resumed from 12; then extended to 20."""
    flags = [*FAKE, "--data.fake.documents=20", "--data.batch-size=2", "--ckpt.interval=4", "--scheduler.type=constant"]
    whole, run_dir, fork = tmp_path / "whole", tmp_path / "run", tmp_path / "fork"
    sft(whole, *flags, "--max-steps=20")
    sft(run_dir, *flags, "--max-steps=15")
    assert steps(run_dir) == [4, 8, 12, 15]
    sft(fork, *flags, "--max-steps=15", "--resume.dir", checkpoint(run_dir, 12))
    assert steps(fork) == [15]
    sft(run_dir, *flags, "--max-steps=20", "--resume")
    assert steps(run_dir) == [4, 8, 12, 15, 16, 20]
    assert samples(run_dir) == samples(whole)
    epoch = [ids for step, ids in samples(run_dir).items() if 10 < step <= 20]
    assert samples(run_dir)[16] == epoch[5]
    assert len({name for rows in epoch for row in rows for name in row}) == 20  # the second epoch, each once
    assert metrics(run_dir)[-1] == metrics(whole)[-1]
    assert "schedule" in differences(checkpoint(whole, 20), checkpoint(run_dir, 20))  # only its horizon, 15
