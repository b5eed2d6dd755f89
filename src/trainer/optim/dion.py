"""microsoft/dion's Muon behind the groups and the state of ours (optim.implementation = "dion").

Groups, state tensors, counters and therefore checkpoints are those of `muon.Muon`, whichever of the two steps them. Per
step the groups are translated and dion's optimizer is lent the state tensors; it does the momentum, the exchange of
shards and the updates, in its own way:

* what is orthogonalised is rounded to bfloat16 first, and the directions arrive in bfloat16;
* `ns_coefficients = "polar_express"` with 5 steps is dion's own function (constants with another margin of safety); for
  other polynomials it is given ours;
* lr reaches its kernels as float32.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.errors import ConfigError, TrainingError
from trainer.optim.exchange import layout_of
from trainer.optim.muon import Muon, local_gradient
from trainer.optim.newton_schulz import SMALLEST_NORM, Coefficients, orthogonalize
from trainer.optim.offload.chunks import plain_step
from trainer.optim.offload.tensors import local_part

INSTALL = "install it with `uv sync --extra dion` in a checkout, or `pip install git+https://github.com/microsoft/dion`"

# One of dion's optimizers: its mesh (None: plain tensors), and what our orthogonalisation needs to know.
Kind = tuple[DeviceMesh | None, Coefficients, int, torch.dtype]


def load_dion() -> Any:
    """Returns the class `dion.Muon`.

    Raises:
        ConfigError: it cannot be imported, or what is called dion is something else.
    """
    try:
        module = importlib.import_module("dion")
    except ImportError as error:
        raise ConfigError(
            f'optim.implementation = "dion" needs microsoft/dion, which cannot be imported ({error}): {INSTALL}; or set '
            'optim.implementation = "own"'
        ) from error
    try:
        return module.Muon
    except AttributeError as error:
        raise ConfigError(
            f'optim.implementation = "dion": the package dion of {module.__file__} has no Muon, so it is not '
            f'microsoft/dion: {INSTALL}; or set optim.implementation = "own"'
        ) from error


class DionMuon(Muon):
    """`Muon` whose steps are microsoft/dion's; everything that a checkpoint holds is the same.

    dion's functions are compiled by torch.compile when they are first called.
    """

    def __init__(self, params: Any, lr: float = 0.02, **options: Any):
        """The arguments of `Muon`.

        Raises:
            ConfigError: dion cannot be imported.
            TrainingError: a group or a parameter is one that `Muon` or dion cannot take.
        """
        self._dion = load_dion()
        self._steppers: dict[Kind, Any] = {}
        super().__init__(params, lr, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] == "muon":
            try:
                for parameter in group["params"]:
                    _check(group, parameter)
            except TrainingError:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_dion": self._dion, "_steppers": {}}

    def _update(self, members: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        lots: dict[Kind, list[dict[str, Any]]] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        borrowed: list[Tensor] = []
        for group, parameters in members:
            for parameter in parameters:
                local_gradient(parameter)  # its placements are the parameter's
                if parameter.grad is None:  # only other ranks have one
                    parameter.grad = torch.zeros_like(parameter)
                    borrowed.append(parameter)
            translate = self._muon_lots if group["algorithm"] == "muon" else self._adamw_lots
            for kind, lot in translate(group, parameters, state):
                lots.setdefault(kind, []).append(lot)
        for kind, groups in lots.items():
            stepper = self._stepper(kind)
            stepper.param_groups = groups
            stepper.state.update({parameter: state[parameter] for group in groups for parameter in group["params"]})
            plain_step(stepper)()
            stepper.param_groups = []
            stepper.state.clear()  # lent for this step: an offloaded state is elsewhere in the next
        for parameter in borrowed:
            parameter.grad = None

    def _muon_lots(
        self, group: dict[str, Any], parameters: list[Tensor], state: dict[Tensor, dict[str, Any]]
    ) -> list[tuple[Kind, dict[str, Any]]]:
        lots: dict[tuple[Kind, bool], list[Tensor]] = {}
        dtype = getattr(torch, group["compute_dtype"])
        for parameter in parameters:
            if local_part(parameter).numel() == 0 and not _is_cut(parameter):
                continue  # no rank waits for this one
            state[parameter] = {"momentum": self.state[parameter]["momentum_buffer"]}
            kind = (_mesh(parameter), group["ns_coefficients"], group["ns_steps"], dtype)
            lots.setdefault((kind, _is_wide(group, parameter)), []).append(parameter)
        entries = {
            "algorithm": "muon",
            "lr": group["lr"],
            "mu": group["momentum"],
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
            "epsilon": SMALLEST_NORM,
            "flatten": False,
            "cautious_wd": False,
            "step": group["step"] - 1,
        }
        if len(group["split_sizes"] or ()) > 1:
            entries["split_sizes"] = tuple(group["split_sizes"])
        own = group["adjust_lr"]
        # dion's "spectral_norm" is sqrt(rows / columns) for wide matrices too, ours is never below 1.
        rules = {True: None, False: None if own == "none" else own}
        return [(kind, entries | {"params": lot, "adjust_lr": rules[wide]}) for (kind, wide), lot in lots.items()]

    def _adamw_lots(
        self, group: dict[str, Any], parameters: list[Tensor], state: dict[Tensor, dict[str, Any]]
    ) -> list[tuple[Kind, dict[str, Any]]]:
        parameters = [parameter for parameter in parameters if local_part(parameter).numel()]
        if not parameters:
            return []
        done = torch.full((len(parameters),), float(group["step"] - 1), device=local_part(parameters[0]).device)
        for parameter, counter in zip(parameters, done.unbind(), strict=True):
            own = self.state[parameter]
            state[parameter] = {"momentum": own["exp_avg"], "variance": own["exp_avg_sq"], "step_dev": counter}
        lot = {
            "params": parameters,
            "algorithm": "adamw",
            "lr": group["lr"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "weight_decay": group["weight_decay"],
            "epsilon": group["eps"],
            "step": group["step"] - 1,
        }
        return [((None, "quintic", 5, torch.bfloat16), lot)]

    def _stepper(self, kind: Kind) -> Any:
        if kind not in self._steppers:
            mesh, coefficients, steps, dtype = kind
            own = coefficients == "polar_express" and steps == 5
            made = self._dion(
                [{"params": []}],
                distributed_mesh=mesh,
                use_polar_express=own,
                newton_schulz_func=None if own else self._orthogonalizer(coefficients, steps, dtype),
            )
            if own and self.compute_device is not None:
                made._newton_schulz_func = _elsewhere(made._newton_schulz_func, self.compute_device)
            self._steppers[kind] = made
        return self._steppers[kind]

    def _orthogonalizer(
        self, coefficients: Coefficients, steps: int, dtype: torch.dtype
    ) -> Callable[[Tensor, Any], Tensor]:
        def function(X: Tensor, epsilon: Any = None) -> Tensor:
            matrices = X.reshape(-1, *X.shape[-2:]).to(self.compute_device or X.device, dtype)
            return orthogonalize(matrices, coefficients, steps).to(X.device, X.dtype).view(X.shape)

        return function


def _elsewhere(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    def there(X: Tensor, epsilon: Tensor) -> Tensor:
        return function(X.to(device), epsilon=epsilon.to(device)).to(X.device)

    return there


def _is_wide(group: dict[str, Any], parameter: Tensor) -> bool:
    """Whether "spectral_norm" leaves the lr of this parameter's matrices as it is."""
    tallest = max(group["split_sizes"] or (parameter.shape[-2],))
    return group["adjust_lr"] == "spectral_norm" and tallest <= parameter.shape[-1]


def _is_cut(parameter: Tensor) -> bool:
    layout = layout_of(parameter)
    return layout is not None and layout.shard is not None


def _mesh(parameter: Tensor) -> DeviceMesh | None:
    """Returns the one-dimensional mesh over which dion shares out the work on this parameter."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, layout = parameter.device_mesh, layout_of(parameter)
    if mesh.ndim == 1:
        return mesh
    dim = mesh.ndim - 1
    if layout is not None:
        found = layout.shard if layout.shard is not None else layout.replica
        dim = dim if found is None else found
    assert mesh.mesh_dim_names is not None  # checked when the group was added
    return mesh[mesh.mesh_dim_names[dim]]


def _check(group: dict[str, Any], parameter: Tensor) -> None:
    """Raises TrainingError for what our Muon takes and dion does not."""
    sizes: tuple[int, ...] = tuple(group["split_sizes"] or ())
    problem = None
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1 and not parameter.device_mesh.mesh_dim_names:
        problem = "lies on a mesh whose dimensions have no names"
    elif len(sizes) > 1 and parameter.ndim != 2:
        problem = "is a stack of fused matrices (split_sizes)"
    elif len(sizes) > 1 and group["adjust_lr"] == "spectral_norm":
        tall = {size > parameter.shape[-1] for size in sizes}
        problem = (
            "fuses wide and tall matrices (split_sizes) under adjust_lr = 'spectral_norm'" if len(tall) > 1 else None
        )
    elif len(sizes) > 1 and _is_cut(parameter):
        layout = layout_of(parameter)
        assert layout is not None
        if layout.tensor_dim == 0 and parameter.shape[0] % layout.size(layout.shard):
            problem = "has fused matrices (split_sizes) and rows that the ranks cannot share evenly"
    if problem is not None:
        raise TrainingError(
            f"optimizer group {group.get('name', 'without a name')!r}: a parameter of shape {list(parameter.shape)} "
            f'{problem}, which microsoft/dion does not do; set optim.implementation = "own"'
        )
