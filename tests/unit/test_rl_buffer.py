"""No prompt is lost and none is trained on twice, whatever is killed in between."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.rl.buffer import Buffer
from trainer.rl.types import Group, Rollout


def group(number: int, version: int) -> Group:
    rollout = Rollout(
        ids=np.array([1, 2], np.int32),
        trained=np.array([False, True]),
        logprobs=np.array([0.0, -1.0], np.float32),
        versions=np.array([-1, version], np.int32),
        finish_reason="stop",
        reward=1.0,
    )
    return Group(number, f"0:{number}", [rollout])


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(1, 5)),
        st.tuples(st.just("finish"), st.integers(1, 5)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("stale"), st.integers(0, 3)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("kill"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_every_prompt_is_taken_exactly_once_over_kills(operations):
    """Against a plain record of what was trained: a kill takes back all that came after the last save."""
    buffer, trained, version = Buffer(), [], 0
    saved = (buffer.state_dict(), [], list(trained))
    for name, count in operations:
        if name == "draw":
            buffer.draw(count)
        elif name == "finish":
            buffer.put([group(number, version) for number in buffer.under_way[:count]])
        elif name == "take":
            trained += [g.number for g in buffer.take(count)]
            version += 1
        elif name == "stale":
            buffer.drop_stale(version - count)
        elif name == "save":
            saved = (buffer.state_dict(), list(buffer.ready), list(trained))
        else:
            buffer = Buffer()
            buffer.load_state_dict(saved[0], saved[1])
            trained = list(saved[2])
    while buffer.ahead or buffer.again:  # to the end: whatever was ever drawn comes out
        buffer.draw(len(buffer.again))
        buffer.put([group(number, version) for number in list(buffer.under_way)])
        trained += [g.number for g in buffer.take(100)]
    assert sorted(trained) == list(range(buffer.next_number))


def test_a_resume_draws_what_was_under_way_again_and_first():
    buffer = Buffer()
    buffer.draw(4)
    buffer.put([group(0, 0), group(1, 0)])
    again = Buffer()
    again.load_state_dict(buffer.state_dict(), list(buffer.ready))
    assert [g.number for g in again.take(9)] == [0, 1]
    assert again.draw(3) == [2, 3, 4]


def test_stale_groups_are_counted_and_drawn_again():
    buffer = Buffer()
    buffer.draw(3)
    buffer.put([group(0, 0), group(1, 2), group(2, 1)])
    assert buffer.drop_stale(1) == 1
    assert buffer.stale == 1
    assert [g.number for g in buffer.take(9)] == [1, 2]
    assert buffer.draw(2) == [0, 3]


def test_a_group_nobody_asked_for_is_an_error():
    buffer = Buffer()
    buffer.draw(1)
    buffer.put([group(0, 0)])
    with pytest.raises(ValueError):
        buffer.put([group(0, 0)])


def test_a_state_without_its_groups_is_an_error():
    buffer = Buffer()
    buffer.draw(1)
    buffer.put([group(0, 0)])
    with pytest.raises(ValueError):
        Buffer().load_state_dict(buffer.state_dict(), [])
