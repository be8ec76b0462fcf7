"""How a worker process begins that reads hostile input: it dies with its parent, and within its memory.

Such a process is killed by its parent when it is late. It imports nothing of ours but what it works with.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import warnings
from typing import TextIO

MEMORY_LIMIT = 2 << 30
"""Bytes of address space."""


def begin() -> TextIO:
    """Set the limits, and return the stream for answers: what libraries print goes to stderr from now on."""
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a library that prints must not be taken for an answer
    return answers


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, even while an answer keeps it busy."""
    import ctypes

    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
