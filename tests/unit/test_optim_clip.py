"""The global norm: its value, and what its bits may depend on."""

import pytest
import torch

from support.pool import run_on_ranks
from trainer.optim.clip import clip_gradients, global_norm


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3_000, 1_000), (257, 300), (4096, 16), (65_537,), (64, 64), (7,), (0,), ()]
    return [torch.randn(shape, generator=generator) * 10.0**-index for index, shape in enumerate(shapes)]


def exact(tensors: list[torch.Tensor]) -> float:
    return sum(tensor.double().square().sum() for tensor in tensors).sqrt().item()


def test_seven_digits_hold_over_millions_of_elements():
    found = global_norm(gradients())
    assert found.dtype == torch.float32 and found.shape == ()
    assert found.item() == pytest.approx(exact(gradients()), rel=3e-7)


def test_bits_do_not_depend_on_threads():
    threads, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(global_norm(gradients()).item())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_bits_do_not_depend_on_strides_and_memory():
    plain = gradients()
    moved = [torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor) for tensor in plain]
    transposed = [tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for tensor in plain]
    assert global_norm(plain).item() == global_norm(moved).item() == global_norm(transposed).item()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_element_is_seen(value):
    found = gradients()
    found[0][-1, -1] = value
    assert not global_norm(found).isfinite()


def test_nothing_has_the_norm_zero():
    assert global_norm([]).item() == global_norm([torch.zeros(0)]).item() == 0.0


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e9])
def test_clipping(max_norm):
    parameters = [torch.nn.Parameter(torch.zeros(t.shape)) for t in gradients()] + [torch.nn.Parameter(torch.zeros(3))]
    for parameter, gradient in zip(parameters, gradients(), strict=False):
        parameter.grad = gradient
    versions = [parameter.grad._version for parameter in parameters[:-1]]
    norm = clip_gradients(parameters, max_norm)
    factor = torch.ones(()) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    assert all(torch.equal(p.grad, g * factor) for p, g in zip(parameters, gradients(), strict=False))
    assert (factor < 1) == (max_norm == 1.0)
    written = [parameter.grad._version > version for parameter, version in zip(parameters, versions, strict=False)]
    assert written == [max_norm == 1.0] * len(versions), "gradients within the norm are not written once more"


def sharded_norms(replicas: int, shards: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    tensors = [tensor for tensor in gradients() if tensor.ndim]
    sharded = [distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]) for tensor in tensors]
    whole = [distribute_tensor(tensor, mesh, [Replicate(), Replicate()]) for tensor in tensors[:2]]
    return [global_norm(sharded).item(), global_norm([*sharded, *whole, tensors[0]]).item()]


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 1)])
def test_shards_are_counted_once_and_copies_not_twice(replicas, shards):
    tensors = [tensor for tensor in gradients() if tensor.ndim]
    wanted = [exact(tensors), exact([*tensors, *tensors[:2], tensors[0]])]
    first, second = run_on_ranks(sharded_norms, 2, replicas, shards)
    assert first == second == pytest.approx(wanted, rel=3e-7)
