"""Orthogonalisation of batches of matrices by odd polynomials in matrix products.

A step maps X to (a I + b R + c R^2) X with R = X X^T, so every singular value s goes to a s + b s^3 + c s^5 while the
singular vectors stay. Two rewritings make the same polynomial cheaper:

* **Completed squares.** On X scaled by a suitable sqrt(s), the bracket is (R + inner I)^2 + outer I: after each product
  only a diagonal is touched, no matrix is scaled or added. The scales of successive steps are chosen so that the last
  step ends at scale 1 (`completed_squares`).
* **Gram form.** For rectangular X, several steps run on the small Gram matrix R alone and X is multiplied once by the
  product of their brackets. Rounding puts an absolute error on R that grows by a^2 per step in the directions of small
  singular values, so X is multiplied, and R computed again from it, after at most 3 steps.
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Coefficients = Literal["quintic", "polar_express"]
Polynomial = tuple[float, float, float]

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""a, b, c of K. Jordan's Muon, the same in every step (https://kellerjordan.github.io/posts/muon/). Steep at zero; it
leaves singular values between 0.68 and 1.21, from 0.002 of the norm on."""

POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""One polynomial per step, the last one for all later steps (Amsel, Persson, Musco, Gower: "The Polar Express",
arXiv 2505.16932, Algorithm 1; best in the worst case for singular values in [1e-3, 1])."""
SAFETY = 1.01
"""Room for rounding in Polar Express: all polynomials but the last take x / 1.01, and X starts at 1 / 1.01 of its norm
(same source). Without it, a singular value rounded above 1 is driven away from 1."""

SMALLEST_NORM = 1e-7
"""Frobenius norm below which a matrix counts as zero: it is divided by this instead of its norm."""

_GRAM_STEPS = 3
"""Steps between two computations of R. In bfloat16, for singular values from 1 to 1e-4, the largest is then 1.13 after
Polar Express, as it should be; it would be 3.0 with 4 steps and 75 with 5."""
_GRAM_RATIO = 1.5
"""Long side over short side from which the Gram form needs fewer multiplications (5 steps, short side n, ratio r:
14 n^3 + 4 r n^3 against 5 n^3 + 10 r n^3)."""
_CPU_BATCH_BYTES = 4 * 2**20
_ACCELERATOR_BATCH_BYTES = 256 * 2**20
"""Bytes of matrices iterated at once: on a CPU per thread, which keeps them in its caches; on an accelerator enough to
fill it."""


def polynomials(coefficients: Coefficients, steps: int) -> tuple[Polynomial, ...]:
    """Returns (a, b, c) of each of `steps` steps; see `QUINTIC` and `POLAR_EXPRESS`."""
    if coefficients == "quintic":
        return (QUINTIC,) * steps
    listed = [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)]
    return tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in listed[:-1]) + tuple(listed[-1:])


def start_norm(coefficients: Coefficients) -> float:
    """Returns the Frobenius norm that a matrix is given before the first step."""
    return 1.0 if coefficients == "quintic" else 1.0 / SAFETY


def completed_squares(steps: tuple[Polynomial, ...]) -> tuple[float, list[tuple[float, float]]]:
    """Returns the factor that X is scaled by before the first step, and (inner, outer) per step.

    With S = s R, inner = s b / (2 c) and outer = s^2 a / c - inner^2:

        (S + inner I)^2 + outer I  =  (s^2 / c) (a I + b R + c R^2).

    X scaled by sqrt(s) leaves this step scaled by sqrt(s') with s' = s^5 / c^2. Read backwards from 1 after the last
    step, s = (s' c^2)^(1/5), which halves any error in log s more than twice per step; needs c > 0.
    """
    scale = 1.0
    squares = []
    for a, b, c in reversed(steps):
        scale = (scale * c * c) ** 0.2
        inner = scale * b / (2 * c)
        squares.append((inner, scale * scale * a / c - inner * inner))
    return scale**0.5, squares[::-1]


def segments(shape: tuple[int, int], steps: int) -> list[int]:
    """Returns how many steps are done at a time on the Gram matrix of an `shape` matrix; they add up to `steps`."""
    if max(shape) < _GRAM_RATIO * min(shape):
        return [1] * steps
    full, rest = divmod(steps, _GRAM_STEPS)
    return [_GRAM_STEPS] * full + [rest] * (rest > 0)


def multiplications(shape: tuple[int, int], steps: int) -> int:
    """Returns the scalar multiplications of `orthogonalize` for one matrix of `shape`."""
    short, long = sorted(shape)
    cube = sum(4 * length - 3 for length in segments(shape, steps))
    return cube * short**3 + 2 * len(segments(shape, steps)) * short * short * long


def orthogonalize(matrices: Tensor, coefficients: Coefficients = "quintic", steps: int = 5) -> Tensor:
    """Returns U p(S) V^T for each matrix U S V^T, with p(S) near 1; a zero matrix stays zero.

    Args:
        matrices: [batch, rows, columns] in the dtype of the iteration: bfloat16, float32 or float64.

    Returns:
        [batch, rows, columns], same dtype and device.
    """
    batch, rows, columns = matrices.shape
    if matrices.numel() == 0:
        return matrices.clone()
    on_cpu = matrices.device.type == "cpu"
    limit_bytes = _CPU_BATCH_BYTES * torch.get_num_threads() if on_cpu else _ACCELERATOR_BATCH_BYTES
    chunk = max(1, limit_bytes // (rows * columns * matrices.element_size()))
    if batch <= chunk:
        return _iterate(matrices, coefficients, steps)
    return torch.cat([_iterate(part, coefficients, steps) for part in matrices.split(chunk)])


def _iterate(matrices: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    scale, squares = completed_squares(polynomials(coefficients, steps))
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_(min=SMALLEST_NORM)
    x = matrices * (scale * start_norm(coefficients) / norm)
    ends = [0]
    for length in segments((matrices.shape[1], matrices.shape[2]), steps):
        ends.append(ends[-1] + length)
    for start, stop in pairwise(ends):
        x = _advance(x, squares[start:stop])
    return x


def _advance(x: Tensor, squares: list[tuple[float, float]]) -> Tensor:
    """Returns x [batch, rows, columns] after the given steps, all of them done on its Gram matrix."""
    tall = x.shape[-2] > x.shape[-1]
    gram = _gram(x, tall)
    current, product = gram, None
    for index, (inner, outer) in enumerate(squares):
        shifted = _add_to_diagonal(gram.clone() if current is gram and len(squares) > 1 else current, inner)
        bracket = _add_to_diagonal(torch.bmm(shifted, shifted), outer)
        product = bracket if product is None else torch.bmm(bracket, product)
        if index + 1 < len(squares):
            # From the first Gram matrix, not from the last one: the errors of the steps do not add up.
            current = torch.bmm(torch.bmm(product, gram), product)
    assert product is not None
    return torch.bmm(x, product) if tall else torch.bmm(product, x)


def _gram(x: Tensor, tall: bool) -> Tensor:
    """Returns X X^T, or X^T X for tall matrices: [batch, short, short]."""
    if tall and x.device.type == "cpu":
        # oneDNN multiplies A^T B at half the rate of A B^T; a transposed copy costs a quarter of what that loses.
        x = x.mT.contiguous()
        tall = False
    return torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)  # `@` would copy the transposed view


def _add_to_diagonal(x: Tensor, value: float) -> Tensor:
    x.diagonal(dim1=-2, dim2=-1).add_(value)
    return x
