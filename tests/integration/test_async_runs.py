"""Real runs that save beside the training: the bytes of the moment of the call, in every offload mode."""

import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.runs import checkpoint, differences, metrics, read, sft
from support.stops import stopped
from trainer.checkpoint.manifest import read_manifest
from trainer.core.files import file_hook
from trainer.core.signals import Requests

FLAGS = ["--max-steps", "6", "--ckpt.interval", "2", "--val.interval", "0", "--ckpt.no-export-weights"]
OPTIMIZERS = {"adamw": [], "muon": ["--optim.type", "muon", "--optim.lr", "0.02", "--optim.adamw-lr", "3e-3"]}


def held_until_the_next_step(run_dir: Path, held: list[int], last_step: int = 6):
    """A file hook: nothing of a save is written before the step after it has been trained, and its row is there."""

    def hook(operation: str, path: Path) -> None:
        match = re.fullmatch(r"step_(\d+)\.tmp-.*", path.name)
        if operation != "mkdir" or match is None or int(match[1]) == last_step:
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


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
def test_e3_the_gradients_of_a_cycle_are_those_of_the_call(mode, tmp_path):
    """Saved after two of four micro-steps while the other two, the update and the next step go on."""
    flags = ("--ckpt.async", "--ckpt.on-signal", "now", "--model.offload", mode, "--ckpt.interval", "0")
    whole, run_dir, fork, held = tmp_path / "whole", tmp_path / "run", tmp_path / "fork", []
    assert stopped(whole, *flags) == 0
    with file_hook(held_until_the_next_step(run_dir, held, last_step=4)):
        assert stopped(run_dir, *flags, plan=[("train", 6, "SIGUSR1")]) == 0
    assert held == [1]
    assert read_manifest(checkpoint(run_dir, 1)).micro_step == 2
    assert stopped(fork, *flags, "--resume.dir", checkpoint(run_dir, 1)) == 0
    for other in (run_dir, fork):
        assert differences(checkpoint(whole, 4), checkpoint(other, 4)) == ""
    assert metrics(fork) == metrics(whole)[2:]


def test_the_last_save_before_a_stop_is_written_within_what_the_grace_period_waits_for(tmp_path, monkeypatch):
    """The end of the grace period waits for a save in the foreground; so it must for one that nothing goes on beside."""
    run_dir, events, saved = tmp_path / "run", [], threading.Event()
    saving = Requests.saving

    @contextmanager
    def noted(self):
        saved.clear()
        events.append("saving")
        with saving(self):
            yield
        events.append("saved")
        saved.set()

    def hook(operation: str, path: Path) -> None:
        if operation == "mkdir" and ".tmp-" in path.name:
            saved.wait(0.5)  # a disk that is slower than the way out
        if operation == "rename" and path.name.startswith("step_"):
            events.append("committed")

    monkeypatch.setattr(Requests, "saving", noted)
    flags = ("--ckpt.async", "--ckpt.interval", "0")
    with file_hook(hook):
        assert stopped(run_dir, *flags, plan=[("train", 6, "SIGTERM")]) == 143
    assert events == ["saving", "committed", "saved"]
