"""A peer's environment, made once from its requirements.txt."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import CACHE, ROOT

PEERS = ROOT / "benchmarks" / "peers"


def python_of(peer: str) -> Path:
    """Returns the interpreter of `peer`'s environment under .cache/bench/, made or brought up to date if need be.

    Raises:
        RuntimeError: uv is missing, or installing fails.
    """
    requirements = PEERS / peer / "requirements.txt"
    folder = CACHE / peer
    python = folder / "bin" / "python"
    stamp = folder / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"  making the environment of {peer} (once)", flush=True)
    uv = _uv()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _run([uv, "venv", "--quiet", "--allow-existing", "--python", version, str(folder)])
    _run([uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), "-r", str(requirements)])
    stamp.write_text(wanted)
    return python


def _uv() -> str:
    found = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    if not Path(found).exists():
        raise RuntimeError("the peers' environments need uv, on PATH or in .uv/ (make sync puts it there)")
    return found


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[:3])} failed:\n{done.stderr[-3000:]}")


def version_of(peer: str, package: str) -> str:
    """Returns the version of a package in a peer's environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python_of(peer), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
