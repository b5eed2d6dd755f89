"""Console lines, the progress bar and the log files."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.run import RunConfig
from trainer.train.metrics import MetricsLog
from trainer.train.sinks.console import Eta, count, describe, duration

CHILD = """
import sys
from trainer.config.run import RunConfig
from trainer.core.log import logger, setup_logging
from trainer.train.metrics import MetricsLog

run_dir, start, end, interval, progress = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
setup_logging("info", run_dir + "/logs")
config = RunConfig.model_validate({"log": {"interval": interval, "progress": progress}})
with MetricsLog(run_dir, config, is_main=True, start_step=start, max_steps=20, run_id="id") as log:
    for step in range(start + 1, end + 1):
        row = {"step": step, "loss": 2 + 1 / step, "lr": 1e-4, "grad_norm": 0.871, "tokens_per_second": 12345.6}
        if step == 14:
            row["val_loss"] = 2.25
            logger.warning("look out")
        log.log(row)
    if progress == "auto" and end < 20:
        raise KeyboardInterrupt
"""


def run_child(tmp_path: Path, *arguments: object, terminal: bool = False) -> str:
    """What the child writes to standard error, a terminal of 120 columns or a pipe."""
    command = [sys.executable, "-c", CHILD, str(tmp_path), *map(str, arguments)]
    env = os.environ | {"COLUMNS": "120", "TERM": "xterm-256color"}
    if not terminal:
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False).stderr
    ours, theirs = pty.openpty()
    child = subprocess.Popen(command, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    child.wait()
    return seen.decode()


def test_lines_every_interval_and_for_the_first_last_and_validated_steps(tmp_path: Path) -> None:
    said = run_child(tmp_path, 10, 20, 6, "auto")
    lines = [line for line in said.splitlines() if "step" in line]
    assert [line.split("step ")[1].split("  ")[0] for line in lines] == ["11/20", "12/20", "14/20", "18/20", "20/20"]
    assert "step 12/20  loss 2.0833  lr 1.00e-04  grad_norm 0.87  12.3k tok/s  ETA 0:00" in said
    assert "12.3k tok/s  val_loss 2.2500  ETA 0:00" in said
    assert "ETA" not in lines[-1]


def test_bar_starts_at_the_resumed_step_and_log_lines_appear_above_it(tmp_path: Path) -> None:
    said = run_child(tmp_path, 10, 20, 1, "auto", terminal=True)
    assert "10/20" in said
    assert " 0/20" not in said
    assert "20/20" in said
    assert "loss 2.0500  lr 1.00e-04  12.3k tok/s  ETA 0:00" in said
    first_bar, warning, last_bar = said.index("10/20"), said.index("look out"), said.rindex("20/20")
    assert first_bar < warning < last_bar
    assert said.count("look out") == 1
    assert "val_loss 2.2500" in said  # a permanent line
    assert "step 12/20" not in said  # the steps are in the file only
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert all(f"step {step}/20" in log for step in range(11, 21))
    assert "look out" in log


def test_bar_is_taken_down_when_training_raises(tmp_path: Path) -> None:
    said = run_child(tmp_path, 0, 5, 1, "auto", terminal=True)
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1  # cursor hidden, then shown again
    assert said.index("\x1b[?25h") < said.index("KeyboardInterrupt")


def test_bar_on_request_without_a_terminal_and_standard_error_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    config = RunConfig.model_validate({"log": {"progress": "on"}, "stop_step": 12})
    with MetricsLog(tmp_path, config, is_main=True, start_step=10, max_steps=100, run_id="id") as log:
        assert sys.stderr is not stream
        log.log({"step": 11, "loss": 1.5})
    assert sys.stderr is stream
    assert "11/100" in stream.getvalue()


def test_no_bar_on_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    config = RunConfig.model_validate({"log": {"progress": "on"}})
    with MetricsLog(tmp_path, config, is_main=False, start_step=0, max_steps=5, run_id="id") as log:
        log.log({"step": 1})
    assert stream.getvalue() == ""


def test_eta_counts_the_steps_of_this_process_only() -> None:
    now = 1000.0
    eta = Eta(start_step=10, last_step=20, clock=lambda: now)
    assert eta.seconds() is None
    now += 3.0
    eta.update(11)
    assert eta.seconds() == pytest.approx(27.0)
    for step in range(12, 21):
        now += 3.0
        eta.update(step)
    assert eta.seconds() == 0.0


def test_eta_follows_a_change_of_pace() -> None:
    now = 0.0
    eta = Eta(start_step=0, last_step=1000, clock=lambda: now)
    for step in range(1, 201):
        now += 100.0 if step <= 100 else 1.0
        eta.update(step)
    assert eta.seconds() == pytest.approx(800.0)


def test_validation_before_the_first_step_does_not_upset_the_eta() -> None:
    eta = Eta(start_step=0, last_step=4, clock=iter([0.0, 2.0]).__next__)
    eta.update(0)
    assert eta.seconds() is None
    eta.update(1)
    assert eta.seconds() == 6.0


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (987.4, "987"), (999.7, "1.0k"), (12345.6, "12.3k"), (999_960, "1.0M"), (1.25e9, "1.2G")],
)
def test_count(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (62, "1:02"), (59.6, "1:00"), (3661, "1:01:01")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_describe_leaves_out_what_the_row_lacks() -> None:
    assert describe({"step": 0, "val_loss": 2.5, "val_tokens": 9}) == "val_loss 2.5000"
    assert describe({"step": 1, "loss": float("nan"), "grad_norm": float("inf")}) == "loss nan  grad_norm inf"


def logging_child(code: str, tmp_path: Path, **environment: str) -> tuple[str, str]:
    """Standard error and the log file of rank 0 (or `RANK`) after `code` ran behind `setup_logging`."""
    rank = environment.get("RANK", "0")
    prefix = f"from trainer.core.log import logger, setup_logging\nsetup_logging('info', {str(tmp_path)!r}, {rank})\n"
    command = [sys.executable, "-c", prefix + code]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
    return done.stderr, (tmp_path / f"rank_{rank}.log").read_text()


def test_console_has_the_chosen_level_and_the_file_everything(tmp_path: Path) -> None:
    code = "logger.debug('low {}', 1); logger.info('{curly} <b>tag</b>'); logger.warning('high')"
    console, file = logging_child(code, tmp_path)
    assert [line.split(maxsplit=1)[1] for line in console.splitlines()] == [
        "INFO    {curly} <b>tag</b>",
        "WARNING high",
    ]
    assert all(text in file for text in ("low 1", "{curly} <b>tag</b>", "high"))


def test_a_resumed_process_appends_to_the_log_file(tmp_path: Path) -> None:
    logging_child("logger.info('first')", tmp_path)
    _, file = logging_child("logger.info('second')", tmp_path)
    assert file.index("first") < file.index("second")


def test_other_ranks_show_errors_only_and_say_who_they_are(tmp_path: Path) -> None:
    console, file = logging_child("logger.warning('quiet'); logger.error('loud')", tmp_path, RANK="3")
    assert "quiet" not in console
    assert "ERROR   [rank 3] loud" in console
    assert "quiet" in file


def test_warnings_and_standard_logging_take_the_same_way(tmp_path: Path) -> None:
    code = (
        "import logging, warnings\n"
        "warnings.warn('for users')\n"
        "warnings.warn('for developers', FutureWarning)\n"
        "logging.getLogger('some.package').warning('from a library')\n"
        "logging.getLogger('some.package').info('chatter')\n"
    )
    console, file = logging_child(code, tmp_path)
    assert "WARNING UserWarning: for users (<string>:" in console
    assert "from a library" in console
    assert "for developers" not in console
    assert "chatter" not in console + file
    assert all(text in file for text in ("for users", "for developers", "some.package", "from a library"))


@pytest.mark.parametrize("ci", ["", "1"])  # with CI set, transformers passes its records to the root logger as well
def test_a_library_with_its_own_handler_prints_once(tmp_path: Path, ci: str) -> None:
    code = (
        "from transformers.utils import logging\n"
        "logging.get_logger('transformers.modeling').warning('check your weights')\n"
        "logging.get_logger('transformers.modeling').warning('check again')\n"
    )
    console, file = logging_child(code, tmp_path, CI=ci)
    assert console.count("check your weights") == console.count("check again") == 1
    assert "WARNING check your weights" in console
    assert file.count("transformers.modeling") == 2


def test_logging_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; assert not {'torch', 'numpy', 'transformers', 'rich', 'pydantic'} & set(sys.modules)"
    logging_child(code, tmp_path)


def test_a_log_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "from trainer.core.log import setup_logging\nfrom trainer.errors import LaunchError\n"
        f"try:\n    setup_logging('info', {str(tmp_path / 'file' / 'logs')!r})\n"
        "except LaunchError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot open the log file" in done.stdout
    assert "rank_0.log" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_log_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").symlink_to("/dev/full")
    code = (
        f"from trainer.core.log import logger, setup_logging\nsetup_logging('info', {str(tmp_path)!r})\n"
        "for number in range(3):\n    logger.info('line {}', number)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if " line " not in line]
    assert said == [f"WARNING lines are missing in {tmp_path / 'rank_0.log'}: No space left on device"]
    assert len(done.stderr.splitlines()) == 4
