"""The graders as the trainer and the evaluation use them: one object a kind, asynchronous, with a synchronous twin."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, get_args

from agentropy.errors import UserError
from agentropy.evaluation.grading.choice import choice_letter, grade_choice
from agentropy.evaluation.grading.extract import Extraction, Mode, extract, unbox
from agentropy.evaluation.grading.math import grade_fast
from agentropy.evaluation.grading.qa import METRICS, Metric, grade_qa
from agentropy.evaluation.grading.verdict import Verdict, best, unscorable, wrong

KINDS = ("math", "qa", "choice", "code")


class Grader(Protocol):
    """Grades answers against the accepted golds (the best counts). Safe to call for hundreds of answers at once.

    `grade_answer`: the answer string itself, as a protocol read it. `grade_text`: a model's own text with a marked
    answer (a box, an answer tag; in lenient mode also a marked final answer). `grade`: whatever it is: a text with a
    marked answer, else the whole string as the answer.
    """

    async def grade(self, prediction: str, golds: Sequence[str]) -> Verdict: ...

    async def grade_answer(self, answer: str | None, golds: Sequence[str]) -> Verdict: ...

    async def grade_text(self, text: str, golds: Sequence[str]) -> Verdict: ...

    def grade_now(self, prediction: str, golds: Sequence[str]) -> Verdict:
        """`grade` for callers without an event loop; blocks."""
        ...

    async def aclose(self) -> None:
        """Stops what the grader started. Further use starts it again."""
        ...


class _TextGrader:
    """What graders of text answers share: finding the answer."""

    mode: Mode

    async def grade_answer(self, answer: str | None, golds: Sequence[str]) -> Verdict:
        raise NotImplementedError

    async def grade(self, prediction: str, golds: Sequence[str]) -> Verdict:
        found = self._find(prediction, whole=True)
        return await self._graded(found, golds)

    async def grade_text(self, text: str, golds: Sequence[str]) -> Verdict:
        return await self._graded(self._find(text, whole=False), golds)

    def grade_now(self, prediction: str, golds: Sequence[str]) -> Verdict:
        return asyncio.run(self.grade(prediction, golds))

    async def aclose(self) -> None:
        return None

    def _find(self, text: str, *, whole: bool) -> Extraction:
        found = extract(text, self.mode)
        if found.source == "none" and whole and "box is not closed" not in found.note:
            return Extraction(text.strip() or None, "whole")
        return found

    async def _graded(self, found: Extraction, golds: Sequence[str]) -> Verdict:
        if found.answer is None:
            if not golds:
                return unscorable("ungradable", detail="there is no gold answer")
            return wrong("no_answer", None, found.note or "no answer was given")
        return (await self.grade_answer(found.answer, golds)).with_answer(found.answer)


class QAGrader(_TextGrader):
    """EM or F1 of short text answers (see `qa`)."""

    def __init__(self, metric: Metric = "f1", mode: Mode = "strict") -> None:
        self.metric = metric
        self.mode = mode

    async def grade_answer(self, answer: str | None, golds: Sequence[str]) -> Verdict:
        return grade_qa(None if answer is None else unbox(answer), golds, self.metric)


class ChoiceGrader(_TextGrader):
    """Option letters."""

    def __init__(self, mode: Mode = "strict", options: Sequence[str] = ()) -> None:
        self.mode = mode
        self.options = options

    async def grade_answer(self, answer: str | None, golds: Sequence[str]) -> Verdict:
        return grade_choice(None if answer is None else unbox(answer), golds, self.options)


class MathGrader(_TextGrader):
    """Maths: exact numbers at once, everything else in killable workers."""

    def __init__(self, mode: Mode = "strict", workers: int = 2, timeout: float = 5.0) -> None:
        self.mode = mode

    async def grade_answer(self, answer: str | None, golds: Sequence[str]) -> Verdict:
        if answer is None:
            return wrong("no_answer", None, "no answer was given")
        answer = unbox(answer)
        verdicts: list[Verdict] = []
        for gold in golds:
            verdict = grade_fast(answer, unbox(gold))
            if verdict is None:
                verdict = unscorable("ungradable", answer, "the symbolic path is not built yet")
            if verdict.correct:
                return verdict
            verdicts.append(verdict)
        return best(verdicts)


def make_grader(
    kind: str,
    *,
    metric: str = "f1",
    mode: Mode = "strict",
    workers: int = 2,
    timeout: float = 5.0,
) -> Grader:
    """The grader of a kind: `math`, `qa`, `choice` or `code`.

    metric: for `qa`, one of em, f1, em_squad, f1_squad. workers, timeout (seconds an answer): for `math`.
    """
    if kind == "qa":
        if metric not in METRICS:
            raise UserError(f"unknown metric {metric!r}; one of {', '.join(METRICS)}")
        return QAGrader(next(m for m in get_args(Metric) if m == metric), mode)
    if kind == "math":
        return MathGrader(mode, workers, timeout)
    if kind == "choice":
        return ChoiceGrader(mode)
    raise UserError(f"unknown grader {kind!r}; one of {', '.join(KINDS)}")


__all__ = ["KINDS", "ChoiceGrader", "Grader", "MathGrader", "QAGrader", "choice_letter", "make_grader"]
