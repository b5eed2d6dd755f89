"""What saving and loading through torch.distributed.checkpoint (DCP) have in common: dtypes, memory, errors."""

import sys
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from trainer.errors import CheckpointError, TrainerError

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""torch dtype -> its safetensors name, for every dtype a checkpoint can hold."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The way back."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor as writable bytes, without a copy."""
    return as_bytes(tensor).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as uint8 [bytes], without a copy."""
    if not tensor.numel():  # flattened its stride is 0, which a view with another dtype refuses
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def dcp_errors(what: str):
    """DCP's exception is a BaseException that holds one exception per failed rank: turn it into a CheckpointError."""
    if sys.byteorder != "little":
        raise CheckpointError(f"{what}: checkpoints hold little-endian bytes and this machine is big-endian")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        failures = {rank: pair[0] for rank, pair in sorted(error.failures.items())}
        for cause in failures.values():
            if isinstance(cause, KeyboardInterrupt | SystemExit):
                raise cause from None
        texts = [f"rank {rank}: {error_text(cause)}" for rank, cause in failures.items()]
        kinds = {type(cause) for cause in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else CheckpointError
        kind = kind if issubclass(kind, CheckpointError) else CheckpointError
        raise kind(f"{what}: {'; '.join(texts)}") from next(iter(failures.values()))
    except RuntimeError as error:
        raise lost_each_other(what, error) from error


def lost_each_other(what: str, error: RuntimeError) -> Exception:
    """Returns what to raise for an error of a collective: gloo and NCCL raise it when another rank is gone, or the
    timeout is over."""
    if type(error) is RuntimeError or isinstance(error, dist.DistError):
        return CheckpointError(f"{what}: the ranks lost each other: {error}")
    return error  # a fault of the code, such as NotImplementedError


def error_text(error: BaseException) -> str:
    """Returns how an error of another rank is told."""
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
