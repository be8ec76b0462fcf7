"""Results of evaluations as tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentropy.terminal import duration

COLUMNS = 4
"""Benchmarks side by side; more go into further tables."""
WIDTH = 120
"""Characters where nobody says how many there are."""


def console() -> Console:
    """The terminal; a file or pipe gets lines of a fixed width."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def print_results(results: Mapping[str, Mapping[str, Any]], title: str, usage: Mapping[str, Any] | None = None) -> None:
    """One column a benchmark, one line a number; a table for every four benchmarks."""
    rest = iter(results.values())
    while some := list(islice(rest, COLUMNS)):
        table = Table(title=escape(title))
        table.add_column("")
        for row in some:
            table.add_column(escape(str(row["title"])), justify="right")
        for label, cells in _lines(some):
            if any(cells):
                table.add_row(label, *(escape(c) or "-" for c in cells))
        console().print(table)
    if usage:
        counts = ", ".join(f"{name.replace('_', ' ')} {_count(value)}" for name, value in usage.items() if value)
        console().print(f"Server: {counts}", markup=False, highlight=False, soft_wrap=True)


def _count(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{k}: {v}" for k, v in value.items()) + ")"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    k = max(int(r["samples"]) for r in rows)
    levels = sorted({level for r in rows for level in r["pass"]}, key=int)
    lines = [
        ("questions x samples", [f"{r['questions']} x {r['samples']}" for r in rows]),
        (f"Avg@{k}", [_interval(r["avg"]) for r in rows]),
        ("exact match", [_interval(r["exact"]) for r in rows]),
    ]
    if k > 1:
        lines += [(f"Pass@{level}", [_interval(r["pass"].get(level)) for r in rows]) for level in levels]
        lines.append((f"maj@{k}", [_interval(r["majority"]) for r in rows]))
    estimated = any(r["effective_is_estimate"] for r in rows)
    lines += [
        (f"Len@{k}, tokens", [_interval(r["tokens"], "{:,.0f}") for r in rows]),
        ("calls a question", [_interval(r["calls"], "{:.2f}") for r in rows]),
        ("valid calls", [_share(r["valid_call_rate"]) for r in rows]),
        ("valid programs", [_share(r["valid_code_rate"]) for r in rows]),
        ("code lines a program", [_number(r["code_lines"]) for r in rows]),
        ("effective calls" + (" (estimate)" if estimated else ""), [_share(r["effective_ratio"]) for r in rows]),
        ("stopped by", [_stops(r) for r in rows]),
        ("not graded", [_some(r["ungraded"]) for r in rows]),
        ("lost", [_some(r["lost"]) for r in rows]),
        ("questions with fewer samples", [_some(r["questions_with_fewer_samples"]) for r in rows]),
        ("questions without any", [_some(r["questions_without_score"]) for r in rows]),
        ("left out", ["\n".join(f"{n} {why}" for why, n in r["left_out"].items()) for r in rows]),
        ("time", [duration(r["seconds"]) if r["seconds"] else "" for r in rows]),
        ("tokens a second", [_number(r["tokens_per_second"], "{:,.0f}") for r in rows]),
    ]
    return lines


def _interval(value: Mapping[str, float] | None, form: str = "{:.3f}") -> str:
    if value is None:
        return ""
    return f"{form.format(value['mean'])} [{form.format(value['low'])}, {form.format(value['high'])}]".replace(
        "[", "\\["
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "" if value is None else form.format(value)


def _some(count: int) -> str:
    return str(count) if count else ""


def _stops(row: Mapping[str, Any]) -> str:
    total = sum(row["stops"].values())
    return "\n".join(f"{name} {100 * n / total:.0f} %" for name, n in row["stops"].items()) if total else ""
