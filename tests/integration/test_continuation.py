"""The continuation matrix: optimizer x schedule x offload x save point x accumulation x packing x mode after the resume.

Run A goes through. Run B stops after the save and goes on from the checkpoint, under the same or another offload mode; every
later metrics row and the final checkpoint (weights, optimizer state, groups, counters, cursor) are compared bit for bit.
"""

import itertools
from pathlib import Path

import pytest

from support.runs import checkpoint, differences, metrics, sft

STEPS = 8
OPTIMIZERS = {
    "adamw": ["--optim.lr", "3e-3"],
    "muon": ["--optim.type", "muon", "--optim.lr", "0.02", "--optim.adamw-lr", "3e-3"],
    "sgd": ["--optim.type", "sgd", "--optim.lr", "0.1", "--optim.momentum", "0.9"],
}
SCHEDULES = {
    "constant": ["--scheduler.type", "constant", "--scheduler.warmup-steps", "0"],
    "warmup": ["--scheduler.warmup-steps", "4", "--scheduler.decay-steps", "0"],
    "wsd": ["--scheduler.warmup-steps", "2", "--scheduler.decay-steps", "3"],
    "cosine": ["--scheduler.type", "cosine", "--scheduler.warmup-steps", "2"],
}
MODES = ("none", "optimizer", "full")
AXES = {
    "optimizer": tuple(OPTIMIZERS),
    "schedule": tuple(SCHEDULES),
    "offload": MODES,
    "after": MODES,
    "save": (1, 3, 6),
    "micro": (8, 2),  # accumulation 1 and 4
    "pack": (True, False),
}


def pairwise(axes: dict[str, tuple]) -> list[dict]:
    """Few combinations in which every pair of values of two axes occurs; greedy, always the same."""
    names = list(axes)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(axes[a], axes[b])
    }
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    chosen = []

    def covers(case: dict) -> set:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    while missing:
        best = max(everything, key=lambda case: len(covers(case) & missing))
        chosen.append(best)
        missing -= covers(best)
    return chosen


def flags(case: dict, mode: str) -> list[str]:
    return [
        *("--max-steps", str(STEPS), "--ckpt.interval", "0", "--val.interval", "0", "--no-ckpt.export-weights"),
        *OPTIMIZERS[case["optimizer"]],
        *SCHEDULES[case["schedule"]],
        *("--model.offload", mode, "--data.micro-batch-size", str(case["micro"])),
        *("--data.pack" if case["pack"] else "--no-data.pack",),
    ]


@pytest.mark.parametrize("case", pairwise(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_resumed_equals_uninterrupted(case, tmp_path: Path):
    _compare(case, tmp_path, world_size=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_two_ranks(optimizer, tmp_path):
    others = {"adamw": ("full", "none"), "muon": ("optimizer", "full"), "sgd": ("none", "optimizer")}[optimizer]
    case = {"optimizer": optimizer, "schedule": "cosine", "save": 3, "micro": 2, "pack": True}
    _compare(case | {"offload": others[0], "after": others[1]}, tmp_path, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "case",
    [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_full_product(case, world_size, tmp_path):
    _compare(case, tmp_path, world_size)


def _compare(case: dict, tmp_path: Path, world_size: int) -> None:
    sft(tmp_path / "a", *flags(case, case["offload"]), world_size=world_size)
    sft(tmp_path / "b", *flags(case, case["offload"]), "--stop-step", str(case["save"]), world_size=world_size)
    sft(tmp_path / "b", *flags(case, case["after"]), "--resume", world_size=world_size)
    assert metrics(tmp_path / "b") == metrics(tmp_path / "a")
    assert differences(checkpoint(tmp_path / "a", STEPS), checkpoint(tmp_path / "b", STEPS)) == ""


@pytest.mark.parametrize("mode", MODES)
def test_lost_param_groups_are_seen(mode, tmp_path, monkeypatch):
    """Anti-inert: without the groups' entries a resume is refused or differs, in every mode."""
    from trainer.errors import CheckpointMismatch
    from trainer.optim import state

    case = {"optimizer": "muon", "schedule": "wsd", "micro": 8, "pack": True}
    sft(tmp_path / "b", *flags(case, mode), "--stop-step", "3")
    monkeypatch.setattr(state, "write_entries", lambda live, saved, keep=frozenset(): [])
    with pytest.raises(CheckpointMismatch, match="groups"):
        sft(tmp_path / "b", *flags(case, mode), "--resume")
