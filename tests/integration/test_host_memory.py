"""Host memory of a run belongs to that run: neither a later one nor a second try at a checkpoint finds it taken."""

import gc

import pytest

from support.runs import checkpoint, opened, sft
from trainer.optim.offload.base import OffloadOptimizer


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), OffloadOptimizer) for thing in gc.get_objects())


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_a_run_that_has_ended_and_a_try_that_failed_leave_none_behind(mode, tmp_path):
    flags = ("--model.offload", mode)
    before = alive()
    sft(tmp_path / "run", *flags, "--ckpt.interval", "2", "--stop-step", "4")
    assert alive() == before
    shard = next(checkpoint(tmp_path / "run", 4).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with opened(tmp_path / "run", *flags, "--resume") as run:
        assert run.progress.step == 2  # the damaged one was built for first
        assert alive() == before + 1
        del run
    assert alive() == before
