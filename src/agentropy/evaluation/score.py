"""Scores answers to tasks with the grader that each task names; graders are started once and shared."""

from __future__ import annotations

from collections.abc import Mapping

from agentropy.evaluation.benchmarks import livecodebench
from agentropy.evaluation.grading.code import problem_gold
from agentropy.evaluation.grading.extract import extract
from agentropy.evaluation.grading.graders import Grader, make_grader
from agentropy.evaluation.grading.qa import METRICS
from agentropy.tasks.base import Task


def problem(task: Task) -> str:
    """The tests of a task as a gold of the code grader."""
    tests, prelude = task.row["tests"], ""
    if isinstance(tests, Mapping) and livecodebench.PACKED in tests:
        tests, prelude = livecodebench.unpack(tests)
    return problem_gold(tests, task.row.get("checker"), prelude)


def lenient_answer(answer: str) -> str:
    """What a text marks as its answer in any of the usual ways; the whole text where it marks none."""
    return extract(answer, "lenient").answer or answer


class Scorer:
    """Grades answers for the agent loop. Counts what could not be graded, by reason.

    lenient: of an answer without a box, what follows the last "the answer is", "final answer" or "####" counts.
    """

    def __init__(self, workers: int = 1, timeout: float = 5.0, lenient: bool = False) -> None:
        self._lenient = lenient
        self._graders: dict[str, Grader] = {}
        self._workers = workers
        self._timeout = timeout
        self.ungraded: dict[str, int] = {}

    def grader(self, name: str) -> Grader:
        """The grader that a task's `grader` names: math, code, choice, or a metric of QA (f1, em, …)."""
        if name not in self._graders:
            kind, metric = ("qa", name) if name in METRICS else (name, "f1")
            self._graders[name] = make_grader(kind, metric=metric, workers=self._workers, timeout=self._timeout)
        return self._graders[name]

    async def __call__(self, task: Task, answer: str) -> float | None:
        """The score in [0, 1]; None where the gold cannot be graded or the grader failed for no fault of the answer."""
        golds = task.answers
        if not golds and "tests" in task.row:
            golds = (problem(task),)
        if self._lenient and task.grader != "code":
            answer = lenient_answer(answer)
        verdict = await self.grader(task.grader).grade_answer(answer, golds)
        if verdict.score is None:
            self.ungraded[verdict.reason] = self.ungraded.get(verdict.reason, 0) + 1
        return verdict.score

    async def close(self) -> None:
        for grader in self._graders.values():
            await grader.aclose()
