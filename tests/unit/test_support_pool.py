import torch
import torch.distributed as dist

from support.pool import run_on_ranks


def summed(x):
    t = torch.ones(1) * x
    dist.all_reduce(t)
    return t.item()


def boom():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def test_a_failing_rank_fails_the_call_and_the_pool_recovers():
    assert run_on_ranks(summed, 2, 3) == [6, 6]
    import pytest

    with pytest.raises(RuntimeError, match="boom"):
        run_on_ranks(boom, 2)
    assert run_on_ranks(summed, 2, 3) == [6, 6]
