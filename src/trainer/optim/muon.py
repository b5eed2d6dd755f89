"""Muon for hidden matrices and AdamW for everything else, in one optimizer, over plain and sharded parameters.

One step of a `algorithm = "muon"` group, for each matrix W with gradient G (K. Jordan,
https://kellerjordan.github.io/posts/muon/):

    M <- momentum M + G
    U <- orthogonalize(G + momentum M)                    (nesterov; else orthogonalize(M))
    W <- (1 - lr weight_decay) W - lr ratio(shape) U      (`adjusted_ratio`)

Momentum and update touch only this rank's part. A sharded matrix is brought together on one rank, which orthogonalises
it alone, and its parts go back; the others are dealt out so that the ranks have equal work (`exchange`). Plain tensors
need no communication. `muon_reference` is the same arithmetic without any of that.
"""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from trainer.errors import TrainingError
from trainer.optim.exchange import Layout, Round, assign_owners, layout_of
from trainer.optim.muon_groups import AdjustLr, Algorithm, ComputeDtype, complete_group
from trainer.optim.newton_schulz import Coefficients, multiplications, orthogonalize

_UNIT_ELEMENTS = {"cpu": 4 * 2**20}
_ACCELERATOR_UNIT_ELEMENTS = 128 * 2**20
"""Elements per rank that are orthogonalised, or exchanged, at once. It bounds the extra memory of a step."""


class Muon(Optimizer):
    """Muon with an AdamW half.

    State is made at construction: "momentum_buffer" for muon groups, "exp_avg" and "exp_avg_sq" for adamw groups, zeros
    like the parameter (same placements). The number of steps done is the groups' "step"; there is no other counter.

    A parameter without a gradient is left alone: no momentum, no decay. Ranks agree on that: where any rank has a
    gradient, the others take zeros.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        *,
        weight_decay: float = 0.0,
        algorithm: Algorithm = "muon",
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: AdjustLr = "rms_norm",
        ns_coefficients: Coefficients = "quintic",
        ns_steps: int = 5,
        compute_dtype: ComputeDtype = "auto",
        split_sizes: tuple[int, ...] | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        compute_device: torch.device | None = None,
    ):
        """Every argument but the last is the default of a group entry of that name.

        Args:
            params: matrices, or groups. Muon groups hold tensors of 2 dimensions or of 3, [matrices, rows, columns].
            adjust_lr: see `adjusted_ratio`.
            compute_dtype: of the orthogonalisation. "auto" is bfloat16, but float32 on a CPU that has no AMX tiles for
                bfloat16 (with them it is 6 times as fast as float32, measured at 768 x 768). The group holds the
                choice, so a run resumed elsewhere keeps it.
            split_sizes: rows of the matrices that are fused in each parameter of the group (e.g. q, k and v); each is
                orthogonalised and has its learning rate adjusted as a matrix of its own.
            compute_device: where matrices are orthogonalised, if not where the parameters are. Not a group entry.

        Raises:
            TrainingError: a group entry or a parameter's shape is impossible; it names the group.
        """
        self.compute_device = compute_device
        self._units: list[list[Tensor]] = []
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "algorithm": algorithm,
            "step": 0,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr": adjust_lr,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "compute_dtype": compute_dtype,
            "split_sizes": split_sizes,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and makes its state; entries that it lacks take the constructor's values.

        Raises:
            TrainingError: the group is impossible; nothing was added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            complete_group(group, self.compute_device)
        except TrainingError:
            self.param_groups.pop()
            raise
        entries = ("momentum_buffer",) if group["algorithm"] == "muon" else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            self.state[parameter] = {entry: torch.zeros_like(parameter, requires_grad=False) for entry in entries}
        self._units.extend(_units(group))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"compute_device": self.compute_device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._units = [unit for group in self.param_groups for unit in _units(group)]  # a copy's parameters are new

    def chunk_units(self) -> list[list[Tensor]]:
        """Returns the parameters that are stepped in one batch or exchange, and so cannot be stepped apart."""
        return [list(unit) for unit in self._units]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. `closure` is called once, before it, with gradients enabled; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = _with_gradient([parameter for group in self.param_groups for parameter in group["params"]])
        members = []
        for group in self.param_groups:
            group["step"] += 1
            members.append((group, [parameter for parameter in group["params"] if parameter in active]))
        self._update(members)
        return loss

    def _update(self, members: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        """Updates the parameters that are given for each group, whose "step" counts this update already."""
        groups: dict[Tensor, dict[str, Any]] = {}
        for group, parameters in members:
            groups |= dict.fromkeys(parameters, group)
            if group["algorithm"] == "adamw" and parameters:
                self._step_adamw(group, parameters)
        sharded: dict[Layout, list[list[Tensor]]] = {}
        for unit in self._units:
            parameters = [parameter for parameter in unit if parameter in groups]
            if not parameters or groups[parameters[0]]["algorithm"] != "muon":
                continue
            layout = layout_of(parameters[0])
            if layout is None:
                self._step_whole(groups[parameters[0]], parameters)
            else:
                sharded.setdefault(layout, []).append(parameters)
        for layout, units in sharded.items():
            self._step_sharded(layout, [(groups[unit[0]], unit) for unit in units])

    # --- muon -----------------------------------------------------------------------------------------------------------

    def _step_whole(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """One update of equal shapes that are whole on this rank."""
        first = _local(parameters[0])
        if first.numel() == 0:
            return
        batch = torch.empty((len(parameters), *first.shape), dtype=_compute_dtype(group), device=first.device)
        for parameter, direction in zip(parameters, batch, strict=True):
            self._advance_momentum(group, parameter, out=direction)
        for parameter, direction in zip(parameters, self._orthogonalize(group, batch), strict=True):
            _move(group, parameter, direction)

    def _step_sharded(self, layout: Layout, units: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        """One update of units that lie in one way; the next unit's pieces travel while one is orthogonalised."""
        loads = [0.0] * layout.owners
        rounds = {0: self._send(layout, *units[0], loads)}
        for index, (group, _) in enumerate(units):
            if index + 1 < len(units):
                rounds[index + 1] = self._send(layout, *units[index + 1], loads)
            rounds[index].give_back([self._orthogonalize(group, batch) for _, batch in rounds[index].whole()])
            if index > 0:
                self._receive(rounds.pop(index - 1), *units[index - 1])
        self._receive(rounds.pop(len(units) - 1), *units[-1])

    def _send(self, layout: Layout, group: dict[str, Any], parameters: list[Tensor], loads: list[float]) -> Round:
        """Deals a unit out to the owners, of which each has `loads` already, and starts the exchange."""
        shapes = [_whole_shape(parameter, layout) for parameter in parameters]
        owners = assign_owners([_cost(group, shape) for shape in shapes], loads)
        exchange = Round(layout, shapes, owners, _compute_dtype(group), _local(parameters[0]).device)
        for index, parameter in enumerate(parameters):
            self._advance_momentum(group, parameter, out=exchange.piece(index))
        exchange.collect()
        return exchange

    def _receive(self, exchange: Round, group: dict[str, Any], parameters: list[Tensor]) -> None:
        exchange.finish()
        layout = exchange.layout
        for index, parameter in enumerate(parameters):
            first_row = 0
            if layout.shard is not None and layout.tensor_dim == parameter.ndim - 2:
                sizes = layout.piece_sizes(parameter.shape[-2])
                first_row = sum(sizes[: layout.rank(layout.shard)])
            _move(group, parameter, exchange.result(index), first_row)

    def _advance_momentum(self, group: dict[str, Any], parameter: Tensor, *, out: Tensor) -> None:
        """Updates the momentum and writes what is to be orthogonalised to `out` (this rank's part, compute dtype)."""
        gradient, momentum = local_gradient(parameter), _local(self.state[parameter]["momentum_buffer"])
        torch.add(gradient, momentum, alpha=group["momentum"], out=momentum)
        if group["nesterov"]:
            torch.add(gradient, momentum, alpha=group["momentum"], out=out)
        else:
            out.copy_(momentum)

    def _orthogonalize(self, group: dict[str, Any], batch: Tensor) -> Tensor:
        """Returns the directions for whole tensors [items, (matrices,) rows, columns]; `batch` may be overwritten."""
        home = batch.device
        batch = batch.to(self.compute_device or home)
        for start, stop in pairwise(_row_edges(group, batch.shape[-2])):
            block = batch[..., start:stop, :]
            matrices = block.reshape(-1, *block.shape[-2:])
            result = orthogonalize(matrices, group["ns_coefficients"], group["ns_steps"]).view(block.shape)
            if block.shape == batch.shape:
                return result.to(home)
            block.copy_(result)
        return batch.to(home)

    # --- AdamW ----------------------------------------------------------------------------------------------------------

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        parameters = [parameter for parameter in parameters if _local(parameter).numel()]
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        done = torch.full((len(parameters),), float(group["step"] - 1), device=_local(parameters[0]).device)
        adamw(
            [_local(parameter) for parameter in parameters],
            [local_gradient(parameter) for parameter in parameters],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            list(done.unbind()),  # torch's kernel wants a counter per tensor and adds 1 to it
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def adjusted_ratio(adjust_lr: AdjustLr, rows: int, columns: int) -> float:
    """Returns what lr is multiplied by for the direction of a [rows, columns] = [fan out, fan in] matrix.

    * "rms_norm": 0.2 sqrt(max(rows, columns)). An orthogonalised matrix has RMS 1 / sqrt(max(rows, columns)); 0.2 is the
      RMS of AdamW's updates, whose lr and decay then fit (Liu et al., "Muon is Scalable for LLM Training",
      arXiv 2502.16982, section 2.2).
    * "spectral_norm": sqrt(max(1, rows / columns)), so that matrices which widen have updates of RMS operator norm about
      1 (Jordan's rule, the one of torch.optim.Muon's "original"; without the maximum, Bernstein's
      https://jeremybernste.in/writing/deriving-muon).
    * "none": 1.
    """
    if adjust_lr == "rms_norm":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr == "spectral_norm":
        return math.sqrt(max(1.0, rows / columns))
    return 1.0


def _move(group: dict[str, Any], parameter: Tensor, direction: Tensor, first_row: int = 0) -> None:
    """Decays and moves this rank's part of a parameter, whose rows start at `first_row` of the whole matrices."""
    weight, rows, columns = _local(parameter), parameter.shape[-2], parameter.shape[-1]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    for start, stop in pairwise(_row_edges(group, rows)):
        low, high = max(start - first_row, 0), min(stop - first_row, weight.shape[-2])
        if low < high:
            lr = group["lr"] * adjusted_ratio(group["adjust_lr"], stop - start, columns)
            weight.narrow(-2, low, high - low).add_(direction.narrow(-2, low, high - low), alpha=-lr)


def _row_edges(group: dict[str, Any], rows: int) -> list[int]:
    """Returns where the matrices fused in a parameter begin and end, counted in rows."""
    edges = [0]
    for size in group["split_sizes"] or (rows,):
        edges.append(edges[-1] + size)
    return edges


def _cost(group: dict[str, Any], shape: torch.Size) -> float:
    blocks = [stop - start for start, stop in pairwise(_row_edges(group, shape[-2]))]
    return math.prod(shape[:-2]) * sum(multiplications((rows, shape[-1]), group["ns_steps"]) for rows in blocks)


def _units(group: dict[str, Any]) -> list[list[Tensor]]:
    """Returns the group's parameters, each once, in the lots that a step takes: the same on all ranks and in all steps.

    Muon's lots are of one layout and bounded size; whole tensors are also of one shape.
    """
    if group["algorithm"] != "muon":
        return [[parameter] for parameter in group["params"]]
    lots: dict[Any, list[list[Tensor]]] = {}
    filled: dict[Any, int] = {}
    for parameter in group["params"]:
        layout = layout_of(parameter)
        key = layout or (
            parameter.shape,
            getattr(parameter, "device_mesh", None),
            getattr(parameter, "placements", None),
        )
        device = _local(parameter).device.type
        limit = _UNIT_ELEMENTS.get(device, _ACCELERATOR_UNIT_ELEMENTS) * (layout.owners if layout else 1)
        if key not in lots or filled[key] + parameter.numel() > limit:
            lots.setdefault(key, []).append([])
            filled[key] = 0
        lots[key][-1].append(parameter)
        filled[key] += parameter.numel()
    return [lot for several in lots.values() for lot in several]


def _whole_shape(parameter: Tensor, layout: Layout) -> torch.Size:
    """Returns the shape that this rank sees once the layout's pieces are together."""
    shape = list(_local(parameter).shape)
    if layout.shard is not None:
        shape[layout.tensor_dim] = parameter.shape[layout.tensor_dim]
    return torch.Size(shape)


def _with_gradient(parameters: list[Tensor]) -> set[Tensor]:
    """Returns the parameters that are updated: those with a gradient, for sharded ones with a gradient on any rank."""
    active = {parameter for parameter in parameters if parameter.grad is not None}
    meshes: dict[DeviceMesh, list[Tensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            meshes.setdefault(parameter.device_mesh, []).append(parameter)
    for mesh, members in meshes.items():
        present = torch.tensor([parameter in active for parameter in members], dtype=torch.uint8)
        for mesh_dim in range(mesh.ndim):
            group = mesh.get_group(mesh_dim)
            # Through the host where the group can: asking the device would wait for the whole backward pass.
            host = torch.device("cpu") in group._device_types
            flags = present if host else present.to(_local(members[0]).device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
            present = flags.cpu()
        active.update(parameter for parameter, flag in zip(members, present.tolist(), strict=True) if flag)
    return active


def _compute_dtype(group: dict[str, Any]) -> torch.dtype:
    return getattr(torch, group["compute_dtype"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Returns this rank's part of the gradient; zeros if only other ranks have one."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(_local(parameter))
    if isinstance(parameter, DTensor) and getattr(gradient, "placements", None) != parameter.placements:
        raise TrainingError(
            f"a parameter of shape {list(parameter.shape)} has placements {parameter.placements}, its gradient "
            f"{getattr(gradient, 'placements', 'is a plain tensor')}; reduce gradients before the optimizer's step"
        )
    return _local(gradient)
