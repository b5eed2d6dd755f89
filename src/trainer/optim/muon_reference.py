"""Muon's step written down as it is defined, one matrix at a time in float64: what `muon.Muon` is held against."""

import math

import torch
from torch import Tensor

from trainer.optim.muon_groups import AdjustLr
from trainer.optim.newton_schulz import Coefficients, polynomials, start_norm


def muon_reference(
    weight: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr: AdjustLr = "rms_norm",
    ns_coefficients: Coefficients = "quintic",
    ns_steps: int = 5,
    split_sizes: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the new weight and the new momentum buffer, float64 tensors like `weight`; changes nothing.

    weight, gradient, momentum_buffer: whole tensors [rows, columns] or [matrices, rows, columns].
    """
    weight, gradient = weight.double(), gradient.double()
    momentum_buffer = momentum * momentum_buffer.double() + gradient
    wanted = gradient + momentum * momentum_buffer if nesterov else momentum_buffer
    rows, columns = weight.shape[-2:]
    moved = (1 - lr * weight_decay) * weight.reshape(-1, rows, columns)
    for index, matrices in enumerate(wanted.reshape(-1, rows, columns)):
        first = 0
        for size in split_sizes or (rows,):
            direction = orthogonalize_reference(matrices[first : first + size], ns_coefficients, ns_steps)
            if adjust_lr == "rms_norm":
                direction = direction * 0.2 * math.sqrt(max(size, columns))
            elif adjust_lr == "spectral_norm":
                direction = direction * math.sqrt(max(1.0, size / columns))
            moved[index, first : first + size] -= lr * direction
            first += size
    return moved.reshape(weight.shape), momentum_buffer


def orthogonalize_reference(matrix: Tensor, coefficients: Coefficients = "quintic", steps: int = 5) -> Tensor:
    """Returns U p(S) V^T for the [rows, columns] matrix U S V^T, p the composed polynomials, from its float64 SVD."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values * start_norm(coefficients) / torch.linalg.vector_norm(matrix.double()).clamp(min=1e-7)
    for a, b, c in polynomials(coefficients, steps):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right
