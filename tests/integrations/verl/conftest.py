"""Tests of the verl plug-in, in verl's own environment: `make test-verl`. Elsewhere there is nothing to collect."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

HAS_VERL = importlib.util.find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["test_*.py"]
# Ray would write a token into the home folder, and give its workers the lowest priority: on a busy machine they starve.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "WANDB_MODE": "disabled"}


def pytest_configure(config: Any) -> None:
    if HAS_VERL:  # what verl, Ray and their engines warn of is not ours to mend; what we warn of is
        config.addinivalue_line("filterwarnings", "ignore")
        config.addinivalue_line("filterwarnings", r"error:::agentropy\.")
