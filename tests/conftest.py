"""Shared by all tests: one thread per process, no network, and `support` importable in worker processes too."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy with something else is no fault of a test.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")

pytest.register_assert_rewrite("support")  # its assertions say what they compared, as those of the tests do

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_SILENT"] = "true"

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory):
    """The continuation matrix's runs that go through, shared by the tests of a module."""
    from support.continuation import Uninterrupted

    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))
