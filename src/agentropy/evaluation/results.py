"""The numbers of an evaluation, with intervals over questions. docs/evaluation.md says what each means."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agentropy.evaluation.metrics import bootstrap_questions, majority, pass_at_k
from agentropy.evaluation.records import Record, same_answer

SOLVED = 0.5
"""A score from which an answer counts as right in Pass@k; graders of maths and code give 0 or 1."""


def by_question(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by question, both in the order in which they come."""
    out: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        out[record.question_id].append(record)
    return dict(out)


def pass_levels(samples: int) -> list[int]:
    """The k of Pass@k: the powers of 2 up to the number of samples, and that number."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def summarize(records: Sequence[Record], samples: int, *, exact: bool = False, vote: bool = True) -> dict[str, Any]:
    """The results of one benchmark.

    samples: K, the attempts a question was meant to have. A question of which some were lost or not graded counts with
    the rest: Pass@k is then that of the n < k it has. exact: also give exact match. vote: whether a majority vote over
    answers makes sense (it does not for programs).
    """
    asked = by_question(records)
    graded = {q: kept for q, rows in asked.items() if (kept := [r for r in rows if r.score is not None])}
    good = [r for rows in graded.values() for r in rows]
    scores = {q: [float(r.score or 0.0) for r in rows] for q, rows in graded.items()}
    correct = {q: sum(s >= SOLVED for s in row) for q, row in scores.items()}
    calls = sum(r.calls for r in good)
    programs = sum(r.programs for r in good)
    measured = [r for r in good if r.reducing is not None]
    out: dict[str, Any] = {
        "questions": len(asked),
        "samples": samples,
        "trajectories": len(records),
        "lost": sum(r.lost for r in records),
        "ungraded": sum(r.score is None and not r.lost for r in records),
        "questions_without_score": len(asked) - len(graded),
        "questions_with_fewer_samples": sum(len(rows) < samples for rows in graded.values()),
        "avg": interval([_mean(row) for row in scores.values()]),
        "pass": {
            str(k): interval([pass_at_k(len(row), correct[q], min(k, len(row))) for q, row in scores.items()])
            for k in pass_levels(samples)
        },
        "majority": interval([_vote(rows) for rows in graded.values()]) if vote else None,
        "exact": interval([_mean([r.exact or 0.0 for r in rows]) for rows in graded.values()]) if exact else None,
        "tokens": interval([_mean([r.tokens for r in rows]) for rows in graded.values()]),
        "all_tokens": _share(sum(r.all_tokens for r in good), len(good)),
        "calls": interval([_mean([r.calls for r in rows]) for rows in graded.values()]),
        "usage_rate": _share(sum(r.calls > 0 for r in good), len(good)),
        "valid_call_rate": _share(sum(r.valid for r in good), calls),
        "valid_code_rate": _share(sum(r.programs_valid for r in good), programs),
        "code_lines": _share(sum(r.lines for r in good), programs),
        "effective_ratio": _share(sum(r.reducing or 0 for r in measured), sum(r.calls for r in measured)),
        "effective_is_estimate": any(r.estimated for r in measured),
        "stops": dict(Counter(r.stop for r in records).most_common()),
        "groups": _groups(graded),
        "scores": scores,
    }
    return out


def interval(values: Sequence[float]) -> dict[str, float] | None:
    """Mean over questions with its 95 % bootstrap interval; None without questions."""
    if not values:
        return None
    found = bootstrap_questions(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _vote(rows: Sequence[Record]) -> float:
    picked = majority([r.answer for r in rows], same_answer)
    return 0.0 if picked is None else float(rows[picked].score or 0.0)


def _groups(graded: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, float]]:
    """Avg@K by kind of question, where there are several."""
    found: dict[str, list[float]] = defaultdict(list)
    for rows in graded.values():
        found[rows[0].group].append(_mean([float(r.score or 0.0) for r in rows]))
    if len(found) < 2:
        return {}
    return {name: {"questions": len(row), "avg": _mean(row)} for name, row in sorted(found.items())}
