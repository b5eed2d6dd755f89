"""Every write, fsync, rename and removal of a save fails or never happens, one at a time, in real runs.

Whatever the point, on whichever rank, in the foreground or background: the next start resumes from the newest committed
state, and the run ends bit for bit as the one that never stopped.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.faults import Fault, FaultSuite, tally


@pytest.fixture(scope="module")
def suites():
    """(world size, background) -> suite; made when first wanted, in memory, where an fsync costs nothing."""
    made: dict[tuple[int, bool], FaultSuite] = {}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:

        def get(world_size: int, background: bool) -> FaultSuite:
            if (world_size, background) not in made:
                folder = Path(place) / f"{world_size}-{background}"
                folder.mkdir()
                made[world_size, background] = FaultSuite(folder, world_size=world_size, background=background)
            return made[world_size, background]

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


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@BACKGROUND
def test_e1_e2_e4_e16_every_point(suites, world_size, background, capsys):
    suite = suites(world_size, background)
    faults = suite.faults()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // world_size)) as pool:
        endings = list(pool.map(suite.check, faults))
    with capsys.disabled():
        print(f"\n{world_size} ranks, {'async' if background else 'sync'}: {tally(endings)}")
    assert {"killed", "failed", "went on"} == set(endings)
