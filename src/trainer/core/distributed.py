"""The ranks of a run: who they are, how they agree, and the mesh they form.

Everything works with one process and no process group; then every helper is the plain local thing. The helpers use the
default group, which belongs to the training thread; another thread brings a `group` of its own (`new_group`).
"""

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.core.log import logger
from trainer.errors import LaunchError, TrainerError, first_line

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


_HOW_TO_START = (
    "start with torchrun (--nproc-per-node N -m trainer ...), or unset RANK and WORLD_SIZE for a single process"
)


@dataclass(frozen=True)
class World:
    """This process among the processes of the run (torchrun's RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE)."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_env() -> World:
    """Reads torchrun's environment; a single process when there is none. Does not import torch.

    Raises:
        LaunchError: half of it is there, or what is there are no numbers.
    """
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not given:
        return World()
    if len(given) == 1:
        name, missing = *given, *({"RANK", "WORLD_SIZE"} - given.keys())
        raise LaunchError(f"{name} = {given[name]} is set, but {missing} is not: a launcher sets both; {_HOW_TO_START}")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name, "1" if "SIZE" in name else "0") for name in names]
    try:
        return World(*(int(value) for value in values))
    except ValueError as error:
        found = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise LaunchError(f"the launcher's environment holds no numbers: {found}; {_HOW_TO_START}") from error


def check_launch() -> None:
    """Finds out, before torch is imported, whether this process was started as one of several that can find each other.

    Raises:
        LaunchError: the environment says half of it, or makes no sense.
    """
    world = world_from_env()
    if world.size != 1:
        _check_rendezvous(world)


def _active() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def process_group(device: "torch.device", timeout_seconds: int):
    """The default process group while the block runs: gloo for CPU tensors, NCCL for the GPU's.

    A CPU backend is always present because object agreement, offloaded states and checkpoints use CPU tensors. Under a
    single process without torchrun no group is made.
    """
    import torch.distributed as dist

    world = world_from_env()
    if world.size == 1 or dist.is_initialized():
        yield
        return
    check_launch()
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # nobody else would say what is waited for
        logger.info(
            f"rank {world.rank} of {world.size}: meeting the others at {place}, for {timeout_seconds} s at most"
        )
    try:
        _init_process_group(backend, timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} cannot meet the others at MASTER_ADDR:MASTER_PORT = {place}: "
            f"{first_line(error).rstrip('.')}. Each rank must be started, once, and the port be free on that host; "
            f"{_HOW_TO_START}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """As `dist.init_process_group`, also in ranks that torchrun has started again (--max-restarts).

    torchrun has one store for all of its restarts, and torch keeps nothing apart in it: new ranks would find the addresses
    of those before and wait for them. Here each attempt has keys of its own.

    Raises:
        LaunchError: the ranks were started again on several nodes, which count their attempts differently.
    """
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        if attempt != "0":
            raise LaunchError(
                "torchrun has started the ranks again on several nodes, with a store that still holds the addresses of the "
                "ranks before: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node"
            )
        dist.init_process_group(backend, timeout=timeout)
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _check_rendezvous(world: World) -> None:
    """Raises LaunchError if torch could not find the other ranks by the environment."""
    if not 0 <= world.rank < world.size:
        raise LaunchError(f"RANK = {world.rank} is not below WORLD_SIZE = {world.size}; {_HOW_TO_START}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise LaunchError(f"WORLD_SIZE = {world.size}, but {' and '.join(missing)} {verb} not set; {_HOW_TO_START}")


# What gloo says when the process at the other end is gone, or does not answer within the timeout.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timeout caused pair closure")


def has_lost_a_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, and not for a fault of this one."""
    import torch.distributed as dist

    told = type(error) is RuntimeError and any(text in str(error) for text in _LOST)
    return _active() and (told or isinstance(error, dist.DistError))


def build_mesh(device_type: str, dp_replicate: int, dp_shard: int, world_size: int) -> "DeviceMesh | None":
    """Returns the mesh ("shard") or ("replicate", "shard"), or None for a single process.

    Raises:
        LaunchError: the two degrees do not multiply to the world size.
    """
    shard = world_size // dp_replicate if dp_shard == -1 else dp_shard
    if shard < 1 or dp_replicate * shard != world_size:
        raise LaunchError(
            f"parallel.dp_replicate ({dp_replicate}) x parallel.dp_shard ({dp_shard}) must give the number of ranks "
            f"({world_size}); set dp_shard = -1 to shard over all ranks of a replica group"
        )
    if world_size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if dp_replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (dp_replicate, shard), mesh_dim_names=("replicate", "shard"))


def new_group() -> "ProcessGroup | None":
    """Returns a gloo group of all ranks for a thread beside the training, None for a single process; collective.

    Two threads must not share a group: their collectives would meet in another order on each rank.
    """
    if not _active():
        return None
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def close_group(group: "ProcessGroup | None") -> None:
    """Ends a group made by `new_group`."""
    if group is not None:
        import torch.distributed as dist

        dist.destroy_process_group(group)


def agree(value: T, *, group: "ProcessGroup | None" = None) -> T:
    """Returns rank 0's `value` (any picklable object) on every rank."""
    if not _active():
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def gather_objects(value: T, *, group: "ProcessGroup | None" = None) -> list[T]:
    """Returns every rank's `value`, in rank order, on every rank."""
    if not _active():
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_main(function: Callable[..., T], *args: Any, group: "ProcessGroup | None" = None, **kwargs: Any) -> T:
    """Runs `function` on rank 0 and returns its result, or raises its error, on every rank.

    Ranks that look at a file system by themselves may see different things; one looks, all follow.
    """
    if not _active():
        return function(*args, **kwargs)
    import torch.distributed as dist

    outcome: Any = (None, None)
    if dist.get_rank() == 0:
        try:
            outcome = (function(*args, **kwargs), None)
        except TrainerError as error:
            outcome = (None, error)
        except Exception as error:  # sent to the other ranks as text: not every exception can be pickled
            agree((None, TrainerError(f"rank 0 failed: {type(error).__name__}: {error}")), group=group)
            raise
    result, error = agree(outcome, group=group)  # rank 0's result, whatever this rank has
    if error is not None:
        raise error
    return result


def raise_together(error: Exception | None, what: str, *, group: "ProcessGroup | None" = None) -> None:
    """Raises on every rank if any rank brings an error: the own one where there is one, else the first other's text."""
    if not _active():
        if error is not None:
            raise error
        return
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise TrainerError(f"{what} failed on rank {rank}: {text}")


def sum_over_ranks(*values: float, device: "torch.device | str" = "cpu") -> list[float]:
    """Returns each value summed over all ranks, in float64."""
    if not _active():
        return list(values)
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def barrier() -> None:
    if _active():
        import torch.distributed as dist

        dist.barrier()
