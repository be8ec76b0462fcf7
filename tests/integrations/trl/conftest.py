"""Tests of the TRL adapter, in TRL's own environment: `make test-trl`. Elsewhere there is nothing to collect."""

from __future__ import annotations

import importlib.util
from typing import Any

HAS_TRL = importlib.util.find_spec("trl") is not None
collect_ignore_glob = [] if HAS_TRL else ["test_*.py"]


def pytest_configure(config: Any) -> None:
    if HAS_TRL:  # what TRL asks of transformers is not ours to mend
        config.addinivalue_line("filterwarnings", "ignore::FutureWarning:transformers")
        config.addinivalue_line("filterwarnings", "ignore:.*pin_memory.*:UserWarning")
