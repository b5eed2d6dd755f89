"""AdamW on the host in one pass over memory: clipping factor, update, and rounding of the weights to bf16.

A small C kernel (`adamw.c`), compiled when it is first wanted. It is used only if, on this machine, it gives the very
bits of torch's fused kernel; without a compiler, or with any difference, torch does the same in several passes.
"""

import ctypes
import hashlib
import math
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_not
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from trainer.core.log import logger
from trainer.optim.offload.tensors import bare_part

SOURCE = Path(__file__).with_name("adamw.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
SWITCH = "TRAINER_NATIVE"
"""Environment variable; "0" leaves everything to torch."""


_TENSOR = struct.Struct("@6Pq8f")
"""What the kernel calls a Tensor: the addresses of parameter, gradient, both moments, rounded values and counter; the
size; the `_numbers` of its group."""


class _Member(NamedTuple):
    """A parameter that the kernel can step: its group's index, and where its parts lie at the moment."""

    group: int
    parameter: int  # its id
    param: int
    grad: int
    exp_avg: int
    exp_avg_sq: int
    step: int
    size: int
    count: float
    """Of this update, from 1."""


@dataclass(frozen=True, slots=True)
class _State:
    """A parameter's state, looked at once: it stays as it is, unless somebody puts other tensors there, or other memory
    into them (`.data`)."""

    parameter: Tensor  # held, so that its id is not given to another one
    parts: tuple[Tensor, Tensor, Tensor]
    places: tuple[int, int, int]


class NativeAdamW:
    """Steps parameters of an `AdamW` on the host, with the bits of its own fused step."""

    def __init__(self, optimizer: AdamW, kernel: Any):
        self._optimizer = optimizer
        self._kernel = kernel
        self._known: dict[int, _State] = {}  # by id of the parameter

    @classmethod
    def of(cls, optimizer: Optimizer) -> "NativeAdamW | None":
        """Returns None where the kernel cannot be had, or the update rule is another one."""
        if type(optimizer) is not AdamW or os.environ.get(SWITCH) == "0":
            return None
        kernel = load_kernel()
        return None if kernel is None else cls(optimizer, kernel)

    def plan(self, parameters: Mapping[int, Sequence[Tensor]]) -> list[_Member] | None:
        """Returns what `step` needs to step these parameters (group index -> parameters with a gradient), good until one of
        their tensors is replaced; None if the kernel cannot step all of them."""
        members = []
        for index, several in parameters.items():
            if not _plain(self._optimizer.param_groups[index]):
                return None
            for parameter in several:
                member = self._member(index, parameter)
                if member is None:
                    return None
                members.append(member)
        return members

    def step(self, members: Sequence[_Member], factor: Tensor | None, rounded: Mapping[int, Tensor]) -> None:
        """One update.

        members: from `plan`.
        factor: 0-dim float32; the update is that of the gradients times this factor. They are not changed.
        rounded: id of a parameter -> contiguous bfloat16 host tensor that takes its new values.
        """
        numbers: dict[tuple[int, float], tuple[float, ...]] = {}  # few groups and counters, many tensors
        tensors = []
        for m in members:
            key = m.group, m.count
            if key not in numbers:
                numbers[key] = _numbers(self._optimizer.param_groups[m.group], m.count)
            out = rounded.get(m.parameter)
            place = 0 if out is None else out.data_ptr()
            tensors.append(_TENSOR.pack(m.param, m.grad, m.exp_avg, m.exp_avg_sq, place, m.step, m.size, *numbers[key]))
        scale = 1.0 if factor is None else factor.item()
        self._kernel(b"".join(tensors), len(tensors), scale, torch.get_num_threads())

    def _member(self, index: int, parameter: Tensor) -> _Member | None:
        grad = parameter.grad
        if grad is None:
            return None
        part, gradient = bare_part(parameter), bare_part(grad)
        if not _is_plain(part) or not _is_plain(gradient):
            return None
        if (part is not parameter or gradient is not grad) and not _are_sharded_alike(parameter, grad):
            return None
        state = self._state(parameter)
        if state is None:
            return None
        places, count = state.places, state.parts[0].item() + 1
        return _Member(
            index, id(parameter), part.data_ptr(), gradient.data_ptr(), *places[1:], places[0], part.numel(), count
        )

    def _state(self, parameter: Tensor) -> _State | None:
        entries = self._optimizer.state.get(parameter)
        if not entries:
            return None
        step, exp_avg, exp_avg_sq = entries.get("step"), entries.get("exp_avg"), entries.get("exp_avg_sq")
        if step is None or exp_avg is None or exp_avg_sq is None:
            return None
        parts = bare_part(step), bare_part(exp_avg), bare_part(exp_avg_sq)
        places = parts[0].data_ptr(), parts[1].data_ptr(), parts[2].data_ptr()
        known = self._known.get(id(parameter))
        if known is None or known.places != places or any(map(is_not, known.parts, parts)):
            if not all(map(_is_plain, parts)):
                return None
            known = self._known[id(parameter)] = _State(parameter, parts, places)
        return known


def _is_plain(part: Tensor) -> bool:
    return part.dtype is torch.float32 and part.is_cpu and part.is_contiguous()


def _are_sharded_alike(a: Tensor, b: Tensor) -> bool:
    return isinstance(a, DTensor) and isinstance(b, DTensor) and a.placements == b.placements


def _plain(group: Mapping[str, Any]) -> bool:
    """Whether the group's update is the one that the kernel knows; torch's other branches are left to torch."""
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    special = ("amsgrad", "maximize", "capturable", "differentiable")
    return (
        bool(group["fused"])
        and not any(group[name] for name in special)
        and all(isinstance(number, int | float) for number in numbers)
        and 1 - group["betas"][0] < 0.5
    )


def _numbers(group: Mapping[str, Any], step: float) -> tuple[float, ...]:
    """Returns the last fields of a `_TENSOR` for the step-th update."""
    beta1, beta2 = group["betas"]
    correction = math.sqrt(1 - beta2**step)
    decay, move = 1 - group["lr"] * group["weight_decay"], -(group["lr"] / (1 - beta1**step))
    return decay, 1 - beta1, beta2, 1 - beta2, correction, group["eps"], move, step


# --- the kernel -----------------------------------------------------------------------------------------------------


@cache
def load_kernel() -> Any:
    """Returns the compiled kernel, checked against torch; None, with one log line, if it cannot be used."""
    try:
        kernel = ctypes.CDLL(str(_compiled())).trainer_adamw
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.info(f"AdamW on the host runs in several passes (torch's): the native kernel cannot be built: {error}")
        return None
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int64]
    kernel.restype = None
    if not equals_torch(kernel):
        logger.info("AdamW on the host runs in several passes (torch's): the native kernel's bits differ from torch's")
        return None
    return kernel


def _compiled() -> Path:
    """Returns the shared library for this source, compiler and processor, from the user's cache if it is there."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    info = Path("/proc/cpuinfo")  # a home directory may be shared by machines with other instructions
    flags = [line for line in info.read_text().splitlines() if line.startswith("flags")][:1] if info.exists() else []
    identity = (SOURCE.read_bytes(), version, platform.machine(), *FLAGS, *flags)
    key = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    try:
        # RuntimeError: a user without an entry in the system's tables, as in many containers, has no home
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exact-trainer"
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home):
            pass
    except (OSError, RuntimeError):
        home = Path(tempfile.mkdtemp(prefix="exact-trainer-"))
    target = home / f"adamw-{key}.so"
    if not target.exists():
        # Not by process id: containers that share a home directory have the same ones.
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / target.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
            made.replace(target)  # ranks that compile at the same time put the same file there
    return target


@torch.no_grad()
def equals_torch(kernel: Any) -> bool:
    """Whether the kernel gives torch's bits: all lengths of tails, decay or none, factor or none, early and late steps."""
    generator = torch.Generator().manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    parameters, copies = [], []
    for size in (*range(1, 18), 1003):
        values = torch.randn(size, generator=generator, **kind)
        parameters.append(torch.nn.Parameter(values.clone()))
        copies.append(torch.nn.Parameter(values.clone()))
    cases = ((0.0, (0.9, 0.95), 1e-3, 0), (0.1, (0.8, 0.999), 1e-2, 5000))
    for decay, betas, lr, first_step in cases:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": decay, "eps": 1e-8, "fused": True}
        ours, theirs = AdamW(parameters, **options), AdamW(copies, **options)
        for a, b in zip(parameters, copies, strict=True):
            moments = torch.randn(2, a.numel(), generator=generator, **kind) * 0.01
            for optimizer, parameter in ((ours, a), (theirs, b)):
                optimizer.state[parameter] = {
                    "step": torch.tensor(first_step, **kind),
                    "exp_avg": moments[0].clone(),
                    "exp_avg_sq": moments[1].square(),
                }
            a.grad = torch.randn(a.shape, generator=generator, **kind) * 0.01
            b.grad = a.grad.clone()
        native = NativeAdamW(ours, kernel)
        for factor in (None, torch.tensor(0.37, **kind)):
            rounded = {
                id(parameter): torch.empty_like(parameter, dtype=torch.bfloat16) for parameter in parameters[::2]
            }
            members = native.plan({0: parameters})
            if members is None:
                return False
            native.step(members, factor, rounded)
            for parameter in copies:
                if factor is not None and parameter.grad is not None:
                    parameter.grad = parameter.grad * factor
            theirs.step()
            if not _same(ours, theirs, parameters, copies, rounded):
                return False
    return True


def _same(ours: AdamW, theirs: AdamW, a: Sequence[Tensor], b: Sequence[Tensor], rounded: Mapping[int, Tensor]) -> bool:
    for x, y in zip(a, b, strict=True):
        pairs = [(x, y), *((ours.state[x][key], theirs.state[y][key]) for key in ours.state[x])]
        if id(x) in rounded:
            pairs.append((rounded[id(x)], y.to(torch.bfloat16)))
        if not all(torch.equal(mine, other) for mine, other in pairs):  # type: ignore[arg-type]
            return False
    return True
