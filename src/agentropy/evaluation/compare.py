"""Does B differ from A? Paired over the questions that both answered."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.evaluation.journal import TRAJECTORIES
from agentropy.evaluation.metrics import Difference, paired_bootstrap
from agentropy.evaluation.records import Record, read_records

FEW = 10
"""Questions below which a bootstrap interval is too narrow to be trusted."""


def trajectory_file(source: str) -> Path:
    """The file of trajectories that a source means.

    An evaluation directory (or its results.json), a file of trajectories, an `evaluation-before.json` or `-after.json`
    of a training run, or the directory of a run, which means what it evaluated after training.
    """
    path = Path(source)
    if not path.exists():
        raise UserError(f"there is no {source}")
    if path.name == "results.json":
        path = path.parent
    if path.is_dir() and (path / TRAJECTORIES).is_file():
        return path / TRAJECTORIES
    if path.is_dir():
        return _of_run(path, "after")
    if path.name in ("evaluation-before.json", "evaluation-after.json"):
        return _of_run(path.parent, path.stem.removeprefix("evaluation-"))
    return path


def _of_run(run: Path, when: str) -> Path:
    for split in ("test", "validation"):
        if (file := run / "trajectories" / f"{split}-{when}.jsonl").is_file():
            return file
    raise UserError(
        f"{run} holds neither {TRAJECTORIES} nor trajectories/test-{when}.jsonl; name a file of trajectories"
    )


@dataclass(frozen=True)
class Question:
    """One question that both answered: mean scores and samples of A and of B."""

    id: str
    text: str
    a: float
    b: float
    samples_a: int
    samples_b: int


@dataclass(frozen=True)
class Comparison:
    """B minus A on one benchmark.

    differences: of the score, of executed calls, of sampled tokens a trajectory; means over questions of means over
    samples. only_a, only_b: questions that the other was not asked, or had no graded answer to. text_differs: questions
    with the same id and another text, which are not compared.
    """

    benchmark: str
    questions: tuple[Question, ...]
    mean_a: dict[str, float]
    mean_b: dict[str, float]
    differences: dict[str, Difference]
    only_a: int
    only_b: int
    text_differs: int

    @property
    def verdict(self) -> str:
        """What the score's interval says, in a sentence."""
        d = self.differences["score"]
        if len(self.questions) < FEW:
            return f"too few questions ({len(self.questions)}) to tell"
        if d.low > 0:
            return "B is better"
        if d.high < 0:
            return "B is worse"
        return "no difference can be told"

    def to_json(self, questions: bool) -> dict[str, Any]:
        """Everything as JSON values; with the single questions where asked for."""
        out = {
            "benchmark": self.benchmark,
            "shared_questions": len(self.questions),
            "only_a": self.only_a,
            "only_b": self.only_b,
            "text_differs": self.text_differs,
            "a": self.mean_a,
            "b": self.mean_b,
            "differences": {n: asdict(d) | {"excludes_zero": excludes_zero(d)} for n, d in self.differences.items()},
            "verdict": self.verdict,
        }
        return out | ({"questions": [asdict(q) for q in most_different(self)]} if questions else {})


def excludes_zero(difference: Difference) -> bool:
    """Whether the interval lies on one side of 0."""
    return difference.low > 0 or difference.high < 0


def most_different(comparison: Comparison) -> list[Question]:
    """The questions by the size of the difference, largest first, those of equal size in their order."""
    return sorted(comparison.questions, key=lambda q: -abs(q.b - q.a))


def compare_files(a: str, b: str) -> list[Comparison]:
    """The comparisons of all benchmarks that both sources hold. Raises UserError where there is none."""
    first, second = trajectory_file(a), trajectory_file(b)
    if first.resolve() == second.resolve():
        raise UserError(f"A and B are the same file, {first}")
    return compare(read_records(first), read_records(second))


def compare(a: Iterable[Record], b: Iterable[Record]) -> list[Comparison]:
    """As `compare_files`, of records. One benchmark on each side is compared whatever it is called."""
    left, right = _by_benchmark(a), _by_benchmark(b)
    if len(left) == len(right) == 1:
        (name, rows), (other, others) = *left.items(), *right.items()
        return [_one(name if name == other else f"{name} and {other}", rows, others)]
    shared = [name for name in left if name in right]
    if not shared:
        raise UserError(f"A and B share no benchmark: {', '.join(left) or 'none'}; {', '.join(right) or 'none'}")
    # One benchmark whose answers were all lost must not hide what the others say.
    useful = [name for name in shared if _same(_graded(left[name]), _graded(right[name]))]
    return [_one(name, left[name], right[name]) for name in useful or shared]


Rows = dict[str, list[Record]]


def _by_benchmark(records: Iterable[Record]) -> dict[str, Rows]:
    out: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
    for record in records:
        out[record.benchmark][record.question_id].append(record)
    return out


def _one(name: str, a: Rows, b: Rows) -> Comparison:
    graded_a, graded_b = _graded(a), _graded(b)
    both = [q for q in graded_a if q in graded_b]
    same = _same(graded_a, graded_b)
    if not same:
        raise UserError(f"A and B share no question of {name} that both have a graded answer to")
    differences, mean_a, mean_b = {}, {}, {}
    for measure in ("score", "calls", "tokens"):
        one = [_mean(measure, graded_a[q]) for q in same]
        other = [_mean(measure, graded_b[q]) for q in same]
        mean_a[measure], mean_b[measure] = math.fsum(one) / len(one), math.fsum(other) / len(other)
        differences[measure] = paired_bootstrap(one, other)
    questions = tuple(
        Question(
            q,
            graded_a[q][0].question,
            _mean("score", graded_a[q]),
            _mean("score", graded_b[q]),
            len(graded_a[q]),
            len(graded_b[q]),
        )
        for q in same
    )
    return Comparison(
        name,
        questions,
        mean_a,
        mean_b,
        differences,
        only_a=len(a.keys() - set(both)),
        only_b=len(b.keys() - set(both)),
        text_differs=len(both) - len(same),
    )


def _same(a: Rows, b: Rows) -> list[str]:
    return [q for q in a if q in b and _text(a[q]) == _text(b[q])]


def _graded(rows: Rows) -> Rows:
    return {q: kept for q, some in rows.items() if (kept := [r for r in some if r.score is not None])}


def _text(records: Sequence[Record]) -> str:
    return " ".join(records[0].question.split())


def _mean(measure: str, records: Sequence[Record]) -> float:
    return math.fsum(float(getattr(r, measure)) for r in records) / len(records)
