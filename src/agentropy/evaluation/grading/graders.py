"""The graders as the trainer and the evaluation use them: one object a kind, asynchronous, with a synchronous twin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, get_args

from agentropy.errors import UserError
from agentropy.evaluation.grading.choice import choice_letter, grade_choice
from agentropy.evaluation.grading.extract import Extraction, Mode, extract, unbox
from agentropy.evaluation.grading.math import grade_fast, verdict_of
from agentropy.evaluation.grading.pool import Reply, WorkerPool
from agentropy.evaluation.grading.qa import METRICS, Metric, grade_qa
from agentropy.evaluation.grading.verdict import Verdict, best, unscorable, wrong

KINDS = ("math", "qa", "choice", "code")
_KNOWN = 20_000  # slow verdicts remembered: the samples of one question often give the same answer

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, also where an event loop already runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(work))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return future.result()


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
        """Stops what the grader started; waits for it. Further use starts it again."""
        ...

    def close(self) -> None:
        """`aclose` for callers without an event loop."""
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
        return run_blocking(self.grade(prediction, golds))

    async def aclose(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _find(self, text: str, *, whole: bool) -> Extraction:
        found = extract(text, self.mode)
        if found.source == "none" and whole and "box is not closed" not in found.note:
            return Extraction(text.strip() or None, "whole")
        return found

    async def _graded(self, found: Extraction, golds: Sequence[str]) -> Verdict:
        if found.answer is None:
            return self._no_answer(found, golds)
        return (await self.grade_answer(found.answer, golds)).with_answer(found.answer)

    @staticmethod
    def _no_answer(found: Extraction, golds: Sequence[str]) -> Verdict:
        if not golds:
            return unscorable("ungradable", detail="there is no gold answer")
        return wrong("no_answer", None, found.note or "no answer was given")


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
    """Maths: exact numbers at once, everything else in killable workers.

    workers: processes of the slow path, started when first needed. timeout: seconds one answer may take there.
    """

    def __init__(self, mode: Mode = "strict", workers: int = 2, timeout: float = 5.0) -> None:
        self.mode = mode
        self.pool = WorkerPool(workers, timeout)
        self._known: dict[tuple[str, str], Verdict] = {}

    async def grade_answer(self, answer: str | None, golds: Sequence[str]) -> Verdict:
        verdicts, pending = self._start(answer, golds)
        for gold, future in pending:
            verdicts.append(self._finish(answer or "", gold, await asyncio.wrap_future(future)))
        return best(verdicts)

    def grade_now(self, prediction: str, golds: Sequence[str]) -> Verdict:
        found = self._find(prediction, whole=True)
        if found.answer is None:
            return self._no_answer(found, golds)
        verdicts, pending = self._start(found.answer, golds)
        verdicts.extend(self._finish(found.answer, gold, future.result()) for gold, future in pending)
        return best(verdicts).with_answer(found.answer)

    def _start(self, answer: str | None, golds: Sequence[str]) -> tuple[list[Verdict], list[tuple[str, Future[Reply]]]]:
        """The verdicts that can be given at once, and what the workers have to decide."""
        if answer is None or not golds:
            empty = wrong("no_answer", None, "no answer was given") if golds else None
            return ([empty] if empty else []), []
        verdicts: list[Verdict] = []
        open_golds: list[str] = []
        for gold in golds:
            verdict = grade_fast(unbox(answer), unbox(gold)) or self._known.get((answer, gold))
            if verdict is None:
                open_golds.append(gold)
            elif verdict.correct:
                return [verdict], []
            else:
                verdicts.append(verdict)
        return verdicts, [(gold, self.pool.submit(unbox(gold), unbox(answer))) for gold in open_golds]

    def _finish(self, answer: str, gold: str, reply: Reply) -> Verdict:
        verdict = verdict_of(reply, answer)
        if verdict.reason not in ("timeout", "infrastructure") and len(self._known) < _KNOWN:
            self._known[answer, gold] = verdict
        return verdict

    async def aclose(self) -> None:
        await asyncio.to_thread(self.pool.close)

    def close(self) -> None:
        self.pool.close()


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
