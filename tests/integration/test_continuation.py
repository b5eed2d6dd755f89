"""The continuation matrix: optimizer x schedule x offload x save point x accumulation x packing x ranks x mode after the resume.

Run A goes through. Run B is killed after its save and goes on from the checkpoint in new processes, under the same or another
offload mode. After every later step the whole state (parameters, optimizer state, groups with their lr, schedule, counters,
data position) and the row of metrics (loss, gradient norm, lr) are compared bit for bit, and at the end the checkpoints.
"""

import itertools
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.fresh import run_fresh
from support.observed import digests, observed
from support.runs import checkpoint, differences, metrics, sft

STEPS, ROWS = 8, 6
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
    "save": (0, 1, 2, 5, 6),  # WSD: before and in the warmup, where the plateau begins, where the decay begins, in it
    "accumulation": (1, 3),
    "pack": (True, False),
    "ranks": (1, 2),
    "max_norm": ("1.0", "none"),  # without clipping, mode "full" updates weights in the backward pass
}


def pairwise(axes: dict[str, tuple]) -> list[dict]:
    """Few combinations in which every pair of values of two axes occurs; greedy, always the same."""
    order = sorted(axes, key=lambda axis: -len(axes[axis]))
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(order, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }
    found = []
    while missing:
        case = dict(min(missing, key=lambda pair: sorted(map(str, pair))))
        for axis in order:
            if axis not in case:
                gains = [sum(frozenset({(axis, x), y}) in missing for y in case.items()) for x in axes[axis]]
                case[axis] = axes[axis][gains.index(max(gains))]
        missing -= {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
        found.append({axis: case[axis] for axis in axes})
    return found


def name(case: dict) -> str:
    return "-".join(map(str, case.values()))


def flags(case: dict, mode: str) -> list[str]:
    return [
        *("--max-steps", str(STEPS), "--ckpt.interval", "0", "--val.interval", "0", "--no-ckpt.export-weights"),
        *OPTIMIZERS[case["optimizer"]],
        *SCHEDULES[case["schedule"]],
        *("--model.offload", mode, "--optim.max-norm", case["max_norm"]),
        *("--data.batch-size", str(ROWS)),
        *("--data.micro-batch-size", str(ROWS // case["ranks"] // case["accumulation"])),
        *("--data.pack" if case["pack"] else "--no-data.pack",),
    ]


@pytest.mark.parametrize("case", pairwise(AXES), ids=name)
def test_resumed_equals_uninterrupted(case, tmp_path: Path):
    compare(case, tmp_path, [case["after"]])


def halves() -> list[dict]:
    """Every combination, without the mode after the resume; every other one is clipped."""
    axes = {axis: values for axis, values in AXES.items() if axis not in ("after", "max_norm")}
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [case | {"max_norm": AXES["max_norm"][sum(map(ord, name(case))) % 2]} for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", halves(), ids=name)
def test_full_product(case, tmp_path):
    compare(case, tmp_path, MODES)


def test_the_comparison_can_fail(tmp_path):
    """Anti-inert: a resume that leaves the optimizer's state out is another run from its first step on."""
    with pytest.raises(AssertionError, match=r"\[3, 4, 5, 6, 7, 8\] == \[\]"):
        compare(pairwise(AXES)[0] | {"save": 2, "ranks": 1}, tmp_path, ["full"], "--ckpt.skip-optimizer")


def compare(case: dict, tmp_path: Path, modes_after: Sequence[str], *more: str) -> None:
    ranks, save_at = case["ranks"], case["save"]
    before = flags(case, case["offload"])
    assert run_fresh(observed, ranks, tmp_path / "a", tmp_path / "a.log", before) == [0] * ranks
    killed = run_fresh(observed, ranks, tmp_path / "b", tmp_path / "killed.log", before, save_at)
    assert killed == [-signal.SIGKILL] * ranks
    for mode in modes_after:
        run_dir, log = tmp_path / mode, tmp_path / f"{mode}.log"
        shutil.copytree(tmp_path / "b", run_dir)
        after = [*flags(case, mode), "--resume", *more]
        assert run_fresh(observed, ranks, run_dir, log, after) == [0] * ranks
        for rank in range(ranks):
            (expected, whole), (found, resumed) = digests(tmp_path / "a.log", rank), digests(log, rank)
            assert list(found) == list(range(save_at + 1, STEPS + 1))
            assert [step for step in found if found[step] != expected[step]] == []
            if save_at:
                assert len(whole | resumed | digests(tmp_path / "killed.log", rank)[1]) == 3
        assert metrics(run_dir) == metrics(tmp_path / "a")
        assert differences(checkpoint(tmp_path / "a", STEPS), checkpoint(run_dir, STEPS)) == ""


@pytest.mark.parametrize("mode", MODES)
def test_lost_param_groups_are_seen(mode, tmp_path, monkeypatch):
    """Anti-inert: without the groups' entries a resume is refused or differs, in every mode."""
    from trainer.errors import CheckpointMismatch
    from trainer.optim import state

    case = {"optimizer": "muon", "schedule": "wsd", "accumulation": 1, "pack": True, "ranks": 1, "max_norm": "1.0"}
    sft(tmp_path / "b", *flags(case, mode), "--stop-step", "3")
    monkeypatch.setattr(state, "write_entries", lambda live, saved, keep=frozenset(): [])
    with pytest.raises(CheckpointMismatch, match="groups"):
        sft(tmp_path / "b", *flags(case, mode), "--resume")
