"""Fixtures every test file can use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine a first call may take seconds; what is too slow is for benchmarks to say.
settings.register_profile("agentropy", deadline=None)
settings.load_profile("agentropy")

# A shell starts its background jobs with SIGINT ignored, and so would be everything that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of known cases and real questions beside the checkout; tests that need it skip without it."""
    root = Path(os.environ.get("AGENTROPY_SHARED", Path(__file__).parents[2] / "shared"))
    if not root.is_dir():
        pytest.skip(f"no folder of shared cases at {root} (set AGENTROPY_SHARED)")
    return root
