"""optim.on_nonfinite: a step whose gradient is NaN never reaches a checkpoint, whether it is left out or ends the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.runs import checkpoint, differences, metrics, opened, sft
from trainer.errors import TrainingError
from trainer.optim.offload.base import named_parameters
from trainer.train.cross_entropy import cross_entropy
from trainer.train.loop import fit, take_step

MODES = ("none", "optimizer", "full")
FLAGS = ("--val.interval", "0", "--max-steps", "5", "--ckpt.interval", "0", "--ckpt.at", "2")
BAD, MICRO_STEPS = 3, 4


def poisoned() -> Any:
    """The loss; NaN in one micro-step of step 3."""
    calls = 0

    def loss(model: Any, micro_batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return cross_entropy(model, micro_batch) * (float("nan") if calls == BAD * MICRO_STEPS - 1 else 1.0)

    return loss


def everything(run: Any) -> dict[str, torch.Tensor]:
    named = named_parameters(run.optimizer)
    found = {name: parameter.detach().clone() for name, parameter in named.items()}
    for name, parameter in named.items():
        found |= {f"{name}.{key}": value.clone() for key, value in run.optimizer.state[parameter].items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("max_norm", ["1.0", "none"])
def test_a_skipped_step_changes_counters_and_lr_alone(max_norm, optimizer, tmp_path):
    """The same in all modes; without clipping the update must not have begun before the whole gradient is known."""
    ends = []
    for mode in MODES:
        flags = (*FLAGS, "--model.offload", mode, "--optim.max-norm", max_norm, "--optim.type", optimizer)
        with opened(tmp_path / mode, *flags, "--optim.on-nonfinite", "skip", loss=poisoned()) as run:
            for step in range(1, 6):
                before = everything(run)
                row = take_step(run, run.loader.next_batch())
                assert same(everything(run), before) == (step == BAD)
                assert (row["loss"] == row["loss"]) == (step != BAD)
            assert (run.progress.step, run.progress.skipped_updates) == (5, 1)
            assert [group["lr"] for group in run.optimizer.param_groups] == [
                group["initial_lr"] * run.schedule.schedule.factor(5) for group in run.optimizer.param_groups
            ]
            ends.append(everything(run))
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


@pytest.mark.parametrize("max_norm", ["1.0", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_names_what_is_left_and_the_last_checkpoint_goes_on(mode, max_norm, tmp_path):
    """Mode "full" without clipping updates in the backward pass: its weights are lost then, and cannot be saved."""
    flags = (*FLAGS, "--model.offload", mode, "--optim.max-norm", max_norm)
    run_dir: Path = tmp_path / "run"
    is_lost = mode == "full" and max_norm == "none"
    with opened(run_dir, *flags, loss=poisoned()) as run:
        with pytest.raises(TrainingError, match="step 3: .*weights are " + ("lost" if is_lost else "those of step 2")):
            fit(run)
        if is_lost:
            with pytest.raises(TrainingError, match="go on from a checkpoint"):
                run.checkpoints.app.state_dict()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_00000002"]
    sft(tmp_path / "whole", *flags)
    sft(run_dir, *flags, "--resume")
    assert metrics(run_dir) == metrics(tmp_path / "whole")
    assert differences(checkpoint(tmp_path / "whole", 5), checkpoint(run_dir, 5)) == ""
