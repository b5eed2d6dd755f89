"""The one place that knows about GPUs. On CPU every call does the plain thing."""

import os
import weakref
from typing import TYPE_CHECKING, Any

from trainer.core.distributed import World
from trainer.core.files import huge_pages
from trainer.errors import LaunchError

if TYPE_CHECKING:
    import torch

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable that says which GPUs a process sees."""

_HUGE_PAGES_FROM_BYTES = 2**23


def select_device(choice: str, world: World) -> "torch.device":
    """Returns this rank's device for `runtime.device` and makes it current.

    Raises:
        LaunchError: a GPU is asked for and there is none for this local rank.
    """
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and available == 0):
        return torch.device("cpu")
    if world.local_rank >= available:
        if available == 0:
            raise LaunchError(
                f"runtime.device = {choice!r}, but torch sees no GPU on this host; set --runtime.device cpu, or look at the "
                f"driver and at {VISIBLE_DEVICES}"
            )
        raise LaunchError(
            f"runtime.device = {choice!r}: local rank {world.local_rank} needs GPU {world.local_rank}, but this host "
            f"has {available}; start at most {available} ranks here or set --runtime.device cpu"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def configure(device: "torch.device", *, threads: int, deterministic: bool, world: World) -> None:
    """Sets threads and determinism for this process; call before the first tensor operation."""
    import torch

    if threads == 0 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // world.local_size)
    if threads:
        torch.set_num_threads(threads)
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may split reductions differently
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False


def seed_generators(seed: int) -> None:
    """Seeds torch's default generators of the CPU and of the GPU in use.

    torch.manual_seed does so too, but asks every backend there is: 168 us against 2 us on CPU, once per micro-step.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def pins_memory(device: "torch.device") -> bool:
    """Whether host memory must be page-locked for fast copies to `device`."""
    return device.type == "cuda"


def synchronize(device: "torch.device") -> None:
    """Waits for the device's queued work (nothing to wait for on CPU)."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def host_buffer(size_bytes: int, device: "torch.device") -> "torch.Tensor":
    """Returns host memory of unspecified content: uint8 [size_bytes], page-locked if `device` is a GPU.

    Copies between page-locked memory and the GPU run beside the computation. The memory is locked in place, because
    torch's own page-locked allocator rounds up to a power of two: 33 GiB of optimizer state would take 64.

    Large buffers ask for huge pages: an optimizer's step walks through several of them at once, and with pages of
    4 KiB a good part of its time is page-table walks.

    Raises:
        LaunchError: the host does not have that much memory, or may not lock it.
    """
    import torch

    try:
        if size_bytes < _HUGE_PAGES_FROM_BYTES:
            buffer = torch.empty(size_bytes, dtype=torch.uint8)
        else:
            buffer = torch.frombuffer(huge_pages(size_bytes), dtype=torch.uint8)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"this host has no {size_bytes / 2**30:.1f} GiB of free memory") from error
    if device.type == "cuda" and size_bytes:
        _lock_pages(buffer)
    return buffer


def _lock_pages(buffer: "torch.Tensor") -> None:
    import torch

    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1))  # 1: seen as locked by every GPU
    if code != 0:
        raise LaunchError(
            f"cannot lock {buffer.numel() / 2**30:.1f} GiB of host memory for copies to the GPU (CUDA error {code}); "
            "raise the limit on locked memory (ulimit -l), free memory, or offload less (model.offload)"
        )
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the GPU, or the host, has no memory left."""
    import torch

    text = str(error)
    told = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    return told or isinstance(error, MemoryError | torch.OutOfMemoryError)


def peak_memory_gib(device: "torch.device") -> float:
    """Returns the peak memory of this process in GiB: allocated on the GPU, or resident on CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / 2**30


def describe(device: "torch.device") -> str:
    """Returns a short name of the device for the start-up lines."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({torch.get_num_threads()} threads)"
