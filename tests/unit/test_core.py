"""Addressed randomness, the world read from the launcher, and agreement between ranks."""

import socket

import pytest
import torch

from support.pool import run_on_ranks
from trainer.core import device as devices
from trainer.core import distributed
from trainer.core.distributed import World, agree, gather_objects, on_main, raise_together, sum_over_ranks
from trainer.core.rng import derive_seed, numpy_generator, seed_micro_step, torch_generator
from trainer.errors import CheckpointError, LaunchError, TrainerError


def test_seeds_are_functions_of_their_address():
    assert derive_seed(1, "shuffle", 0) == derive_seed(1, "shuffle", 0)
    addresses = [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, "a1"), (0, "a", "1"), (0, 1, "a")]
    assert len({derive_seed(*address) for address in addresses}) == len(addresses)
    assert all(0 <= derive_seed(seed, "x") < 2**63 for seed in range(100))
    assert numpy_generator(3, "x").integers(1 << 30) == numpy_generator(3, "x").integers(1 << 30)
    assert torch.equal(
        torch.rand(4, generator=torch_generator(3, "x")), torch.rand(4, generator=torch_generator(3, "x"))
    )


def test_default_generators_are_addressed_by_micro_step():
    import random

    import numpy as np

    def draw(step, micro_step):
        seed_micro_step(7, step, micro_step, 0)
        return random.random(), np.random.rand(), torch.rand(1).item()

    first = draw(5, 1)
    torch.rand(100)
    assert draw(5, 1) == first
    assert all(a != b for a, b in zip(draw(5, 2), first, strict=True))


def test_world_from_the_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.world_from_env() == World()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert distributed.world_from_env() == World(rank=3, local_rank=1, size=4, local_size=2)
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(LaunchError, match="RANK=three"):
        distributed.world_from_env()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set; start with torchrun"),
        ({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK = 5 is not below"),
    ],
)
def test_an_environment_without_a_rendezvous_is_told(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=message), distributed.process_group(torch.device("cpu"), 5):
        pass


@pytest.mark.parametrize(("name", "value", "missing"), [("RANK", "0", "WORLD_SIZE"), ("WORLD_SIZE", "4", "RANK")])
def test_half_an_environment_is_told(monkeypatch, name, value, missing):
    """Taken for a single process, each of four would train the same run by itself."""
    for each in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"{name} = {value} is set, but {missing} is not.*torchrun.*unset"):
        distributed.world_from_env()


@pytest.mark.parametrize("port", ["taken", "none", "abc"])
def test_a_rendezvous_that_cannot_be_is_told(monkeypatch, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1]) if port == "taken" else {"none": "99999999"}.get(port, port)
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            LaunchError, match=f"rank 0 of 2 cannot meet the others at .*127.0.0.1:{number}: .*torchrun"
        ):
            with distributed.process_group(torch.device("cpu"), 5):
                pass


def test_memory_that_runs_out_is_recognised():
    assert devices.is_out_of_memory(MemoryError())
    assert devices.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(RuntimeError) as told:
        torch.empty(2**60, dtype=torch.uint8)
    assert devices.is_out_of_memory(told.value)
    assert not devices.is_out_of_memory(RuntimeError("shapes do not match"))


def test_a_mesh_that_does_not_multiply_is_refused():
    with pytest.raises(LaunchError, match=r"dp_replicate \(2\) x parallel.dp_shard \(2\).*ranks \(6\)"):
        distributed.build_mesh("cpu", 2, 2, 6)


def _agreement(own_errors: bool):
    import torch.distributed as dist

    rank = dist.get_rank()
    results = [agree(rank), gather_objects(rank), sum_over_ranks(rank + 0.5, 1.0), on_main(lambda: f"rank {rank}")]

    def fail():
        raise CheckpointError("no space")

    with pytest.raises(CheckpointError, match="no space"):
        on_main(fail)
    with pytest.raises(TrainerError, match="saving failed on rank 1: ValueError: bad" if rank == 0 else "bad"):
        try:
            raise_together(ValueError("bad") if rank == 1 else None, "saving")
        except ValueError as error:
            raise TrainerError(str(error)) from error
    raise_together(None, "nothing")
    return results


def test_ranks_agree_and_fail_together():
    assert run_on_ranks(_agreement, 2, True) == [[0, [0, 1], [2.0, 2.0], "rank 0"]] * 2


def test_one_process_needs_no_group():
    assert agree(5) == 5
    assert gather_objects(5) == [5]
    assert sum_over_ranks(1.5) == [1.5]
    assert on_main(lambda: 3) == 3
