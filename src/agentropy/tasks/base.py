"""Where questions come from: an endless, reproducible training stream, and fixed validation and test splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `grader` names how an answer is scored (`math`, `f1`, `em`, `code`, …) against any of `answers`.

    `kind` groups questions in tables. `need` is the least number of tool calls that a sure answer takes (0, 1, …), None
    where nobody knows. `row` is what a stateful tool's `reset(**row)` gets; its `setup` is code that the Python tool
    runs before the agent's.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    grader: str
    kind: str = ""
    need: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)


class TaskSource(Protocol):
    """A set of questions. Splits are disjoint by question text, with its hidden data where it has some."""

    @property
    def name(self) -> str:
        """What the source is called in logs and run directories."""
        ...

    def train(self, index: int) -> Task:
        """The question at a place of the training stream, which never ends. The same index gives the same question."""
        ...

    def split(self, split: Literal["validation", "test"]) -> Sequence[Task]:
        """A fixed split, the same for every seed of a run."""
        ...
