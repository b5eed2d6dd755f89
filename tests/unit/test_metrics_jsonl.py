"""metrics.jsonl, samples.jsonl and events.jsonl through kills and resumes."""

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.config.run import RunConfig
from trainer.core.files import file_hook
from trainer.errors import DataError, TrainingError
from trainer.train.metrics import MetricsLog
from trainer.train.sinks.jsonl import decode_row, encode_row, read_rows

MAX_STEPS = 220


def open_log(run_dir: Path, start_step: int, *, fresh: bool | None = None, **config: Any) -> MetricsLog:
    config = {"log": {"progress": "off"}} | config
    return MetricsLog(
        run_dir,
        RunConfig.model_validate(config),
        is_main=True,
        start_step=start_step,
        max_steps=MAX_STEPS,
        run_id="id",
        fresh=fresh,
    )


def train(run_dir: Path, start_step: int, end_step: int, process: int, *, killed: bool = False, **config: Any) -> None:
    """A process that logs the steps after `start_step`; a killed one never closes its files."""
    log = open_log(run_dir, start_step, **config)
    for step in range(start_step + 1, end_step + 1):
        log.log({"step": step, "loss": 1 / step, "process": process})
        log.log_samples(step, 0, [[f"0:{step}"]])
    if not killed:
        log.close()


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def processes(run_dir: Path) -> dict[int, int]:
    return {row["step"]: row["process"] for row in read_rows(run_dir / "metrics.jsonl")}


def test_m1_crash_after_a_checkpoint_leaves_one_row_per_step_of_the_surviving_run(tmp_path: Path) -> None:
    train(tmp_path, 0, 212, process=0, killed=True)
    train(tmp_path, 200, 220, process=1)
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 221))
    assert processes(tmp_path) == {step: 0 if step <= 200 else 1 for step in range(1, 221)}
    old = read_rows(tmp_path / "metrics.superseded.jsonl")
    assert [row["step"] for row in old] == list(range(201, 213))
    assert {(row["process"], row["generation"]) for row in old} == {(0, 0)}


def test_two_resumes_know_which_process_wrote_what_they_supersede(tmp_path: Path) -> None:
    train(tmp_path, 0, 212, process=0, killed=True)
    train(tmp_path, 200, 205, process=1, killed=True)
    train(tmp_path, 190, 220, process=2)
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 221))
    assert processes(tmp_path)[190] == 0
    assert processes(tmp_path)[191] == 2
    old = read_rows(tmp_path / "metrics.superseded.jsonl")
    assert [row["step"] for row in old] == [*range(201, 213), *range(191, 206)]
    assert all(row["generation"] == row["process"] for row in old)


def test_resume_exactly_where_the_run_stopped_supersedes_nothing(tmp_path: Path) -> None:
    train(tmp_path, 0, 5, process=0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train(tmp_path, 5, 10, process=1)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 11))
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_a_launch_that_starts_over_supersedes_everything_step_0_too(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.log({"step": 0, "val_loss": 3.0})
    log.log({"step": 1, "loss": 2.0})
    log = open_log(tmp_path, 0)  # killed before its first checkpoint and launched again
    log.log({"step": 0, "val_loss": 3.0})
    log.close()
    assert steps_of(tmp_path / "metrics.jsonl") == [0]
    assert steps_of(tmp_path / "metrics.superseded.jsonl") == [0, 1]


def test_a_resume_at_step_0_keeps_the_row_of_step_0(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.log({"step": 0, "val_loss": 3.0})
    log.log({"step": 1, "loss": 2.0})
    open_log(tmp_path, 0, fresh=False).close()
    assert steps_of(tmp_path / "metrics.jsonl") == [0]
    assert steps_of(tmp_path / "metrics.superseded.jsonl") == [1]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step": 4, "loss": 0.5', b"\x00" * 40, b"{"])
def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path, torn: bytes) -> None:
    train(tmp_path, 0, 3, process=0, killed=True)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    train(tmp_path, 3, 5, process=1)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_whole_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    train(tmp_path, 0, 3, process=0, killed=True)
    data = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(data[:-1])
    train(tmp_path, 3, 4, process=1)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_torn_line_in_the_events_does_not_hide_the_starts_around_it(tmp_path: Path) -> None:
    train(tmp_path, 0, 10, process=0, killed=True)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "st')
    train(tmp_path, 5, 8, process=1, killed=True)
    train(tmp_path, 5, 10, process=2)
    old = read_rows(tmp_path / "metrics.superseded.jsonl")
    assert [(row["step"], row["generation"]) for row in old] == [(s, 0) for s in range(6, 11)] + [
        (6, 1),
        (7, 1),
        (8, 1),
    ]


def test_a_kill_between_moving_rows_and_cutting_the_file_moves_them_once(tmp_path: Path) -> None:
    train(tmp_path, 0, 10, process=0, killed=True)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def kill(operation: str, path: Path) -> None:
        if operation == "replace" and path.name == "metrics.jsonl":
            raise KeyboardInterrupt

    with file_hook(kill), pytest.raises(KeyboardInterrupt):
        open_log(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert steps_of(tmp_path / "metrics.superseded.jsonl") == [6, 7, 8, 9, 10]
    train(tmp_path, 5, 12, process=1)
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 13))
    assert steps_of(tmp_path / "metrics.superseded.jsonl") == [6, 7, 8, 9, 10]


def test_sample_ids_follow_the_same_rule(tmp_path: Path) -> None:
    data = {"log_ids": True}
    train(tmp_path, 0, 12, process=0, killed=True, data=data)
    train(tmp_path, 10, 20, process=1, data=data)
    rows = read_rows(tmp_path / "samples.jsonl")
    assert rows == [{"step": step, "epoch": 0, "ids": [[f"0:{step}"]]} for step in range(1, 21)]
    assert steps_of(tmp_path / "samples.superseded.jsonl") == [11, 12]


def test_without_log_ids_there_is_no_samples_file(tmp_path: Path) -> None:
    train(tmp_path, 0, 2, process=0)
    assert not (tmp_path / "samples.jsonl").exists()


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 4.9453690e-5, 1e22, math.pi * 1e-300, 0.007500000025]
    log = open_log(tmp_path, 0)
    for step, value in enumerate(values, start=1):
        log.log({"step": step, "loss": value})
    log.close()
    assert [row["loss"].hex() for row in read_rows(tmp_path / "metrics.jsonl")] == [value.hex() for value in values]


def test_values_that_are_not_finite_are_strict_json_and_come_back() -> None:
    line = encode_row({"step": 1, "loss": math.nan, "grad_norm": math.inf, "x": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "loss": "NaN",
        "grad_norm": "Infinity",
        "x": "-Infinity",
    }
    row = decode_row(line)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["x"]) == (math.inf, -math.inf)


def test_every_row_is_in_the_file_before_log_returns(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for step in range(1, 4):
        log.log({"step": step})
        assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, step + 1))


@pytest.mark.parametrize("again", [2, 1])
def test_a_step_that_does_not_grow_is_refused(tmp_path: Path, again: int) -> None:
    train(tmp_path, 0, 2, process=0)
    log = open_log(tmp_path, 2)
    with pytest.raises(ValueError, match=f"step {again} was logged after step 2"):
        log.log({"step": again})


def test_events_tell_starts_and_ends_apart(tmp_path: Path) -> None:
    train(tmp_path, 0, 7, process=0, killed=True)
    train(tmp_path, 5, 8, process=1)
    with pytest.raises(RuntimeError, match="boom"), open_log(tmp_path, 8) as log:
        log.log({"step": 9})
        raise RuntimeError("boom")
    events = [
        (row["event"], row["generation"], row["step"], row.get("fresh", row.get("status")))
        for row in read_rows(tmp_path / "events.jsonl")
    ]
    assert events == [
        ("start", 0, 0, True),
        ("start", 1, 5, False),
        ("end", 1, 8, "finished"),
        ("start", 2, 8, False),
        ("end", 2, 9, "failed"),
    ]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = MetricsLog(run_dir, RunConfig(), is_main=False, start_step=0, max_steps=2, run_id="id")
    log.log({"step": 1})
    log.log_samples(1, 0, [["0:0"]])
    log.sync()
    log.close()
    assert not run_dir.exists()


def test_an_unreadable_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not a JSON row"):
        read_rows(path)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process may grow past 300 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
def test_a_row_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl: File too large.*--resume"):
        for step in range(1, 100):
            log.log({"step": step, "loss": 1 / step})


@pytest.mark.parametrize(
    "line", ['{"event": "start"}', '{"event": "start", "step": "x"}', "[1]", "[" * 200_000, '{"step": 1e999}', "\udcff"]
)
def test_lines_that_somebody_has_spoilt_do_not_stop_a_resume(tmp_path: Path, line: str) -> None:
    train(tmp_path, 0, 5, process=0)
    for name in ("events.jsonl", "metrics.jsonl", "metrics.superseded.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    train(tmp_path, 3, 7, process=1)
    assert processes(tmp_path) == {step: int(step > 3) for step in range(1, 8)}
