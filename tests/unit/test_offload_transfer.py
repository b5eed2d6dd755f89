"""Memory and queues: packing, the stream through the device, and that every copy waits for what it must wait for."""

import pytest
import torch
from torch import Tensor, nn

from support.lanes import SimulatedDevice
from support.offload import Run, adamw, groups_of
from trainer.core import device as devices
from trainer.core.transfer import HostArena, Lanes
from trainer.errors import LaunchError
from trainer.optim.offload.base import named_parameters
from trainer.optim.offload.full import FullCPUOffloadOptimizer
from trainer.optim.offload.gradients import HostGradients
from trainer.optim.offload.hosting import StateOnHost
from trainer.optim.offload.masters import HostMasters
from trainer.optim.offload.state import CPUOffloadOptimizer
from trainer.optim.offload.transfer import SLOTS, ChunkStream, Passage

CPU = torch.device("cpu")


# --- the arena ------------------------------------------------------------------------------------------------------


def test_tensors_are_packed_aligned_and_apart():
    arena = HostArena(CPU, block_bytes=4096)
    shapes = [((3, 5), torch.float32), ((), torch.float32), ((1000,), torch.bfloat16), ((0, 4), torch.float32)]
    taken = [arena.take(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in shapes * 3]
    for index, tensor in enumerate(taken):
        assert (tuple(tensor.shape), tensor.dtype) == shapes[index % 4]
        assert tensor.data_ptr() % HostArena.ALIGNMENT_BYTES == 0
        assert arena.owns(tensor) == (tensor.numel() > 0)
        tensor.fill_(index)
    assert all((tensor == index).all() for index, tensor in enumerate(taken))  # nobody wrote over a neighbour
    assert not arena.owns(torch.zeros(4)) and not arena.owns(torch.zeros(4, device="meta"))
    used = sum(t.numel() * t.element_size() for t in taken)
    assert used < arena.size_bytes < used + 3 * 4096


def test_dense_strides_are_kept():
    """The fused kernels walk weights and moments in memory order, so both must have the same one."""
    arena = HostArena(CPU)
    weight = torch.randn(4, 6).t()
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (weight, image):
        assert arena.take(tensor).stride() == tensor.stride()
        assert torch.equal(arena.take(tensor).copy_(tensor), tensor)
    assert arena.take(torch.zeros(4, 8)[:, ::2]).is_contiguous()
    assert arena.take(weight, dtype=torch.float64).dtype == torch.float64


def test_memory_that_the_host_does_not_have_is_a_named_error():
    with pytest.raises(LaunchError, match="no .* GiB of free memory"):
        devices.host_buffer(2**60, CPU)


# --- state made on the host -----------------------------------------------------------------------------------------


def test_state_like_a_parameter_is_made_on_the_host_and_nothing_else():
    """The "meta" device stands in for a GPU: it is not where the host is, and what lies there has no memory."""
    parameter = nn.Parameter(torch.zeros(4, 6, device="meta").t())
    arena = HostArena(CPU)
    with StateOnHost([parameter], arena):
        zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        narrow = torch.zeros_like(parameter, dtype=torch.bfloat16)
        full, ones, empty = torch.full_like(parameter, 2.5), torch.ones_like(parameter), torch.empty_like(parameter)
        elsewhere = [
            torch.zeros((), device="meta"),  # a counter, where the fused kernel wants it
            torch.zeros_like(torch.zeros(3, device="meta")),  # like something else
            torch.zeros_like(parameter.data),
        ]
        on_request = torch.zeros_like(parameter, device="cpu")
    assert all(arena.owns(tensor) for tensor in (zeros, narrow, full, ones, empty))
    assert zeros.stride() == parameter.stride() and narrow.dtype == torch.bfloat16
    assert [t.float().unique().tolist() for t in (zeros, narrow, full, ones, empty)] == [[0], [0], [2.5], [1], [0]]
    assert not any(tensor.requires_grad for tensor in (zeros, full))
    assert all(tensor.device.type == "meta" for tensor in elsewhere)
    assert on_request.device == CPU


def test_building_never_makes_state_on_the_device():
    parameter = nn.Parameter(torch.zeros(4, 6, device="meta"))
    arena = HostArena(CPU)
    with StateOnHost([parameter], arena):
        optimizer = adamw([{"params": [parameter], "param_names": ["p"], "name": "all"}])
    devices_of = {key: value.device.type for key, value in optimizer.state[parameter].items()}
    assert devices_of == {"step": "meta", "exp_avg": "cpu", "exp_avg_sq": "cpu"}


# --- the stream -----------------------------------------------------------------------------------------------------


def passages(count: int = 7) -> tuple[list[Passage], list[list[Tensor]]]:
    """Chunks of three tensors each; the last tensor of each is read only."""
    arena = HostArena(CPU, block_bytes=4096)
    tensors = [
        [arena.take(torch.empty(size + i, device="meta")).fill_(10 * i + j) for j, size in enumerate((5, 70, 3))]
        for i in range(count)
    ]
    return [Passage(chunk, returned=2) for chunk in tensors], tensors


def stream(tensors: list[list[Tensor]], chunk_stream: ChunkStream, runs: int = 3) -> None:
    for _ in range(runs):

        def work(index: int) -> None:
            a, b, c = chunk_stream.twins[index]
            a.add_(c.sum())
            b.mul_(2).add_(a[0])
            c.fill_(-1)  # not returned

        chunk_stream.run(work)
    chunk_stream.synchronize()


def test_neighbours_are_moved_by_one_copy():
    chunks, _ = passages()
    chunk_stream = ChunkStream(chunks, CPU, Lanes())
    assert [len(runs) for runs in chunk_stream._inputs] == [1] * len(chunks)
    a, b = torch.ones(3), torch.ones(3)  # memory of their own
    assert len(ChunkStream([Passage([a, b], 2)], CPU, Lanes())._inputs[0]) == 2


def test_the_buffer_is_bounded_by_three_chunks():
    chunks, tensors = passages(9)
    largest = max(sum(-(-t.numel() * 4 // 256) * 256 for t in chunk) for chunk in tensors)
    assert 0 < ChunkStream(chunks, CPU, Lanes()).device_bytes <= SLOTS * largest
    assert ChunkStream(chunks[:1], CPU, Lanes()).device_bytes <= largest
    assert ChunkStream([Passage([], 0)], CPU, Lanes()).device_bytes == 0


def expected() -> list[list[list[float]]]:
    chunks, tensors = passages()
    for _ in range(3):
        for a, b, c in tensors:
            a.add_(c.sum())
            b.mul_(2).add_(a[0])
    return [[t.tolist() for t in chunk] for chunk in tensors]


@pytest.mark.parametrize("queued_computation", [False, True])
def test_every_order_that_the_waits_allow_gives_the_same(queued_computation):
    wanted = expected()
    for seed in range(60):
        chunks, tensors = passages()
        stream(tensors, ChunkStream(chunks, CPU, SimulatedDevice(seed, queued_computation=queued_computation)))
        assert [[t.tolist() for t in chunk] for chunk in tensors] == wanted, seed


def test_a_missing_wait_is_found():
    """The test above must be able to fail."""
    wanted, wrong = expected(), 0
    for seed in range(30):
        chunks, tensors = passages()
        stream(tensors, ChunkStream(chunks, CPU, SimulatedDevice(seed, queued_computation=True, deaf=0.2)))
        wrong += [[t.tolist() for t in chunk] for chunk in tensors] != wanted
    assert wrong > 15


def test_empty_tensors_pass():
    """A rank whose shard of a short tensor is empty."""
    tensors = [torch.zeros(0, 4), torch.ones(2), torch.zeros(0), torch.ones(3)]
    chunk_stream = ChunkStream([Passage(tensors, 4)], CPU, Lanes())
    chunk_stream.run(lambda index: [twin.add_(1) for twin in chunk_stream.twins[index]])
    chunk_stream.synchronize()
    assert [t.tolist() for t in tensors] == [[], [2, 2], [], [2, 2, 2]]


# --- gradients on their way -----------------------------------------------------------------------------------------


def leaving(lanes: Lanes) -> tuple[nn.Parameter, nn.Parameter, HostGradients]:
    parameter, master = nn.Parameter(torch.zeros(6, 6)), nn.Parameter(torch.zeros(6, 6))
    gradients = HostGradients(HostArena(CPU, block_bytes=4096), CPU, copies=True, slot_bytes=40, lanes=lanes)
    gradients.watch(parameter, master)
    return parameter, master, gradients


def test_gradients_of_any_layout_are_added_in_order():
    """One that cannot be sent in pieces must not overtake, or be overwritten by, one that is still on its way."""
    weights = torch.arange(36.0).view(6, 6)
    for seed in range(20):
        parameter, master, gradients = leaving(SimulatedDevice(seed))
        (parameter * weights).sum().backward()
        parameter.grad = torch.full((6, 12), 100.0)[:, ::2]
        gradients._leave(parameter)
        (parameter * weights).sum().backward()
        gradients.finish()
        assert master.grad is not None and torch.equal(master.grad, 2 * weights + 100)
        assert parameter.grad is None


def test_a_first_gradient_is_taken_as_it_is():
    """0 + -0.0 would be 0.0, and what the last step left in the sum must be gone."""
    parameter, master, gradients = leaving(SimulatedDevice(0))
    for value in (3.0, -0.0):
        master.grad = None
        (parameter * value).sum().backward()
        gradients.finish()
        assert master.grad is not None and (master.grad == value).all()
    assert torch.signbit(master.grad).all()  # type: ignore[arg-type]


def test_a_gradient_leaves_when_it_has_been_computed():
    for seed in range(20):
        lanes = SimulatedDevice(seed, queued_computation=True)
        parameter, master, gradients = leaving(lanes)
        parameter.grad = gradient = torch.zeros(6, 6)
        lanes.compute.run(lambda gradient=gradient: gradient.fill_(7.0))  # still queued when the hook runs
        gradients._leave(parameter)
        gradients.finish()
        assert master.grad is not None and (master.grad == 7).all(), seed


def weights_seen(seed: int, staged: bool) -> list[float]:
    """What a computation reads before and after three refreshes, whose copies are queued as it is."""
    lanes, seen = SimulatedDevice(seed, queued_computation=True), []
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = HostMasters([("w", weight)], HostArena(CPU, block_bytes=4096), copies=True, lanes=lanes)
    for value in (2.0, 3.0, 4.0):
        lanes.compute.run(lambda: seen.append(weight[0].item()))
        with torch.no_grad():
            masters.synchronize()
            masters.masters["w"].fill_(value)
        if staged:
            places = masters.stage(["w"])
            places["w"].fill_(value)
            masters.send(places)
        else:
            masters.refresh(["w"])
    lanes.compute.run(lambda: seen.append(weight[0].item()))
    lanes.compute.mark().synchronize()
    return seen


@pytest.mark.parametrize("staged", [False, True])
def test_new_weights_arrive_after_the_old_ones_were_read_and_before_the_next_use(staged):
    assert [weights_seen(seed, staged) for seed in range(30)] == [[1.0, 2.0, 3.0, 4.0]] * 30


@pytest.mark.parametrize("staged", [False, True])
def test_a_slot_is_not_written_before_it_was_sent(staged):
    """More weights than slots, one after the other; nobody waits in between."""
    for seed in range(30):
        lanes = SimulatedDevice(seed, queued_computation=True)
        weights = {f"w{index}": nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for index in range(5)}
        masters = HostMasters(
            weights.items(), HostArena(CPU, block_bytes=4096), copies=True, slot_bytes=16, lanes=lanes
        )
        for index, name in enumerate(weights):
            with torch.no_grad():
                masters.masters[name].fill_(index + 1)
            if staged:
                places = masters.stage([name])
                places[name].fill_(index + 1)
                masters.send(places)
            else:
                masters.refresh([name])
        masters.synchronize()
        assert [weight[0].item() for weight in weights.values()] == [1, 2, 3, 4, 5], seed


# --- whole steps in any order ---------------------------------------------------------------------------------------


def simulated(mode: str, dtype: torch.dtype, lanes: Lanes, slot_bytes: int = 64) -> Run:
    run = Run("none", accumulate=2, max_norm=0.5)
    run.model.compute_dtype = dtype
    if mode == "optimizer":
        run.optimizer = CPUOffloadOptimizer(run.optimizer, transfer="copy", chunk_bytes=300, lanes=lanes)
        return run
    arena = HostArena(CPU, block_bytes=4096)
    masters = HostMasters(
        run.model.named_parameters(), arena, copies=True, compute_dtype=dtype, slot_bytes=slot_bytes, lanes=lanes
    )
    masters.cast_model(run.model)
    run.optimizer = FullCPUOffloadOptimizer(
        adamw, groups_of(run.model), masters, arena, transfer="copy", chunk_bytes=300, lanes=lanes
    )
    return run


def results(run: Run) -> dict[str, list]:
    found = {name: parameter.tolist() for name, parameter in named_parameters(run.optimizer).items()}
    state = run.optimizer.state
    for name, parameter in named_parameters(run.optimizer).items():
        found |= {f"{name}.{key}": value.tolist() for key, value in state[parameter].items()}
    return found


@pytest.mark.parametrize(("mode", "slot_bytes"), [("optimizer", 0), ("full", 64), ("full", 512)])
def test_steps_are_right_whatever_the_copies_do(mode, slot_bytes):
    """Slots of 64 bytes take a weight in pieces, slots of 512 a chunk at a time."""
    dtype = torch.bfloat16 if mode == "full" else torch.float32
    reference = Run("none", dtype=dtype, accumulate=2, max_norm=0.5)
    norms = reference.train(3)
    wanted = results(reference)
    weights = {name: parameter.to(dtype).tolist() for name, parameter in reference.model.named_parameters()}
    for seed in range(8):
        run = simulated(mode, dtype, SimulatedDevice(seed), slot_bytes)
        assert run.train(3) == norms, seed
        assert results(run) == wanted, seed
        for name, parameter in run.model.named_parameters():
            assert parameter.dtype == dtype and parameter.tolist() == weights[name], (seed, name)


def test_state_is_complete_right_after_a_step():
    """Page-locked memory may still be the target of a copy when a step returns; who reads it must not see that."""
    reference = Run("none", accumulate=2, max_norm=0.5)
    run = simulated("optimizer", torch.float32, SimulatedDevice(0))
    run.optimizer._lanes.eagerness = 0.0  # type: ignore[attr-defined]
    for _ in range(100):
        run.train(), reference.train()
        assert results(run) == results(reference)
