"""Some cases of the continuation matrix, in which every two values of two axes meet; all of them are in the two files
beside this one."""

import pytest

from support.continuation import AXES, MODES, compare, flags, name, pairwise
from support.runs import sft


@pytest.mark.parametrize("case", pairwise(AXES), ids=name)
def test_resumed_equals_uninterrupted(case, tmp_path, uninterrupted):
    compare(case, tmp_path, uninterrupted(case), [case["after"]])


def test_the_comparison_can_fail(tmp_path, uninterrupted):
    """Anti-inert: a resume that leaves the optimizer's state out is another run from its first step on."""
    case = pairwise(AXES)[0] | {"save": 2, "ranks": 1}
    with pytest.raises(AssertionError, match=r"\[3, 4, 5, 6, 7, 8\] == \[\]"):
        compare(case, tmp_path, uninterrupted(case), ["full"], "--ckpt.skip-optimizer")


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
