"""What a study shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentropy.terminal import duration, print_line

PLAIN_EVERY = 60.0
"""Seconds between two plain lines on how far everything is."""


@dataclass(frozen=True)
class Status:
    """Where a study is. running: (name, step, steps) of each running run. left: seconds, None before the first step."""

    total: int
    done: int
    failed: int
    running: Sequence[tuple[str, int, int]]
    share: float
    left: float | None

    def line(self) -> str:
        """In one line."""
        parts = [f"{self.done} of {self.total} done", f"{len(self.running)} running"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.left is not None:
            parts.append(f"about {duration(self.left)} left")
        return ", ".join(parts)


class TimeLeft:
    """Seconds to go, from the steps that this process saw."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: int | None = None

    def after(self, done: int, total: int) -> float | None:
        """done, total: steps of all runs."""
        if self._first is None:
            self._first = done
        if done <= self._first:
            return None
        return (time.monotonic() - self._started) / (done - self._first) * (total - done)


class Display(Protocol):
    """Shows how far a study is, and words in between."""

    def show(self, status: Status) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """A line for each thing that happens, and one a minute."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, status: Status) -> None:
        if time.monotonic() - self._last >= PLAIN_EVERY:
            self._last = time.monotonic()
            print_line("; ".join([status.line(), *(f"{name} step {step}/{n}" for name, step, n in status.running)]))

    def say(self, text: str) -> None:
        print_line(text)

    def close(self) -> None:
        pass


class LiveDisplay:
    """The runs in progress with their steps, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, status: Status) -> None:
        self._live.update(self._render(status), refresh=True)

    def _render(self, status: Status) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for name, step, steps in status.running:
            table.add_row(Text(name), ProgressBar(total=max(steps, 1), completed=step, width=24), f"{step}/{steps}")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=1.0, completed=status.share, width=40), Text(status.line()))
        return Group(table, bar)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


def make_display() -> Display:
    """A live table where stdout is a terminal, plain lines elsewhere."""
    return LiveDisplay(Console()) if sys.stdout.isatty() else PlainDisplay()
