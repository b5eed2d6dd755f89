"""Worker: the output head and its token cross-entropy, forward and backward, in one of several forms."""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gate import Gate, Stopped
from trainer.kernels.linear_cross_entropy import linear_cross_entropy

LossForm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [N, D], weight [V, D], labels int64 [N] -> the summed loss, 0-dim."""


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The reference: all logits at once, in float32 from there on."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def torch_plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's own as it comes (2.15 and later)."""
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum")


def torch_chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's own in chunks as large as ours; by its own heuristic they have 4 tokens here and take ten times longer."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


FORMS: dict[str, LossForm] = {
    "full logits": full_logits,
    "ours": linear_cross_entropy,
    "torch": torch_plain,
    "torch, chunked": torch_chunked,
}


def inputs(tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden and weight, which want gradients, and labels, every one of them supervised."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab_size, (tokens,), generator=generator)


def once(form: LossForm, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Runs forward and backward, drops the gradients and returns the mean loss."""
    loss = form(hidden, weight, labels)
    loss.backward()
    hidden.grad = weight.grad = None
    return loss.item() / labels.numel()


def peak_extra_bytes(work: Callable[[], object]) -> int:
    """Returns by how much the resident memory of this process rose above its start while `work` ran (Linux only)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def main() -> None:
    arguments = json.loads(sys.argv[1])
    form = FORMS[arguments["form"]]
    dtype = getattr(torch, arguments["dtype"])
    gate = Gate(torch.set_num_threads)
    small = inputs(8, arguments["hidden_size"], 512, dtype)
    once(form, *small)  # libraries allocate their own buffers in the first call
    given = inputs(arguments["tokens"], arguments["hidden_size"], arguments["vocab_size"], dtype)
    found: dict[str, float] = {}
    found["extra_bytes"] = peak_extra_bytes(lambda: found.update(loss=once(form, *given)))
    try:
        while True:
            gate.before_step()
            once(form, *given)
            gate.count(arguments["tokens"])
            gate.note(**found)
    except Stopped:
        pass


if __name__ == "__main__":
    main()
