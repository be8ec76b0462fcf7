"""Dynamic sampling: what is drawn, what replaces it, what is counted. The rollout is a function of the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from agentropy.methods import make_method
from agentropy.policies.base import SamplingParams
from agentropy.rollout.loop import Agent, Attempt, Limits
from agentropy.seeds import derive
from agentropy.tasks.base import Task
from agentropy.training.checkpoint import Progress
from agentropy.training.collect import Collected, attempts_for, collect
from agentropy.trajectory import Trajectory
from make_trajectories import trajectory

Score = Callable[[Attempt], float | None]


@dataclass
class Source:
    """`size` questions, over and over."""

    size: int
    name: str = "source"

    def train(self, index: int) -> Task:
        return Task(f"q{index % self.size}", "?", ("1",), "math")

    def split(self, split: Literal["validation", "test"]) -> Sequence[Task]:
        return ()


@dataclass
class Roll:
    score: Score
    attempts: list[Attempt] = field(default_factory=list)

    async def __call__(
        self, agent: Agent, attempts: Sequence[Attempt], params: SamplingParams, limits: Limits
    ) -> list[Trajectory]:
        self.attempts += attempts
        return [
            trajectory([([1.0], [], [])], self.score(a), question=a.task.id, name=a.trajectory_id) for a in attempts
        ]


def collected(score: Score, method: str = "tao-rl", progress: Progress | None = None, **changes: Any) -> Collected:
    options: dict[str, Any] = {"questions": 4, "samples": 2, "max_oversample": 2.0, "size": 1000} | changes
    roll = Roll(score)
    source = Source(options.pop("size"))
    return asyncio.run(
        collect(
            None,  # type: ignore[arg-type]  # the rollout needs no agent
            make_method(method),
            source,
            progress or Progress(),
            params=SamplingParams(),
            limits=Limits(),
            seed=0,
            roll=roll,
            **options,
        )
    )


def sample(a: Attempt) -> int:
    return int(a.trajectory_id.split("/")[-1])


def number(a: Attempt) -> int:
    return int(a.task.id[1:])


def test_removed_groups_are_replaced_and_counted_where_they_were_drawn() -> None:
    progress = Progress(next_index=10)
    found = collected(lambda a: float(sample(a) % 2) if number(a) % 2 else 1.0, progress=progress)
    assert found.batch.n_groups == 4
    assert all(int(q[1:]) % 2 for q in found.batch.question_ids)
    assert found.questions == len(found.sampled) // 2 == progress.next_index - 10 == 8
    assert found.rounds == 3
    assert found.shaped.metrics["filter/groups_removed"] == 0
    assert found.filtered["filter/groups_removed"] == 4
    assert found.filtered["filter/not_discriminative"] == 8
    assert found.filtered["filter/kept_share"] == 0.5


def test_sampling_is_bounded_and_an_empty_batch_is_told() -> None:
    found = collected(lambda a: 1.0, max_oversample=2.6)
    assert (found.questions, found.batch.n_trajectories) == (10, 0)
    assert found.shaped.metrics["batch/empty"] == 1
    assert found.filtered["filter/groups_removed"] == 10


@pytest.mark.parametrize("method", ["grpo", "tao-rl", "tepo-dense"])
def test_a_batch_that_the_machinery_lost_teaches_nothing(method: str) -> None:
    found = collected(lambda a: None, method)
    assert found.shaped.metrics["batch/empty"] == 1
    assert found.filtered["filter/lost"] == len(found.sampled)


def test_a_method_without_filters_takes_every_group() -> None:
    found = collected(lambda a: 1.0, "grpo")
    assert (found.rounds, found.questions, found.batch.n_groups) == (1, 4, 4)


def test_a_question_that_comes_twice_gets_other_random_numbers() -> None:
    found = collected(lambda a: float(sample(a) % 2), size=3)
    assert len({t.trajectory_id for t in found.trajectories}) == len(found.trajectories) == 8
    attempts = attempts_for([Source(3).train(i) for i in range(5)], 2, seed=7, tag="x")
    assert len({a.seed for a in attempts}) == 10
    assert attempts[0].seed == derive(7, "x", "q0", 0)
    assert attempts[6].trajectory_id == "q0/x/2"
