"""The HTML report: one self-contained file with an overview and a viewer of trajectories (docs/report.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentropy.analysis.report.build import page_of_files, page_of_trajectories, shrink
from agentropy.analysis.report.encode import CallPoint
from agentropy.analysis.report.overview import Table
from agentropy.analysis.report.page import render
from agentropy.methods.base import Method
from agentropy.trajectory import Trajectory, write_lines

LARGEST = 4_900_000
"""Bytes of a report. Trajectories that do not fit are left out, and the page says so."""


def write_report(
    out: Path | str,
    source: Path | Sequence[Path] | Iterable[Trajectory],
    *,
    method: Method | None = None,
    model: Path | None = None,
    title: str | None = None,
    tables: Sequence[Table] = (),
    calls: Iterable[CallPoint] | None = None,
    total: int | None = None,
) -> dict[str, Any]:
    """Write the report of a run or evaluation directory, of files, or of trajectories; returns the page's data.

    Args:
        out: the HTML file.
        source: a directory, files of trajectories, or trajectories (a stream is read once, in bounded memory).
        method: whose advantages and filters are shown; None takes the run's own, or TAO-RL's defaults.
        model: a folder with the tokenizer; None looks in the run directory.
        tables: further tables for the overview.
        calls: points of all calls, where `source` are trajectories and the caller has measured them already.
        total: number of trajectories where `source` is a sample of more.

    Raises: UserError for what cannot be read or written.
    """
    held = list(source) if isinstance(source, Sequence) else None
    if isinstance(source, Path):
        data = page_of_files(source, method=method, model=model, title=title, tables=tables)
    elif held and all(isinstance(p, Path) for p in held):
        paths = [p for p in held if isinstance(p, Path)]
        data = page_of_files(paths, method=method, model=model, title=title, tables=tables)
    else:
        stream = (t for t in source if isinstance(t, Trajectory))
        name = title or "trajectories"
        data = page_of_trajectories(
            stream, title=name, method=method, model=model, tables=tables, calls=calls, total=total
        )
    text = render(data, data["title"])
    while len(text) > LARGEST and data["trajectories"]:
        data = shrink(data, 0.9 * LARGEST / len(text))
        text = render(data, data["title"])
    write_lines(out, [text])
    return data


__all__ = ["CallPoint", "Table", "write_report"]
