"""What a run shows while it trains: a live table on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentropy.terminal import duration, print_line

# Name of the metric, what the column is called, and how its number is written.
COLUMNS = (
    ("reward/accuracy", "accuracy", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("tool/calls_per_question", "calls", "{:.2f}"),
    ("tool/valid_rate", "valid", "{:.2f}"),
    ("entropy/model", "entropy", "{:.3f}"),
    ("optim/grad_norm", "grad", "{:.3f}"),
    ("time/tokens_per_second", "tok/s", "{:,.0f}"),
)


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    value = metrics.get(name)
    return "-" if value is None or value != value else form.format(value)


def trouble(metrics: Mapping[str, float]) -> str:
    """Why a step taught nothing, or less than it should have; empty where all is well."""
    parts = []
    if metrics.get("length/turns") == 0:
        parts.append("no update: no prompt fits into the context (rollout.max_context, or the model's own)")
    elif metrics.get("batch/empty"):
        parts.append("no update: every group was filtered")
    elif metrics.get("optim/updates") == 0 and not metrics.get("optim/skipped_not_finite"):
        parts.append("no update: all advantages are 0")
    if skipped := metrics.get("optim/skipped_not_finite"):
        parts.append(f"{skipped:.0f} updates skipped: gradient not finite")
    if lost := metrics.get("tool/lost_trajectories"):
        parts.append(f"{lost:.0f} trajectories lost to faults of tools, graders or servers")
    return ", ".join(parts)


class Display(Protocol):
    """Shows steps as they end, and words in between."""

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class TimeLeft:
    """Seconds to go, from the steps that were seen; what comes before the first step (an evaluation) is not counted."""

    def __init__(self) -> None:
        self._started = 0.0
        self._first: int | None = None

    def after(self, step: int, total: int, metrics: Mapping[str, float]) -> float:
        """Called at the end of each step."""
        now = time.monotonic()
        if self._first is None:
            self._first = step - 1
            self._started = now - metrics.get("time/step", 0.0)
        return (now - self._started) / (step - self._first) * (total - step)


class PlainDisplay:
    """One line a step, for logs and pipes. Goes on in silence where the reader of a pipe has gone."""

    def __init__(self) -> None:
        self._left = TimeLeft()

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        left = self._left.after(step, total, metrics)
        cells = " ".join(f"{label} {_cell(metrics, name, form)}" for name, label, form in COLUMNS)
        note = trouble(metrics)
        print_line(f"step {step}/{total} {cells} left {duration(left)}" + (f" ({note})" if note else ""))

    def say(self, text: str) -> None:
        print_line(text)

    def close(self) -> None:
        pass


class SilentDisplay:
    """Shows nothing: for all ranks but the one that speaks."""

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class LiveDisplay:
    """The last steps as a table that is redrawn in place, with a bar and the time left."""

    def __init__(self, console: Console, rows: int = 12) -> None:
        self._console = console
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=rows)
        self._left = TimeLeft()
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        self._rows.append((step, metrics))
        if note := trouble(metrics):
            self.say(f"step {step}: {note}")
        self._live.update(self._render(total, self._left.after(step, total, metrics)))

    def _render(self, total: int, left: float) -> RenderableType:
        table = Table(box=None, padding=(0, 1), header_style="bold")
        for column in ("step", *(label for _, label, _ in COLUMNS)):
            table.add_column(column, justify="right")
        for step, metrics in self._rows:
            table.add_row(str(step), *(_cell(metrics, name, form) for name, _, form in COLUMNS))
        step = self._rows[-1][0]
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=total, completed=step, width=40), Text(f"{step}/{total}, {duration(left)} left"))
        return Group(table, bar)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


def make_display() -> Display:
    """A live table where stdout is a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        return LiveDisplay(Console())
    return PlainDisplay()
