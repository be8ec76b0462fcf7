"""What an evaluation keeps of a trajectory: a few numbers, so that 100,000 of them fit into memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from agentropy.algorithms.entropy import entropy_change
from agentropy.batch import make_batch
from agentropy.evaluation.grading.extract import unbox
from agentropy.evaluation.grading.number import parse_number
from agentropy.evaluation.grading.qa import grade_qa, normalize_strict
from agentropy.evaluation.metrics import code_lines
from agentropy.evaluation.score import lenient_answer
from agentropy.evaluation.summary import executed_calls
from agentropy.trajectory import Trajectory, read_jsonl

CHUNK = 64
UNNAMED = "all"
"""The benchmark of trajectories that name none."""


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory in numbers.

    score: None where it is `lost` (a fault of the machinery) or could not be graded. exact: exact match with one of the
    accepted answers, None where those are not recorded. tokens: what the policy sampled; all_tokens: with prompt and
    results. calls: executed ones; valid: those with status ok; programs, programs_valid, lines: likewise for code, and
    its lines without blank ones and comments. reducing: calls with dH < 0, None where entropies are missing. estimated:
    entropies come from the k likeliest tokens.
    """

    benchmark: str
    group: str
    question_id: str
    trajectory_id: str
    question: str
    answer: str | None
    score: float | None
    exact: float | None
    lost: bool
    stop: str
    tokens: int
    all_tokens: int
    calls: int
    valid: int
    programs: int
    programs_valid: int
    lines: int
    reducing: int | None
    estimated: bool


def records_of(trajectories: Iterable[Trajectory]) -> Iterator[Record]:
    """The records of trajectories, in their order."""
    rest = iter(trajectories)
    while chunk := list(islice(rest, CHUNK)):
        yield from _chunk(chunk)


def read_records(path: Path | str) -> Iterator[Record]:
    """The records of a file of trajectories. Raises UserError with the line at fault."""
    return records_of(read_jsonl(path))


def _chunk(trajectories: Sequence[Trajectory]) -> Iterator[Record]:
    batch = make_batch(trajectories)
    reducing = [0] * len(trajectories)
    for of, flag in zip(batch.call_trajectory.tolist(), entropy_change(batch).reducing.tolist(), strict=True):
        reducing[of] += flag
    for t, count in zip(trajectories, reducing, strict=True):
        yield _record(t, count)


def _record(t: Trajectory, reducing: int) -> Record:
    programs = [(str(c.arguments["code"]), r.status) for c, r in executed_calls(t) if "code" in c.arguments]
    measured = all(s.entropies is not None for s in t.segments if s.is_model and s.ids)
    gold = t.extra.get("gold")
    answer = lenient_answer(t.answer) if t.answer and t.extra.get("lenient") else t.answer
    lost = t.stop == "error" or any(r.status == "lost" for r in t.results)
    return Record(
        benchmark=str(t.extra.get("benchmark") or UNNAMED),
        group=str(t.extra.get("kind") or ""),
        question_id=t.question_id,
        trajectory_id=t.trajectory_id,
        question=t.question,
        answer=answer,
        score=None if lost else t.score,
        exact=_exact(answer, gold) if isinstance(gold, list) and gold and not lost and t.score is not None else None,
        lost=lost,
        stop=t.stop,
        tokens=t.model_tokens,
        all_tokens=sum(len(s.ids) for s in t.segments),
        calls=len(t.results),
        valid=sum(r.status == "ok" for r in t.results),
        programs=len(programs),
        programs_valid=sum(status == "ok" for _, status in programs),
        lines=sum(code_lines(code).stripped for code, _ in programs),
        reducing=reducing if measured else None,
        estimated=t.entropy_kind != "exact",
    )


def _exact(answer: str | None, gold: Sequence[object]) -> float:
    return grade_qa(None if answer is None else unbox(answer), [str(g) for g in gold], "em").score or 0.0


def same_answer(answer: str) -> Hashable:
    """What a majority vote takes for the same answer: equal numbers, else equal words."""
    text = unbox(answer)
    number = parse_number(text)
    return (number.value, number.percent) if number is not None else normalize_strict(text) or text.strip()
