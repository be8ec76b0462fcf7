"""A task source that draws its questions from a seed and keeps train, validation and test apart by hash."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from agentropy.errors import UserError
from agentropy.tasks.base import Split, Task

TEST_SHARE, VALIDATION_SHARE = 15, 5
"""Per cent of all possible questions that belong to the test and the validation split."""
MAX_DRAWS = 2000
"""Draws for one place of a stream before the world is called too small."""


def split_of(key: str) -> Split:
    """The split a question belongs to, whatever the seed: by the SHA-256 of its text."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    if bucket < TEST_SHARE:
        return "test"
    return "validation" if bucket < TEST_SHARE + VALIDATION_SHARE else "train"


def question_id(name: str, key: str) -> str:
    """A short id that the same question always gets."""
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


@dataclasses.dataclass(frozen=True)
class GeneratedTasks:
    """An endless training stream and two fixed splits of drawn questions.

    `draw` makes one question from a random state. A question belongs to the split that the hash of `key(task)` (its
    text, unless several phrasings must stay together) says, so no seed can mix the splits. Two tasks are the same
    question if `identity(task)` is the same: their text, unless there are hidden data besides. Within a split no
    question comes twice; the training stream may repeat one, as a stream over a finite world must.
    """

    name: str
    draw: Callable[[random.Random], Task]
    seed: int = 0
    validation_size: int = 128
    test_size: int = 256
    key: Callable[[Task], str] = lambda task: task.question
    identity: Callable[[Task], str] = lambda task: task.question

    def train(self, index: int) -> Task:
        """The question at a place of the training stream: a function of (seed, index) alone."""
        return self._find(random.Random(f"{self.name}/train/{self.seed}/{index}"), "train")

    def split(self, split: Literal["validation", "test"]) -> Sequence[Task]:
        """A fixed split, the same for every seed."""
        if split not in ("validation", "test"):
            raise UserError(f"a split is validation or test, not {split!r}")
        return _split(self, split)

    def _find(self, rng: random.Random, split: Split) -> Task:
        for _ in range(MAX_DRAWS):
            task = self.draw(rng)
            if split_of(self.key(task)) == split:
                return dataclasses.replace(task, id=question_id(self.name, self.identity(task)))
        raise UserError(f"world {self.name}: no {split} question in {MAX_DRAWS} draws; allow more kinds")


@lru_cache(maxsize=32)
def _split(source: GeneratedTasks, split: Literal["validation", "test"]) -> tuple[Task, ...]:
    rng = random.Random(f"{source.name}/{split}")
    size = source.test_size if split == "test" else source.validation_size
    found: dict[str, Task] = {}
    for _ in range(size * 20):
        task = source._find(rng, split)
        found.setdefault(task.id, task)
        if len(found) == size:
            break
    return tuple(found.values())
