"""What an evaluation shows while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentropy.terminal import duration, print_line

LINE_SECONDS = 10.0
"""Seconds between two plain lines."""


@dataclass
class Tally:
    """How far the work on one benchmark is. `begun` counts what an earlier start of the evaluation had done."""

    title: str
    total: int
    begun: int
    done: int
    started: float
    tokens: int = 0
    score: float = 0.0
    scored: int = 0
    lost: int = 0

    def text(self) -> str:
        """The state in words: score so far, speed, time left, losses."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        fresh = self.done - self.begun
        parts = []
        if self.scored:
            parts.append(f"score {self.score / self.scored:.3f}")
        if fresh:
            parts.append(f"{self.tokens / seconds:,.0f} tok/s")
            parts.append(f"{duration(seconds / fresh * (self.total - self.done))} left")
        if self.lost:
            parts.append(f"{self.lost} lost")
        return ", ".join(parts)


class Progress(Protocol):
    """Shows a tally as it grows, and words in between."""

    def show(self, tally: Tally) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """A line every ten seconds and at the end."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS or tally.done == tally.total:
            self._last = now
            print_line(f"{tally.title}: {tally.done}/{tally.total} {tally.text()}".rstrip())

    def say(self, text: str) -> None:
        print_line(text)

    def close(self) -> None:
        pass


class LiveProgress:
    """A bar that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4)
        self._live.start()

    def show(self, tally: Tally) -> None:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=tally.total, completed=tally.done, width=30)
        row.add_row(Text(tally.title), bar, Text(f"{tally.done}/{tally.total}"), Text(tally.text()))
        self._live.update(row)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


def make_progress() -> Progress:
    """A bar where stdout is a terminal, plain lines elsewhere."""
    return LiveProgress(Console()) if sys.stdout.isatty() else PlainProgress()
