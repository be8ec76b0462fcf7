"""What there is to say about all calls: the numbers of `analysis.json`, which docs/analysis.md defines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentropy.analysis.imports import Source
from agentropy.trajectory import STATUSES, STOPS

Array = np.ndarray[Any, Any]
RESAMPLES = 1000
LEVEL = 0.95
LAST_POSITION = 8
"""Calls from this one on are counted together."""


@dataclass(frozen=True)
class Tables:
    """Columns over all calls and all trajectories; `tools` and `sources` are what their codes count from."""

    calls: Mapping[str, Array]
    trajectories: Mapping[str, Array]
    tools: Sequence[str]
    sources: Sequence[Source]


def summarise(t: Tables, seed: int = 0) -> dict[str, Any]:
    """Counts, changes of entropy by tool, status, correctness, position and part, and the effective-call ratio.

    Undefined numbers are None. The interval resamples questions with `seed`.
    """
    calls, trajectories = t.calls, t.trajectories
    graded = ~np.isnan(trajectories["score"])
    n, n_calls = len(graded), len(calls["tool"])
    statuses = np.bincount(calls["status"], minlength=len(STATUSES))
    stops = np.bincount(trajectories["stop"], minlength=len(STOPS))
    judged = calls["used"] >= 0
    scored = ~np.isnan(calls["score"])
    correct = calls["score"] >= 0.5
    position = np.minimum(calls["call"], LAST_POSITION).astype(int)
    parts = list(dict.fromkeys(s.part for s in t.sources))
    part_of = np.array([parts.index(s.part) for s in t.sources], dtype=int)
    return {
        "trajectories": n,
        "groups": len(np.unique(trajectories["group"])),
        "graded": int(graded.sum()),
        "accuracy": _mean(trajectories["score"][graded]),
        "solved": _mean(trajectories["score"][graded] >= 0.5),
        "faulty": int(trajectories["faulty"].sum()),
        "model_tokens": _mean(trajectories["tokens"][~np.isnan(trajectories["tokens"])]),
        "stops": {s: int(c) for s, c in zip(STOPS, stops, strict=True) if c},
        "entropies": {
            "exact": int((trajectories["measured"] & ~trajectories["estimated"]).sum()),
            "estimated": int((trajectories["measured"] & trajectories["estimated"]).sum()),
            "missing": int((~trajectories["measured"]).sum()),
        },
        "calls": n_calls,
        "inherited_calls": int(calls["inherited"].sum()),
        "calls_per_trajectory": n_calls / n if n else None,
        "usage_rate": _mean(trajectories["calls"] > 0),
        "statuses": {s: int(c) for s, c in zip(STATUSES, statuses, strict=True) if c},
        "effective": effective(calls, seed),
        "all": cell(calls, np.ones(n_calls, dtype=bool)),
        "by_tool": [
            {"tool": name, **cell(calls, calls["tool"] == code)}
            for code, name in sorted(enumerate(t.tools), key=lambda pair: -int((calls["tool"] == pair[0]).sum()))
        ],
        "by_status": [
            {"status": name, **cell(calls, calls["status"] == code)}
            for code, name in enumerate(STATUSES)
            if statuses[code]
        ],
        "by_correctness": [
            {"answer": name, **cell(calls, mask)}
            for name, mask in (("right", scored & correct), ("wrong", scored & ~correct), ("not graded", ~scored))
            if mask.any()
        ],
        "by_position": [
            {"position": f"{k}+" if k == LAST_POSITION else str(k), **cell(calls, position == k)}
            for k in range(1, LAST_POSITION + 1)
            if (position == k).any()
        ],
        "by_part": [
            {
                "part": name,
                "trajectories": int((part_of[trajectories["source"]] == i).sum()),
                "accuracy": _mean(trajectories["score"][graded & (part_of[trajectories["source"]] == i)]),
                **cell(calls, part_of[calls["source"]] == i),
            }
            for i, name in enumerate(parts)
        ],
        "repeated": {"calls": int(calls["repeated"].sum()), "share": _mean(calls["repeated"])},
        "unused": {
            "judged": int(judged.sum()),
            "calls": int((calls["used"] == 0).sum()),
            "share": _mean(calls["used"][judged] == 0),
        },
        "seconds": {"total": float(calls["seconds"].sum(dtype=np.float64)), "mean": _mean(calls["seconds"])},
    }


def cell(calls: Mapping[str, Array], where: Array) -> dict[str, Any]:
    """Numbers of some calls: how many, how many with a dH, its mean, median and quartiles, the share below 0."""
    change = calls["entropy_change"][where]
    change = change[~np.isnan(change)]
    quartiles = np.quantile(change, (0.25, 0.5, 0.75)).tolist() if len(change) else [None] * 3
    return {
        "calls": int(where.sum()),
        "defined": len(change),
        "mean": _mean(change),
        "q1": quartiles[0],
        "median": quartiles[1],
        "q3": quartiles[2],
        "effective": _mean(change < 0),
        "ok": _mean(calls["status"][where] == STATUSES.index("ok")),
    }


def effective(calls: Mapping[str, Array], seed: int) -> dict[str, Any]:
    """The effective-call ratio: the share of calls with dH < 0, where one whose dH is undefined is not effective.

    Left out are calls of trajectories without entropies, and of those that a fault of the machinery spoilt. The
    interval is the percentile bootstrap over questions: all trajectories of a question are drawn together.
    """
    counted = calls["measured"] & ~calls["faulty"]
    reducing, groups = calls["reducing"][counted] > 0, calls["group"][counted]
    if not len(reducing):
        return {"ratio": None, "low": None, "high": None, "calls": 0, "groups": 0, "resamples": 0, "level": LEVEL}
    _, codes = np.unique(groups, return_inverse=True)
    good, total = np.bincount(codes, weights=reducing), np.bincount(codes)
    low, high = _bootstrap(good, total, seed)
    return {
        "ratio": float(reducing.mean()),
        "low": low,
        "high": high,
        "calls": len(reducing),
        "groups": len(total),
        "resamples": RESAMPLES if low is not None else 0,
        "level": LEVEL,
    }


def _bootstrap(good: Array, total: Array, seed: int) -> tuple[float | None, float | None]:
    """The interval of a ratio of sums over questions; None with fewer than two questions."""
    n = len(total)
    if n < 2:
        return None, None
    rng = np.random.default_rng(seed)
    ratios = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(n, size=n)
        ratios[i] = good[drawn].sum() / total[drawn].sum()
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)).tolist()
    return low, high


def _mean(values: Array) -> float | None:
    """The mean as a plain number; None of nothing."""
    mean = float(np.mean(values, dtype=np.float64)) if len(values) else math.nan
    return None if math.isnan(mean) else mean
