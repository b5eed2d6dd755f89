"""A vLLM server that the trainer starts, watches and stops."""

import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.config.rl import EngineConfig
from trainer.core.device import VISIBLE_DEVICES
from trainer.core.log import logger
from trainer.errors import LaunchError

BACKEND = "safetensors_dir"
"""Name of the plugin's weight transfer engine."""
HOST = "127.0.0.1"
DEFAULT_PYTHON = ".vllm/bin/python"
STOP_SECONDS = 30.0
PORT_SECONDS = 30.0
"""The server of a run that was killed ends with it, but not at once: a resume waits this long for its port."""

# What torchrun tells its ranks would make the server believe that it is one of them.
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "VIRTUAL_ENV"),
)


def server_command(
    config: EngineConfig, model_dir: Path, *, dtype: str, max_model_tokens: int, logprobs_mode: str, on_cpu: bool
) -> list[str]:
    """Returns the command line of a server for the config; `engine.args` come last and win.

    Raises:
        LaunchError: there is no such interpreter.
    """
    python = Path(config.python or DEFAULT_PYTHON).expanduser()
    if not python.exists():
        raise LaunchError(
            f"engine.python = {str(python)!r} does not exist; `make vllm` makes .vllm/, or set engine.python to the "
            "interpreter of an environment that has vLLM and the plugin (docs/rl.md)"
        )
    settings = {
        "--model": str(model_dir),
        "--served-model-name": "policy",
        "--host": HOST,
        "--port": str(config.port),
        "--dtype": dtype,
        "--max-model-len": str(max_model_tokens),
        "--load-format": "dummy",  # whatever it began with would be replaced before the first request
        "--logprobs-mode": logprobs_mode,
        "--disable-access-log-for-endpoints": "/health,/weight_info",  # asked every few seconds
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
    }
    flags = ["--enable-scale-out", "--skip-tokenizer-init", *(["--enforce-eager"] if on_cpu else [])]
    pairs = [word for pair in settings.items() for word in pair]
    # Absolute, but not resolved: the interpreter of an environment is a link, and is told apart by its own place.
    return [str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *config.args]


def server_environment(config: EngineConfig, *, on_cpu: bool) -> dict[str, str]:
    """Returns the environment of the server: this process's, without what is only meant for a rank."""
    env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    env = {name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    if on_cpu:
        defaults["TORCHDYNAMO_DISABLE"] = "1"  # else g++ compiles small functions for a minute before the first token
    env = defaults | env | {"VLLM_SERVER_DEV_MODE": "1", "EXACT_TRAINER_PARENT": str(os.getpid())}
    if config.devices is not None:
        env[VISIBLE_DEVICES] = config.devices
    return env


class LaunchedServer:
    """A server process with a log file. It leads a process group of its own, so that its helpers end with it.

    Raises:
        LaunchError: from `start`.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path, port: int):
        self.log, self.port = log, port
        self._command, self._environment = list(command), environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; it answers much later."""
        _await_port(self.port)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                log.write(f"\n$ {' '.join(self._command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"the vLLM server cannot be started: {error}") from error

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """Returns None while the process runs."""
        return None if self._process is None else self._process.poll()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends the process and its helpers: asks, waits, and then insists."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)  # helpers that outlived it too
        process.wait()

    def last_lines(self, count: int = 15) -> str:
        """Returns the end of the log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"({self.log} cannot be read: {error})"
        return "\n".join(f"  {line}" for line in lines[-count:])

    def _signal(self, number: int) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # nothing of it is left


def _await_port(port: int) -> None:
    """Returns when the port is free. Raises `LaunchError` if it cannot be used, or is still taken after PORT_SECONDS."""
    deadline = time.monotonic() + PORT_SECONDS
    is_told = False
    while (problem := _port_problem(port)) is not None:
        if problem.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
            why = problem.strerror or str(problem)
            raise LaunchError(f"port {port} on {HOST} cannot be used: {why}; set engine.port to a free one")
        if not is_told:
            logger.info(f"port {port} is taken, maybe by the server of a run that was killed: waiting for it")
            is_told = True
        time.sleep(0.2)


def _port_problem(port: int) -> OSError | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error
    return None
