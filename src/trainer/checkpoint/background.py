"""One save at a time, on a thread beside the training."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.core.distributed import close_group, new_group, sum_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Work = Callable[["ProcessGroup | None"], None]
"""Writes a staged checkpoint; its collectives go over the given group and no other."""


class BackgroundWriter:
    """Runs the writing part of saves in order, at most one at a time, and keeps what went wrong until it is asked for.

    Every method is collective and belongs to the training thread. The thread has a process group of its own: on the
    training's, its collectives would get in between.
    """

    def __init__(self) -> None:
        self._group = new_group()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save was handed over whose outcome has not been asked for; the same on every rank."""
        return self._thread is not None

    def submit(self, work: Work) -> None:
        """Starts `work`; the one before must have been waited for."""
        assert self._thread is None, "one save at a time"
        # A daemon: a process that is told to end at once does not wait for it. `close` does, on every ordinary way out.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Raises what the last save raised, once it has ended on every rank; never waits for a disk."""
        if self._thread is None:
            return
        if sum_over_ranks(self._thread.is_alive())[0] == 0:
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written; raises what the last save raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits as `wait` does, and ends the group."""
        try:
            self.wait()
        finally:
            close_group(self._group)
            self._group = None

    def _run(self, work: Work) -> None:
        try:
            work(self._group)
        except BaseException as error:  # raised by `wait`, on the thread that can act on it
            self._failure = error
