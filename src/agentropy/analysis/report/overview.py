"""The overview of a page: what ran, what came out, distributions of dH. Plain data that the page draws."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentropy.analysis.report.encode import CallPoint, round4
from agentropy.analysis.report.sources import RunFiles
from agentropy.evaluation.metrics import paired_bootstrap

BINS = 40
# Name of the metric, what it is called, and how it is written: a share in percent, or a number with so many digits.
OUTCOME: tuple[tuple[str, str, str], ...] = (
    ("eval/avg", "Avg@{k}", "%"),
    ("eval/pass", "Pass@{k}", "%"),
    ("greedy/avg", "accuracy, greedy", "%"),
    ("train/accuracy", "training accuracy, first and last {n} steps", "%"),
    ("tool/calls_per_question", "calls a trajectory", "2"),
    ("eval/calls_need_0", "calls where none is needed", "2"),
    ("tool/effective_ratio", "effective calls (dH < 0)", "%"),
    ("tool/valid_rate", "valid calls (status ok)", "%"),
    ("tool/all_failed_rate", "trajectories whose calls all failed", "%"),
    ("entropy/model", "entropy, nats a token", "3"),
    ("entropy/post_tool", "entropy after a successful call, nats a token", "3"),
    ("length/model_tokens", "policy's tokens a trajectory", "1"),
    ("length/turns", "turns a trajectory", "2"),
)


RESULTS = (
    ("avg", "Avg@K"),
    ("majority", "majority"),
    ("exact", "exact match"),
    ("calls", "calls"),
    ("tokens", "tokens"),
)


@dataclass(frozen=True)
class Table:
    """A table of somebody else's for the overview. Numbers are shown as they are; None is a dash."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    note: str = ""

    def to_page(self) -> dict[str, Any]:
        """As the page holds it."""
        cells = [[round4(c) if isinstance(c, float) else c for c in row] for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": cells, "note": self.note}


def results_table(results: Mapping[str, Any]) -> Table | None:
    """The results of an evaluation, a row a benchmark; None where there are none."""
    benchmarks = results.get("benchmarks")
    rows = []
    for name, row in benchmarks.items() if isinstance(benchmarks, dict) else ():
        if isinstance(row, dict):
            shares = [_with_interval(row.get(key), percent=key in ("avg", "majority", "exact")) for key, _ in RESULTS]
            effective = row.get("effective_ratio")
            about = "≈ " if row.get("effective_is_estimate") else ""
            share = f"{about}{100 * effective:.1f} %" if isinstance(effective, int | float) else None
            rows.append((str(row.get("title") or name), row.get("questions"), row.get("samples"), *shares, share))
    columns = ("benchmark", "questions", "K", *(label for _, label in RESULTS), "effective calls")
    note = "In brackets: 95 % interval by a bootstrap over questions. Calls and tokens are means a trajectory."
    return Table("Results", columns, tuple(rows), note) if rows else None


def _with_interval(value: Any, percent: bool) -> str | None:
    try:
        mean, low, high = (float(value[key]) * (100 if percent else 1) for key in ("mean", "low", "high"))
    except (TypeError, KeyError, ValueError):
        return None
    digits = 1 if percent or mean >= 10 else 2
    return f"{mean:.{digits}f}{' %' if percent else ''} [{low:.{digits}f}, {high:.{digits}f}]"


def outcome_rows(run: RunFiles, scores: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """The table of before and after. `scores[part][question]` are those of the evaluations' trajectories."""
    before, after = dict(run.before), dict(run.after)
    accuracy = [r["reward/accuracy"] for r in run.metrics if "reward/accuracy" in r]
    n = max(1, min(5, len(accuracy) // 2))
    if len(accuracy) > 1:
        before["train/accuracy"], after["train/accuracy"] = (
            statistics.mean(accuracy[:n]),
            statistics.mean(accuracy[-n:]),
        )
    k = int(after.get("eval/k") or before.get("eval/k") or 0)
    rows = []
    for name, label, form in OUTCOME:
        b, a = before.get(name), after.get(name)
        if isinstance(b, int | float) or isinstance(a, int | float):
            row = {"name": name, "label": label.format(k=k, n=n), "form": form, "before": _6(b), "after": _6(a)}
            interval = _interval(scores) if name == "eval/avg" else None
            rows.append(row | ({"interval": interval} if interval else {}))
    return rows


def _6(value: Any) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _interval(scores: Mapping[str, Mapping[str, Sequence[float]]]) -> list[float] | None:
    """The change of Avg@K and its 95% interval, by a bootstrap over the questions that both evaluations asked."""
    before, after = scores.get("before", {}), scores.get("after", {})
    shared = [q for q in before if q in after]
    if len(shared) < 2:
        return None
    means = [[statistics.mean(side[q]) for q in shared] for side in (before, after)]
    change = paired_bootstrap(means[0], means[1], resamples=2000)
    return [float(f"{v:.4g}") for v in (change.mean, change.low, change.high)]


def distributions(calls: Iterable[tuple[str, bool, CallPoint]]) -> dict[str, Any] | None:
    """Histograms of dH over all calls: by status, outcome, tool, position and phase. None without a defined change.

    calls: each with the phase of the run that it belongs to, or an empty text, and whether it counts in the other
    histograms as well.
    """
    values: dict[str, dict[str, list[float]]] = {d: defaultdict(list) for d in DIMENSIONS}
    for phase, counts, c in calls:
        outcome = "not graded" if c.correct is None else "right" if c.correct else "wrong"
        place = f"call {c.position}" if c.position < 5 else "call 5 and later"
        for d, name in zip(DIMENSIONS, (c.status, outcome, c.tool or "(no name)", place, phase), strict=True):
            if name and (counts or d == "phase"):
                values[d][name].append(c.change)
    everything = np.array([v for some in values["status"].values() for v in some])
    finite = everything[np.isfinite(everything)]
    if not finite.size:
        return None
    reach = max(float(np.quantile(np.abs(finite), 0.99)), 1e-6)
    edge = float(f"{reach:.1g}") if float(f"{reach:.1g}") >= reach else float(f"{reach * 1.5:.1g}")
    groups = {d: [_histogram(n, v, edge) for n, v in _ordered(d, some)] for d, some in values.items() if some}
    return {"edge": edge, "bins": BINS, "all": _histogram("all calls", everything.tolist(), edge), "by": groups}


DIMENSIONS = ("status", "outcome", "tool", "position", "phase")
ORDERS = {
    "status": ("ok", "error", "timeout", "invalid", "lost"),
    "outcome": ("right", "wrong", "not graded"),
    "phase": ("before training", "first fifth of the steps", "last fifth of the steps", "after training"),
}


def _ordered(dimension: str, groups: Mapping[str, list[float]]) -> list[tuple[str, list[float]]]:
    order = ORDERS.get(dimension)
    if order is not None:
        return sorted(groups.items(), key=lambda g: order.index(g[0]))
    if dimension == "tool":
        return sorted(groups.items(), key=lambda g: (-len(g[1]), g[0]))[:12]
    return sorted(groups.items())


def _histogram(name: str, changes: Sequence[float], edge: float) -> dict[str, Any]:
    """Counts in `BINS` equal bins from -edge to edge; what lies beyond is in the outermost."""
    array = np.array(changes, dtype=np.float64)
    finite = array[np.isfinite(array)]
    inside = np.clip(finite, -edge, np.nextafter(edge, 0))
    counts, _ = np.histogram(inside, bins=BINS, range=(-edge, edge))
    return {
        "name": name,
        "n": int(array.size),
        "undefined": int(array.size - finite.size),
        "mean": round4(float(finite.mean())) if finite.size else None,
        "median": round4(float(np.median(finite))) if finite.size else None,
        "effective": round4(float((finite < 0).sum() / array.size)) if array.size else None,
        "counts": counts.tolist(),
    }


def curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every metric as a column, to six digits; null where a step lacks it."""
    names = sorted({k for row in metrics for k in row if k != "step"})
    return {
        "steps": [row["step"] for row in metrics],
        "columns": {name: [_6(row.get(name)) for row in metrics] for name in names},
    }
