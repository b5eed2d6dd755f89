"""Worker: one optimizer's steps over the parameters of a decoder, with gradients that are there already."""

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gate import Gate, Stopped
from trainer.config.train import OptimConfig
from trainer.core.log import setup_logging
from trainer.optim.build import build_optimizer
from trainer.optim.offload.base import OffloadOptimizer, updated_parameters
from trainer.optim.offload.build import Mode, build_offload

Step = Callable[[], object]


class Weights(nn.Module):
    """The matrices and norms of a decoder with an embedding and no head."""

    def __init__(self, hidden_size: int, layers: int, vocab_size: int):
        super().__init__()
        d = hidden_size
        shapes = [(vocab_size, d)] + layers * [(d, d), (d, d), (d, d), (d, d), (4 * d, d), (d, 4 * d), (d,), (d,)]
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) * 0.02 for shape in shapes)


class Owner:
    """Stands for the model's owner in a checkpoint, which a step does not use."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Tensor], /) -> None:
        pass


def flat(model: Weights, clip: bool) -> Step:
    """torch's fused AdamW over one flat tensor."""
    whole = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    whole.grad = torch.randn_like(whole) * 1e-3
    return _plain_step(torch.optim.AdamW([whole], lr=1e-4, fused=True), [whole], clip)


def separate(model: Weights, clip: bool) -> Step:
    """torch's fused AdamW over the model's own tensors."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return _plain_step(torch.optim.AdamW(parameters, lr=1e-4, fused=True), parameters, clip)


def traffic(model: Weights, clip: bool) -> Step:
    """Only the memory traffic of a step with bf16 gradients in and bf16 weights out, 28 bytes a parameter, in one pass."""
    assert not clip
    count = sum(parameter.numel() for parameter in model.parameters())
    floats = [torch.rand(count) for _ in range(3)]
    halves = [torch.rand(count).bfloat16() for _ in range(2)]
    kernel = _compile(TRAFFIC)
    pool = ThreadPoolExecutor()

    def step() -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*floats, *halves)]
        threads = torch.get_num_threads()
        edges = [ctypes.c_int64(count * part // threads) for part in range(threads + 1)]
        done = [pool.submit(kernel, *pointers, edges[part], edges[part + 1]) for part in range(1, threads)]
        kernel(*pointers, edges[0], edges[1])
        for share in done:
            share.result()

    return step


TRAFFIC = """
#include <stdint.h>
void kernel(float *restrict a, float *restrict b, float *restrict c, const uint16_t *restrict in,
            uint16_t *restrict out, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) { a[i] += 1; b[i] += 1; c[i] += 1; out[i] = in[i] + 1; }
}
"""


def _compile(source: str) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    (folder / "kernel.c").write_text(source)
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", folder / "kernel.so", folder / "kernel.c"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "kernel.so")).kernel


def offloaded(mode: Mode, model: Weights, clip: bool, dtype: torch.dtype = torch.float32) -> Step:
    """The trainer's optimizer of an offload mode; gradients arrive in the compute dtype before the steps."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    groups = [{"name": "all", "lr": 1e-4, "params": list(parameters), "param_names": list(names)}]
    factory = partial(build_optimizer, OptimConfig())
    built = build_offload(mode, factory, groups, model, Owner(), compute_dtype=dtype)
    optimizer = built.optimizer
    assert isinstance(optimizer, OffloadOptimizer)
    sum((parameter * 1e-3).float().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    for gradient in optimizer.gradients().values():
        gradient.normal_().mul_(1e-3)
    held = [(parameter, parameter.grad) for parameter in updated_parameters(optimizer)]
    limits = _falling_limits()

    def step() -> None:
        for parameter, gradient in held:  # as if backward had just left them there
            parameter.grad = gradient
        if clip:
            optimizer.clip_gradients(next(limits), within_step=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: bool) -> Step:
    limits = _falling_limits()

    def step() -> None:
        if clip:
            nn.utils.clip_grad_norm_(parameters, next(limits))
        optimizer.step()

    return step


def _falling_limits():
    """Limits that clip every step although the gradients stay as the last step left them."""
    limit = 1.0
    while True:
        yield limit
        limit *= 0.99


VARIANTS: dict[str, Callable[[Weights, bool], Step]] = {
    "flat": flat,
    "none": separate,
    "optimizer": lambda model, clip: offloaded("optimizer", model, clip),
    "full": lambda model, clip: offloaded("full", model, clip),
    "full bf16": lambda model, clip: offloaded("full", model, clip, torch.bfloat16),
    "traffic": traffic,
}


def main() -> None:
    setup_logging("error", rank=0)
    arguments = json.loads(sys.argv[1])
    gate = Gate(torch.set_num_threads)
    model = Weights(arguments["hidden_size"], arguments["layers"], arguments["vocab_size"])
    count = sum(parameter.numel() for parameter in model.parameters())
    step = VARIANTS[arguments["variant"]](model, arguments["clip"])
    try:
        while True:
            gate.before_step()
            step()
            gate.note(parameters=count)
    except Stopped:
        pass


if __name__ == "__main__":
    main()
