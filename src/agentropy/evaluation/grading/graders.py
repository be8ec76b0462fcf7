"""The graders as the trainer and the evaluation use them: one object a kind, asynchronous, with a synchronous twin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args

from agentropy.errors import UserError
from agentropy.evaluation.grading.choice import choice_letter, grade_choice
from agentropy.evaluation.grading.code import Executor, grade_code, program_of, read_problem
from agentropy.evaluation.grading.extract import Extraction, Mode, extract, unbox
from agentropy.evaluation.grading.math import grade_fast, verdict_of
from agentropy.evaluation.grading.pool import Reply, WorkerPool
from agentropy.evaluation.grading.qa import METRICS, Metric, grade_qa
from agentropy.evaluation.grading.verdict import Verdict, best, unscorable, wrong

if TYPE_CHECKING:
    from agentropy.sandbox import LocalSandbox

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

    async def grade(self, prediction: str, golds: Sequence[str], *, timeout: float | None = None) -> Verdict: ...

    async def grade_answer(
        self, answer: str | None, golds: Sequence[str], *, timeout: float | None = None
    ) -> Verdict: ...

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

    async def grade_answer(self, answer: str | None, golds: Sequence[str], *, timeout: float | None = None) -> Verdict:
        raise NotImplementedError

    async def grade(self, prediction: str, golds: Sequence[str], *, timeout: float | None = None) -> Verdict:
        found = self._find(prediction, whole=True)
        return await self._graded(found, golds, timeout)

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

    async def _graded(self, found: Extraction, golds: Sequence[str], timeout: float | None = None) -> Verdict:
        if found.answer is None:
            return self._no_answer(found, golds)
        return (await self.grade_answer(found.answer, golds, timeout=timeout)).with_answer(found.answer)

    @staticmethod
    def _no_answer(found: Extraction, golds: Sequence[str]) -> Verdict:
        if not golds:
            return unscorable("ungradable", detail="there is no gold answer")
        return wrong("no_answer", None, found.note or "no answer was given")


class QAGrader(_TextGrader):
    """EM or F1 of short text answers (see `qa`)."""

    def __init__(self, metric: Metric = "f1", mode: Mode = "strict") -> None:
        self.metric = metric
        # The reference scores what it is given, so only what is marked without doubt is taken out of it.
        self.mode = "strict" if metric.endswith("_squad") else mode

    async def grade_answer(self, answer: str | None, golds: Sequence[str], *, timeout: float | None = None) -> Verdict:
        return grade_qa(None if answer is None else unbox(answer), golds, self.metric)


class ChoiceGrader(_TextGrader):
    """Option letters."""

    def __init__(self, mode: Mode = "strict", options: Sequence[str] = ()) -> None:
        self.mode = mode
        self.options = options

    async def grade_answer(self, answer: str | None, golds: Sequence[str], *, timeout: float | None = None) -> Verdict:
        return grade_choice(None if answer is None else unbox(answer), golds, self.options)


class MathGrader(_TextGrader):
    """Maths: exact numbers at once, everything else in killable workers.

    workers: processes of the slow path, started when first needed. timeout: seconds one answer may take there.
    """

    def __init__(self, mode: Mode = "strict", workers: int = 2, timeout: float = 5.0) -> None:
        self.mode = mode
        self.pool = WorkerPool(workers, timeout)
        self._known: dict[tuple[str, str], Verdict] = {}

    async def grade_answer(self, answer: str | None, golds: Sequence[str], *, timeout: float | None = None) -> Verdict:
        verdicts, pending = self._start(answer, golds, timeout)
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

    def _start(
        self, answer: str | None, golds: Sequence[str], timeout: float | None = None
    ) -> tuple[list[Verdict], list[tuple[str, Future[Reply]]]]:
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
        return verdicts, [(gold, self.pool.submit(unbox(gold), unbox(answer), timeout)) for gold in open_golds]

    def _finish(self, answer: str, gold: str, reply: Reply) -> Verdict:
        verdict = verdict_of(reply, answer)
        if verdict.reason not in ("timeout", "infrastructure") and len(self._known) < _KNOWN:
            self._known[answer, gold] = verdict
        return verdict

    async def aclose(self) -> None:
        await asyncio.to_thread(self.pool.close)

    def close(self) -> None:
        self.pool.close()


class CodeGrader:
    """Programs: each gold is a problem (see `code.read_problem`); all tests of one of them must pass.

    executor: the sandbox to use; without one, a LocalSandbox is started when first needed, in the running event loop,
    and stopped by `aclose`. timeout: seconds a test. stdin: the input where a gold is an expected output only.
    """

    def __init__(self, executor: Executor | None = None, timeout: float = 5.0, stdin: str = "") -> None:
        self.timeout = timeout
        self.stdin = stdin
        self._given = executor
        self._own: LocalSandbox | None = None
        self._lock: asyncio.Lock | None = None

    async def _executor(self) -> Executor:
        if self._given is not None:
            return self._given
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._own is None:
                from agentropy.sandbox import Limits, LocalSandbox

                # Expected outputs may be long; the default keeps only what a model should read.
                own = LocalSandbox(preload=(), limits=Limits(output_kb=4096, output_kill_mb=16))
                await own.start()
                self._own = own
            return self._own

    async def grade(
        self, prediction: str, golds: Sequence[str], *, timeout: float | None = None, stdin: str | None = None
    ) -> Verdict:
        return await self.grade_answer(prediction, golds, timeout=timeout, stdin=stdin)

    async def grade_text(self, text: str, golds: Sequence[str]) -> Verdict:
        return await self.grade_answer(text, golds)

    async def grade_answer(
        self, answer: str | None, golds: Sequence[str], *, timeout: float | None = None, stdin: str | None = None
    ) -> Verdict:
        if answer is None or not answer.strip():
            return wrong("no_answer", answer, "there is no program")
        executor = await self._executor()
        program = program_of(answer)
        verdicts: list[Verdict] = []
        for gold in golds:
            try:
                problem = read_problem(gold, self.stdin if stdin is None else stdin)
            except ValueError as error:
                verdicts.append(unscorable("ungradable", program, str(error)))
                continue
            verdicts.append(await grade_code(program, problem, executor, timeout=timeout or self.timeout))
            if verdicts[-1].correct:
                break
        return best(verdicts)

    def grade_now(self, prediction: str, golds: Sequence[str]) -> Verdict:
        async def once() -> Verdict:
            grader = CodeGrader(self._given, self.timeout, self.stdin)
            try:
                return await grader.grade(prediction, golds)
            finally:
                await grader.aclose()

        return run_blocking(once())

    async def aclose(self) -> None:
        own, self._own, self._lock = self._own, None, None
        if own is not None:
            await own.close()

    def close(self) -> None:
        """Nothing to stop outside an event loop: `grade_now` stops its own sandbox; use `aclose` inside one."""


def make_grader(
    kind: str,
    *,
    metric: str = "f1",
    mode: Mode = "strict",
    workers: int = 2,
    timeout: float = 5.0,
    executor: Executor | None = None,
) -> Grader:
    """The grader of a kind: `math`, `qa`, `choice` or `code`.

    metric: for `qa`, one of em, f1, em_squad, f1_squad. workers: for `math`. timeout: seconds an
    answer (`math`) or a test (`code`). executor: the sandbox of `code`.
    """
    if kind == "qa":
        if metric not in METRICS:
            raise UserError(f"unknown metric {metric!r}; one of {', '.join(METRICS)}")
        return QAGrader(next(m for m in get_args(Metric) if m == metric), mode)
    if kind == "math":
        return MathGrader(mode, workers, timeout)
    if kind == "choice":
        return ChoiceGrader(mode)
    if kind == "code":
        return CodeGrader(executor, timeout)
    raise UserError(f"unknown grader {kind!r}; one of {', '.join(KINDS)}")


__all__ = ["KINDS", "ChoiceGrader", "Grader", "MathGrader", "QAGrader", "choice_letter", "make_grader"]
