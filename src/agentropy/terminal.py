"""Words for the person at the terminal."""

from __future__ import annotations

import os
import sys


def duration(seconds: float) -> str:
    """12s, 3m05s or 2h07m."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m"


def print_line(text: str) -> None:
    """Print, and go on in silence where nobody reads any more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head`, a lost connection; the run is worth finishing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
