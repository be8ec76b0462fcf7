"""Branching rollouts (ARPO, AEPO): some trajectories of a question start at the prompt, others where a tool's result
left an earlier one. A question gets exactly as many trajectories, the leaves of its tree, as it has attempts.

A turn is sampled first and looked at then; where it says so, the state *before* it is forked out of the parent's cache.
So a branch costs no prefill and no slot before it is sure, and nothing waits for a decision. All of it happens
between the end of a turn and the step at which the engine expects the sequence back, so with a virtual clock the tree
does not depend on how long tools take.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentropy.algorithms.branching import (
    Branching,
    branch_probability,
    forks,
    penalty,
    split_budget,
    window_entropy,
)
from agentropy.errors import UserError
from agentropy.methods.base import RolloutSpec
from agentropy.policies.base import Generation, PolicyLost, SamplingParams, SequenceHandle, Stop
from agentropy.rollout.loop import Agent, Attempt, Limits, RolloutFunction, finish, rollout, take_turns
from agentropy.seeds import derive
from agentropy.tools.base import ToolSession
from agentropy.trajectory import Segment, StopReason, Trajectory


def rollout_for(spec: RolloutSpec | None, samples: int) -> RolloutFunction:
    """The rollout that a method names, for groups of `samples` attempts. Raises UserError where it cannot be had."""
    if spec is None:
        return rollout
    if not isinstance(spec, Branching):
        raise UserError(f"no rollout {spec.name!r}: a method's rollout is None or a Branching")
    if spec.split_beta is None and spec.initial_roots(samples) > samples:
        raise UserError(
            f"method {spec.name}: option roots={spec.roots} is more than the {samples} trajectories a question has "
            "(rollout.samples)"
        )
    return functools.partial(branching_rollout, spec, samples)


@dataclass(eq=False, slots=True)
class _Path:
    """One leaf in the making. `began`: number of its first own turn."""

    number: int
    attempt: Attempt
    handle: SequenceHandle | None
    segments: list[Segment]
    session: ToolSession | None = None
    parent_id: str | None = None
    fork_at: int | None = None
    began: int = 1
    first: float = math.nan
    last: float = math.nan
    consecutive: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """The state after a result: `at` tokens, `segments`, before the turn of that number, after so many forks in a
    row."""

    at: int
    turn: int
    segments: list[Segment]
    consecutive: int


@dataclass(eq=False, slots=True)
class _Tree:
    """One question. `used`: attempts begun; `room`: how many of the others may be branches; `alive`: leaves that can
    still fork; `pilot`: the split of the budget is not known yet."""

    attempts: Sequence[Attempt]
    room: int
    pilot: bool
    used: int = 0
    alive: int = 0
    places: list[tuple[_Place, ToolSession]] = field(default_factory=list)
    root_entropy: float = math.nan
    tool_entropies: list[float] = field(default_factory=list)
    leaves: dict[int, Trajectory] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        return len(self.attempts)


async def branching_rollout(
    spec: Branching,
    samples: int,
    agent: Agent,
    attempts: Sequence[Attempt],
    params: SamplingParams,
    limits: Limits,
) -> list[Trajectory]:
    """Sample trees of `samples` leaves, one for each run of so many attempts at a question; leaves are in their order.

    An attempt becomes a root or a branch in the order in which they are made; its seed is that of its sampling. A
    branch has `parent_id` and `fork_at`, the index of its first own token. With a pilot (AEPO) the first attempt is
    sampled alone, decides on the split, and may be branched from afterwards.

    Raises: UserError where a tool's state cannot be copied for a branch; otherwise as `rollout`.
    """
    groups = [attempts[i : i + samples] for i in range(0, len(attempts), samples)]
    if any(len(g) != samples or len({a.task.id for a in g}) != 1 for g in groups):
        raise ValueError(f"attempts do not come in runs of {samples} at one question")
    pilot = spec.split_beta is not None
    roots = 1 if pilot else spec.initial_roots(samples)
    trees = [_Tree(g, samples - roots, pilot) for g in groups]
    run = _Run(spec, agent, params, limits)
    try:
        opened = await asyncio.gather(*(run.open(a) for tree in trees for a in tree.attempts[:roots]))
        for i, tree in enumerate(trees):
            run.plant(tree, opened[i * roots : (i + 1) * roots])
        async with asyncio.TaskGroup() as run.tasks:
            for tree, path in run.planted:
                run.tasks.create_task(run.grow(tree, path))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for handle in run.handles:
            agent.policy.close(handle)
        await asyncio.gather(*(session.close() for session in run.sessions))
    return [tree.leaves[i] for tree in trees for i in range(samples)]


class _Run:
    """What the trees of one call share."""

    def __init__(self, spec: Branching, agent: Agent, params: SamplingParams, limits: Limits) -> None:
        self.spec = spec
        self.agent = agent
        self.params = params
        self.limits = limits
        self.tasks = asyncio.TaskGroup()
        self.planted: list[tuple[_Tree, _Path]] = []
        self.handles: list[SequenceHandle] = []
        self.sessions: list[ToolSession] = []

    # -- making paths -------------------------------------------------------------------------------------------------

    async def open(self, attempt: Attempt) -> tuple[ToolSession, list[int]]:
        """Fresh tools, and the prompt."""
        session, addition = await self.agent.toolbox.open(attempt.task.row, attempt.seed)
        self.sessions.append(session)
        question = attempt.task.question + (f"\n{addition}" if addition else "")
        return session, self.agent.dialect.prompt(question, self.agent.toolbox.specs, self.agent.system)

    def plant(self, tree: _Tree, opened: Sequence[tuple[ToolSession, list[int]]]) -> None:
        """The roots that a tree begins with; neighbours with the same prompt share its prefill."""
        i = 0
        while i < len(opened):
            prompt, j = opened[i][1], i
            while j < len(opened) and opened[j][1] == prompt:
                j += 1
            attempts = tree.attempts[i:j]
            handles: list[SequenceHandle | None] = [None] * (j - i)
            if len(prompt) < self.limits.max_context:
                handles = [*self.agent.policy.open(prompt, [a.seed for a in attempts])]
                self.handles += [h for h in handles if h is not None]
            for (session, _), handle in zip(opened[i:j], handles, strict=True):
                self.planted.append((tree, self._next(tree, handle, [Segment("prompt", tuple(prompt))], session)))
            i = j

    def _next(
        self, tree: _Tree, handle: SequenceHandle | None, segments: list[Segment], session: ToolSession | None = None
    ) -> _Path:
        """A path for the next attempt."""
        path = _Path(tree.used, tree.attempts[tree.used], handle, segments, session)
        tree.used += 1
        tree.alive += 1
        return path

    def _split(self, tree: _Tree, source: _Path, at: int, segments: list[Segment]) -> _Path:
        """A path for the next attempt out of the first `at` tokens of a path that is away."""
        handle = source.handle
        if handle is not None:
            handle = self.agent.policy.fork(handle, tree.attempts[tree.used].seed, at)
            self.handles.append(handle)
        return self._next(tree, handle, segments)

    def _branch(self, tree: _Tree, source: _Path, place: _Place) -> _Path:
        path = self._split(tree, source, place.at, list(place.segments))
        path.parent_id, path.fork_at, path.began = source.attempt.trajectory_id, place.at, place.turn
        path.first, path.consecutive = source.first, place.consecutive
        return path

    async def _copy_tools(self, path: _Path) -> ToolSession | None:
        """Tools in the same state; None where the machinery failed (a busy sandbox)."""
        assert path.session is not None
        try:
            session = await path.session.fork()
        except UserError as error:
            name = self.spec.name
            raise UserError(
                f"method {name} branches after tool results, so its tools must be copied: {error}"
            ) from None
        except (RuntimeError, OSError):
            return None
        self.sessions.append(session)
        return session

    async def _fresh(self, tree: _Tree, source: _Path, count: int) -> None:
        """Start the next `count` attempts at the prompt. Their handles are made before anything is waited for."""
        prompt = source.segments[0]
        paths = [self._split(tree, source, len(prompt.ids), [prompt]) for _ in range(count)]
        for path in paths:
            await self._open_tools(path)
        self._start(tree, paths)

    async def _open_tools(self, path: _Path) -> None:
        """Fresh tools for a root, and its own prompt where an environment asks every attempt something else."""
        path.session, prompt = await self.open(path.attempt)
        if tuple(prompt) == path.segments[0].ids:
            return
        if path.handle is not None:
            self.agent.policy.close(path.handle)
        path.handle, path.segments = None, [Segment("prompt", tuple(prompt))]
        if len(prompt) < self.limits.max_context:
            [path.handle] = self.agent.policy.open(prompt, [path.attempt.seed])
            self.handles.append(path.handle)

    async def _uproot(self, path: _Path, source: _Path) -> None:
        """A branch whose tools could not be copied starts at the prompt instead."""
        assert path.handle is not None
        assert source.handle is not None
        prompt = source.segments[0]
        self.agent.policy.close(path.handle)
        path.handle = self.agent.policy.fork(source.handle, path.attempt.seed, len(prompt.ids))
        self.handles.append(path.handle)
        path.segments, path.parent_id, path.fork_at, path.began, path.consecutive = [prompt], None, None, 1, 0
        await self._open_tools(path)

    def _start(self, tree: _Tree, paths: Sequence[_Path]) -> None:
        for path in paths:
            self.tasks.create_task(self.grow(tree, path))

    # -- growing ------------------------------------------------------------------------------------------------------

    async def grow(self, tree: _Tree, path: _Path) -> None:
        """Take turns to the end, then grade."""
        agent = self.agent
        answer: str | None = None
        stop: StopReason = "context_full"
        assert path.session is not None
        if path.handle is not None:
            watch = functools.partial(self._watch, tree, path)
            answer, stop = await take_turns(
                agent, path.handle, path.session, path.segments, self.params, self.limits, watch
            )
            if path.segments[-1].kind == "result":
                # Ended by a tool, at a time that the engine's clock does not know: who is the last of the tree, and so
                # when its budget is filled up, would hang on the tool's speed. One token more, and the clock knows.
                one = SamplingParams(self.params.temperature, self.params.top_p, self.params.top_k, 1)
                with contextlib.suppress(PolicyLost):
                    await agent.policy.generate(path.handle, (), one, Stop())
        await self._leave(tree, path)
        if path.handle is not None:
            agent.policy.close(path.handle)
        tree.leaves[path.number] = await finish(
            agent, path.attempt, path.session, path.segments, answer, stop, path.parent_id, path.fork_at
        )
        await path.session.close()

    async def _watch(self, tree: _Tree, path: _Path, turn: int, out: Generation) -> None:
        """Fork the state before a turn where the turn's entropy says so. Decides before anything is waited for."""
        spec = self.spec
        before, now = path.last, window_entropy(out.entropies, spec.window)
        path.last = now
        if turn == 1:
            path.first = now
            tree.root_entropy = now
            return
        if tree.pilot and not math.isnan(now):
            tree.tool_entropies.append(now)
        if turn == path.began or not out.ids:  # the place that the path came from has been decided on
            return
        seen = now if spec.timing == "after" else before
        probability = branch_probability(seen, path.first, self.agent.policy.info.vocab_size, spec.base, spec.beta)
        probability *= penalty(path.consecutive, spec.fork_penalty)
        draw = derive(path.attempt.seed, "branch", turn) / 2**63
        count = min(spec.beam - 1, tree.room)
        if count < 1 or not forks(probability, draw, spec.tau, spec.decision):
            path.consecutive = 0
            return
        path.consecutive += 1
        assert path.handle is not None
        assert path.session is not None
        at = path.handle.length - len(out.ids)
        place = _Place(at, turn, list(path.segments), path.consecutive)
        tree.room -= count
        if tree.pilot:
            copies = [await self._copy_tools(path) for _ in range(count)]
            tree.places += [(place, session) for session in copies if session is not None]
            return
        paths = [self._branch(tree, path, place) for _ in range(count)]
        for branch in paths:
            branch.session = await self._copy_tools(path)
            if branch.session is None:
                await self._uproot(branch, path)
        self._start(tree, paths)

    async def _leave(self, tree: _Tree, path: _Path) -> None:
        """The path has ended, and its handle is still open. The last one fills the budget up with fresh roots."""
        tree.alive -= 1
        if tree.alive:
            return
        if tree.pilot:
            await self._divide(tree, path)
        if not tree.alive and tree.used < tree.budget:
            tree.room = 0
            await self._fresh(tree, path, tree.budget - tree.used)

    async def _divide(self, tree: _Tree, pilot: _Path) -> None:
        """AEPO's pre-monitoring: the pilot, one of the roots, has ended and says how many roots there are."""
        spec = self.spec
        assert spec.split_beta is not None
        tools = tree.tool_entropies
        mean = math.fsum(tools) / len(tools) if tools else math.nan
        roots = split_budget(tree.budget, tree.root_entropy, mean, spec.split_beta, spec.split)
        tree.pilot = False
        tree.room = tree.budget - roots
        taken, unused = tree.places[: tree.room], tree.places[tree.room :]
        tree.room -= len(taken)
        paths = []
        for place, session in taken:
            branch = self._branch(tree, pilot, place)
            branch.session = session
            paths.append(branch)
        self._start(tree, paths)
        await self._fresh(tree, pilot, roots - 1)
        await asyncio.gather(*(session.close() for _, session in unused))
