"""Float32 weights on the host, and the model's weights on the device that follow them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.core.transfer import HostArena, Lanes, Mark
from trainer.errors import TrainingError
from trainer.optim.offload.fsdp import keep_reduced_in_float32
from trainer.optim.offload.tensors import around, bare_part, local_part

SLOTS = 2
SLOT_BYTES = 2**26


class HostMasters:
    """The canonical weights: one float32 master on the host for every floating-point parameter, frozen ones too.

    The model's parameters are copies of them, rounded to their own dtype. A master is sharded as its parameter is.
    Where a parameter lies on the host in float32 already (training on CPU), it is its own master and nothing is copied.

    Attributes:
        masters: name -> `nn.Parameter`, float32, host; plain or DTensor.
        parameters: name -> the model's parameter.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        arena: HostArena,
        *,
        copies: bool,
        compute_dtype: torch.dtype = torch.float32,
        float32: Iterable[str] = (),
        slot_bytes: int = SLOT_BYTES,
        lanes: Lanes | None = None,
    ):
        """Takes the parameters' present values, in whatever dtype they have.

        Args:
            copies: masters have memory of their own in any case, and weights go to the device through page-locked slots.
            compute_dtype: what float32 parameters become in `cast_model`.
            float32: names of parameters that stay float32, unless they are sharded (FSDP wants one dtype).
        """
        self.parameters = {name: p for name, p in parameters if p.is_floating_point()}
        self.masters: dict[str, nn.Parameter] = {}
        self._dtype = compute_dtype
        keep = set(float32)
        self._narrowed = {
            name
            for name, p in self.parameters.items()
            if p.dtype == torch.float32 != compute_dtype and (name not in keep or isinstance(p, DTensor))
        }
        self._shared: set[str] = set()
        self._copies = copies
        self._lanes = lanes or Lanes()
        for name, parameter in self.parameters.items():
            part = local_part(parameter)
            is_same = part.dtype == torch.float32 and part.device.type == "cpu" and name not in self._narrowed
            if is_same and not copies:
                self._shared.add(name)
            else:
                part = arena.take(part, dtype=torch.float32).copy_(part)
            self.masters[name] = nn.Parameter(around(part, parameter), requires_grad=parameter.requires_grad)
        parts = [local_part(parameter) for parameter in self.parameters.values()]
        self._device = parts[0].device if parts else torch.device("cpu")
        self._lane = self._lanes.new(self._device)
        slot_bytes = min(slot_bytes, sum(part.numel() for part in parts) * 4 + 2**12)
        shape = torch.empty(slot_bytes, dtype=torch.uint8, device="meta")
        self._slots = [arena.take(shape) for _ in range(SLOTS)] if copies else []
        self._sent: list[Mark] = [self._lane.mark()] * SLOTS
        self._next = 0
        self._versions: dict[str, tuple[int, int]] = {}
        self._see()

    @property
    def all_shared(self) -> bool:
        """Whether every parameter is its own master."""
        return len(self._shared) == len(self.parameters)

    # --- masters -> device ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self, names: Iterable[str], *, early: bool = False) -> None:
        """Queues the copies that make the named device weights their rounded masters.

        early: the computation goes on meanwhile. It has read these weights for the last time, and waits for the new ones
            when `arrive` is called.
        """
        names = [name for name in names if name not in self._shared]
        if not early:
            self._lane.wait(self._lanes.current(self._device).mark())  # a forward may still read the old weights
        for name in names:
            target, source = local_part(self.parameters[name]), local_part(self.masters[name])
            if not self._copies:
                target.copy_(source)
            elif target.is_contiguous() and source.is_contiguous():
                self._send(source.view(-1), target.view(-1))
            else:
                self._lane.run(lambda target=target, source=source: target.copy_(source))
        if not early:
            self.arrive()
        self._see(names)

    @torch.no_grad()
    def stage(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns where a step may itself write the rounded values of the named masters, for those that are bf16.

        name -> contiguous bfloat16 host tensor of the size of the master's part. `send` must follow, and comes before
        the next `stage`.
        """
        targets = {name: local_part(self.parameters[name]) for name in names if name not in self._shared}
        targets = {name: t for name, t in targets.items() if t.dtype == torch.bfloat16 and t.is_contiguous()}
        if not self._copies:
            return targets  # the weights themselves
        if sum(target.numel() for target in targets.values()) * 2 > self._slots[self._next].numel():
            return {}
        self._sent[self._next].synchronize()
        rest, places = self._slots[self._next].view(torch.bfloat16), {}
        for name, target in targets.items():
            places[name], rest = rest[: target.numel()], rest[target.numel() :]
        return places

    @torch.no_grad()
    def send(self, staged: Mapping[str, Tensor], *, early: bool = False) -> None:
        """Queues the copies of staged values to the device; `early` as in `refresh`."""
        if self._copies and staged:
            if not early:
                self._lane.wait(self._lanes.current(self._device).mark())
            for name, values in staged.items():
                target = local_part(self.parameters[name]).view(-1)
                self._lane.run(lambda target=target, values=values: target.copy_(values, non_blocking=True))
            self._sent[self._next] = self._lane.mark()
            self._next = (self._next + 1) % SLOTS
            if not early:
                self.arrive()
        self._see(staged)

    def arrive(self) -> None:
        """Lets what is computed from here on see the weights of all copies queued so far."""
        self._lanes.current(self._device).wait(self._lane.mark())

    def synchronize(self) -> None:
        """Returns when the weights have reached the device: masters may be written again."""
        self._lane.mark().synchronize()

    def _send(self, source: Tensor, target: Tensor) -> None:
        start, count = 0, source.numel()
        while start < count:
            index, self._next = self._next, (self._next + 1) % SLOTS
            self._sent[index].synchronize()
            slot = self._slots[index]
            length = min(count - start, slot.numel() // target.element_size())
            rounded = slot[: length * target.element_size()].view(target.dtype)
            rounded.copy_(source[start : start + length])
            piece = target[start : start + length]
            self._lane.run(lambda piece=piece, rounded=rounded: piece.copy_(rounded, non_blocking=True))
            self._sent[index] = self._lane.mark()
            start += length

    # --- device -> masters ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_from_device(self) -> None:
        """Makes the device's weights the masters."""
        for name, master in self.masters.items():
            if name not in self._shared:
                local_part(master).copy_(local_part(self.parameters[name]))
        self._see()

    def announce_write(self, names: Iterable[str]) -> None:
        """Tells autograd that the named device weights are about to be written, by whatever means: a backward pass that
        reads one of them later ends with its error instead of a wrong gradient."""
        parameters = [self.parameters[name] for name in names]
        torch.autograd.graph.increment_version([*parameters, *(bare_part(p) for p in parameters)])

    def check_unchanged(self) -> None:
        """Holds the device's weights against the masters where somebody else may have written to them.

        Raises:
            TrainingError: they differ. A step would write the old weights back over the new ones without a word.
        """
        written = [name for name, version in self._versions.items() if self._version(name) != version]
        for name in written:
            ours = local_part(self.parameters[name])
            if not torch.equal(ours, local_part(self.masters[name]).to(ours.device, ours.dtype)):
                raise TrainingError(
                    f"the weights of {name!r} were changed outside of the optimizer, which trains float32 masters on the "
                    "host: the next step would undo the change. Call optimizer.load_master_weights() after the change"
                )
        self._see(written)

    def _see(self, names: Iterable[str] | None = None) -> None:
        for name in self.parameters if names is None else names:
            if name not in self._shared:
                self._versions[name] = self._version(name)

    def _version(self, name: str) -> tuple[int, int]:
        """Rises with every write that autograd sees: through the whole tensor, or through this rank's part of it."""
        parameter = self.parameters[name]
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        return parameter._version, part._version

    # --- the model ------------------------------------------------------------------------------------------------------

    def cast_model(self, model: nn.Module) -> None:
        """Gives the model's parameters the compute dtype, in place; buffers stay as they are.

        Gradients of sharded parameters keep arriving in float32, in which they were reduced; so do those of parameters
        that the model has under two names, or the sum of both uses would be rounded.
        """
        if not self._narrowed:
            return
        uses: dict[int, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        narrowed = {id(self.parameters[name]): self.parameters[name] for name in self._narrowed}
        for key, parameter in narrowed.items():
            if parameter.requires_grad and (isinstance(parameter, DTensor) or uses[key] > 1):
                parameter.grad_dtype = torch.float32
        model._apply(lambda tensor: tensor.to(self._dtype) if id(tensor) in narrowed else tensor)
        keep_reduced_in_float32(model)
        self._see()

    @contextmanager
    def in_model(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's parameters are the masters: for reading the exact weights (export), not for a forward."""
        self.synchronize()
        masters: Mapping[int, nn.Parameter] = {id(p): self.masters[name] for name, p in self.parameters.items()}
        replaced = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in masters
        ]
        try:
            for module, name, parameter in replaced:
                module._parameters[name] = masters[id(parameter)]
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
