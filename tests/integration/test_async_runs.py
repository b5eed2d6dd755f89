"""Real runs that save beside the training: the bytes of the moment of the call, in every offload mode."""

import re
import time
from pathlib import Path

import pytest

from support.runs import checkpoint, differences, metrics, read, sft
from trainer.core.files import file_hook

FLAGS = ["--max-steps", "6", "--ckpt.interval", "2", "--val.interval", "0", "--ckpt.no-export-weights"]
OPTIMIZERS = {"adamw": [], "muon": ["--optim.type", "muon", "--optim.lr", "0.02", "--optim.adamw-lr", "3e-3"]}


def held_until_the_next_step(run_dir: Path, held: list[int]):
    """A file hook: nothing of a save is written before the step after it has been trained, and its row is there."""

    def hook(operation: str, path: Path) -> None:
        match = re.fullmatch(r"step_(\d+)\.tmp-.*", path.name)
        if operation != "mkdir" or match is None or int(match[1]) == 6:
            return
        deadline = time.monotonic() + 60
        while read(run_dir / "metrics.jsonl")[-1]["step"] <= int(match[1]):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        held.append(int(match[1]))

    return hook


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_e3_what_is_written_is_the_state_of_the_call(optimizer, mode, tmp_path):
    flags = [*FLAGS, *OPTIMIZERS[optimizer], "--model.offload", mode]
    waiting, beside, held = tmp_path / "waiting", tmp_path / "beside", []
    sft(waiting, *flags)
    with file_hook(held_until_the_next_step(beside, held)):
        sft(beside, *flags, "--ckpt.async")
    assert held == [2, 4]
    for step in (2, 4, 6):
        assert differences(checkpoint(waiting, step), checkpoint(beside, step)) == ""
    assert "model" in differences(checkpoint(beside, 2), checkpoint(beside, 4))
    assert metrics(waiting) == metrics(beside)
