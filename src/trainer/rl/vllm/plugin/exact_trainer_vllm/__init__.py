"""A plugin of vLLM; it runs in the server's processes and imports nothing of the trainer.

vLLM calls `register` in each of its processes before it builds anything.
"""

# pyright: reportMissingImports=false

import ctypes
import os
import signal
import sys

BACKEND = "safetensors_dir"
PARENT = "EXACT_TRAINER_PARENT"
"""Environment variable with the process id of the trainer that started the server."""


def register() -> None:
    """Makes `--weight-transfer-config '{"backend": "safetensors_dir"}'` known to vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # a process may load its plugins more than once
        WeightTransferEngineFactory.register_engine(BACKEND, "exact_trainer_vllm.weights", "SafetensorsDirectoryEngine")
    if PARENT in os.environ:
        _end_with_parent(int(os.environ[PARENT]))


def _end_with_parent(trainer: int) -> None:
    """A server that a trainer started has no use without it: also after SIGKILL, which lets nobody clean up."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() == 1 and trainer != 1:  # it died before this was set
        os._exit(1)
