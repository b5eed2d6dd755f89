"""A user's reward function may do anything: it costs its sample and no more. Real processes throughout."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.config.rl import EnvConfig
from trainer.errors import TrainingError
from trainer.rl.envs import LoadedEnvironment, load_environments
from trainer.rl.scoring import Scorer, Stepped
from trainer.rl.types import Prompt

USER = "support.user_envs"
CONFIGS = [
    EnvConfig(name=f"{USER}:Wild", score_seconds=1.0),
    EnvConfig(name="reverse-text"),
    EnvConfig(name=f"{USER}:Guess"),
]


@pytest.fixture(scope="module")
def scorer():
    with Scorer(load_environments(CONFIGS, 0), 0) as made:
        yield made


def conversation(completion: str, env: int = 0, info: dict | None = None) -> tuple[Prompt, list]:
    messages = ({"role": "user", "content": "?"},)
    return Prompt(0, env, 5, messages, info or {}), [*messages, {"role": "assistant", "content": completion}]


def processes(mark: str) -> list[int]:
    """Living processes with `mark` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark in (entry / "cmdline").read_text() and "State:\tZ" not in (entry / "status").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has just ended
    return found


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_what_goes_wrong_costs_its_sample_and_is_told(scorer):
    words = ["ok", "raise", "nan", "infinite", "text", "none", "exit", "leave", "hang", "ok"]
    before = scorer.failures[0]
    results = dict(zip(words, scorer.score([conversation(word) for word in words]), strict=True))
    assert results["ok"].reward == 0.5 and results["ok"].error is None
    expected = {
        "raise": "score() raised ValueError: no such luck (",
        "nan": "the reward is nan",
        "infinite": "part 'part' is inf",
        "text": "expected a number",
        "none": "expected a number",
        "exit": "SystemExit: bye",
        "leave": "ended the scoring process (exit code 7)",
        "hang": "gave no answer within 1 s",
    }
    for word, text in expected.items():
        error = results[word].error
        assert results[word].reward is None
        assert error is not None and text in error and "Wild" in error and "envs.0" in error and "prompt 0:5" in error
    assert "user_envs.py:" in results["raise"].error and "second line" not in results["raise"].error
    assert scorer.failures[0] - before == len(expected)


def test_answers_come_in_the_order_of_the_requests_across_environments(scorer):
    asked = [
        conversation("cba", env=1, info={"answer": "cba"}),
        conversation("true"),
        conversation("raise"),
        conversation("cb", env=1, info={"answer": "cba"}),
        conversation("numpy"),
        conversation("7", env=2, info={"number": 7}),
    ]
    results = scorer.score(asked)
    assert [result.reward for result in results] == [1.0, 1.0, None, 2 / 3, 0.25, 1.0]
    assert results[4].parts == {"half": 0.5}
    assert results[5].parts == {"turns": 1.0}


def test_what_user_code_prints_is_no_answer(scorer):
    assert [result.reward for result in scorer.score([conversation("print"), conversation("true")])] == [0.75, 1.0]


def test_the_process_persists_and_random_numbers_depend_on_the_request_alone(scorer):
    first, ok, again, other = scorer.score([conversation(w) for w in ("random", "ok", "random", "random 2")])
    assert (first.reward, first.parts) == (again.reward, again.parts)
    assert first.reward != other.reward and first.parts != other.parts
    assert scorer.score([conversation("pid")])[0].reward == scorer.score([conversation("pid")])[0].reward


def test_what_an_environment_draws_while_it_is_made_is_the_same_in_every_process():
    rewards = []
    for _ in range(2):
        with Scorer(load_environments([EnvConfig(name=f"{USER}:Drawn")], 0), 0) as scorer:
            rewards.append(scorer.score([conversation("")])[0].reward)
    assert rewards[0] == rewards[1] is not None


def test_a_hang_takes_its_own_processes_along(scorer):
    mark = f"grandchild-{os.getpid()}"
    result = scorer.score([conversation(f"spawn {mark}")])[0]
    assert "gave no answer" in (result.error or "")
    wait_until(lambda: not processes(mark), "a process of the reward function is left")
    assert scorer.score([conversation("ok")])[0].reward == 0.5


def test_a_signal_to_the_group_does_not_reach_the_worker(scorer):
    pid = int(scorer.score([conversation("pid")])[0].reward)
    assert os.getpgid(pid) != os.getpgrp()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert scorer.score([conversation("pid")])[0].reward == pid


def test_a_process_that_was_killed_in_between_costs_no_sample(scorer):
    pid = int(scorer.score([conversation("pid")])[0].reward)
    os.kill(pid, signal.SIGKILL)  # it may be ending still while it is asked
    assert scorer.score([conversation("pid")])[0].reward not in (None, pid)


@pytest.mark.parametrize(("word", "code"), [("fork", 0), ("fork oh no", 1), ("fork 7", 7)])
def test_a_forked_child_that_comes_back_answers_nothing(scorer, word, code):
    """Its answer would be taken for the next request's."""
    forked, pid, ok = scorer.score([conversation(word), conversation("pid"), conversation("ok")])
    assert (forked.reward, forked.parts) == (0.25, {"code": code})
    assert pid.reward > 1 and ok.reward == 0.5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("signal", f"ended the scoring process (signal {signal.SIGRTMIN + 6})"),
        ("write 3 {{{", "sent no answer but something else: Expecting property name"),
        ("write 2 []", "sent no answer but something else: a list"),
        ("write 2000000000 {", "sent no answer but something else: more than"),
        ("write 100 {", "gave no answer within 1 s"),  # the rest never comes
    ],
)
def test_whatever_a_process_sends_costs_its_sample_and_no_more(scorer, word, message):
    broken, ok = scorer.score([conversation(word), conversation("ok")])
    assert message in (broken.error or "")
    assert ok.reward == 0.5


@pytest.mark.parametrize("length", [1, 5_000_000])  # the longer one does not fit into the connection
def test_a_process_that_stops_between_two_requests_costs_no_sample(scorer, length):
    pid = int(scorer.score([conversation("pid")])[0].reward)
    assert scorer.score([conversation("stop")])[0].reward == 0.5
    wait_until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text(), "it did not stop")
    assert scorer.score([conversation("x" * length)])[0].reward == 0.5


def test_steps(scorer):
    asked = [conversation(said, env=2, info={"number": 7}) for said in ("3", "9", "7", "boom", "word")]
    replies = scorer.step(asked)
    assert replies[0] == Stepped([{"role": "user", "content": "too low"}])
    assert replies[1] == Stepped([{"role": "user", "content": "too high"}])
    assert replies[2] == Stepped(None)
    assert "step() raised RuntimeError: step failed" in replies[3].error
    assert "step() raised ValueError" in replies[4].error


def test_closing_ends_the_process_and_nothing_is_scored_any_more():
    with Scorer(load_environments(CONFIGS, 0), 0) as scorer:
        pid = int(scorer.score([conversation("pid")])[0].reward)
        scorer.close()
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(TrainingError, match="at its end"):
            scorer.score([conversation("pid")])
        assert [process.pid for process in scorer._processes] == [None]


def test_closing_ends_what_is_being_scored():
    """A thread that generates ahead may be waiting for scores when the run ends."""
    patient = [EnvConfig(name=f"{USER}:Wild", score_seconds=600.0)]
    with Scorer(load_environments(patient, 0), 0, processes=2) as scorer, ThreadPoolExecutor(1) as thread:
        scorer.score([conversation("ok")])
        asked = thread.submit(scorer.score, [conversation(f"spawn closing-{os.getpid()}"), *[conversation("ok")] * 3])
        wait_until(lambda: processes(f"closing-{os.getpid()}"), "the reward function was not called")
        scorer.close()
        with pytest.raises(TrainingError, match="at its end"):
            asked.result(60)
    wait_until(lambda: not processes(f"closing-{os.getpid()}"), "a process of the reward function is left")


def test_closing_waits_for_nothing_that_keeps_the_connection_open_and_loses_no_sample():
    patient = [EnvConfig(name=f"{USER}:Wild", score_seconds=600.0)]
    with Scorer(load_environments(patient, 0), 0) as scorer, ThreadPoolExecutor(1) as thread:
        pid = int(scorer.score([conversation("pid")])[0].reward)
        asked = thread.submit(scorer.score, [conversation("daemon 20")])
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_until(children.read_text, "the reward function was not called")
        began = time.monotonic()
        time.sleep(0.3)  # it leaves the group
        scorer.close()
        with pytest.raises(TrainingError, match="at its end"):
            asked.result(60)
        assert time.monotonic() - began < 10
        assert not scorer.failures


def test_slow_scoring_is_done_by_several_processes(tmp_path: Path):
    patient = [EnvConfig(name=f"{USER}:Wild", score_seconds=600.0)]
    with Scorer(load_environments(patient, 0), 0, processes=3) as scorer:
        words = ["pid", *[f"meet {tmp_path} 3"] * 3, "pid"]
        first, *met, _ = (result.reward for result in scorer.score([conversation(word) for word in words]))
        assert len(set(met)) == 3 and first in met


def test_quick_scoring_is_done_by_one_process():
    with Scorer(load_environments(CONFIGS, 0), 0, processes=3) as scorer:
        scorer.score([conversation("ok")])
        assert len({result.reward for result in scorer.score([conversation("pid")] * 20)}) == 1


def test_what_fails_in_one_process_fails_the_call_and_leaves_the_others_usable(tmp_path: Path):
    file = tmp_path / "moody.py"
    file.write_text(Path(__file__).parents[1].joinpath("support", "user_envs.py").read_text())
    configs = [EnvConfig(name=f"{USER}:Wild"), EnvConfig(name=f"{file}:Double")]
    environments = load_environments(configs, 0)
    file.unlink()
    with Scorer(environments, 0, processes=2) as scorer:
        with pytest.raises(TrainingError, match="no file"):
            scorer.score([conversation("ok"), conversation("ok", env=1), *[conversation("ok")] * 3])
        assert [result.reward for result in scorer.score([conversation("ok")] * 3)] == [0.5] * 3


def changing(tmp_path: Path, **fields) -> tuple[Path, list[LoadedEnvironment]]:
    """`Wild` in a file of its own, which can be changed while the run goes on."""
    file = tmp_path / "changing.py"
    file.write_text(Path(__file__).parents[1].joinpath("support", "user_envs.py").read_text())
    return file, load_environments([EnvConfig(name=f"{file}:Wild", **fields)], 0)


def test_a_process_that_joins_late_and_cannot_load_costs_samples_not_the_run(tmp_path: Path):
    file, environments = changing(tmp_path, score_seconds=3.0)
    with Scorer(environments, 0, processes=2) as scorer:
        scorer.score([conversation("ok")])
        file.unlink()
        first, hung, *rest = scorer.score([conversation(word) for word in ("ok", "hang", "ok", "ok")])
        assert first.reward == 0.5 and "gave no answer" in (hung.error or "")
        for result in rest:
            assert "could not load the environment again" in (result.error or "") and "no file" in (result.error or "")


def test_loading_again_is_part_of_what_a_batch_may_take(tmp_path: Path):
    file, environments = changing(tmp_path, score_seconds=0.5)
    with Scorer(environments, 0, patience_seconds=2.0) as scorer:
        scorer.score([conversation("ok")])
        file.write_text("import time; time.sleep(3600)")
        began = time.monotonic()
        _, again, late = scorer.score([conversation(word) for word in ("hang", "ok", "ok")])
        assert time.monotonic() - began < 10
        assert "could not load the environment again: gave no answer within 1." in (again.error or "")
        assert "half of runtime.timeout_seconds" in (again.error or "")
        assert "was not called" in (late.error or "")


def test_a_batch_whose_scoring_takes_too_long_loses_the_rest_and_the_next_is_scored():
    """The other ranks wait for a batch's rewards: a hundred hangs in a row would be longer than they do."""
    with Scorer(load_environments(CONFIGS, 0), 0, patience_seconds=60.0) as scorer:
        patience = scorer.patience()
        patience.left = 0.5
        hung, *rest = scorer.score([conversation("hang"), conversation("hang"), conversation("ok")], patience)
        assert "gave no answer within 1 s" in (hung.error or "")
        (stepped,) = scorer.step([conversation("7", env=2, info={"number": 7})], patience)  # of the same batch
        for result in (*rest, stepped):
            assert "was not called: scoring its batch has taken 60 s" in (result.error or "")
            assert "rl.score_processes" in (result.error or "")
        assert scorer.failures == {0: 3, 2: 1}
        assert (
            scorer.score([conversation("cba", env=1, info={"answer": "cba"})], patience)[0].reward == 1.0
        )  # in-process
        assert scorer.score([conversation("ok")])[0].reward == 0.5


def test_built_in_environments_start_no_process():
    with Scorer(load_environments([EnvConfig(name="reverse-text")], 0), 0) as scorer:
        assert scorer.score([conversation("cba", info={"answer": "cba"})])[0].reward == 1.0
        assert [process.pid for process in scorer._processes] == [None]


def test_an_environment_that_loads_here_but_not_there_ends_the_run(tmp_path: Path):
    file = tmp_path / "moody.py"
    file.write_text(Path(__file__).parents[1].joinpath("support", "user_envs.py").read_text())
    environments = load_environments([EnvConfig(name=f"{file}:Double")], 0)
    file.unlink()
    with Scorer(environments, 0) as scorer, pytest.raises(TrainingError, match="no file"):
        scorer.score([conversation("ok")])


_PARENT = """
import sys, time
from support.user_envs import Wild
from trainer.config.rl import EnvConfig
from trainer.rl.envs import load_environments
from trainer.rl.scoring import Scorer
from trainer.rl.types import Prompt
scorer = Scorer(load_environments([EnvConfig(name="support.user_envs:Wild", score_seconds=600)], 0), 0)
ask = lambda word: scorer.score([(Prompt(0, 0, 0, ()), [{"role": "assistant", "content": word}])])[0]
print(int(ask("pid").reward), flush=True)
ask("hang")
"""


def test_a_killed_run_leaves_no_scoring_process():
    """Even one that hangs, and so never sees that its connection is closed."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: pid not in processes("score_worker"), "the scoring process is left")


_WORKER = """
import json
from trainer.config.rl import EnvConfig
from trainer.rl import score_worker
score_worker._SPARE_SECONDS = 0.5
config = EnvConfig(name="support.user_envs:Wild", score_seconds=0.5).model_dump_json()
environments = {}
score_worker._handle(environments, json.dumps({"task": "load", "env": 0, "config": config, "seed": 0}).encode())
messages = [{"role": "assistant", "content": "regex"}]
score_worker._handle(environments, json.dumps({"task": "score", "env": 0, "info": {}, "messages": messages}).encode())
"""


def test_a_process_that_never_lets_the_interpreter_go_ends_without_its_parent():
    """Its thread that looks for the parent does not run then."""
    worker = subprocess.run([sys.executable, "-c", _WORKER], stderr=subprocess.PIPE, timeout=60)
    assert worker.returncode == 1 and b"Timeout" in worker.stderr and b"user_envs.py" in worker.stderr
