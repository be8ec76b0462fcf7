"""A protocol of plain ids, tools with any delay, and checks of trees, for the tests of branching rollouts."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentropy.algorithms.branching import Branching
from agentropy.policies.base import Finish, Policy, SamplingParams, Stop
from agentropy.protocols.base import Dialect, Turn
from agentropy.rollout.branching import branching_rollout
from agentropy.rollout.loop import Agent, Attempt, Limits
from agentropy.seeds import derive
from agentropy.tasks.base import Task
from agentropy.tools.base import Tool
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import ToolCall, ToolResult, Trajectory

CALLS, ANSWERS = frozenset(range(5, 17)), frozenset(range(17, 21))


class IdDialect:
    """A turn that ends with an id of CALLS calls `tool` with it, one that ends with an id of ANSWERS answers it."""

    name = "ids"
    stop = Stop(token_ids=CALLS | ANSWERS)

    def prompt(self, question: str, tools: Sequence[Mapping[str, Any]], system: str | None = None) -> list[int]:
        return [21 + b % 70 for b in question.encode()]

    def read(self, ids: Sequence[int], finish: Finish) -> Turn:
        last = ids[-1] if ids else -1
        if finish == "stop" and last in CALLS:
            return Turn(len(ids) - 1, (ToolCall("tool", {"x": last}),))
        return Turn(len(ids), (), str(last) if finish == "stop" and last in ANSWERS else None)

    def results(self, results: Sequence[ToolResult], after: int | None = None) -> list[int]:
        return [21 + b % 70 for r in results for b in r.content.encode()]


Run = Callable[[Mapping[str, Any]], Awaitable[ToolResult]]
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def slow_tool(timing: int | None = None, last: Callable[[int], bool] = lambda x: False, seconds: float = 0.0) -> Tool:
    """A tool that takes its time (`seconds`, or decided by `timing`); where `last(x)` holds it ends the trajectory."""
    clock = random.Random(timing)

    async def run(arguments: Mapping[str, Any]) -> ToolResult:
        if timing is not None:
            for _ in range(clock.randrange(5)):
                await asyncio.sleep(0)
            if clock.random() < 0.4:
                await asyncio.sleep(clock.random() * 0.01)
        await asyncio.sleep(seconds)
        return ToolResult(f"r{arguments['x']}", stop=last(arguments["x"]))

    return Tool("tool", "Does something.", X, run)


async def even(task: Task, answer: str) -> float | None:
    return float(answer[-1] in "02468")


def attempts_of(questions: int, samples: int, seed: int = 0) -> list[Attempt]:
    tasks = [Task(f"q{i}", f"question {'x' * i}", ("1",), "math") for i in range(questions)]
    return [Attempt(t, f"{t.id}/{k}", derive(seed, t.id, k)) for t in tasks for k in range(samples)]


def grow(
    policy: Policy,
    spec: Branching,
    *,
    questions: int = 1,
    samples: int = 8,
    parts: Sequence[Any] | None = None,
    limits: Limits = Limits(4, 40, 200),
    params: SamplingParams = SamplingParams(max_new_tokens=12),
    seed: int = 0,
    dialect: Dialect | None = None,
) -> list[Trajectory]:
    """Trees by a policy with the dialect of ids."""

    async def main() -> list[Trajectory]:
        toolbox = make_toolbox([slow_tool()] if parts is None else parts)
        await toolbox.start()
        try:
            agent = Agent(policy, dialect or IdDialect(), toolbox, even)
            rolled = branching_rollout(spec, samples, agent, attempts_of(questions, samples, seed), params, limits)
            return await asyncio.wait_for(rolled, 60)
        finally:
            await toolbox.close()

    return asyncio.run(main())


def check_tree(leaves: Sequence[Trajectory], budget: int) -> None:
    """What holds of the leaves of one question, whatever the policy."""
    assert len(leaves) == budget
    by_id = {t.trajectory_id: t for t in leaves}
    assert len(by_id) == budget
    for t in leaves:
        assert (t.parent_id is None) == (t.fork_at is None)
        if t.parent_id is None or t.fork_at is None:
            continue
        parent = by_id[t.parent_id]
        assert parent is not t
        assert t.ids[: t.fork_at] == parent.ids[: t.fork_at]
        place, shared = 0, 0
        for own, other in zip(t.segments, parent.segments, strict=False):
            place += len(own.ids)
            if place > t.fork_at:
                break
            assert own is other  # ids, numbers and results are those of the parent: stored once
            shared += 1
        assert t.inherited == t.segments[:shared]
        assert sum(len(s.ids) for s in t.inherited) == t.fork_at
        assert t.segments[shared - 1].kind == "result"
        assert len(t.segments) > shared  # a turn of its own
        assert shared != len(parent.segments)


def bare(t: Trajectory) -> Trajectory:
    """Without how long its tools took."""

    def timeless(results: Sequence[ToolResult]) -> tuple[ToolResult, ...]:
        return tuple(dataclasses.replace(r, seconds=0.0) for r in results)

    return dataclasses.replace(
        t, segments=tuple(dataclasses.replace(s, results=timeless(s.results)) for s in t.segments)
    )
