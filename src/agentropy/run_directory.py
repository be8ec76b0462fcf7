"""What every run directory has: one process at a time, and a record of what it was made with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from agentropy import __version__
from agentropy.errors import UserError

RECORDED = ("torch", "transformers", "tokenizers", "numpy", "peft", "bm25s", "math-verify", "sympy")


def make_directory(directory: Path) -> None:
    """Make a run directory where there is none. Raises UserError where it cannot be made or written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot make a run directory at {str(directory)!r} ({why}); choose another --out") from None


@contextlib.contextmanager
def alone_in(directory: Path, doing: str) -> Iterator[None]:
    """Keep other processes out of a run directory. The lock is the kernel's, so it goes with the process.

    `doing` says in the message what another one does there.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another process is {doing} in {directory}; wait for it, or choose another --out") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def environment() -> dict[str, Any]:
    """What a run was made with: versions, commit, machine, command line."""
    versions = {}
    for name in RECORDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        root = Path(__file__).parent
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=5, check=True
        ).stdout
        commit += "+changes" if dirty.strip() else ""
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "agentropy": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": versions,
    }
