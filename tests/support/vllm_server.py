"""A small HTTP server with the endpoints of vLLM that the trainer uses, to test the trainer's side of them.

It says nothing about vLLM: that the real server behaves like this is what tests/integration/test_vllm_server.py checks.
"""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Complete = Callable[[list[int], dict[str, Any]], tuple[list[int], list[float]]]
"""(prompt ids, sampling parameters) -> (ids, log-probabilities)"""


def count_up(prompt: list[int], parameters: dict[str, Any]) -> tuple[list[int], list[float]]:
    ids = [prompt[-1] + 1 + number for number in range(parameters["max_tokens"])]
    return ids, [-float(token) for token in ids]


class StandIn:
    """One server in this process.

    Attributes:
        label: of its weights; "default" as long as it was given none.
        directory: which it loaded last.
        calls: (path, query, body) of each POST, in order of arrival.
        trouble: path -> what happens instead: an HTTP status, "hang" or "drop" (the connection). Consumed one by one.
        spans: gives the weight_versions of a completion with that many tokens, in place of one span of `label`.
        most_at_once: requests for tokens that were under way together.
    """

    def __init__(self, complete: Complete = count_up, *, port: int = 0, delay_seconds: float = 0.0):
        self.complete, self.delay_seconds = complete, delay_seconds
        self.label, self.directory, self.is_paused, self.session = "default", None, False, False
        self.load: Callable[[Path], None] = lambda directory: None
        self.calls: list[tuple[str, dict[str, str], Any]] = []
        self.trouble: dict[str, list[int | str]] = {}
        self.spans: Callable[[int], list[dict[str, Any]]] | None = None
        self.most_at_once = self._at_once = 0
        self._lock, self._released = threading.Lock(), threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.calls]

    def begin_anew(self) -> None:
        """As after a restart: other weights, no memory."""
        self.label, self.directory, self.is_paused, self.session = "default", None, False, False

    def close(self) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer._serve(self, None)

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length)
                outer._serve(self, json.loads(text) if text else None)

            def log_message(self, format, *args):
                pass

        return Handler

    def _serve(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        parts = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        with self._lock:
            if request.command == "POST":
                self.calls.append((parts.path, query, body))
            waiting = self.trouble.get(parts.path)
            trouble = waiting.pop(0) if waiting else None
        if trouble and parts.path == "/update_weights":
            self.session = False
        if trouble == "hang":
            self._released.wait(600)
            return
        if trouble == "drop":
            request.connection.close()
            return
        status, answer = (int(trouble), {"error": "made up"}) if trouble else self._answer(parts.path, query, body)
        data = json.dumps(answer).encode()
        try:
            request.send_response(status)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)
        except OSError:
            pass  # the client has gone

    def _answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path == "/health":
            return 200, {}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/init_weight_transfer_engine":
            return 200, {}
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
            return 200, {}
        if path == "/start_weight_update":
            if self.session:
                return 500, {"error": "a weight update is already active"}
            self.session = True
            return 200, {}
        if path == "/update_weights" and self.session:
            self.directory = Path(body["update_info"]["path"])
            self.load(self.directory)
            return 200, {}
        if path == "/finish_weight_update" and self.session:
            self.session, self.label = False, body["weight_version"]
            return 200, {}
        if path == "/inference/v1/generate":
            return self._generate(body)
        return 404, {"error": f"no {path}"}

    def _generate(self, body: Any) -> tuple[int, Any]:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            while self.is_paused and not self._released.wait(0.01):
                pass
            time.sleep(self.delay_seconds)
            ids, logprobs = self.complete(body["token_ids"], body["sampling_params"])
        finally:
            with self._lock:
                self._at_once -= 1
        spans = [{"version": self.label, "start": 0, "end": len(ids)}] if self.spans is None else self.spans(len(ids))
        content = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in zip(ids, logprobs, strict=True)
        ]
        stopped = bool(ids) and ids[-1] in body["sampling_params"]["stop_token_ids"]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop" if stopped else "length",
            "weight_versions": spans,
        }
        return 200, {"request_id": "x", "choices": [choice]}


if __name__ == "__main__":
    import sys

    server = StandIn(port=int(sys.argv[1]))
    print("ready", flush=True)
    server._thread.join()
