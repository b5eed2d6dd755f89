"""Servers that fail, start anew or belong to somebody else: they get the present weights, or are told apart."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.vllm_server import StandIn
from trainer.config.rl import EngineConfig
from trainer.errors import LaunchError, TrainingError
from trainer.rl.vllm import keeper as keeping
from trainer.rl.vllm.client import ServerClient
from trainer.rl.vllm.keeper import Keeper, Replica
from trainer.rl.vllm.publish import MANIFEST, WeightsFolder
from trainer.rl.vllm.server import LaunchedServer, server_command, server_environment

STAND_IN = Path(__file__).parents[1] / "support" / "vllm_server.py"


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch):
    monkeypatch.setattr(keeping, "LOOK_INTERVAL_SECONDS", 0.05)


class Published(WeightsFolder):
    """Versions without weights: nobody here reads them."""

    def put(self, version: int) -> None:
        staging = self.root / "staging"
        staging.mkdir()
        self._commit(version, staging, {})


@pytest.fixture
def folder(tmp_path) -> Published:
    folder = Published(tmp_path / "served")
    folder.clear()
    return folder


@pytest.fixture
def closing():
    """Whatever is appended is closed at the end, the last one first."""
    opened: list = []
    yield opened
    for thing in reversed(opened):
        thing.close()


def keeper_of(folder: Published, closing: list, *servers: StandIn | Replica, start_seconds: float = 20.0) -> Keeper:
    replicas = [s if isinstance(s, Replica) else Replica(ServerClient(s.url, 5.0)) for s in servers]
    keeper = Keeper(replicas, folder, keep_cache=False, start_seconds=start_seconds)
    closing.append(keeper)
    keeper.start()
    return keeper


def serve(keeper: Keeper, folder: Published, version: int) -> None:
    folder.put(version)
    keeper.serve(version)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def stand_in(closing: list, **options) -> StandIn:
    closing.append(StandIn(**options))
    return closing[-1]


def test_every_server_gets_every_version_and_old_ones_go(folder, closing):
    a, b = stand_in(closing), stand_in(closing)
    keeper = keeper_of(folder, closing, a, b)
    for version in (3, 4):
        serve(keeper, folder, version)
        assert [s.label for s in (a, b)] == [keeper.label(version)] * 2
        assert a.directory == folder.path(version)
        assert folder.versions == [version]
    assert [replica.loads for replica in keeper.current()] == [2, 2]


def test_a_server_that_began_anew_gets_the_present_weights(folder, closing):
    a = stand_in(closing)
    keeper = keeper_of(folder, closing, a)
    serve(keeper, folder, 5)
    keeper.replicas[0].proven = 2
    a.begin_anew()
    wait_for(lambda: a.label == keeper.label(5))
    assert (folder.path(5) / MANIFEST).exists()
    wait_for(lambda: keeper.replicas[0].loads == 1)
    assert keeper.replicas[0].proven == 0  # it has to show again that it serves the right model


def test_one_server_down_does_not_stop_the_others_and_is_caught_up_with(folder, closing):
    a, b = stand_in(closing), stand_in(closing)
    keeper = keeper_of(folder, closing, a, b)
    serve(keeper, folder, 1)
    port = b.port
    b.close()
    closing.remove(b)
    serve(keeper, folder, 2)
    assert [replica.client.url for replica in keeper.current()] == [a.url]
    assert folder.versions == [2]
    back = stand_in(closing, port=port)
    wait_for(lambda: back.label == keeper.label(2))
    wait_for(lambda: len(keeper.current()) == 2)


def test_no_server_at_all_is_an_error_that_names_it(folder, closing):
    a = stand_in(closing)
    keeper = keeper_of(folder, closing, a, start_seconds=0.5)
    a.close()
    closing.remove(a)
    with pytest.raises(TrainingError, match=f"step 1 (?s:.*){a.url}: .*refused"):
        serve(keeper, folder, 1)


def test_a_failed_load_is_not_served_and_not_repeated_over(folder, closing):
    a = stand_in(closing)
    keeper = keeper_of(folder, closing, a)
    a.trouble["/update_weights"] = [500] * 3
    with pytest.raises(TrainingError, match="/update_weights answered 500"):
        serve(keeper, folder, 1)
    assert a.is_paused and keeper.current() == []


def test_a_server_that_another_run_updates_is_given_up(folder, closing):
    a = stand_in(closing)
    keeper = keeper_of(folder, closing, a)
    serve(keeper, folder, 1)
    a.label = "0123abcd:9"
    wait_for(lambda: keeper.replicas[0].lost)
    assert keeper.current() == [] and a.label == "0123abcd:9"
    folder.put(2)
    with pytest.raises(TrainingError, match="another run"):
        keeper.serve(2)


def test_a_given_server_that_is_not_there_is_named(folder, closing):
    with StandIn() as a:
        url = a.url
    with pytest.raises(LaunchError, match=f"{url}/health did not answer within 0.3 s"):
        keeper_of(folder, closing, Replica(ServerClient(url, 5.0)), start_seconds=0.3)


# --- processes ------------------------------------------------------------------------------------------------------


def launched(tmp_path: Path, *words: str) -> tuple[LaunchedServer, ServerClient]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *(words or (str(STAND_IN), str(port)))]
    return LaunchedServer(command, dict(os.environ), tmp_path / "vllm.log", port), ServerClient(
        f"127.0.0.1:{port}", 5.0
    )


def test_a_launched_server_that_is_killed_starts_again_with_the_present_weights(tmp_path, folder, closing):
    process, client = launched(tmp_path)
    replica = Replica(client, process)
    keeper = keeper_of(folder, closing, replica)
    serve(keeper, folder, 4)
    before = process.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: process.pid != before and client.is_healthy() and client.label() == keeper.label(4))
    wait_for(lambda: keeper.current() == [replica])
    serve(keeper, folder, 5)
    assert client.label() == keeper.label(5) and replica.restarts == 0
    keeper.close()
    assert process.exit_code() is not None and not client.is_healthy()


def test_a_server_that_keeps_dying_is_given_up_with_its_last_words(tmp_path, folder, closing):
    process, client = launched(tmp_path)
    replica = Replica(client, process)
    keeper = keeper_of(folder, closing, replica)
    process._command = [sys.executable, "-c", "print('out of memory'); raise SystemExit(9)"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"exit code 9(?s:.*)out of memory"):
        serve(keeper, folder, 1)
    assert replica.lost


def test_a_server_that_cannot_start_tells_why(tmp_path, folder, closing):
    process, client = launched(tmp_path, "-c", "print('no such model'); raise SystemExit(3)")
    with pytest.raises(LaunchError, match=r"exit code 3 (?s:.*)no such model"):
        keeper_of(folder, closing, Replica(client, process))


def test_a_taken_port_is_named(tmp_path, folder, closing, monkeypatch):
    monkeypatch.setattr("trainer.rl.vllm.server.PORT_SECONDS", 0.0)
    process, client = launched(tmp_path)
    other = stand_in(closing, port=process.port)
    with pytest.raises(LaunchError, match=rf"port {other.port} .* engine\.port"):
        keeper_of(folder, closing, Replica(client, process))


def test_the_port_of_a_server_that_is_on_its_way_out_is_waited_for(tmp_path, folder, closing, monkeypatch):
    """As after a kill -9 of the trainer: its server ends a little later than it."""
    from trainer.rl.vllm import server

    process, client = launched(tmp_path)
    other = stand_in(closing, port=process.port)
    waits: list[float] = []
    monkeypatch.setattr(server.time, "sleep", lambda seconds: waits.append(seconds) or other.close())
    server._await_port(process.port)
    assert len(waits) == 1
    monkeypatch.undo()
    keeper_of(folder, closing, Replica(client, process))
    assert client.is_healthy()


def test_the_command_line_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PYTHONPATH", "x")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    config = EngineConfig(
        type="vllm", launch=True, python=str(python), port=1234, args=("--dtype", "half"), devices="5"
    )
    command = server_command(
        config, tmp_path, dtype="float32", max_model_tokens=64, logprobs_mode="raw_logprobs", on_cpu=True
    )
    assert command[:3] == [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--dtype", "half"]  # the user's own arguments win
    assert command[command.index("--host") + 1] == "127.0.0.1"
    environment = server_environment(config, on_cpu=True)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and "5" in environment.values()
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & environment.keys()


def test_an_interpreter_that_is_not_there_is_named():
    config = EngineConfig(type="vllm", launch=True, python="nowhere/python")
    with pytest.raises(LaunchError, match="nowhere/python.*make vllm"):
        server_command(config, Path("x"), dtype="float32", max_model_tokens=1, logprobs_mode="x", on_cpu=True)
