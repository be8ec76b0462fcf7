"""The report in Markdown, and how numbers are written in it and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentropy.study.figures import caption
from agentropy.study.plan import Run, dotted
from agentropy.study.results import LEVEL, Cell, Results, Row, Table
from agentropy.study.spec import Column

NONE = "–"


def number(value: float, column: Column, *, sign: bool = False) -> str:
    """A value as the column prints it."""
    text = f"{value * column.factor:{'+' if sign else ''}.{column.decimals}f}"
    return _unsigned_zero(text)


def _unsigned_zero(text: str) -> str:
    """A number without its sign where only zeros are left of it: rounding has decided nothing."""
    return text if text.strip("+-0.%") else text.lstrip("+-")


def written(cell: Cell, column: Column, expected: int, *, difference: bool = False) -> str:
    """A cell: mean [low, high], how many seeds where fewer than the row's have a value, a star and the relative change
    for differences."""
    if cell.mean is None:
        return NONE
    text = number(cell.mean, column, sign=difference)
    if cell.low is not None and cell.high is not None:
        text += f" [{number(cell.low, column, sign=difference)}, {number(cell.high, column, sign=difference)}]"
    if difference:
        text += "*" if cell.excludes_zero else ""
        text += f" ({_unsigned_zero(f'{cell.relative:+.0%}')})" if cell.relative is not None else ""
    if len(cell.values) != expected:
        text += f" (n={len(cell.values)})"
    return text


def heading(label: str, column: Column) -> str:
    """A column's heading, with its unit where that is per cent."""
    return label + (", %" if column.percent else "")


def overrides_text(overrides: Mapping[str, Any]) -> str:
    """Dotted keys with their values in one line."""
    return ", ".join(f"{k}: {v}" for k, v in dotted(overrides).items()) or NONE


def intro(results: Results) -> list[str]:
    """What was compared, a paragraph an item, in plain text."""
    study, spec = results.study, results.study.spec
    measured = [r.config.evaluation for r in study.runs]
    splits, questions, samples = (
        " or ".join(map(str, sorted({getattr(e, key) for e in measured}))) for key in ("split", "questions", "samples")
    )
    texts = [
        f"{len(results.data)} of {len(study.runs)} runs are complete: {len(results.tables)} settings, "
        f"{len({r.variant for r in study.runs})} variants, seeds {', '.join(map(str, spec.seeds))}.",
        f"Measured after training unless a column says otherwise, on at most {questions} questions of the {splits} "
        f"split, {samples} samples each" + (", and once greedily." if measured[0].greedy else "."),
        f"Numbers are means over seeds with the {LEVEL:.0%} percentile bootstrap interval over seeds in brackets. "
        "Such intervals are too narrow for few seeds.",
    ]
    if study.baselines:
        n = len(spec.seeds)
        chance = min(1.0, 2.0 ** (1 - n))
        texts.append(
            "Differences are paired by seed; * marks an interval that excludes zero, a percentage is relative to the "
            f"baseline's mean. Of variants that do not differ at all, at least {chance:.1%} would have all {n} seeds "
            "on one side by chance, and so the mark."
        )
    return texts


def state_of(results: Results, run: Run) -> str:
    """Why a run is not in the tables, in one line."""
    found = results.found[run.name]
    if found.state == "partial":
        return f"not finished, step {found.step} of {run.config.steps}"
    if found.state == "failed":
        return "failed: " + " / ".join(found.message.splitlines())
    if found.state == "changed":
        return f"made with another configuration: {found.message}"
    return "not started"


def versions(results: Results) -> str:
    """What made the runs, in one line."""
    seen: dict[str, set[str]] = {}
    for data in results.data.values():
        e = data.environment
        packages = e.get("packages") if isinstance(e.get("packages"), dict) else {}
        for name, value in {
            "agentropy": e.get("agentropy"),
            "commit": e.get("commit"),
            "python": e.get("python"),
            **(packages or {}),
        }.items():
            seen.setdefault(name, set()).add(str(value))
    return ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in seen.items())


def render(results: Results, figures: Sequence[str]) -> list[str]:
    """The lines of results.md. figures: paths of the SVGs, relative to it."""
    study = results.study
    lines = [f"# {study.spec.name}", ""]
    for text in intro(results):
        lines += [text, ""]
    for warning in results.warnings:
        lines += [f"**Note:** {warning}.", ""]
    for table in results.tables:
        lines += [f"## {table.setting}", "", *_table(table, table.rows), ""]
        for d in table.differences:
            lines += [f"Differences from {_escaped(d.label)}:", "", *_table(table, d.rows, difference=True), ""]
    if figures:
        lines += ["## Learning curves", "", f"Each curve: {caption(results)}.", ""]
        lines += [f"![{path}]({path})" for path in figures]
        lines += [""]
    if results.unfinished:
        lines += ["## Not in the tables", ""]
        lines += [f"- {run.name}: {_escaped(state_of(results, run))}" for run in results.unfinished]
        lines += [""]
    lines += ["## What was compared", ""]
    for what, named in (("setting", study.spec.settings), ("variant", study.spec.variants)):
        lines += [f"| {what} | overrides |", "|---|---|"]
        lines += [f"| {name} | {_escaped(overrides_text(keys))} |" for name, keys in named.items()]
        lines += [""]
    lines += [f"All runs: {_escaped(overrides_text(study.spec.base))}.", ""]
    if results.data:
        lines += [f"Made with {versions(results)}.", ""]
    lines += ["Values by seed and run directories: results.json, results.csv, index.html."]
    return lines


def _table(table: Table, rows: Iterable[Row], *, difference: bool = False) -> list[str]:
    headings = [heading(label, c) for label, c in zip(table.labels, table.columns, strict=True)]
    out = [
        "| " + " | ".join(["variant", "seeds", *map(_escaped, headings)]) + " |",
        "|---|" + "---:|" * (len(headings) + 1),
    ]
    for row in rows:
        cells = [
            written(c, column, len(row.seeds), difference=difference)
            for c, column in zip(row.cells, table.columns, strict=True)
        ]
        name = f"*{row.name}*" if row.measured else row.name
        out.append("| " + " | ".join([name, str(len(row.seeds)), *cells]) + " |")
    return out


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
