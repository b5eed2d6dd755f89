"""Batches of groups over random saves and kills, generated ahead or not, with filters: none is lost, none comes twice."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.scripted import SilentGenerator
from trainer.config.load import load_config
from trainer.config.run import RLConfig
from trainer.core.distributed import World
from trainer.rl.source import RolloutSource
from trainer.rl.types import Group, Rollout

FLAGS = (
    "--max-steps 9 --output-dir runs/x --model.name m --envs.0.name arithmetic --data.seq-len 64 --rl.max-new-tokens 8 "
    "--rl.samples 2"
).split()
VLLM = ["--engine.type", "vllm", "--engine.launch"]
STEPS = 10


@dataclass
class Run:
    """What a trainer does with a source: a batch for each step, checkpoints, and starts from them."""

    prompts: int
    lag: int
    overlaps: bool
    left_out: frozenset[int]
    resamples: int
    batches: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Step -> (number, version) of the groups that it trained."""

    def start(self, state: dict | None = None) -> None:
        engine = SilentGenerator(overlaps=self.overlaps)
        flags = [
            *FLAGS,
            "--rl.prompts",
            str(self.prompts),
            "--rl.max-lag",
            str(self.lag),
            "--rl.max-resamples",
            str(self.resamples),
            *(VLLM if self.overlaps else []),
        ]
        config = load_config(RLConfig, flags).config
        why = {True: "unwanted", False: None}
        self.source = RolloutSource(config, World(), order={}, keep=lambda group: why[group.number in self.left_out])
        if state is not None:
            self.source.load_state_dict(state)
        self.source.attach(engine, lambda numbers: [_group(number, engine.version) for number in numbers])

    def step(self, step: int) -> None:
        self.batches[step] = [(group.number, group.version) for group in self.source.next_groups(step - 1).groups]

    def save(self) -> dict:
        self.source.settle()
        return self.source.state_dict()

    def save_within(self) -> dict:
        """Between two micro-steps of the step whose batch came last."""
        state = self.source.state_before()
        self.source.settle()
        return state


def _group(number: int, version: int) -> Group:
    one = np.ones(1, np.int32)
    rollout = Rollout(one, one.astype(bool), one.astype(np.float32), one * version, "stop", reward=float(number))
    return Group(number, f"0:{number}", [rollout])


KILLS = st.lists(st.tuples(st.integers(1, STEPS - 1), st.integers(0, 3), st.booleans()), max_size=4)
"""(step of the checkpoint, steps done after it when the kill comes, whether it is taken in the middle of the next step)."""


SHORT = {"prompts": 2, "overlaps": False, "resamples": 0}  # a batch that a filter leaves short, saved in its step


@settings(max_examples=60, deadline=None)
@example(**SHORT, lag=0, left_out=frozenset({2}), kills=[(1, 0, True)])
@example(**SHORT, lag=1, left_out=frozenset({2, 5}), kills=[(1, 0, True), (3, 1, True)])
@given(
    prompts=st.integers(1, 3),
    lag=st.integers(0, 3),
    overlaps=st.booleans(),
    left_out=st.frozensets(st.integers(0, 30), max_size=12),
    resamples=st.sampled_from([0, 1, 20]),
    kills=KILLS,
)
def test_every_group_is_trained_once_and_in_order_whatever_is_killed(
    prompts, lag, overlaps, left_out, resamples, kills
):
    whole, killed = (Run(prompts, lag, overlaps, left_out, resamples) for _ in range(2))
    whole.start()
    for step in range(1, STEPS + 1):
        whole.step(step)
    whole.source.close()

    killed.start()
    done = 0
    for at, lost, within in [*sorted(kills), (STEPS, 0, False)]:
        for step in range(done + 1, at + 1):
            killed.step(step)
        if at == STEPS:
            break
        state = None if within else killed.save()
        for step in range(at + 1, min(at + 1 + lost + within, STEPS + 1)):
            killed.step(step)
            if within and state is None:
                state = killed.save_within()
        killed.source.close()  # what it still did is gone
        killed.start(state)
        done = at
    buffer = killed.source.buffer
    killed.source.close()

    trained = [number for step in range(1, STEPS + 1) for number, _ in killed.batches[step]]
    assert len(set(trained)) == len(trained) and not set(trained) & left_out
    assert len(trained) == STEPS * prompts or resamples < 20  # else the filters may leave a batch short
    waiting = {group.number for group in buffer.ready} | set(buffer.under_way) | set(buffer.again)
    assert set(trained) | waiting | left_out >= set(range(buffer.next_number))
    assert not set(trained) & waiting
    for step, groups in killed.batches.items():
        assert all(step - 1 - lag <= version <= step - 1 for _, version in groups)
    if not overlaps:  # which weights generate what depends on the step alone
        assert killed.batches == whole.batches
