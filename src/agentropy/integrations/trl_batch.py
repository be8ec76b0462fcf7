"""A generation batch of all processes: sampled, graded, shaped, and filled up where the filters removed questions.

Nothing here imports TRL; what is collective (sampling, gathering) comes as a function.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentropy.batch import Batch, make_batch
from agentropy.integrations.batches import completion_starts
from agentropy.integrations.trl_rollout import Row, completion_of
from agentropy.methods.base import Method, Shaped
from agentropy.training.collect import Collected
from agentropy.trajectory import Trajectory


@dataclass(frozen=True)
class Item:
    """One finished trajectory. `place`: its row in the batch of all processes; `logprobs`: of the completion, as the
    sampler gave them; `rewards`: one a reward function, NaN where it says nothing; `extra`: what these logged."""

    place: int
    trajectory: Trajectory
    logprobs: list[float]
    rewards: list[float]
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """One generation batch of all processes, of which `rows` rows from `first` on are this one's."""

    items: list[Item]
    first: int
    rows: int
    batch: Batch
    shaped: Shaped
    starts: Tensor

    def own(self) -> list[Item]:
        """The rows of this process."""
        return self.items[self.first : self.first + self.rows]


Sample = Callable[[Sequence[Row], Sequence[int], int, Mapping[int, Item]], list[Item]]
"""`(rows, active, round, known) -> items` of the rows with the indices `active`. Every process calls it each round."""


def collect(
    inputs: Sequence[Row],
    method: Method,
    *,
    process: int,
    processes: int,
    samples: int,
    budget: int,
    sample: Sample,
    gather: Callable[[list[Item]], list[Item]],
    replace: Callable[[int, int], list[Row]],
) -> tuple[Made, Collected]:
    """Sample the rows, and then others in place of questions that the method's filters removed altogether.

    What cannot be replaced stays in the batch, removed: nothing is learned from it, and nobody's mean contains it.

    Args:
        inputs: the rows of this process; runs of `samples` over all processes are one question.
        budget: questions to sample at most.
        replace: `(round, n) -> n` rows, the same in all processes.
    """
    rows, first = list(inputs), process * len(inputs)
    total = len(inputs) * processes
    groups = drawn = total // samples
    known: dict[int, Item] = {}
    sampled: list[Trajectory] = []
    active = list(range(len(rows)))
    rounds = 0
    while True:
        rounds += 1
        found = sorted(gather(sample(rows, active, rounds, known)), key=lambda item: item.place)
        known |= {item.place: item for item in found}
        sampled += [item.trajectory for item in found]
        items = _apart([known[i] for i in range(total)], samples)
        batch = make_batch([item.trajectory for item in items])
        shaped = method.shape(batch)
        dead = (~shaped.kept.view(groups, samples).any(1)).nonzero().flatten().tolist()
        removed = dead[: max(budget - drawn, 0)]
        if not removed:
            break
        drawn += len(removed)
        replaced = dict(zip(removed, replace(rounds, len(removed)), strict=True))
        active = [i for i in range(len(rows)) if (first + i) // samples in replaced]
        for i in active:
            rows[i] = replaced[(first + i) // samples]
    over = shaped if rounds == 1 else method.shape(make_batch(sampled))
    filtered = {k: v for k, v in over.metrics.items() if k.startswith("filter/")}
    made = Made(items, first, len(inputs), batch, shaped, completion_starts(batch))
    return made, Collected(sampled, filtered, batch, shaped, [i.trajectory for i in items], rounds, drawn)


def _apart(items: Sequence[Item], samples: int) -> list[Item]:
    """Groups are runs of `samples` rows, as in TRL: one whose question was there before gets a name of its own."""
    seen: dict[str, int] = defaultdict(int)
    out: list[Item] = []
    for start in range(0, len(items), samples):
        question = items[start].trajectory.question_id
        seen[question] += 1
        for item in items[start : start + samples]:
            if seen[question] > 1:
                t = dataclasses.replace(item.trajectory, question_id=f"{question}#{seen[question]}")
                item = dataclasses.replace(item, trajectory=t)
            out.append(item)
    return out


def score_of(rewards: Sequence[float], weights: Sequence[float]) -> float | None:
    """The weighted sum of the rewards that there are, None where there are none."""
    known = [w * r for r, w in zip(rewards, weights, strict=True) if r == r]
    return sum(known) if known else None


def completion_logprobs(t: Trajectory) -> list[float]:
    """For each id of `completion_of` the sampler's log-probability, 0 where the policy did not sample it."""
    ids, _ = completion_of(t)
    values = [p for s in t.segments if s.kind != "prompt" for p in (s.logprobs or (0.0,) * len(s.ids))]
    return values[: len(ids)]
