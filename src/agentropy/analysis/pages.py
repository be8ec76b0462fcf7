"""The analysis as an HTML page: the report of `agentropy.analysis.report` with the tables of the analysis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentropy.analysis.analyse import Analysis
from agentropy.analysis.imports import Source
from agentropy.analysis.report import CallPoint, Table, write_report
from agentropy.analysis.report.tokens import tokenizer_places
from agentropy.trajectory import STATUSES

FIRST = "The first ones in the order of the files."
READ_AGAIN = 64 << 20
"""Bytes of files in the project's own format that the page reads itself, with all that it knows of run directories."""


def write_page(
    out: Path, paths: Sequence[str], sources: Sequence[Source], analysis: Analysis, model: str | None = None
) -> dict[str, Any]:
    """Write the page of an analysis, and return what it shows.

    One directory, or files, in the project's own format are shown as a run's report shows them. Of anything else, and
    of long files, the page has the trajectories that the analysis holds, and the distributions of all calls.
    """
    tables = tuple(_tables(analysis.report))
    own = all(s.format == "agentropy" for s in sources) and sum(s.path.stat().st_size for s in sources) <= READ_AGAIN
    directories = [p for p in map(Path, paths) if p.is_dir()]
    folder = Path(model) if model is not None else None
    if own and len(paths) == 1 and directories:
        return write_report(out, directories[0], tables=tables, model=folder)
    if own:
        return write_report(out, [s.path for s in sources], tables=tables, model=folder)
    several = len(sources) > 1
    held = [replace(t, question_id=f"{sources[i].name}: {t.question_id}") if several else t for i, t in analysis.held]
    return write_report(
        out,
        held,
        title=", ".join(s.name for s in sources[:3]) + (", …" if len(sources) > 3 else ""),
        tables=tables,
        model=folder or _tokenizer(sources),
        calls=list(_points(analysis)),
        total=analysis.report["trajectories"],
    )


def _tokenizer(sources: Sequence[Source]) -> Path | None:
    places = [p for s in sources for p in tokenizer_places(s.path.resolve().parent.parent)]
    return places[0] if places else None


def _points(analysis: Analysis) -> Iterator[CallPoint]:
    calls, tools = analysis.calls, analysis.tools
    for tool, status, score, position, change in zip(
        calls["tool"].tolist(),
        calls["status"].tolist(),
        calls["score"].tolist(),
        calls["call"].tolist(),
        calls["entropy_change"].tolist(),
        strict=True,
    ):
        correct = None if score != score else score >= 0.5
        yield CallPoint(tools[tool], STATUSES[status], correct, int(position), change)


def _tables(report: Mapping[str, Any]) -> Iterator[Table]:
    e = report["effective"]
    interval = None if e["low"] is None else f"{e['low']:.1%} to {e['high']:.1%}"
    yield Table(
        "Calls",
        ("calls", "a trajectory", "effective", "95% interval", "repeated", "result never used"),
        (
            (
                report["calls"],
                report["calls_per_trajectory"],
                _share(e["ratio"]),
                interval,
                _share(report["repeated"]["share"]),
                _share(report["unused"]["share"]),
            ),
        ),
        " ".join(report["notes"]),
    )
    yield Table(
        "What methods would make of them",
        ("method", "keeps", "drops", "groups left", "no signal", "mean reward", "share of the bonus"),
        tuple(_method_row(name, m) for name, m in report["methods"].items()),
    )
    several = len(report["sources"]) > 1
    for title, rows, note in (
        ("Most useful calls", report["most_useful"], ""),
        ("Least useful calls", report["least_useful"], ""),
        ("Repeated calls", report["repeated"]["examples"], FIRST),
        ("Results that were never used", report["unused"]["examples"], FIRST),
    ):
        if rows:
            columns = ("dH", *(("source",) if several else ()), "trajectory", "call", "tool", "arguments", "status")
            yield Table(title, (*columns, "result"), tuple(_example(row, several) for row in rows), note)


def _example(row: Mapping[str, Any], with_source: bool) -> tuple[str | None, ...]:
    dh, about = row["entropy_change"], "≈\u202f" if row["estimated"] else ""
    return (
        None if dh is None else about + f"{dh:+.3f}".replace("-", "\u2212"),
        *((row["source"],) if with_source else ()),
        row["trajectory_id"],
        f"{row['call']} of {row['calls']}",
        row["tool"],
        row["arguments"],
        row["status"],
        row["result"],
    )


def _method_row(name: str, m: Mapping[str, Any]) -> tuple[str | float | None, ...]:
    if "why_not" in m:
        return name, None, str(m["why_not"]), None, None, None, None
    dropped = ", ".join(f"{n} {reason}" for reason, n in m["dropped"].items()) or "nothing"
    kept = f"{m['kept']} of {m['trajectories']}"
    groups = f"{m['groups_kept']} of {m['groups']}"
    return name, kept, dropped, groups, _share(m["no_signal_share"]), m["reward_mean"], _share(m["bonus_share"], 2)


def _share(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{value:.{digits}%}"
