"""From run directories to numbers: the values of each column by seed, means with intervals, paired differences.

Nothing is scaled here: numbers are those of the run's files.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentropy.config import RunConfig
from agentropy.evaluation.metrics import bootstrap_questions, gradient_fluctuation
from agentropy.study.plan import Run, Study
from agentropy.study.spec import Column
from agentropy.study.state import Found, find

LEVEL = 0.95
TRAINING_ONLY = {"method", "method_options", "seed", "steps", "out", "log", "optim", "loss", "checkpoint"}


@dataclass(frozen=True)
class RunData:
    """The numbers of a complete run. series[name] has one number a step, NaN where there is none."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    series: Mapping[str, Sequence[float]]
    environment: Mapping[str, Any]
    config_text: str


def read_run(run: Run, directory: Path) -> RunData:
    """Read what a run wrote; files that are not there read as empty."""
    steps: dict[int, dict[str, float]] = {}
    path = directory / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(_numbers(row))
    total = 0.0
    for step in sorted(steps):
        row = steps[step]
        row.pop("step", None)
        if "filter/questions_sampled" in row:
            row["rollout/trajectories"] = row["filter/questions_sampled"] * run.config.rollout.samples
        if "time/total_tokens" in row:
            row["rollout/tokens"] = row["time/total_tokens"] - total
            total = row["time/total_tokens"]
    names = {name for row in steps.values() for name in row}
    series = {name: [steps[s].get(name, math.nan) for s in sorted(steps)] for name in sorted(names)}
    config = directory / "config.yaml"
    return RunData(
        before=_evaluation(directory / "evaluation-before.json"),
        after=_evaluation(directory / "evaluation-after.json"),
        series=series,
        environment=_json(directory / "environment.json"),
        config_text=config.read_text(encoding="utf-8") if config.is_file() else "",
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _evaluation(path: Path) -> dict[str, float]:
    return {k: v for k, v in _numbers(_json(path)).items() if k != "step"}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def value_of(column: Column, data: RunData) -> float:
    """A column's number in one run; NaN where there is none."""
    if column.at != "train":
        return (data.before if column.at == "before" else data.after).get(column.metric, math.nan)
    values = np.asarray(data.series.get(column.metric, ()), dtype=np.float64)
    values = values[-column.last :] if column.last else values
    values = values[np.isfinite(values)]
    if not values.size:
        return math.nan
    if column.statistic in ("cv", "window_cv", "mean_change", "spike_rate"):
        return float(getattr(gradient_fluctuation(values, column.window), column.statistic))
    if column.statistic == "final":
        return float(values[-1])
    return float(getattr(np, column.statistic)(values))


@dataclass(frozen=True)
class Cell:
    """One number of a table: its values by seed (those that exist), their mean and bootstrap interval.

    low and high are None with fewer than two values. relative: a difference over the baseline's mean.
    """

    values: Mapping[int, float]
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    relative: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def cell(values: Mapping[int, float], reference: Mapping[int, float] | None = None) -> Cell:
    """Mean over seeds with a percentile bootstrap interval; minus `reference`, paired by seed, where it is given."""
    known = {seed: v for seed, v in values.items() if math.isfinite(v)}
    relative = None
    if reference is not None:
        both = [s for s in known if math.isfinite(reference.get(s, math.nan))]
        base = float(np.mean([reference[s] for s in both])) if both else 0.0
        known = {s: known[s] - reference[s] for s in both}
        relative = float(np.mean(list(known.values()))) / abs(base) if base else None
    if not known:
        return Cell({})
    numbers = list(known.values())
    if len(numbers) == 1:
        return Cell(known, numbers[0], relative=relative)
    estimate = bootstrap_questions(numbers, level=LEVEL)  # its unit of resampling is here a seed
    return Cell(known, estimate.mean, estimate.low, estimate.high, relative)


@dataclass(frozen=True)
class Row:
    """A row of a table: a variant, the seeds whose runs are complete, a cell for each column.

    measured: in a row "before training", the variant whose runs its numbers come from.
    """

    name: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    measured: str | None = None


@dataclass(frozen=True)
class Differences:
    """A table of differences from a baseline: variants minus it, seed by seed."""

    label: str
    members: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """The tables of one setting."""

    setting: str
    columns: tuple[Column, ...]
    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    differences: tuple[Differences, ...]


@dataclass(frozen=True)
class Results:
    """Everything that the report says. data and found are by `Run.name`; data has the complete runs only."""

    study: Study
    out: Path
    found: Mapping[str, Found]
    data: Mapping[str, RunData]
    tables: Sequence[Table]
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Run]:
        return [r for r in self.study.runs if r.name not in self.data]


def collect(study: Study, out: Path) -> Results:
    """Read all runs and compute all tables."""
    found = {run.name: find(run, out) for run in study.runs}
    data: dict[str, RunData] = {}
    warnings: list[str] = []
    for run in study.runs:
        if found[run.name].state == "complete":
            try:
                data[run.name] = read_run(run, run.directory(out))
            except (OSError, ValueError, KeyError, TypeError) as error:
                found[run.name] = Found("failed", f"its files cannot be read ({error}); remove it to make it again")
    columns = _columns(study, data, warnings)
    settings = dict.fromkeys(run.setting for run in study.runs)
    tables = [_table(study, setting, columns, data) for setting in settings]
    return Results(study, out, found, data, tables, [*warnings, *_version_warnings(data)])


def _columns(study: Study, data: Mapping[str, RunData], warnings: list[str]) -> list[Column]:
    """The columns to print: default ones that no run has are left out, others are named in a warning."""
    if not data:
        return list(study.spec.columns)
    chosen = []
    for column in study.spec.columns:
        if any(math.isfinite(value_of(column, d)) for d in data.values()):
            chosen.append(column)
        elif "columns" in study.spec.model_fields_set:
            chosen.append(column)
            names = {
                n for d in data.values() for n in {"after": d.after, "before": d.before, "train": d.series}[column.at]
            }
            if column.metric not in names:
                near = difflib.get_close_matches(column.metric, sorted(names), n=1, cutoff=0.5)
                guess = f"; did you mean {near[0]!r}?" if near else ""
                warnings.append(f"column {column.metric!r} (at: {column.at}) is in no run{guess}")
    return chosen


def _table(study: Study, setting: str, columns: Sequence[Column], data: Mapping[str, RunData]) -> Table:
    runs = [r for r in study.runs if r.setting == setting]
    variants = list(dict.fromkeys(r.variant for r in runs))
    by_variant = {v: {r.seed: data[r.name] for r in runs if r.variant == v and r.name in data} for v in variants}
    values = {v: [{seed: value_of(c, d) for seed, d in by_variant[v].items()} for c in columns] for v in variants}
    rows = [Row(v, tuple(by_variant[v]), tuple(cell(x) for x in values[v])) for v in variants]
    differences = []
    for label, members in study.baselines.items():
        if any(m not in by_variant for m in members):
            continue  # left out in this setting by `only` or `skip`
        reference = [_mean_by_seed([values[m][i] for m in members]) for i in range(len(columns))]
        compared = []
        for v in variants:
            if members == (v,):
                continue
            both = tuple(s for s in by_variant[v] if all(s in by_variant[m] for m in members))
            compared.append(Row(v, both, tuple(cell(x, r) for x, r in zip(values[v], reference, strict=True))))
        differences.append(Differences(label, members, tuple(compared)))
    k = str(runs[0].config.evaluation.samples)
    labels = tuple((c.label or c.metric).replace("{k}", k) for c in columns)
    before = _before(runs, by_variant, columns)
    return Table(setting, tuple(columns), labels, (*before, *rows), tuple(differences))


def _mean_by_seed(values: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean over variants, seed by seed, of seeds that all of them have."""
    seeds = [s for s in values[0] if all(math.isfinite(v.get(s, math.nan)) for v in values)]
    return {s: float(np.mean([v[s] for v in values])) for s in seeds}


def _before(
    runs: Sequence[Run], by_variant: Mapping[str, Mapping[int, RunData]], columns: Sequence[Column]
) -> list[Row]:
    """What the agents could do before training: one row, or several where variants do not start from the same agent."""
    starts: dict[str, list[str]] = {}
    for variant, config in {r.variant: r.config for r in runs}.items():
        if any(d.before for d in by_variant[variant].values()):
            starts.setdefault(_start(config), []).append(variant)
    rows = []
    for alike in starts.values():
        # The variant of those with the same start that has the most seeds speaks for them.
        speaker = max(alike, key=lambda v: len(by_variant[v]))
        data = by_variant[speaker]
        cells = tuple(
            cell({s: d.before.get(c.metric, math.nan) for s, d in data.items()}) if c.at == "after" else Cell({})
            for c in columns
        )
        name = "before training" if len(starts) == 1 else f"before training: {', '.join(alike)}"
        rows.append(Row(name, tuple(data), cells, measured=speaker))
    return rows


def _start(config: RunConfig) -> str:
    """Everything that an evaluation before training depends on, but for the seed."""
    data = config.model_dump(mode="json", exclude=TRAINING_ONLY)
    data["rollout"] = {k: v for k, v in data["rollout"].items() if k.startswith(("max_", "tool_"))}
    return json.dumps(data, sort_keys=True)


def _version_warnings(data: Mapping[str, RunData]) -> list[str]:
    out = []
    for what in ("commit", "agentropy", "python"):
        seen = {str(d.environment.get(what)) for d in data.values()}
        if len(seen) > 1:
            out.append(f"the runs were made with different versions of {what}: {', '.join(sorted(seen))}")
    packages = {json.dumps(d.environment.get("packages"), sort_keys=True) for d in data.values()}
    if len(packages) > 1:
        out.append("the runs were made with different versions of packages; environment.json of each run has them")
    if any(str(d.environment.get("commit")).endswith("+changes") for d in data.values()):
        out.append("some runs were made with changes that are not committed")
    return out
