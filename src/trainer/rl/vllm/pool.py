"""Requests spread over servers, and sent again where one fails."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from trainer.errors import TrainingError
from trainer.rl.vllm.client import ServerClient, ServerError

T = TypeVar("T")
R = TypeVar("R")

REST_SECONDS = 1.0
"""A server that failed gets no request from this rank for this long, as long as there are others."""
MAX_TIMEOUTS = 3
"""A request that ran into its time limit this often is given up."""


class Pool:
    """This rank's way to the servers.

    Args:
        at_once: requests under way at the same time.
        patience_seconds: how long a request is sent again while it fails; a server may be starting anew meanwhile.
        first: where to begin among equally busy servers, so that the ranks do not all begin with the same one.
    """

    def __init__(self, servers: Sequence[ServerClient], *, at_once: int, patience_seconds: float, first: int = 0):
        first %= len(servers)
        self._servers = [*servers[first:], *servers[:first]]
        self._at_once, self._patience_seconds = at_once, patience_seconds
        self._under_way = dict.fromkeys((server.url for server in servers), 0)
        self._rests_until = dict.fromkeys((server.url for server in servers), 0.0)
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def map(self, ask: Callable[[ServerClient, T], R], items: Sequence[T]) -> list[R]:
        """Returns ask(server, item) for each item, in their order, each from whichever server answered it.

        Raises:
            TrainingError: an item got no answer; it names the servers and their reasons.
        """
        if not items:
            return []
        given_up = threading.Event()
        with ThreadPoolExecutor(min(self._at_once, len(items)), thread_name_prefix="requests") as threads:
            futures = [threads.submit(self._ask, ask, item, given_up) for item in items]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            error = next((failure for future in done if (failure := future.exception()) is not None), None)
            if error is not None:
                given_up.set()
                threads.shutdown(wait=True, cancel_futures=True)
                raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Sends nothing any more, neither for the first time nor again, and breaks off what is under way."""
        self._closed.set()
        for server in self._servers:
            server.break_off()

    def _ask(self, ask: Callable[[ServerClient, T], R], item: T, given_up: threading.Event) -> R:
        reasons: dict[str, str] = {}
        timeouts, deadline = 0, None
        last: ServerError | None = None
        while True:
            if self._closed.is_set():
                raise TrainingError("a request was broken off: the engine is closed") from last
            server = self._choose(reasons)
            try:
                return ask(server, item)
            except ServerError as error:
                if not error.may_pass:
                    raise TrainingError(f"a request failed, and would fail again: {error}") from error
                reasons[server.url] = error.reason
                timeouts += error.timed_out
                last = error
            finally:
                self._release(server)
            now = time.monotonic()
            deadline = now + self._patience_seconds if deadline is None else deadline
            self._rests_until[server.url] = now + REST_SECONDS
            over = now >= deadline or timeouts >= MAX_TIMEOUTS or given_up.is_set()
            if self._closed.wait(0 if over else self._pause(deadline)):
                continue
            if over:
                told = "\n".join(f"  {url}: {reason}" for url, reason in reasons.items())
                raise TrainingError(
                    f"no server answered a request, which was sent again for {self._patience_seconds:g} s "
                    f"(engine.start_seconds) and into {timeouts} time-outs of engine.request_seconds:\n{told}\n"
                    "Is it running? A launched server's own words are in logs/vllm.log of the run."
                ) from last

    def _choose(self, failed: Collection[str]) -> ServerClient:
        """Returns the least busy server among those that do not rest, or else the one that has rested longest.

        Either way, those that have failed this request come after those that have not.
        """
        with self._lock:
            now = time.monotonic()
            awake = [server for server in self._servers if self._rests_until[server.url] <= now]
            order = self._under_way if awake else self._rests_until
            chosen = min(awake or self._servers, key=lambda server: (server.url in failed, order[server.url]))
            self._under_way[chosen.url] += 1
            return chosen

    def _release(self, server: ServerClient) -> None:
        with self._lock:
            self._under_way[server.url] -= 1

    def _pause(self, deadline: float) -> float:
        """Returns how long to wait before sending again: not at all while another server is awake."""
        now = time.monotonic()
        soonest = min(self._rests_until.values()) - now
        return max(0.0, min(soonest, deadline - now))
