"""The agent loop: policy and tools take turns until there is an answer, a limit, or nothing to go on with.

Every trajectory is a coroutine of its own; one that waits for its tool holds nobody back. Ids go from the policy into
the trajectory and back into the policy as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentropy.policies.base import Generation, Policy, PolicyInfo, PolicyLost, SamplingParams, SequenceHandle
from agentropy.protocols.base import Dialect
from agentropy.tasks.base import Task
from agentropy.tools.base import ToolBox, ToolSession
from agentropy.trajectory import Segment, StopReason, Trajectory

ENVIRONMENT = "environment"
"""The grader of tasks that a stateful tool scores itself (`get_reward()` of TRL's environment classes)."""
Grade = Callable[[Task, str], Awaitable[float | None]]
"""Scores an answer in [0, 1]; None where it cannot be graded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a trajectory may use. `max_new_tokens` counts sampled tokens over all turns, `max_context` all tokens."""

    max_turns: int = 5
    max_new_tokens: int = 128
    max_context: int = 4096


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trajectory to sample: its question, its name and the seed of its random numbers."""

    task: Task
    trajectory_id: str
    seed: int
    extra: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    """Everything that turns a question into a trajectory."""

    policy: Policy
    dialect: Dialect
    toolbox: ToolBox
    grade: Grade
    system: str | None = None


class Described(Protocol):
    """What says of itself what it is: a policy that samples ids, or a server that chats."""

    @property
    def info(self) -> PolicyInfo: ...


class Graded(Protocol):
    """What `finish` needs of an agent."""

    @property
    def policy(self) -> Described: ...

    @property
    def grade(self) -> Grade: ...


async def rollout(
    agent: Agent, attempts: Sequence[Attempt], params: SamplingParams, limits: Limits
) -> list[Trajectory]:
    """Sample all attempts at once and return their trajectories in the same order.

    Attempts that follow each other with the same prompt share its prefill. If one fails with an exception (a fault of
    the engine or of a tool box, not of a call), the others are cancelled and the exception is raised.
    """
    opened = await asyncio.gather(*(agent.toolbox.open(a.task.row, a.seed) for a in attempts))
    sessions = [session for session, _ in opened]
    handles: list[SequenceHandle | None] = []
    prompts: list[list[int]] = []
    last: tuple[str, list[int]] | None = None
    for attempt, (_, addition) in zip(attempts, opened, strict=True):
        question = attempt.task.question + (f"\n{addition}" if addition else "")
        if last is None or last[0] != question:
            last = (question, agent.dialect.prompt(question, agent.toolbox.specs, agent.system))
        prompts.append(last[1])
    try:
        i = 0
        while i < len(attempts):
            j = i
            while j < len(attempts) and prompts[j] is prompts[i]:
                j += 1
            if len(prompts[i]) >= limits.max_context:
                handles += [None] * (j - i)
            else:
                handles += agent.policy.open(prompts[i], [a.seed for a in attempts[i:j]])
            i = j
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run(agent, attempt, prompt, handle, session, params, limits))
                for attempt, prompt, handle, session in zip(attempts, prompts, handles, sessions, strict=True)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for handle in handles:
            if handle is not None:
                agent.policy.close(handle)
        await asyncio.gather(*(session.close() for session in sessions))
    return [task.result() for task in tasks]


async def _run(
    agent: Agent,
    attempt: Attempt,
    prompt: list[int],
    handle: SequenceHandle | None,
    session: ToolSession,
    params: SamplingParams,
    limits: Limits,
) -> Trajectory:
    segments = [Segment("prompt", tuple(prompt))]
    answer: str | None = None
    stop: StopReason = "context_full"
    if handle is not None:
        answer, stop = await take_turns(agent, handle, session, segments, params, limits)
        agent.policy.close(handle)
    return await finish(agent, attempt, session, segments, answer, stop)


async def finish(
    agent: Graded,
    attempt: Attempt,
    session: ToolSession,
    segments: Sequence[Segment],
    answer: str | None,
    stop: StopReason,
    parent_id: str | None = None,
    fork_at: int | None = None,
) -> Trajectory:
    """Grade what was sampled and write it down."""
    score: float | None = 0.0
    if stop == "error":
        score = None
    elif attempt.task.grader == ENVIRONMENT:
        score = await session.reward()
    elif answer is not None:
        score = await agent.grade(attempt.task, answer)
    gold = {"gold": list(attempt.task.answers)} if attempt.task.answers else {}
    return Trajectory(
        question_id=attempt.task.id,
        trajectory_id=attempt.trajectory_id,
        question=attempt.task.question,
        segments=tuple(segments),
        answer=answer,
        score=score,
        stop=stop,
        entropy_kind=agent.policy.info.entropy_kind,
        parent_id=parent_id,
        fork_at=fork_at,
        extra={"kind": attempt.task.kind, "need": attempt.task.need, **gold, **attempt.extra},
    )


Watch = Callable[[int, Generation], Awaitable[None]]
"""Sees each turn, with its number from 1, when it has been sampled and before anything is done with it."""


async def take_turns(
    agent: Agent,
    handle: SequenceHandle,
    session: ToolSession,
    segments: list[Segment],
    params: SamplingParams,
    limits: Limits,
    watch: Watch | None = None,
) -> tuple[str | None, StopReason]:
    """Take turns, appending to `segments`. Returns the answer and why the trajectory ended.

    `segments` are what the handle's sequence holds: the prompt, or a trajectory up to one of its results. What they
    have used counts against the limits.
    """
    budget = limits.max_new_tokens - sum(len(s.ids) for s in segments if s.is_model)
    context = limits.max_context - sum(len(s.ids) for s in segments)
    new_ids: list[int] = []
    for turn_number in range(1 + sum(s.kind == "result" for s in segments), limits.max_turns + 1):
        context -= len(new_ids)
        room = min(params.max_new_tokens, budget, context)
        if room <= 0:
            return None, "max_tokens" if budget <= 0 else "context_full"
        turn_params = SamplingParams(params.temperature, params.top_p, params.top_k, room)
        try:
            out = await agent.policy.generate(handle, new_ids, turn_params, agent.dialect.stop)
        except PolicyLost:
            return None, "error"
        if watch is not None:
            await watch(turn_number, out)
        budget -= len(out.ids)
        context -= len(out.ids)
        turn = agent.dialect.read(out.ids, out.finish)
        cut = turn.call_start
        if cut or not turn.calls:
            segments.append(Segment("reasoning", out.ids[:cut], out.logprobs[:cut], out.entropies[:cut]))
        if cut < len(out.ids):
            segments.append(Segment("call", out.ids[cut:], out.logprobs[cut:], out.entropies[cut:], calls=turn.calls))
        if turn.answer is not None:
            return turn.answer, "answer"
        if not turn.calls:
            if out.finish == "stop":
                return None, "void"
            return None, "context_full" if out.finish == "context_full" or context <= 0 < budget else "max_tokens"
        if turn_number == limits.max_turns:
            return None, "max_turns"
        results = await session.call(turn.calls)
        new_ids = agent.dialect.results(results, out.ids[-1])
        segments.append(Segment("result", tuple(new_ids), results=tuple(results)))
        if any(r.status == "lost" for r in results):
            return None, "error"
        for r in results:
            if r.stop:
                return r.content, "answer"
    raise AssertionError("the loop returns")


RolloutFunction = Callable[[Agent, Sequence[Attempt], SamplingParams, Limits], Awaitable[list[Trajectory]]]
"""The seam that branching rollouts (`rollout/branching.py`) fill."""
