"""Requests to a running process: save, stop, stop at once.

| request | by | answer |
|---|---|---|
| save | SIGUSR1, a file SAVE, every so many minutes | a checkpoint at the next safe point |
| stop | SIGTERM, SIGINT, a file STOP, a time limit | a checkpoint at the next safe point, then the end |
| stop at once | a second SIGTERM or SIGINT | the end, with what is on disk |

A request is *latched*: nothing happens where it arrives. At its safe points, which are the same on all ranks, the run
calls `agree`, and what one rank was asked for, all ranks answer there.

A thread is woken by the arrival itself, so stopping at once and the grace period work while the interpreter waits
inside a collective or a kernel, where Python's own handlers would not run.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from trainer.core.distributed import sum_over_ranks
from trainer.core.log import logger

SAVE_FILE, STOP_FILE = "SAVE", "STOP"
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after SIGINT; what a shell expects."""

_STOPS = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOPS, signal.SIGUSR1)
# One request may arrive twice: a signal to a whole process group reaches the ranks directly and, a moment later, once
# more through the agent of torchrun, which passes on its own.
_SAME_SECONDS = 0.05
_SAME_UNDER_AGENT_SECONDS = 3.0


@dataclass(frozen=True)
class Asked:
    """What the ranks agreed on; equal on all of them."""

    save: bool
    stop: bool

    def __bool__(self) -> bool:
        return self.save or self.stop


class Requests:
    """Collects the requests to this rank while its block runs, and agrees on them with the other ranks.

    Signal handlers can only be set in a process's main thread; elsewhere files and clocks still work.

    Attributes:
        stopping: the ranks have agreed to stop. It stays so.
        exit_code: what the process should exit with then.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        grace_seconds: float = 600.0,
        exit_code: int = 143,
        save_minutes: float | None = None,
        stop_minutes: float | None = None,
        owns_process: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            directory: where rank 0 looks for SAVE and STOP.
            grace_seconds: the process ends this long after a signal to stop, whatever it is waiting for.
            exit_code: after any stop but SIGINT's, whose code is 130.
            save_minutes: time between two saves after which one is asked for.
            stop_minutes: time from now after which a stop is asked for.
            owns_process: the process ends with the run. Then signals stay ignored after a stop: torchrun sends SIGTERM
                to every rank as soon as the first one has exited.
        """
        self.stopping = False
        self.exit_code = exit_code
        self._rank = rank
        self._files = {name: directory / name for name in (SAVE_FILE, STOP_FILE)}
        self._grace_seconds = grace_seconds
        self._stop_exit_code = exit_code
        self._save_minutes, self._stop_minutes = save_minutes, stop_minutes
        self._owns_process = owns_process
        self._clock = clock
        self._began = self._saved = clock()
        self._save = self._stop = self._interrupt = False  # what has arrived here and is not agreed on yet
        self._saving = False
        self._previous: dict[int, Any] = {}
        self._watcher: _Watcher | None = None

    # --- agreeing -------------------------------------------------------------------------------------------------------

    def agree(self) -> Asked:
        """Returns what any rank was asked for; collective. The caller answers a save at once and says `saved`."""
        if self.stopping:
            return Asked(save=False, stop=True)
        save, self._save = self._save, False
        stop, interrupt = self._stop, self._interrupt
        if self._rank == 0:
            save = save or os.path.exists(self._files[SAVE_FILE]) or self._is_over(self._save_minutes, self._saved)
            stop = stop or os.path.exists(self._files[STOP_FILE]) or self._is_over(self._stop_minutes, self._began)
        save, stop, interrupt = (count > 0 for count in sum_over_ranks(save, stop, interrupt))
        self.stopping = stop or interrupt
        self.exit_code = self._stop_exit_code if stop else INTERRUPTED
        return Asked(save=save, stop=self.stopping)

    def saved(self) -> None:
        """Notes that a checkpoint has been written: requests for one are answered, and the time to the next begins."""
        self._saved = self._clock()
        if self._rank != 0:
            return
        for name, path in self._files.items():
            if name == SAVE_FILE or self.stopping:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    logger.warning(f"{path} was obeyed and cannot be removed: {error.strerror}")

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, the end of the grace period waits: ending now would waste what has been written."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _is_over(self, minutes: float | None, since: float) -> bool:
        return minutes is not None and self._clock() - since >= minutes * 60

    # --- signals --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._watcher = _Watcher(self._heard, self._give_up, self._grace_seconds)
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._latch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            keep_quiet = self.stopping and self._owns_process
            signal.signal(number, _do_nothing if keep_quiet or previous is None else previous)
        self._previous.clear()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _latch(self, number: int, frame: FrameType | None) -> None:
        """The handler. It must not log: the signal may have come while the logger was at work in this thread."""
        self._save = self._save or number == signal.SIGUSR1
        self._stop = self._stop or number == signal.SIGTERM
        self._interrupt = self._interrupt or number == signal.SIGINT

    def _heard(self, number: int, is_second: bool) -> None:
        """In the watcher's thread, for each signal as it arrives."""
        name = signal.Signals(number).name
        if is_second:
            self._end(number, f"a second request to stop ({name}): stopping now, with the checkpoints that are there")
        answer = "saving" if number == signal.SIGUSR1 else "saving and stopping"
        more = "" if number == signal.SIGUSR1 else "; a second signal stops at once"
        logger.info(f"{name}: {answer} at the next safe point{more}")

    def _give_up(self, number: int) -> bool:
        """In the watcher's thread, when the grace period is over. Returns whether to ask again a little later."""
        if not self._saving:
            self._end(
                number,
                f"no step ended within ckpt.grace_seconds ({self._grace_seconds:g}): stopping now, with the checkpoints "
                'that are there. ckpt.on_signal = "now" does not wait for the step',
            )
        return True

    def _end(self, number: int, why: str) -> None:
        os.write(2, f"rank {self._rank}: {why}\n".encode())
        os._exit(INTERRUPTED if number == signal.SIGINT else self._stop_exit_code)


class _Watcher:
    """A thread that sees signals as they arrive, whatever the main thread does, and keeps the grace period."""

    def __init__(
        self, heard: Callable[[int, bool], None], give_up: Callable[[int], bool], grace_seconds: float
    ) -> None:
        self._heard, self._give_up, self._grace_seconds = heard, give_up, grace_seconds
        self._same_seconds = _SAME_UNDER_AGENT_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else _SAME_SECONDS
        self._first: tuple[int, float] | None = None  # the first signal to stop: number, time
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.send(b"\0")  # closing would not wake the reader while a forked process holds a copy
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        retry_seconds = 0.0
        while True:
            timeout = None
            if self._first is not None:
                timeout = max(retry_seconds, self._first[1] + self._grace_seconds - time.monotonic())
            if not select.select([self._reader], [], [], timeout)[0]:
                assert self._first is not None
                retry_seconds = 0.2 if self._give_up(self._first[0]) else 0.0
                continue
            for number in self._reader.recv(64):
                if number == 0:
                    return
                if number in _SIGNALS:
                    self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if number not in _STOPS:
            self._heard(number, False)
        elif self._first is None:
            self._first = (number, now)
            self._heard(number, False)
        elif now - self._first[1] > self._same_seconds:
            self._heard(number, True)


def ignore_in_worker(worker_id: int = 0) -> None:
    """For the start of a helper process: a signal to the whole process group is its parent's to answer.

    The parent still needs its helpers to finish the step; it ends them when it closes them.
    """
    signal.set_wakeup_fd(-1)  # a copy of the parent's, through which it would hear signals that were not its own
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
