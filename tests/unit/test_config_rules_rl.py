"""Rules of reinforcement learning that join two fields: each is broken once, and the nearest legal config passes."""

import pytest

from trainer.config.load import load_config
from trainer.config.run import RLConfig
from trainer.errors import ConfigError

BASE = ["--model.name=m", "--max-steps=100", "--envs.0.name=sort", "--data.seq-len=1024", "--rl.max-new-tokens=64"]

BROKEN = [
    ("--envs=[]", "nothing to learn from"),
    ("--envs.0.min-reward=1 --envs.0.max-reward=0", "min_reward must not exceed max_reward"),
    ("--max-steps=none --epochs=2", "set max_steps instead of epochs"),
    ("--ckpt.micro-interval=2", "save by ckpt.interval instead"),
    ("--rl.max-new-tokens=1024", "a rollout must fit into a row"),
    ("--data.sources.0.path=a.jsonl", "set both, or neither"),
    ("--objective.sft=0.1", "set both, or neither"),
    ("--rl.samples=1", "has nothing to compare"),
    ("--rl.samples=1 --objective.advantage=reinforce_pp_baseline", "has nothing to compare"),
    ("--rl.filter-equal --objective.advantage=reinforce_pp", "a group of equal rewards does teach"),
    ("--objective.loss=custom", "go together: set both"),
    ("--objective.loss=reinforce --objective.iterations=2", "set objective.iterations = 1"),
    ("--objective.reference=r", "a reference model is used by objective.kl only"),
    ("--objective.distill=0.1", "objective.teacher and objective.distill go together"),
    ("--objective.iterations=2 --rl.max-lag=1", "nothing is gained by generating ahead"),
    ("--engine.launch", 'servers are used with engine.type = "vllm"'),
    ("--engine.type=vllm", "set one of engine.urls"),
    ("--engine.type=vllm --engine.launch --rl.top-p=0.9 --rl.temperature=0.7", "set both temperatures to 1"),
]

LEGAL = [
    "",
    "--envs.0.min-reward=0 --envs.0.max-reward=0",
    "--rl.max-new-tokens=1023",
    "--data.sources.0.path=a.jsonl --objective.sft=0.1",
    "--rl.samples=1 --objective.advantage=reinforce_pp",
    "--rl.filter-equal --objective.advantage=reinforce_pp_baseline",
    "--objective.loss=reinforce",
    "--objective.iterations=2",
    "--engine.type=vllm --engine.launch --rl.temperature=0.7",
]


@pytest.mark.parametrize(("flags", "message"), BROKEN)
def test_broken(flags: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, [*BASE, *flags.split()])
    text = str(caught.value)
    assert text.startswith("a problem in the configuration\n"), "one broken rule, one problem"
    assert message in text


@pytest.mark.parametrize("flags", LEGAL)
def test_legal(flags: str):
    load_config(RLConfig, [*BASE, *flags.split()])
