"""Which trajectories a page shows where it cannot hold all: whole questions, by a rule that a reader can be told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentropy.analysis.report.encode import cost
from agentropy.trajectory import Trajectory


@dataclass
class Group:
    """The trajectories of one question in one file, by their places in it. `interest` is the largest |dH| among them;
    `failed` is True where all calls of one of them failed."""

    question_id: str
    places: list[int]
    cost: int
    interest: float = 0.0
    failed: bool = False


class QuestionSample:
    """A bounded sample of a stream: the trajectories of those questions whose names have the smallest hashes.

    A question is in it whole or not at all, wherever its trajectories stand in the stream, and the same stream gives
    the same sample. `budget` is in bytes of the compressed page.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.total = 0
        self._cost = 0
        self._limit: str | None = None
        self._held: dict[str, list[tuple[int, Trajectory]]] = {}

    def add(self, t: Trajectory) -> None:
        """Take the next trajectory of the stream."""
        place, self.total = self.total, self.total + 1
        key = _hash(t.question_id)
        if self._limit is not None and key >= self._limit:
            return
        self._held.setdefault(key, []).append((place, t))
        self._cost += cost(t)
        while self._cost > self.budget and len(self._held) > 1:
            self._limit = max(self._held)
            self._cost -= sum(cost(gone) for _, gone in self._held.pop(self._limit))

    @property
    def trajectories(self) -> list[Trajectory]:
        """The sample, in the order of the stream."""
        return [t for _, t in sorted((pair for held in self._held.values() for pair in held), key=lambda p: p[0])]


def _hash(question_id: str) -> str:
    return hashlib.blake2b(question_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def sample(trajectories: Iterable[Trajectory], budget: int) -> tuple[list[Trajectory], int]:
    """A bounded sample and how many there were."""
    out = QuestionSample(budget)
    for t in trajectories:
        out.add(t)
    return out.trajectories, out.total


def groups_of(trajectories: Sequence[Trajectory], changes: Sequence[float]) -> list[Group]:
    """The questions of a file, by first appearance. `changes[C]` are the changes over all calls, in order."""
    groups: dict[str, Group] = {}
    call = 0
    for place, t in enumerate(trajectories):
        group = groups.setdefault(t.question_id, Group(t.question_id, [], 0))
        group.places.append(place)
        group.cost += cost(t)
        own = [abs(c) for c in changes[call : call + len(t.results)] if c == c]
        call += len(t.results)
        group.interest = max([group.interest, *own])
        group.failed = group.failed or (bool(t.results) and all(r.status != "ok" for r in t.results))
    return list(groups.values())


def choose(groups: Sequence[Group], budget: int) -> list[Group]:
    """As many whole groups as the budget holds: by turns the most interesting and the next in the file's order."""
    if sum(g.cost for g in groups) <= budget:
        return list(groups)
    ranked = sorted(range(len(groups)), key=lambda i: (-groups[i].interest - groups[i].failed, i))
    order = [i for pair in zip(ranked, range(len(groups)), strict=True) for i in pair]
    chosen: set[int] = set()
    for i in order:
        if i not in chosen and groups[i].cost <= budget:
            chosen.add(i)
            budget -= groups[i].cost
    return [groups[i] for i in sorted(chosen)]


def deal(sizes: dict[str, int], first: Sequence[Sequence[str]], budget: int) -> dict[str, int]:
    """Deal a budget to files that would take `sizes` bytes each.

    first: sets of names, served in turn; a set gets at most half of what is left, shared evenly. The other files share
    the rest evenly; what a small file does not need goes to the others of its set.
    """
    out: dict[str, int] = {}
    left = budget
    named = {name for names in first for name in names}
    rest = [name for name in sizes if name not in named]
    for names in [*first, rest]:
        mine = [n for n in names if n in sizes]
        room = left if names is rest or not rest else left // 2
        for i, name in enumerate(sorted(mine, key=lambda n: sizes[n])):
            out[name] = min(sizes[name], room // (len(mine) - i))
            room -= out[name]
            left -= out[name]
    return out
