"""What a vLLM server is asked over HTTP, and what it answers."""

import http.client
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from trainer.errors import TrainingError
from trainer.rl.types import Sampling

GENERATE = "/inference/v1/generate"
LOOK_SECONDS = 10.0
"""A server that is well answers a question about itself within this time, whatever else it does."""
LOAD_TRIES = 3
"""On a shared file system a server may see new files a little later than their writer."""


class ServerError(TrainingError):
    """A server did not do what it was asked.

    Attributes:
        status: of the HTTP answer; None where none came.
        timed_out: it was given up waiting for.
    """

    def __init__(self, url: str, reason: str, status: int | None = None, timed_out: bool = False):
        super().__init__(url, reason, status, timed_out)  # all of them: an error travels between ranks by its args
        self.url, self.reason, self.status, self.timed_out = url, reason, status, timed_out

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"

    @property
    def may_pass(self) -> bool:
        """Whether the same request can succeed later, or at another server."""
        return self.status is None or self.status >= 500 or self.status in (408, 409, 425, 429)


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a completion were produced by the weights with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    """One completion as a server gives it: `ids` and `logprobs` of the tokens it produced, `spans` covering them."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[Span]


class ServerClient:
    """One server. Every call opens a connection of its own, so it may be used by many threads.

    Raises:
        ServerError: from every method, unless it says otherwise.
    """

    def __init__(self, url: str, request_seconds: float):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(url, "not an address of the form http://host:port", status=400)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.request_seconds = request_seconds
        self._parts = parts
        self._generating: set[http.client.HTTPConnection] = set()

    # -- questions about itself --------------------------------------------------------------------------------------

    def is_healthy(self) -> bool:
        """Whether the server is up and its engine alive; raises nothing."""
        try:
            self._ask("GET", "/health", seconds=LOOK_SECONDS)
        except ServerError:
            return False
        return True

    def label(self) -> str | None:
        """Returns the label of the weights that it serves, as the last `load` or its own start set it."""
        return self._ask("GET", "/weight_info", seconds=LOOK_SECONDS).get("weight_version")

    # -- weights -----------------------------------------------------------------------------------------------------

    def load(self, directory: Path, label: str, *, keep_cache: bool) -> None:
        """Has the server take over a directory of published weights, between two tokens of what it has under way.

        A load that fails leaves the server paused: what it would serve is neither the old weights nor the new ones.

        Args:
            keep_cache: completions under way go on with keys and values of the weights before; else these are computed
                again. New requests never see them.
        """
        self._ask("POST", "/init_weight_transfer_engine", {"init_info": {}})
        self._ask("POST", "/pause", mode="keep", clear_cache=str(not keep_cache).lower())
        for left in reversed(range(LOAD_TRIES)):
            try:
                self._ask("POST", "/start_weight_update", {})  # a load that fails ends what this begins
                self._ask("POST", "/update_weights", {"update_info": {"path": str(directory.absolute())}})
                break
            except ServerError as error:
                if not left or error.status is None:
                    raise
                time.sleep(1.0)
        self._ask("POST", "/finish_weight_update", {"weight_version": label})
        self._ask("POST", "/resume")

    # -- tokens ------------------------------------------------------------------------------------------------------

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int, sampling: Sampling, salt: str | None = None
    ) -> Answer:
        """Returns one completion.

        Args:
            salt: requests with different ones share no cached prefix.
        """
        parameters = {
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "stop_token_ids": sorted(sampling.stop_ids),
            "ignore_eos": True,  # what ends a completion is ours to say
            "logprobs": 0,  # that of the drawn token, and no others
            "detokenize": False,
        }
        body: dict[str, Any] = {"token_ids": list(prompt_ids), "sampling_params": parameters, "stream": False}
        if salt is not None:
            body["cache_salt"] = salt
        found = self._ask("POST", GENERATE, body)
        try:
            return _answer(found)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                self.url,
                f"its answer is not one of {GENERATE} ({error!r}): {json.dumps(found)[:300]}; "
                "is this vLLM >= 0.32, started with --enable-scale-out?",
                status=400,
            ) from error

    def break_off(self) -> None:
        """Ends the completions that are under way: whoever waits for one gets a ServerError."""
        for connection in self._generating.copy():
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has just ended

    # -- transport ---------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Any = None, *, seconds: float | None = None, **query: str) -> Any:
        seconds = self.request_seconds if seconds is None else seconds
        target = f"{self._parts.path.rstrip('/')}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=seconds)
        if path == GENERATE:
            self._generating.add(connection)
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read()
        except TimeoutError as error:
            raise ServerError(self.url, f"{path} gave no answer within {seconds:g} s", timed_out=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(self.url, f"{path}: {_words(error)}") from error
        finally:
            self._generating.discard(connection)
            connection.close()
        text = data.decode("utf-8", "replace")
        if status != 200:
            hint = _HINTS.get((status, path), "")
            raise ServerError(self.url, f"{path} answered {status}: {text[:500].strip()}{hint}", status=status)
        try:
            return json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise ServerError(self.url, f"{path} answered no JSON: {text[:200]!r}", status=502) from error


_DEV_MODE = "; the server must be started with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config, see docs/rl.md"
_HINTS = {
    (404, GENERATE): "; the server must be started with --enable-scale-out, see docs/rl.md",
    **{(404, path): _DEV_MODE for path in ("/init_weight_transfer_engine", "/pause", "/weight_info")},
}


def _answer(found: Any) -> Answer:
    choice = found["choices"][0]
    ids = [int(token) for token in choice["token_ids"]]
    content = (choice["logprobs"] or {"content": []})["content"] or []
    logprobs = [float(token["logprob"]) for token in content]
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probabilities")
    listed = choice.get("weight_versions") or found.get("weight_versions") or []
    spans = [Span(str(span["version"]), int(span["start"]), int(span["end"])) for span in listed]
    return Answer(ids, logprobs, str(choice["finish_reason"]), spans)


def _words(error: Exception) -> str:
    """Returns what the operating system says, without Python's decoration."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
