"""Where updates happen, and which of them serves a request made inside a cycle: the numbers of the resume contract."""

import pytest

from trainer.train.boundary import Boundaries


def boundaries(epoch_end: str, *, in_epoch: int = 10, grad_accum: int = 4) -> Boundaries:
    return Boundaries(grad_accum, epoch_end, lambda epoch: in_epoch)  # pyright: ignore[reportArgumentType]


def test_c1_flush_updates_at_the_end_of_each_epoch():
    flush = boundaries("flush")
    assert [flush.after(step) for step in range(10)] == [0, 4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert [flush.next_boundary(m) for m in (1, 3, 4, 9, 10, 11, 12, 19, 20)] == [4, 4, 4, 10, 10, 14, 14, 20, 20]


def test_carry_updates_every_grad_accum_micro_steps():
    carry = boundaries("carry")
    assert [carry.after(step) for step in range(7)] == [0, 4, 8, 12, 16, 20, 24]
    assert carry.next_boundary(10) == 12


@pytest.mark.parametrize("in_epoch, interval, states", [(100, 3, [4, 8]), (1001, 2000, [2001, 4003])])
def test_c1_requests_are_served_at_the_next_boundary(in_epoch, interval, states):
    flush = boundaries("flush", in_epoch=in_epoch)
    asked = [interval * number for number in range(1, len(states) + 1)]
    assert [flush.next_boundary(m) for m in asked] == states
    steps = [step for step in range(1, 1100) if flush.serves(step, interval)]
    assert [flush.after(step) for step in steps[: len(states)]] == states


def test_serves_says_the_same_as_next_boundary():
    """The loop asks by step, the contract speaks of micro-steps: one arithmetic."""
    for epoch_end in ("carry", "flush"):
        for interval in (1, 3, 4, 5, 9, 25):
            cut = boundaries(epoch_end)
            served = {cut.next_boundary(interval * number) for number in range(1, 200)}
            by_step = {cut.after(step) for step in range(1, 30) if cut.serves(step, interval)}
            assert by_step == {place for place in served if place <= cut.after(29)}


def test_epochs_of_different_lengths():
    lengths = [5, 2, 9]
    flush = Boundaries(4, "flush", lambda epoch: lengths[epoch])
    assert [flush.after(step) for step in range(1, 7)] == [4, 5, 7, 11, 15, 16]
    assert flush.next_boundary(6) == 7
