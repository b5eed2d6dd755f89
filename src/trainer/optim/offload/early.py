"""An update that begins while the backward pass goes on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from torch import Tensor

from trainer.errors import TrainingError


class EarlyUpdate:
    """Steps each chunk of a plan in a thread, as soon as the last gradient of its parameters is there.

    Attributes:
        begun: the chunks that the thread has stepped, or will have stepped by the end of `wait`.
    """

    def __init__(
        self,
        members: Sequence[Sequence[Tensor]],
        step: Callable[[int, bool], object],
        worker: ThreadPoolExecutor,
    ):
        """
        Args:
            members: for each chunk the tensors that it steps.
            step: steps the chunk of this number; True tells that it is called from the thread, beside the backward pass.
            worker: the thread, a single one.
        """
        self.begun: set[int] = set()
        self._chunk_of = {id(member): index for index, chunk in enumerate(members) for member in chunk}
        self._missing = [{id(member) for member in chunk} for chunk in members]
        self._additions: list[list[Future[None]]] = [[] for _ in members]
        self._steps: list[Future[None]] = []
        self._step = step
        self._worker = worker

    def arrived(self, member: Tensor, additions: Sequence[Future[None]]) -> None:
        """Notes that the backward pass has made the gradient of `member`; its sum is complete after `additions`.

        Raises:
            TrainingError: its chunk has been stepped already, with a part of the gradient.
        """
        chunk = self._chunk_of[id(member)]
        if chunk in self.begun:
            raise TrainingError(
                f"the gradient of a parameter of shape {list(member.shape)} came in two parts, and its update had begun "
                "after the first: a module runs twice in one backward pass, under FSDP or reentrant activation "
                "checkpointing. Set optim.max_norm, which makes the update wait for the whole gradient"
            )
        self._additions[chunk] += additions
        self._missing[chunk].discard(id(member))
        if not self._missing[chunk]:
            self.begun.add(chunk)
            self._steps.append(self._worker.submit(self._run, chunk))

    def wait(self) -> None:
        """Returns when the chunks that were begun are stepped; an exception in one of them is raised here."""
        steps, self._steps = self._steps, []
        wait_for(steps)
        for step in steps:
            step.result()

    def finish(self) -> None:
        """Steps the chunks of which a gradient was missing to the end of the backward pass. `wait` comes before."""
        for index in range(len(self._missing)):
            if index not in self.begun:
                self._step(index, False)

    def _run(self, chunk: int) -> None:
        for addition in self._additions[chunk]:
            addition.result()
        self._step(chunk, True)
