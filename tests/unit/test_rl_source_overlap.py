"""Generating ahead with an engine outside this process, which takes new weights while it generates."""

import time
from collections.abc import Sequence

import numpy as np

from support.scripted import SilentGenerator
from trainer.config.load import load_config
from trainer.config.run import RLConfig
from trainer.core.distributed import World
from trainer.rl.source import RolloutSource
from trainer.rl.types import Group, Rollout

FLAGS = (
    "--max-steps 9 --output-dir runs/x --model.name m --envs.0.name arithmetic --data.seq-len 64 --rl.max-new-tokens 8 "
    "--rl.prompts 2 --rl.samples 2 --rl.max-lag 2 --engine.type vllm --engine.launch"
)


def source_of() -> RolloutSource:
    return RolloutSource(load_config(RLConfig, FLAGS.split()).config, World(), order={}, keep=lambda group: None)


def group(number: int, version: int) -> Group:
    one, versions = np.ones(1, np.int32), np.full(1, version, np.int32)
    rollout = Rollout(one, one.astype(bool), one.astype(np.float32), versions, "stop", reward=1.0)
    return Group(number, f"0:{number}", [rollout])


def test_every_prompt_comes_once_and_no_token_is_older_than_allowed():
    engine = SilentGenerator(overlaps=True)
    source = source_of()
    source.attach(engine, lambda numbers: [group(number, engine.version) for number in numbers])
    seen: list[int] = []
    for step in range(8):
        groups = source.next_groups(step).groups
        assert len(groups) == 2 and all(step - 2 <= g.version <= step for g in groups)
        seen += [g.number for g in groups]
    source.close()
    assert sorted(seen) == list(range(16))


def test_the_time_of_generating_is_counted_although_nobody_waits_for_it():
    engine, each = SilentGenerator(overlaps=True), 0.05

    def slow(numbers: Sequence[int]) -> list[Group]:
        time.sleep(each)
        return [group(number, engine.version) for number in numbers]

    source = source_of()
    source.attach(engine, slow)
    seconds = 0.0
    for step in range(4):
        seconds += source.next_groups(step).generating_seconds
        time.sleep(4 * each)  # a step, in which what is ahead gets done
    source.close()
    assert seconds >= 4 * each
