"""What a benchmark is: where its publisher ships it, which columns it has, how it is asked and graded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Adapt = Callable[["Benchmark", str, Mapping[str, Any]], "dict[str, Any] | str"]
"""One row of the publisher's as the row of a task file (question, answers or tests, …), or why it is left out."""

MATHS = "Solve the problem step by step."
SHORT = (
    "Answer the question. The answer is a name, a number, a date, yes or no: as few words as possible, no sentence and "
    "no explanation."
)
CODE = "Solve the programming problem in Python. Your last message must hold the whole program in one ```python block."


@dataclass(frozen=True)
class Source:
    """A data set on the Hugging Face hub. `files`: read these files of it, where it has no plain configuration."""

    name: str
    split: str
    config: str | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    question, answers: columns, of which the first that a row has counts; the later ones are spellings of other copies.
    aliases: columns with further accepted answers. grader: as in task files. group: the column (a.b for one inside
    another) that groups questions in tables. adapt: for rows that need more than their columns copied.
    variants: other sources under `name:variant`, such as an older release. tools: used unless told otherwise.
    hint: False where the answer cannot stand in a box, because it is a program.
    """

    name: str
    title: str
    source: Source
    grader: str = "math"
    question: tuple[str, ...] = ("question", "problem", "Question", "Problem")
    answers: tuple[str, ...] = ("answers", "answer", "Answer")
    aliases: tuple[str, ...] = ()
    ids: tuple[str, ...] = ("id",)
    group: tuple[str, ...] = ()
    adapt: Adapt | None = None
    variants: Mapping[str, Source] = field(default_factory=dict)
    system: str = MATHS
    tools: tuple[str, ...] = ("python",)
    hint: bool = True
    note: str = ""
