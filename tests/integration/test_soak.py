"""`make soak`: runs killed at random instants end identical, and the comparison sees it if they do not."""

import pytest

from scripts import soak, warm


def test_killed_runs_end_identical(capsys):
    assert soak.main(["--kills", "4", "--seed", "7"]) == 0
    assert "4 kills" in capsys.readouterr().out


def test_a_run_that_ends_differently_is_told(capsys, monkeypatch, tmp_path):
    start = warm.start

    def other(argv, logs, **rest):
        changed = [*argv, "--optim.max-norm", "0.1"] if "--ckpt.interval" in argv else argv
        return start(changed, logs, **rest)

    monkeypatch.setattr(soak.warm, "start", other)
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    assert soak.main(["--kills", "1", "--seed", "7"]) == 1
    assert "FAILED in round 0" in capsys.readouterr().out


def test_killed_runs_of_reinforcement_learning_end_identical(capsys):
    assert soak.main(["--kills", "4", "--seed", "7", "--rl"]) == 0
    assert "4 kills" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_ranks_end_identical(capsys):
    assert soak.main(["--kills", "4", "--seed", "7", "--nproc", "2"]) == 0
    assert soak.main(["--kills", "4", "--seed", "7", "--nproc", "2", "--rl"]) == 0
