"""Wall time of the commands that only answer, beyond that of a bare interpreter."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ROOT, worker_environment
from benchmarks.options import Options
from benchmarks.peers.environment import python_of, version_of
from benchmarks.results import Result, Target

HELP_BOUND_SECONDS, CONFIG_BOUND_SECONDS = 0.25, 0.5
CONFIG = "configs/debug/sft.toml"


def run(options: Options) -> Result:
    """Starts each command in turn, `rounds` times; bytecode is compiled in a first round that does not count."""
    bin_dir = Path(sys.executable).parent
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "trainer --help": [str(bin_dir / "trainer"), "--help"],
        "trainer sft --help": [str(bin_dir / "trainer"), "sft", "--help"],
        f"trainer config @ {CONFIG}": [str(bin_dir / "trainer"), "config", "@", CONFIG],
    }
    settings: dict = {"rounds": _rounds(options), "bytecode": "compiled"}
    if options.peers:
        peer = python_of("trl")
        settings["trl"] = version_of("trl", "trl")
        commands |= {
            "python -c pass (TRL's environment)": [str(peer), "-c", "pass"],
            "trl --help": [str(peer.parent / "trl"), "--help"],
            "trl sft --help": [str(peer.parent / "trl"), "sft", "--help"],
        }
    wall: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(_rounds(options) + 1):
        for name, argv in commands.items() if number % 2 else reversed(commands.items()):
            seconds, cpu_seconds = timed(argv)
            if number > 0:
                wall[name].append(seconds)
                cpu[name].append(cpu_seconds)
    result = Result("startup", settings)
    for name in commands:
        bare = "python -c pass (TRL's environment)" if "trl" in name.lower() else "python -c pass"
        result.cases.append(
            {
                "case": name,
                "seconds": round(statistics.median(wall[name]), 4),
                "cpu_seconds": round(statistics.median(cpu[name]), 4),
                "seconds beyond a bare interpreter": round(_beyond(wall[name], wall[bare]), 4),
            }
        )
    bounds = {"trainer --help": HELP_BOUND_SECONDS, f"trainer config @ {CONFIG}": CONFIG_BOUND_SECONDS}
    for case in result.cases:
        if "-c pass" not in case["case"]:
            seconds = case["seconds beyond a bare interpreter"]
            result.targets.append(Target(f"seconds, {case['case']}", seconds, bounds.get(case["case"]), at_least=False))
    return result


def _rounds(options: Options) -> int:
    return 1 if options.smoke else 2 * options.rounds + 3


def _beyond(seconds: list[float], bare: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(seconds, bare, strict=True))


def timed(argv: list[str]) -> tuple[float, float]:
    """Runs a command and returns its wall and CPU time, in seconds.

    Raises:
        RuntimeError: it fails.
    """
    environment = {key: value for key, value in worker_environment(threads=1).items() if key != "PYTHONPATH"}
    started = time.perf_counter()
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}:\n{errors.decode()[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime
