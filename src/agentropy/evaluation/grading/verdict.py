"""What a grader says about one answer: a verdict with a reason that can be counted and read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Reason = Literal[
    "equal_exact",  # the same text, integer or fraction
    "equal_numeric",  # a decimal within the tolerance
    "equal_symbolic",  # the same expression, set, interval, matrix
    "partial",  # QA: some tokens in common
    "different",
    "no_answer",  # nothing given, an empty or cut-off box
    "parse_error",  # given, but not readable as an answer of this kind
    "timeout",
    "ungradable",  # the gold itself can't be read: the answer can't be scored
    "passed",  # code: every test
    "wrong_output",
    "no_output",
    "runtime_error",
    "infrastructure",  # the sandbox or a worker failed: the answer can't be scored
]

# The best verdict over several golds is the highest of this order, unless their scores differ.
_ORDER: dict[str, int] = {
    "equal_exact": 9,
    "passed": 9,
    "equal_numeric": 8,
    "equal_symbolic": 7,
    "partial": 6,
    "different": 5,
    "wrong_output": 5,
    "no_output": 4,
    "runtime_error": 4,
    "timeout": 3,
    "parse_error": 2,
    "no_answer": 1,
    "infrastructure": 0,
    "ungradable": 0,
}


@dataclass(frozen=True)
class Verdict:
    """One graded answer.

    correct: True, False, or None where it can't be known (bad gold, broken sandbox): such an answer is left out.
    score: in [0, 1], the reward; None exactly where `correct` is None.
    extracted: the answer that was read out of the model's text, None if there was none.
    detail: one sentence for people.
    """

    correct: bool | None
    score: float | None
    reason: Reason
    extracted: str | None = None
    detail: str = ""

    def with_answer(self, extracted: str | None) -> Verdict:
        """The same verdict, naming the answer it is about."""
        return replace(self, extracted=extracted)


def right(reason: Reason, extracted: str | None = None, detail: str = "") -> Verdict:
    """A correct answer, score 1."""
    return Verdict(True, 1.0, reason, extracted, detail)


def wrong(reason: Reason, extracted: str | None = None, detail: str = "") -> Verdict:
    """A wrong answer, score 0."""
    return Verdict(False, 0.0, reason, extracted, detail)


def unscorable(reason: Reason, extracted: str | None = None, detail: str = "") -> Verdict:
    """An answer that can't be scored: `correct` and `score` are None."""
    return Verdict(None, None, reason, extracted, detail)


def best(verdicts: Iterable[Verdict]) -> Verdict:
    """The best of the verdicts on one answer against several golds.

    A gold that can't be read counts only when no other gold matched: then the answer may have been right, so it is
    unscorable.
    """
    found = list(verdicts)
    if not found:
        return unscorable("ungradable", detail="there is no gold answer")
    scored = [v for v in found if v.score is not None]
    if not scored:
        return found[0]
    top = max(scored, key=lambda v: (v.score or 0.0, _ORDER[v.reason]))
    blocked = [v for v in found if v.score is None]
    if blocked and not top.correct and top.reason != "no_answer":
        return blocked[0]
    return top
