"""What both offloading optimizers are to the rest of the program: a torch Optimizer that wraps another one."""

import copy
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer.errors import CheckpointMismatch
from trainer.optim.clip import clip_gradients
from trainer.optim.groups import RUN_LOCAL, write_entries

StateDict = dict[str, Any]


class OffloadOptimizer(Optimizer):
    """An optimizer that keeps memory on the host and steps `inner`, an ordinary one.

    `param_groups`, `state` and `defaults` are those of `inner`, not copies: the lists and dicts that a scheduler holds
    are the ones that a step reads, before and after a load. Methods have Optimizer's signatures.

    Attributes:
        inner: the optimizer that knows the update rule.
        mode: the value of `model.offload` that this class implements.
    """

    mode: str
    inner: Optimizer

    def __init__(self, inner: Optimizer):
        # Not Optimizer.__init__: it would make groups and state of its own.
        self.inner = inner
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """{parameter: {entry: live tensor on the host, or scalar}}.

        Waits for copies, so what is read is complete, and takes over what others have put there, so it is on the host.
        """
        self.synchronize()
        self._take_over()
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.defaults

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Host memory held for offloading, on this rank."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Device memory held for offloading, on this rank."""

    @property
    def is_torn(self) -> bool:
        """Whether a part of an update is in the weights, and the rest never will be; see `begin_update`."""
        return False

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when no copy is in flight any more: gradients, state and weights are where they belong."""

    @abstractmethod
    def _update(self) -> None:
        """One update from the gradients at hand."""

    @abstractmethod
    def _take_over(self) -> None:
        """Brings state to the host that was added since the last call."""

    @abstractmethod
    def _adopt(self, group: dict[str, Any]) -> None:
        """Takes over a group's parameters and their state, which are new or were replaced by a load."""

    # --- stepping -------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. `closure` is called once, before it; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for hook in list(self.inner._optimizer_step_pre_hooks.values()):
            hook(self.inner, (), {})
        with torch.no_grad():
            self._update()
        for hook in list(self.inner._optimizer_step_post_hooks.values()):
            hook(self.inner, (), {})
        return loss

    def begin_update(self) -> bool:
        """Lets the update begin in the coming backward pass. Returns whether it will; only mode "full" can."""
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def clip_gradients(self, max_norm: float | None, *, within_step: bool = False) -> Tensor:
        """Returns the global L2 norm of all gradients (0-dim, float32) and clips them; see `clip.clip_gradients`.

        within_step: the factor may be applied as the next `step` reads the gradients, which saves a pass over them.
            `step` or `zero_grad` must follow, and after it `zero_grad`; until then `.grad` may be unclipped.
        """
        return clip_gradients(updated_parameters(self), max_norm)

    def gradients(self) -> dict[str, Tensor]:
        """Returns {parameter: its live gradient, summed over the micro-steps so far}, for those that have one."""
        self.synchronize()
        named = named_parameters(self)
        return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Makes these the sums of the micro-steps so far; a parameter that is not named has none."""
        for name, parameter in named_parameters(self).items():
            parameter.grad = gradients.get(name)

    def load_master_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Makes new weights the ones that training goes on from; optimizer state stays.

        weights: parameter name -> whole tensor or one sharded as here, any float dtype. None: the model's weights have
            been written already (a weights-only load), take them from there.

        Raises:
            CheckpointMismatch: a name or shape is not this model's; nothing was changed then.
        """
        if weights is not None:
            copy_weights(weights, named_parameters(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self._adopt(self.inner.param_groups[-1])

    # --- state dicts ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        self.synchronize()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes a torch state dict over into the live groups and the host memory that state already has.

        Unlike torch's, it keeps every tensor's own dtype and device, and the run's own entries ("fused", "foreach").

        Raises:
            CheckpointMismatch: groups, or the dtype or shape of a tensor, are not those of this optimizer.
        """
        self.synchronize()
        saved = dict(state_dict)
        for hook in list(self.inner._optimizer_load_state_dict_pre_hooks.values()):
            saved = hook(self.inner, saved) or saved
        pairs = _match(self.param_groups, saved["param_groups"])
        by_id = {
            key: parameter
            for live, there in pairs
            for key, parameter in zip(there["params"], live["params"], strict=True)
        }
        _check_state(self.inner.state, saved["state"], by_id)
        for key, entries in saved["state"].items():
            if key in by_id:
                self._load_entries(by_id[key], entries)
            else:  # it belongs to no parameter
                self.inner.state[key] = copy.deepcopy(entries)
        for live, there in pairs:
            write_entries(live, there)
            live.update({k: v for k, v in there.items() if k not in live and k not in RUN_LOCAL})
            self._adopt(live)
        for hook in list(self.inner._optimizer_load_state_dict_post_hooks.values()):
            hook(self.inner)

    def _load_entries(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        live = self.inner.state[parameter]
        for key, value in entries.items():
            if isinstance(value, Tensor) and key in live:
                live[key].copy_(value)
            else:  # lazy state that this process has not made yet; `_adopt` takes it to the host
                live[key] = value.clone() if isinstance(value, Tensor) else value

    def register_state_dict_pre_hook(self, hook: Callable[[Optimizer], None], prepend: bool = False) -> RemovableHandle:
        return self.inner.register_state_dict_pre_hook(lambda _: hook(self), prepend)

    def register_state_dict_post_hook(
        self, hook: Callable[[Optimizer, StateDict], StateDict | None], prepend: bool = False
    ) -> RemovableHandle:
        return self.inner.register_state_dict_post_hook(lambda _, state: hook(self, state), prepend)

    def register_load_state_dict_pre_hook(
        self, hook: Callable[[Optimizer, StateDict], StateDict | None], prepend: bool = False
    ) -> RemovableHandle:
        return self.inner.register_load_state_dict_pre_hook(lambda _, state: hook(self, state), prepend)

    def register_load_state_dict_post_hook(
        self, hook: Callable[[Optimizer], None], prepend: bool = False
    ) -> RemovableHandle:
        return self.inner.register_load_state_dict_post_hook(lambda _: hook(self), prepend)

    def close(self) -> None:
        """Lets go of the model, in whatever state an update is: this optimizer can be read, and not used any more."""

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} holds host memory and hooks and cannot be copied; use state_dict()")


def updated_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors that `optimizer` updates, in the order of its groups, with their gradients in place.

    In mode "full" these are the float32 masters on the host, in all others the model's parameters.
    """
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters(optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns `updated_parameters` by the names that the groups give them."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    return dict(zip(names, updated_parameters(optimizer), strict=True))


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Copies `weights` into the live `parameters` (name -> plain tensor or DTensor).

    Raises:
        CheckpointMismatch: a name is unknown or a shape differs; nothing was copied then.
    """
    wrong = [f"{name}: not a parameter of this model" for name in weights if name not in parameters]
    wrong += [
        f"{name}: shape {list(weight.shape)}, here {list(parameters[name].shape)}"
        for name, weight in weights.items()
        if name in parameters and weight.shape != parameters[name].shape
    ]
    if wrong:
        raise CheckpointMismatch(
            "these weights are not this model's; nothing was loaded:\n  " + "\n  ".join(wrong[:10])
        )
    for name, weight in weights.items():
        _copy(weight, parameters[name])


def _copy(source: Tensor, target: Tensor) -> None:
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        if not isinstance(source, DTensor):  # every rank has the whole tensor and cuts out its part
            source = distribute_tensor(source.to(mesh.device_type), mesh, placements, src_data_rank=None)
        source = source.redistribute(mesh, placements).to_local()
        target = target.to_local()
    target.copy_(source)


def _match(live: Iterable[dict[str, Any]], saved: Iterable[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Pairs by position, as torch's state dicts do; where both sides have names, they must agree."""
    live, saved = list(live), list(saved)
    sizes = [len(group["params"]) for group in live], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise CheckpointMismatch(f"the saved groups have {sizes[1]} parameters, this optimizer's have {sizes[0]}")
    for here, there in zip(live, saved, strict=True):
        names = here.get("param_names"), there.get("param_names")
        if None not in names and list(names[0]) != list(names[1]):  # type: ignore[arg-type]
            raise CheckpointMismatch(f"the saved group has the parameters {names[1]}, this optimizer's has {names[0]}")
    return list(zip(live, saved, strict=True))


def _check_state(live: Mapping[Tensor, Any], saved: Mapping[Any, Any], by_id: Mapping[Any, Tensor]) -> None:
    wrong = [f"{key}: no parameter has this id" for key in saved if key not in by_id and not isinstance(key, str)]
    for key in by_id.keys() & saved.keys():
        entries, here = saved[key], live.get(by_id[key], {})
        for name, value in entries.items():
            mine = here.get(name)
            if isinstance(value, Tensor) and isinstance(mine, Tensor):
                if (value.dtype, value.shape) != (mine.dtype, mine.shape):
                    wrong.append(
                        f"{key}.{name}: {value.dtype} {list(value.shape)}, here {mine.dtype} {list(mine.shape)}"
                    )
    if wrong:
        raise CheckpointMismatch("this state does not fit; nothing was loaded:\n  " + "\n  ".join(wrong[:10]))
