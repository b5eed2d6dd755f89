"""The command where streams are closed, full or have lost their reader, and where the directory is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import main as cli
from trainer.cli.main import main

VALID = ["--model.name", "m", "--max-steps", "10", "--data.fake"]


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script in which `trainer` is the command."""
    setup = f'trainer() {{ "{sys.executable}" -m trainer "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", setup + script], capture_output=True, env=os.environ | env, encoding="utf-8", errors="replace"
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["--help", f"config {' '.join(VALID)}", "sft --help all", "ckpt ls --help", "plot --help"]
)
def test_a_reader_that_has_gone_ends_the_command_quietly(command: str, unbuffered: str):
    """As any program in a pipe; not 0, which would be the answer `identical` of a comparison."""
    done = shell(f"(sleep 0.2; trainer {command}; echo $? >&2) | true", PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == "141\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", f"config {' '.join(VALID)}", "sft --help all"])
def test_an_output_that_cannot_be_written_is_told(command: str, unbuffered: str):
    done = shell(f"trainer {command} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device; send it elsewhere\n"


def test_closed_streams_are_no_trouble():
    done = shell("trainer config --optim.lrr 1 <&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = shell(f"trainer config {' '.join(VALID)} 2>&-")
    assert done.returncode == 0 and "max_steps = 10" in done.stdout


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path):
    """What is written to "standard error" must not end up in a file of the run."""
    script = (
        "import os, sys; from trainer.cli.main import main; main(['--version']);"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); os.write(2, b'noise'); file.write(str(file.fileno()))"
    )
    subprocess.run(["bash", "-c", f'"{sys.executable}" -c "{script}" <&- >&- 2>&-'], check=True)
    assert int((tmp_path / "file").read_text()) > 2


def test_logging_without_a_standard_error():
    script = "import sys; sys.stderr = None; from trainer.core.log import logger, setup_logging; setup_logging();"
    done = subprocess.run([sys.executable, "-c", script + "logger.info('x')"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_terminal_lacks_are_escaped(encoding: str):
    done = shell(f"trainer config {' '.join(VALID)} --output-dir läuft/日本", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and "\\u65e5\\u672c" in done.stdout


def test_a_broken_pipe_elsewhere_is_not_taken_for_the_readers(monkeypatch: pytest.MonkeyPatch):
    """Such as that to a loader process: swallowed, it would end a run early with exit code 0."""

    def fail(_argv: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(BrokenPipeError):
        main(["sft"])


def test_a_file_that_nobody_expected_to_fail_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(_argv: list[str]) -> int:
        raise PermissionError(13, "Permission denied", "runs/a/metrics.jsonl")

    monkeypatch.setattr(cli, "_dispatch", fail)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["plot", "runs/a"]) == 1
    told = capsys.readouterr().err
    assert told == "error: runs/a/metrics.jsonl: Permission denied; look at the path and its permissions\n"


@pytest.mark.parametrize("command", ["config @ a.toml", "sft @ a.toml", "ckpt ls runs/a", "plot runs/a"])
def test_a_directory_that_was_removed_is_told(tmp_path: Path, command: str):
    done = shell(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && trainer {command}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: the current directory has been removed")


def test_names_that_are_not_text_are_told_once():
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "sft", *VALID, "--output-dir", b"runs/\xff"], capture_output=True
    )
    assert done.returncode == 2
    assert done.stderr.count(b"is not UTF-8 text") == 1 and b"1 problem" not in done.stderr


def test_half_an_environment_is_told_before_torch_is_imported():
    script = (
        "import sys; from trainer.cli.main import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", script, "sft", *VALID],
        capture_output=True,
        text=True,
        env=environment | {"WORLD_SIZE": "4"},
    )
    assert done.stdout == "1 False\n"
    assert done.stderr.startswith("error: WORLD_SIZE = 4 is set, but RANK is not")
