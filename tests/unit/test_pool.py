import torch, torch.distributed as dist
from support.pool import run_on_ranks
def f(x):
    t = torch.ones(1)*x; dist.all_reduce(t); return t.item()
def g():
    if dist.get_rank()==1: raise ValueError("boom")
    dist.barrier()
def test_a():
    assert run_on_ranks(f,2,3)==[6,6]
    import pytest
    with pytest.raises(RuntimeError, match="boom"): run_on_ranks(g,2)
    assert run_on_ranks(f,2,3)==[6,6]
