"""Every write, fsync, rename and removal of a save fails or never happens, one at a time, in real runs.

Whatever the point, on whichever rank, in the foreground or background: the next start resumes from the newest committed
state, and the run ends bit for bit as the one that never stopped.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.faults import STEPS, Fault, FaultSuite, tally


@pytest.fixture(scope="module")
def suites():
    """(world size, background, step) -> suite; made when first wanted, in memory, where an fsync costs nothing."""
    made: dict[tuple[int, bool, int], FaultSuite] = {}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:

        def get(world_size: int, background: bool, step: int = STEPS - 1) -> FaultSuite:
            key = (world_size, background, step)
            if key not in made:
                folder = Path(place) / "-".join(map(str, key))
                folder.mkdir()
                made[key] = FaultSuite(folder, world_size=world_size, background=background, step=step)
            return made[key]

        yield get


BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])


def pick(faults: list[Fault], kind: str, operation: str, rank: int = 0) -> Fault:
    return next(f for f in faults if (f.kind, f.rank) == (kind, rank) and f.operation.startswith(operation))


@BACKGROUND
def test_e2_e4_some_points_on_one_rank(suites, background):
    """A point of each kind: writing, committing, removing the old one."""
    suite = suites(1, background)
    faults = suite.faults()
    assert len(faults) > 40
    assert suite.check(pick(faults, "kill", "write rank_00000")) == "killed"
    assert suite.check(pick(faults, "fail", "write rank_00000")) == "failed"
    assert suite.check(pick(faults, "kill", "rename step_00000003")) == "killed"
    assert suite.check(pick(faults, "kill", "unlink manifest.json")) == "killed"
    assert suite.check(pick(faults, "fail", "rename step_00000002")) == "went on"


def test_some_points_on_two_ranks(suites):
    suite = suites(2, True)
    faults = suite.faults()
    assert suite.check(pick(faults, "kill", "write rank_00001", rank=1)) == "killed"
    assert suite.check(pick(faults, "fail", "fsync rank_00001", rank=1)) == "failed"


def test_a_death_between_the_last_commit_and_the_removal_of_the_one_before_it(suites):
    """The resumed run has nothing to train and to write, and still keeps no more than it was told to."""
    suite = suites(1, False, STEPS)
    assert suite.check(pick(suite.faults(), "kill", "rename step_00000003")) == "killed"


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "step"), [(1, STEPS - 1), (2, STEPS - 1), (1, STEPS)])
@BACKGROUND
def test_e1_e2_e4_e16_every_point(suites, world_size, background, step, capsys):
    suite = suites(world_size, background, step)
    faults = suite.faults()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // world_size)) as pool:
        endings = list(pool.map(suite.check, faults))
    with capsys.disabled():
        print(f"\n{world_size} ranks, {'async' if background else 'sync'}, step {step} of {STEPS}: {tally(endings)}")
    assert {"killed", "failed", "went on"} == set(endings)
