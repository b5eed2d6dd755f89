"""A bit flipped, a byte cut or added, a file missing or exchanged, in each file of a checkpoint: found, every time."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpoints import Run, flip_bit, steps_of, whole
from trainer.config.train import ResumeConfig
from trainer.core.log import logger
from trainer.errors import CheckpointError, CorruptCheckpoint

FILES = ("manifest.json", "metadata.json", "rank_00000.safetensors")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "first bit": lambda path: flip_bit(path, 0),
    "last bit": lambda path: flip_bit(path, path.stat().st_size - 1, 7),
    "middle bit": lambda path: flip_bit(path, path.stat().st_size // 2, 3),
    "one byte cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "of another step": lambda path: shutil.copyfile(path.parent.with_name("step_00000004") / path.name, path),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A run with the steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("written") / "run"
    run = Run(run_dir)
    for _ in range(2):
        run.train(4)
        run.save()
    return run_dir


@pytest.fixture(scope="module")
def at_4(written) -> dict[str, bytes]:
    run = Run(written.with_name("at_4"), seed=1)
    run.resume(dir=str(written / "checkpoints/step_00000004"))
    return whole(run.app.state_dict())


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_e2_damage_is_found_and_the_checkpoint_before_is_taken(tmp_path, written, at_4, file, damage):
    run_dir = shutil.copytree(written, tmp_path / "run")
    DAMAGES[damage](run_dir / "checkpoints/step_00000008" / file)
    for explicit in ({"step": 8}, {"dir": str(run_dir / "checkpoints/step_00000008")}):
        # A manifest of another step does not fit the directory's name, or else the files that it lists.
        named = "step_00000008" if (file, damage) == ("manifest.json", "of another step") else file
        with pytest.raises(CheckpointError, match=named) as failure:  # without a manifest it is incomplete
            Run(run_dir, seed=2).resume(**explicit)
        assert damage == "missing" or isinstance(failure.value, CorruptCheckpoint)
    lines = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    try:
        run = Run(run_dir, seed=2)
        assert run.resume() == 4
    finally:
        logger.remove(sink)
    assert any("step_00000008" in line and file in line for line in lines)
    assert whole(run.app.state_dict()) == at_4
    assert steps_of(run_dir) == [4]
    run.train(4)
    run.save()
    assert steps_of(run_dir) == [4, 8]


def positions(path: Path, most: int) -> list[int]:
    size = path.stat().st_size
    return list(range(size)) if size <= most else sorted(random.Random(0).sample(range(size), most))


def check_flips(written: Path, place: Path, most: int) -> int:
    """Flips one bit at up to `most` bytes of each file, one at a time; returns how many. Each must be found."""
    run_dir = shutil.copytree(written, place / "run")
    run, directory, count = Run(run_dir, seed=2), run_dir / "checkpoints/step_00000008", 0
    for file in FILES:
        for position in positions(directory / file, most):
            bit = (position * 5 + position // 8) % 8
            flip_bit(directory / file, position, bit)
            with pytest.raises(CheckpointError, match=file):
                run.manager.resume(ResumeConfig(step=8))
                pytest.fail(f"bit {bit} of byte {position} of {file} was flipped unseen")
            flip_bit(directory / file, position, bit)
            count += 1
    run.manager.resume(ResumeConfig(step=8))
    return count


def test_flipped_bits_anywhere_are_found(written, tmp_path):
    check_flips(written, tmp_path, 40)


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte_is_found(written, tmp_path, capsys):
    count = check_flips(written, tmp_path, 10**6)
    with capsys.disabled():
        print(f"\n{count} flipped bits, all found")


def test_without_checksums_only_sizes_are_compared(written, tmp_path):
    """What `ckpt.verify = "size"` is, and that it is the checksum which finds the bit."""
    run_dir = shutil.copytree(written, tmp_path / "run")
    shard = run_dir / "checkpoints/step_00000008/rank_00000.safetensors"
    flip_bit(shard, 4096 + 5)  # in a weight
    assert Run(run_dir, verify="size").resume(step=8) == 8
    with pytest.raises(CorruptCheckpoint, match="rank_00000.safetensors has checksum"):
        Run(run_dir).resume(step=8)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match="rank_00000.safetensors has"):
        Run(run_dir, verify="size").resume(step=8)


def test_the_files_are_read_once(written, tmp_path, monkeypatch):
    """Checksums are taken while the tensors are read: no byte of a shard is asked for twice but those of the JSON."""
    import os

    run_dir, read = shutil.copytree(written, tmp_path / "run"), 0
    preadv = os.preadv

    def counted(fd, views, position):
        nonlocal read
        count = preadv(fd, views, position)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    run = Run(run_dir, seed=2)
    run.resume(step=8)
    directory = run_dir / "checkpoints/step_00000008"
    json_bytes = run.app.state_dict()["json"].numel()
    size = (directory / "rank_00000.safetensors").stat().st_size
    assert size <= read - (directory / "metadata.json").stat().st_size <= size + json_bytes


def test_owners_get_nothing_of_a_damaged_checkpoint(written, tmp_path):
    """Counters and group entries stay; tensors are overwritten, which is why only another load can follow."""
    run_dir = shutil.copytree(written, tmp_path / "run")
    shard = run_dir / "checkpoints/step_00000008/rank_00000.safetensors"
    flip_bit(shard, 4096 + 5)
    run = Run(run_dir, seed=2)
    checkpoint = run.manager.choose(ResumeConfig(step=8))
    assert checkpoint is not None
    with pytest.raises(CorruptCheckpoint):
        run.manager.load(checkpoint)
    assert run.step == 0
    assert steps_of(run_dir) == [4, 8]  # and nothing was set aside
