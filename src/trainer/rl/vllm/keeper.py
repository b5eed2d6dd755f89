"""Rank 0's part: servers that run, and that serve the weights they should."""

import re
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from trainer.core.log import logger
from trainer.errors import LaunchError, TrainingError
from trainer.rl.vllm.client import ServerClient, ServerError
from trainer.rl.vllm.publish import WeightsFolder
from trainer.rl.vllm.server import LaunchedServer

LOOK_INTERVAL_SECONDS = 2.0
"""Between two looks at the servers."""
HUNG_SECONDS = 120.0
"""A launched server that has answered and then says nothing for this long is started again."""
MAX_RESTARTS = 3
"""Restarts of a launched server without an update that it took in between."""

_LABEL = re.compile(r"[0-9a-f]{8}:\d+")


@dataclass
class Replica:
    """One server.

    Attributes:
        process: None for a server that somebody else runs.
        version: which weights it took last, in its present life; None: none of this run's.
        loads: how many it took in its present life.
        proven: after how many of these its log-probabilities were held against the trainer's.
        problem: why it cannot be used now.
        silent_since: since when it has not answered; None while it does.
        has_answered: in its present life.
        lost: only a person can help.
    """

    client: ServerClient
    process: LaunchedServer | None = None
    version: int | None = None
    loads: int = 0
    proven: int = 0
    restarts: int = 0
    problem: str | None = None
    silent_since: float | None = None
    has_answered: bool = False
    lost: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_anew(self) -> None:
        """It is another process now, with other weights."""
        self.version, self.loads, self.proven = None, 0, 0
        self.silent_since, self.has_answered, self.lost = None, False, False


class Keeper:
    """Starts servers, gives them weights, and repairs both: a server that starts anew gets the present weights again.

    What a server serves is known by its label, which names the run's process and the version, so that neither a server's
    own first weights nor those of another run are ever taken for ours.
    """

    def __init__(self, replicas: Sequence[Replica], folder: WeightsFolder, *, keep_cache: bool, start_seconds: float):
        self.replicas = list(replicas)
        self.token = secrets.token_hex(4)
        self._folder, self._keep_cache, self._start_seconds = folder, keep_cache, start_seconds
        self._wanted: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-keeper", daemon=True)

    def start(self) -> None:
        """Starts the processes, and returns when every server answers.

        Raises:
            LaunchError: one of them ends, or does not answer in time; it tells its last words.
        """
        for replica in self.replicas:
            if replica.process is not None:
                logger.info(f"starting a vLLM server for {replica.client.url}; its log is {replica.process.log}")
                replica.process.start()
        deadline = time.monotonic() + self._start_seconds
        for replica in self.replicas:
            self._await_health(replica, deadline)
        self._thread.start()

    def serve(self, version: int) -> None:
        """Returns when the servers serve `version`, which has been published; those that cannot get it when they can again.

        Raises:
            TrainingError: not one does within the time that a start may take.
        """
        self._wanted = version
        with ThreadPoolExecutor(len(self.replicas), thread_name_prefix="vllm-load") as threads:
            list(threads.map(self._bring_up_to_date, self.replicas))
        deadline = time.monotonic() + self._start_seconds
        while all(replica.version != version for replica in self.replicas):
            if time.monotonic() >= deadline or all(r.lost for r in self.replicas) or self._closing.wait(0.2):
                told = "\n".join(f"  {r.client.url}: {r.problem or 'no answer'}" for r in self.replicas)
                raise TrainingError(
                    f"no server took over the weights of step {version} ({self._folder.path(version)}):\n{told}\n"
                    "Start it again (docs/rl.md says how), then resume the run."
                )
        for replica in self.replicas:
            if replica.version == version:
                replica.restarts = 0
            else:
                logger.warning(f"{replica.client.url} does not serve step {version} yet: {replica.problem}")

    def label(self, version: int) -> str:
        return f"{self.token}:{version}"

    def current(self) -> list[Replica]:
        """Returns the servers that serve the wanted weights."""
        return [replica for replica in self.replicas if replica.version is not None and replica.version == self._wanted]

    def close(self) -> None:
        """Stops watching, and the servers that it started."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=LOOK_INTERVAL_SECONDS + 30)
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.stop()

    # -- weights -----------------------------------------------------------------------------------------------------

    def _bring_up_to_date(self, replica: Replica) -> None:
        url = replica.client.url
        with replica.lock:
            if replica.lost:
                return
            self._folder.expect(url)  # before the version is chosen: from here on it stays on disk
            version = self._wanted
            if version is None or replica.version == version:
                return
            try:
                replica.client.load(self._folder.path(version), self.label(version), keep_cache=self._keep_cache)
            except ServerError as error:
                self._note_failed_load(replica, error)
                return
            replica.version, replica.problem = version, None
            replica.loads += 1
            self._folder.acknowledge(url, version)

    def _note_failed_load(self, replica: Replica, error: ServerError) -> None:
        replica.version, replica.problem = None, replica.problem or error.reason
        if not error.timed_out:  # else it may still be reading
            self._folder.forget(replica.client.url)
        if error.status is None and not error.timed_out:
            return  # it is not there, and begins anew when it is
        # Its weights are half old and half new, and it stays paused: only another process can serve.
        if replica.process is not None:
            replica.process.stop(0.0)
        else:
            replica.lost = True

    # -- health ------------------------------------------------------------------------------------------------------

    def _await_health(self, replica: Replica, deadline: float) -> None:
        process = replica.process
        while not replica.client.is_healthy():
            if process is not None and (code := process.exit_code()) is not None:
                raise LaunchError(
                    f"the vLLM server ended with exit code {code} before it answered. "
                    f"The end of {process.log}:\n{process.last_lines()}"
                )
            if time.monotonic() >= deadline:
                words = "" if process is None else f" The end of {process.log}:\n{process.last_lines()}"
                raise LaunchError(
                    f"{replica.client.url}/health did not answer within {self._start_seconds:g} s "
                    f"(engine.start_seconds).{words}"
                )
            if self._closing.wait(0.5):
                raise LaunchError("the start of the vLLM server was given up")
        replica.has_answered = True

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_INTERVAL_SECONDS):
            for replica in self.replicas:
                try:
                    self._look_after(replica)
                except Exception as error:  # the watch must go on; the error shows in what a failing request reports
                    replica.problem = f"{type(error).__name__}: {error}"
                    logger.warning(f"{replica.client.url}: {replica.problem}")

    def _look_after(self, replica: Replica) -> None:
        process = replica.process
        if process is not None and (code := process.exit_code()) is not None:
            self._restart(replica, f"ended with exit code {code}")
            return
        with replica.lock:  # not in the middle of a load, when the label is neither here nor there
            try:
                label = replica.client.label()
            except ServerError as error:
                self._note_silence(replica, error)
                return
            replica.silent_since, replica.has_answered = None, True
            if replica.version is not None and label != self.label(replica.version):
                self._note_change(replica, label)
        self._bring_up_to_date(replica)

    def _note_change(self, replica: Replica, label: str | None) -> None:
        url = replica.client.url
        replica.begin_anew()
        if label is not None and _LABEL.fullmatch(label):
            replica.lost, replica.problem = True, f"now serves weights of another run ({label}), which updates it too"
            logger.error(f"{url} {replica.problem}; give each run servers of its own (engine.urls)")
        else:
            logger.warning(f"{url} began anew (its weights are {label!r} now) and gets the present weights again")

    def _note_silence(self, replica: Replica, error: ServerError) -> None:
        now = time.monotonic()
        replica.problem = replica.problem or error.reason
        replica.silent_since = now if replica.silent_since is None else replica.silent_since
        if not error.timed_out and error.status is None and replica.process is None:  # nobody listens: it ended
            replica.begin_anew()
            self._folder.forget(replica.client.url)
        if replica.process is not None and replica.has_answered and now - replica.silent_since > HUNG_SECONDS:
            replica.process.stop(0.0)  # the next look starts it again

    def _restart(self, replica: Replica, why: str) -> None:
        process = replica.process
        assert process is not None
        if replica.restarts >= MAX_RESTARTS:
            replica.lost = True
            return
        replica.begin_anew()
        replica.restarts += 1
        replica.problem = f"the server {why}; the end of {process.log}:\n{process.last_lines(5)}"
        self._folder.forget(replica.client.url)
        logger.warning(f"the vLLM server {why} and is started again; see {process.log}")
        process.stop()  # what is left of its group
        process.start()
