"""Requests of one process: what latches them, and what ends the process although the interpreter is busy."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.core.signals import INTERRUPTED, Asked, Requests, ignore_in_worker

NOTHING, SAVE, STOP = Asked(save=False, stop=False), Asked(save=True, stop=False), Asked(save=False, stop=True)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_sigusr1_asks_for_one_checkpoint(tmp_path):
    with Requests(tmp_path) as requests:
        assert requests.agree() == NOTHING
        send(signal.SIGUSR1)
        assert requests.agree() == SAVE
        assert requests.agree() == NOTHING


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, INTERRUPTED)])
def test_a_stop_stays(number, code, tmp_path):
    with Requests(tmp_path) as requests:
        send(number)
        assert not requests.stopping
        assert requests.agree() == requests.agree() == STOP
        assert (requests.stopping, requests.exit_code) == (True, code)


def test_the_exit_code_can_be_another(tmp_path):
    with Requests(tmp_path, exit_code=75) as requests:
        send(signal.SIGTERM)
        requests.agree()
        assert requests.exit_code == 75


def test_files_ask_and_go_when_they_are_obeyed(tmp_path):
    with Requests(tmp_path) as requests:
        (tmp_path / "SAVE").touch()
        assert requests.agree() == SAVE
        requests.saved()
        assert requests.agree() == NOTHING
        (tmp_path / "STOP").touch()
        assert requests.agree() == STOP
        requests.saved()
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_looks_at_files(tmp_path):
    (tmp_path / "STOP").touch()
    assert Requests(tmp_path, rank=1).agree() == NOTHING


def test_clocks(tmp_path):
    now = 0.0
    requests = Requests(tmp_path, save_minutes=10, stop_minutes=60, clock=lambda: now)
    now = 599.0
    assert requests.agree() == NOTHING
    now = 601.0
    assert requests.agree() == SAVE
    requests.saved()
    now = 1200.0
    assert requests.agree() == NOTHING  # the time runs from the last save, whoever asked for that
    now = 3601.0
    assert requests.agree() == Asked(save=True, stop=True)


def test_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with Requests(tmp_path) as requests:
        send(signal.SIGTERM)
        requests.agree()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


BUSY = """
import hashlib, os, sys, time
from pathlib import Path
from trainer.core.signals import Requests
settings = eval(sys.argv[1])
saving = settings.pop("saving", 0.0)
with Requests(Path("."), **settings) as requests:
    print("ready", flush=True)
    if saving:
        with requests.saving():
            time.sleep(saving)
            print("saved", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, where no Python handler runs
"""


def start_busy(directory: Path, **settings) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    environment |= settings.pop("env", {})
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, repr(settings)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Returns the exit code and what was printed."""
    try:
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out + error


@pytest.mark.parametrize("numbers, code", [(("SIGTERM", "SIGTERM"), 143), (("SIGINT", "SIGINT"), 130)])
def test_e10_a_second_signal_ends_a_process_that_is_stuck(numbers, code, tmp_path):
    process = start_busy(tmp_path)
    for name in numbers:
        process.send_signal(getattr(signal, name))
        time.sleep(0.5)
    found, error = ended(process)
    assert found == code
    assert "a second request to stop" in error
    assert "Traceback" not in error


def test_the_agents_copy_of_a_signal_is_no_second_request(tmp_path):
    """A signal to everybody reaches a rank of torchrun twice: directly, and from its agent."""
    process = start_busy(tmp_path, env={"TORCHELASTIC_RUN_ID": "x"})
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    time.sleep(2.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143


def test_the_grace_period_ends_a_process_that_is_stuck(tmp_path):
    process = start_busy(tmp_path, grace_seconds=0.3, exit_code=77)
    process.send_signal(signal.SIGTERM)
    code, error = ended(process)
    assert code == 77
    assert "ckpt.grace_seconds (0.3)" in error


def test_the_grace_period_lets_a_save_end(tmp_path):
    process = start_busy(tmp_path, grace_seconds=0.2, saving=1.5)
    process.send_signal(signal.SIGTERM)
    code, text = ended(process)
    assert (code, text.splitlines()[0]) == (143, "saved")


def test_a_worker_ignores_signals_to_its_group():
    child = os.fork()
    if child == 0:
        ignore_in_worker()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            send(number)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
