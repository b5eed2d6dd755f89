"""Real signals to real processes: a process group with loader processes, torchrun's agent, one of its ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import runs
from support.runs import DEBUG, REPO, checkpoint, differences, metrics, output_of, read, samples, sft
from trainer.checkpoint.discovery import Status, discover

# Many quick steps, so that a signal never finds the run at its end.
LONG = [*DEBUG, "--max-steps", "100000", "--val.interval", "0", "--ckpt.interval", "0"]

# Notes each rank's exit code. bash waits for the rank although it gets the signal too.
RANK = 'trap : TERM INT; "$0" -m trainer "$@"; code=$?; echo $code >"$CODES/exit.$RANK"; exit $code'


def start(*command: str, **env: str) -> subprocess.Popen[str]:
    return start_program(sys.executable, *command, **env)


def start_program(*command: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, command)],
        cwd=REPO,
        env=runs._environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def only_state(run_dir: Path) -> int:
    """Returns the step of the only thing in checkpoints/, which is whole and belongs to the last row of metrics."""
    (candidate,) = discover(run_dir / "checkpoints")
    assert candidate.status is Status.COMMITTED, candidate
    step = candidate.checkpoint().step
    assert read(run_dir / "metrics.jsonl")[-1]["step"] == step
    return step


def pid_of_rank(run_dir: Path, rank: int) -> int:
    """The process that trains as `rank`: not its loader processes, whose parent has the same command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or str(run_dir).encode() not in (entry / "cmdline").read_bytes():
                continue
            if f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    assert len(found) == 1, found
    return found[0]


def test_e11_sigterm_to_the_process_group_with_a_loader_process(tmp_path):
    run_dir = tmp_path / "run"
    process = start("-m", "trainer", "sft", *LONG, "--output-dir", run_dir, "--data.num-workers", "1")
    runs.wait_for_step(run_dir, 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    text = output_of(process)
    assert process.returncode == 143, text
    assert "Traceback" not in text and "DataLoader" not in text
    step = only_state(run_dir)
    assert f"stopped after step {step} of 100000; go on with --resume" in text


def test_e10_a_second_sigint_ends_it_at_once(tmp_path):
    """In a step of minutes: the first one only asks for its end."""
    run_dir = tmp_path / "run"
    sft(run_dir, "--stop-step", "1", "--val.interval", "0")
    slow = ["--data.batch-size", "40000", "--resume.override", "data.batch_size"]
    process = start("-m", "trainer", "sft", *LONG, "--output-dir", run_dir, *slow)
    log = run_dir / "logs" / "rank_0.log"
    _wait(lambda: "resumed from" in log.read_text())
    process.send_signal(signal.SIGINT)
    _wait(lambda: "SIGINT: saving and stopping" in log.read_text())
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    text = output_of(process)
    assert process.returncode == 130, text
    assert "a second request to stop (SIGINT)" in text and "Traceback" not in text
    (candidate,) = discover(run_dir / "checkpoints")
    assert (candidate.status, candidate.step) == (Status.COMMITTED, 1)


def _wait(condition, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_e10_sigterm_to_torchrun(tmp_path):
    """The agent passes it on to the ranks' whole sessions, with their loader processes."""
    run_dir = tmp_path / "run"
    arguments = ["sft", *LONG, "--output-dir", run_dir, "--data.num-workers", "1"]
    process = start(*TORCHRUN, "--no-python", "bash", "-c", RANK, sys.executable, *arguments, CODES=str(tmp_path))
    runs.wait_for_step(run_dir, 2, process)
    process.send_signal(signal.SIGTERM)
    text = output_of(process)
    assert [(tmp_path / f"exit.{rank}").read_text() for rank in (0, 1)] == ["143\n", "143\n"], text
    assert process.returncode != 0
    step = only_state(run_dir)
    ranks = text.partition("stopped after step")[0]
    assert f"stopped after step {step} of 100000" in text
    assert "Traceback" not in ranks  # torchrun prints one of its own afterwards


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_in_a_line_by_the_others(tmp_path):
    run_dir = tmp_path / "run"
    process = start(*TORCHRUN, "-m", "trainer", "sft", *LONG, "--output-dir", run_dir)
    runs.wait_for_step(run_dir, 2, process)
    os.kill(pid_of_rank(run_dir, 1), signal.SIGKILL)
    text = output_of(process)
    told, found, _ = text.partition("error (rank 0): rank 0 of 2 has lost another rank: ")
    assert found and "Traceback" not in told, text  # torchrun prints one of its own afterwards
    assert "the run ends with TrainingError: rank 0 of 2 has lost" in (run_dir / "logs" / "rank_0.log").read_text()


@pytest.mark.slow
def test_e10_sigterm_to_one_rank_and_the_agent_starts_them_again(tmp_path):
    """Both ranks stop at one boundary; with --max-restarts the agent starts them anew, and they resume by themselves."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    flags = ["--max-steps", "40", "--val.interval", "0", "--ckpt.interval", "0"]
    sft(whole, *flags, world_size=2)
    arguments = ["sft", *DEBUG, *flags, "--output-dir", run_dir, "--resume.if-exists"]
    process = start(*TORCHRUN, "--max-restarts", "1", "-m", "trainer", *arguments)
    runs.wait_for_step(run_dir, 2, process)
    os.kill(pid_of_rank(run_dir, 1), signal.SIGTERM)
    text = output_of(process)
    assert process.returncode == 0, text
    assert "go on with --resume" in text
    starts = [row["step"] for row in read(run_dir / "events.jsonl") if row["event"] == "start"]
    assert len(starts) == 2 and 2 <= starts[1] < 40
    assert {candidate.step for candidate in discover(run_dir / "checkpoints")} == {starts[1], 40}
    assert differences(checkpoint(whole, 40), checkpoint(run_dir, 40)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)


@pytest.mark.slow
def test_two_nodes_start_again_by_the_launch_script(tmp_path):
    """Two agents with a rank each: one rank leaves, both agents start theirs anew, and the run goes on."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    flags = ["--max-steps", "40", "--val.interval", "0", "--ckpt.interval", "0"]
    sft(whole, *flags, world_size=2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = {"NODES": "2", "HEAD": f"localhost:{port}", "RANKS_PER_NODE": "1", "RESTARTS": "1"}
    nodes["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = REPO / "scripts/launch/torchrun_multinode.sh"
    agents = [start_program(script, *DEBUG, *flags, "--output-dir", run_dir, **nodes) for _ in range(2)]
    runs.wait_for_step(run_dir, 2, agents[0])
    os.kill(pid_of_rank(run_dir, 1), signal.SIGTERM)
    texts = [output_of(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], texts
    starts = [row["step"] for row in read(run_dir / "events.jsonl") if row["event"] == "start"]
    assert len(starts) == 2 and 2 <= starts[1] < 40
    assert differences(checkpoint(whole, 40), checkpoint(run_dir, 40)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)
