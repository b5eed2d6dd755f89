"""What `warm` imports before it forks: all that a short run turns out to need. Only imports happen in this process."""

import atexit
import contextlib
import gc
import importlib
import os
import sys
import tempfile
from pathlib import Path

import trainer.config.load
import trainer.config.run
import trainer.rl.train
import trainer.sft.train  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
DEBUG_RUN = ["@", str(ROOT / "configs/debug/sft.toml"), "--max-steps", "2", "--log.level", "error"]


def modules_of_a_run() -> list[str]:
    """Returns what a forked run has imported, in its order. It trains and so may have threads: this process may not."""
    with tempfile.TemporaryDirectory() as place:
        names = Path(place) / "modules"
        child = os.fork()
        if child == 0:
            try:
                from trainer.cli.main import main

                os.chdir(ROOT)
                main(["sft", *DEBUG_RUN, "--output-dir", f"{place}/run"])
                names.write_text("\n".join(sys.modules))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return names.read_text().split("\n") if names.exists() else []


for name in modules_of_a_run():
    with contextlib.suppress(Exception):  # not every entry of sys.modules can be imported by its name
        importlib.import_module(name)
atexit.register(os._exit, 0)  # else triton's bindings list what they leak, on the terminal
gc.collect()
gc.freeze()  # the forked processes' collections leave these objects, and the memory they share, alone
