"""What a benchmark found, where it was found, and whether that is what was promised."""

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import CACHE, ROOT

RESULTS = ROOT / "benchmarks" / "results"
SMOKE_RESULTS = CACHE / "smoke"


@dataclass(frozen=True)
class Target:
    """A promise and what was measured; `met` is None where the figure is only reported."""

    what: str
    value: float
    bound: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self, *, judged: bool = True) -> str:
        """One line for the terminal; not `judged` where the value means nothing."""
        if self.bound is None or not judged:
            return f"  {'':6} {self.value:8.3f}            {self.what}"
        sign, verdict = (">=" if self.at_least else "<="), ("ok" if self.met else "MISSED")
        return f"  {verdict:6} {self.value:8.3f} {sign} {self.bound:<8g} {self.what}"


@dataclass
class Result:
    """Everything one benchmark writes.

    Attributes:
        settings: what was measured, so that the numbers can be read without the code.
        cases: one entry per measurement, free in form but flat enough for a table.
        targets: the figures the benchmark is for.
    """

    name: str
    settings: dict[str, Any]
    cases: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def write(self, *, smoke: bool, load_before: float, command: str, machine_name: str | None = None) -> Path:
        """Writes the JSON and returns where; with `machine_name`, beside the results that are there."""
        content = {
            "benchmark": self.name,
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "git_revision": git_revision(),
            "machine": machine(),
            "load_average": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},
            "niceness": os.nice(0),
            "settings": self.settings,
            "targets": [asdict(target) | {"met": target.met} for target in self.targets],
            "cases": self.cases,
        }
        folder = SMOKE_RESULTS if smoke else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (f"{self.name}@{machine_name}.json" if machine_name else f"{self.name}.json")
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def git_revision() -> str:
    """Returns the commit, with "+changes" where tracked files of the trainer or the benchmarks differ from it."""
    try:
        revision = _output("git", "rev-parse", "--short=12", "HEAD")
        changes = _output("git", "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+changes" if changes else "")


def _output(*argv: str) -> str:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.exists():
        for line in info.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    family = f", family {fields['cpu family']} model {fields['model']}" if "model" in fields else ""
    return f"{name}{family} ({', '.join(wide)})" if wide else name
