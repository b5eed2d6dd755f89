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

from support.fresh import run_fresh
from support.observed import digests, observed
from support.runs import checkpoint, differences, metrics

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
    "accumulation": (1, 3),
    "pack": (True, False),
    "ranks": (1, 2),
    "save": (0, 1, 2, 5, 6),  # WSD: before and in the warmup, where the plateau begins, where the decay begins, in it
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


def product(ranks: int) -> list[dict]:
    """Every combination at this number of processes, without the mode after the resume; every other one is clipped."""
    axes = {axis: values for axis, values in AXES.items() if axis not in ("after", "max_norm")} | {"ranks": (ranks,)}
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [case | {"max_norm": AXES["max_norm"][sum(map(ord, name(case))) % 2]} for case in cases]


class Uninterrupted:
    """The runs that go through, each made once and kept until another one is asked for that has a state of its own."""

    def __init__(self, place: Path):
        """place: an empty folder."""
        self.place = place
        self._made: dict[str, Path] = {}

    def __call__(self, case: dict) -> Path:
        """Returns the run's directory; beside it lies its log."""
        key = name({axis: value for axis, value in case.items() if axis not in ("save", "after")})
        if key not in self._made:
            if len(self._made) == 2:  # clipped and not
                self._forget()
            run_dir = self.place / key
            ranks = case["ranks"]
            assert run_fresh(observed, ranks, run_dir, log_of(run_dir), flags(case, case["offload"])) == [0] * ranks
            self._made[key] = run_dir
        return self._made[key]

    def _forget(self) -> None:
        shutil.rmtree(self.place)  # the logs too: another run of the same name would add to them
        self.place.mkdir()
        self._made.clear()


def log_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def compare(case: dict, tmp_path: Path, whole: Path, modes_after: Sequence[str], *more: str) -> None:
    """Kills a run after its save, resumes it under each mode, and holds every step against the run `whole`."""
    ranks, save_at = case["ranks"], case["save"]
    killed = tmp_path / "killed"
    codes = run_fresh(observed, ranks, killed, log_of(killed), flags(case, case["offload"]), save_at)
    assert codes == [-signal.SIGKILL] * ranks
    for mode in modes_after:
        run_dir = tmp_path / mode
        shutil.copytree(killed, run_dir)
        after = [*flags(case, mode), "--resume", *more]
        assert run_fresh(observed, ranks, run_dir, log_of(run_dir), after) == [0] * ranks
        for rank in range(ranks):
            (expected, first), (found, resumed) = digests(log_of(whole), rank), digests(log_of(run_dir), rank)
            assert list(found) == list(range(save_at + 1, STEPS + 1))
            assert [step for step in found if found[step] != expected[step]] == []
            if save_at:
                assert len(first | resumed | digests(log_of(killed), rank)[1]) == 3
        assert metrics(run_dir) == metrics(whole)
        assert differences(checkpoint(whole, STEPS), checkpoint(run_dir, STEPS)) == ""
