"""All files of a study's report: results.md, .json and .csv, the figures, and index.html."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentropy.study import markdown, page
from agentropy.study.figures import draw
from agentropy.study.plan import Study, overrides_of
from agentropy.study.results import LEVEL, Cell, Results, Row, collect, value_of
from agentropy.trajectory import write_lines


def write_report(study: Study, out: Path) -> Results:
    """Read the runs in `out` and write the report beside them. The same runs give the same bytes."""
    results = collect(study, out)
    figures = []
    for curve in study.spec.curves if results.data else ():
        if (path := draw(results, curve, out / "figures")) is not None:
            figures.append((curve.label or curve.metric, path))
    write_lines(out / "results.json", [json.dumps(_as_json(results), indent=1, allow_nan=False)])
    write_lines(out / "results.csv", _as_csv(results))
    write_lines(out / "index.html", [page.render(results, figures)])
    write_lines(out / "results.md", markdown.render(results, [f"figures/{path.name}" for _, path in figures]))
    return results


def _as_csv(results: Results) -> Iterator[str]:
    """A row for each complete run and number: all of its evaluations, and the columns that come from its training."""

    def line(*cells: Any) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="").writerow(cells)
        return buffer.getvalue()

    yield line("setting", "variant", "seed", "at", "metric", "statistic", "value", "run")
    for run in results.study.runs:
        if (data := results.data.get(run.name)) is None:
            continue
        name = (run.setting, run.variant, run.seed)
        for at, numbers in (("before", data.before), ("after", data.after)):
            for metric, value in numbers.items():
                yield line(*name, at, metric, "", repr(value), f"runs/{run.name}")
        for column in results.study.spec.columns:
            value = value_of(column, data)
            if column.at == "train" and math.isfinite(value):
                statistic = column.key.partition("@train.")[2]
                yield line(*name, "train", column.metric, statistic, repr(value), f"runs/{run.name}")


def _as_json(results: Results) -> dict[str, Any]:
    study = results.study
    return {
        "name": study.spec.name,
        "level": LEVEL,
        "study": study.spec.model_dump(mode="json"),
        "warnings": list(results.warnings),
        "tables": [
            {
                "setting": table.setting,
                "columns": [
                    {"key": c.key, "label": label, "factor": c.factor}
                    for c, label in zip(table.columns, table.labels, strict=True)
                ],
                "rows": [_row(r) for r in table.rows],
                "differences": [
                    {"from": d.label, "variants": list(d.members), "rows": [_row(r) for r in d.rows]}
                    for d in table.differences
                ],
            }
            for table in results.tables
        ],
        "runs": [
            {
                "setting": run.setting,
                "variant": run.variant,
                "seed": run.seed,
                "directory": f"runs/{run.name}",
                "state": "complete" if run.name in results.data else results.found[run.name].state,
                "message": results.found[run.name].message,
                "steps": results.found[run.name].step,
                "overrides": overrides_of(study.spec, run.setting, run.variant),
                "environment": results.data[run.name].environment if run.name in results.data else {},
            }
            for run in study.runs
        ],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "variant": row.name,
        "before_training_of": row.measured,
        "seeds": list(row.seeds),
        "cells": [_cell(c) for c in row.cells],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "mean": cell.mean,
        "low": cell.low,
        "high": cell.high,
        "relative": cell.relative,
        "values": {str(seed): value for seed, value in cell.values.items()},
    }
