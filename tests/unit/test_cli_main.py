"""The `trainer` command: what it prints, what it exits with, and what it does not import."""

import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import trainer
from trainer.cli import main as cli
from trainer.cli.main import main
from trainer.config.run import SFTConfig
from trainer.errors import CheckpointError, LaunchError, TrainerError

VALID = ["--model.name", "m", "--max-steps", "10", "--data.fake"]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["sft", "--help"], 0),
        (["config", "--help", "data"], 0),
        (["config", *VALID], 0),
        (["sft", *VALID, "--dry-run"], 0),
        (["config", "--schema"], 0),
        (["config", "--optim.lrr", "1"], 2),
        (["sft", "@", "gone.toml"], 2),
        (["sft"], 2),
    ],
)
def test_no_command_imports_more_than_it_needs(argv: list[str], code: int):
    script = (
        "import sys; from trainer.__main__ import main; code = main(sys.argv[1:]);"
        "print(code, *(m for m in ('torch', 'numpy', 'transformers', 'pydantic', 'pydantic_settings', 'rich', 'loguru')"
        " if m in sys.modules), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True)
    last = result.stderr.splitlines()[-1].split()
    assert int(last[0]) == code
    assert set(last[1:]) <= ({"pydantic"} if argv[:1] in (["sft"], ["config"]) else set())


def test_the_module_and_the_command_are_one(tmp_path: Path):
    command = [sys.executable, "-m", "trainer", "config", "--optim.lrr", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: a problem in the configuration\n  optim.lrr (flag --optim.lrr): no such key; did you mean optim.lr?\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"exact-trainer {project['version']}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"trainer {command}" in text for command in ("sft", "config", "ckpt", "plot"))
    assert max(map(len, text.splitlines())) <= 120


def test_sft_help_lists_the_sections_and_all_keys(capsys: pytest.CaptureFixture[str]):
    assert main(["sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name}" in text for name in SFTConfig.model_fields)
    assert "--dry-run" in text
    assert main(["sft", "--help", "all"]) == 0
    text = capsys.readouterr().out
    for flag in ("--optim.lr", "--output-dir", "--resume.if-exists", "--data.fake.sigma", "--data.sources.0.path"):
        assert f"\n{flag}    " in f"\n{text}"


def test_help_on_one_key_and_on_a_wrong_one(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "@", "gone.toml", "--help", "scheduler.warmup-steps"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("--scheduler.warmup-steps    a whole number >= 0; default 0\n")
    assert main(["sft", "--help", "optim.warmup_steps"]) == 2
    assert "did you mean scheduler.warmup_steps?" in capsys.readouterr().err


def test_every_key_is_explained():
    from trainer.config.schema import all_keys, lookup

    for key in all_keys(SFTConfig):
        parent = lookup(SFTConfig, key[:-1])
        shape = lookup(SFTConfig, key)
        assert parent and parent.section and shape
        text = shape.section.__doc__ if shape.kind == "section" and shape.section else None
        assert text or parent.section.model_fields[key[-1]].description, key


def test_dry_run_is_config(capsys: pytest.CaptureFixture[str]):
    assert main(["sft", "--dry-run", *VALID]) == 0
    dry = capsys.readouterr().out
    for argv in (["config", *VALID], ["config", "sft", *VALID]):
        assert main(argv) == 0
        assert capsys.readouterr().out == dry
    assert tomllib.loads(dry)["max_steps"] == 10


def test_only_kinds_of_run_that_exist(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "rk", *VALID]) == 2
    assert "no kind of run 'rk'" in capsys.readouterr().err


def test_schema_is_json_without_null(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--schema"]) == 0
    text = capsys.readouterr().out
    schema = json.loads(text)
    assert set(schema["properties"]) == set(SFTConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert "null" not in text
    assert schema["properties"]["max_steps"]["anyOf"][1] == {"const": "none"}


def test_errors_are_a_message_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    module = types.ModuleType("trainer.sft.train")
    seen = []

    def run(loaded, owns_process):
        seen.append(loaded)
        raise CheckpointError("step_00000005: truncated")

    module.run = run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "trainer.sft.train", module)
    assert main(["sft", *VALID]) == 1
    assert capsys.readouterr().err == "error: step_00000005: truncated\n"
    assert seen[0].config.max_steps == 10 and seen[0].origins["max_steps"] == "flag --max-steps"

    monkeypatch.setattr(cli, "RANK_GRACE_SECONDS", 0.0)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["sft", *VALID]) == 1
    assert capsys.readouterr().err == "error (rank 3): step_00000005: truncated\n"


@pytest.mark.parametrize("command", ["ckpt", "plot"])
def test_other_commands_get_their_arguments(monkeypatch: pytest.MonkeyPatch, command: str):
    module = types.ModuleType(f"trainer.cli.{command}")
    module.main = lambda argv: 7 if argv == ["a", "--b"] else 0  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, f"trainer.cli.{command}", module)
    assert main([command, "a", "--b"]) == 7


def test_one_rank_tells_a_config_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cli, "RANK_GRACE_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["sft", "--optim.lrr", "1"]) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    assert main(["sft", "--optim.lrr", "1"]) == 2
    assert "did you mean optim.lr?" in capsys.readouterr().err


def test_a_rank_without_a_world_tells_its_config_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert main(["sft", "--optim.lrr", "1"]) == 2
    assert "did you mean optim.lr?" in capsys.readouterr().err


def test_other_ranks_let_rank_0_tell_an_error_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(_argv: list[str]) -> int:
        raise LaunchError("no device")

    told: list[str] = []
    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.setattr(cli.time, "sleep", lambda _: told.append(capsys.readouterr().err))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, before in (("0", []), ("1", [""])):  # rank 1 waits, and has not printed before
        told.clear()
        monkeypatch.setenv("RANK", rank)
        assert main(["sft"]) == 1
        assert told == before
        assert capsys.readouterr().err == f"error (rank {rank}): no device\n"


def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "trainer", "config", *VALID]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.stderr == ""


@pytest.mark.parametrize("name", sorted(trainer.PUBLIC))
def test_public_names_resolve(name: str):
    assert getattr(trainer, name).__name__ == name
    assert name in dir(trainer)


def test_names_that_are_not_public():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018
    assert issubclass(trainer.ConfigError, TrainerError)
