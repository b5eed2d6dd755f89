"""Generating ahead with an engine outside this process, which takes new weights while it generates."""

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


def test_every_prompt_comes_once_and_no_token_is_older_than_allowed():
    engine = SilentGenerator(overlaps=True)
    source = RolloutSource(load_config(RLConfig, FLAGS.split()).config, World(), order={}, keep=lambda group: None)

    def group(number: int) -> Group:
        one, version = np.ones(1, np.int32), np.full(1, engine.version, np.int32)
        rollout = Rollout(one, one.astype(bool), one.astype(np.float32), version, "stop", reward=1.0)
        return Group(number, f"0:{number}", [rollout])

    source.attach(engine, lambda numbers: [group(number) for number in numbers])
    seen: list[int] = []
    for step in range(8):
        groups = source.next_groups(step).groups
        assert len(groups) == 2 and all(step - 2 <= g.version <= step for g in groups)
        seen += [g.number for g in groups]
    source.close()
    assert sorted(seen) == list(range(16))
