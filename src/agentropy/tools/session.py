"""The tools of a run and of one trajectory: arguments checked, time limits kept, nothing raised at the rollout.

A `ToolBox` is made of parts. A part is what has a life of its own: plain functions, an environment class, the sandbox,
a search index. It gives every trajectory its own `PartSession`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentropy.errors import UserError
from agentropy.tools.base import Tool
from agentropy.tools.faults import FaultyBox
from agentropy.tools.functions import EnvironmentPart, from_function
from agentropy.tools.mcp import McpPart
from agentropy.tools.parts import Part, PartSession, StaticPart, ToolLost
from agentropy.tools.schema import ArgumentError, check_arguments
from agentropy.trajectory import Status, ToolCall, ToolResult

RETRIES = 2
"""Times that a call is repeated whose tool failed by our own fault. Any other call is run exactly once."""
RETRY_PAUSE = 0.05
"""Seconds before the first repetition; doubled for each further one."""

Describe = Callable[[Status, str], str]


def describe(status: Status, message: str) -> str:
    """What the model reads of a call that gave no output of its own."""
    prefix = {"invalid": "Invalid call: ", "timeout": "Timeout: ", "lost": "Tool unavailable: "}.get(status, "Error: ")
    return prefix + message


@dataclass(frozen=True)
class _Owned:
    tool: Tool
    part: PartSession


class Session:
    """The tools of one trajectory. Made by `Box.open`."""

    def __init__(self, box: Box, parts: Sequence[PartSession]) -> None:
        self._box = box
        self._parts = list(parts)
        self._tools = {t.name: _Owned(t, p) for p in parts for t in p.tools}
        self._closed = False

    async def call(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one turn, concurrently, one result each and in order.

        Raises nothing for what a call or its tool did; UserError where a tool cannot run at all on this machine.
        """
        if len(calls) == 1:
            return [await self._one(calls[0])]
        return list(await asyncio.gather(*(self._one(c) for c in calls)))

    async def reward(self) -> float | None:
        """The sum of what the environments say the trajectory earned (`get_reward`), None where none says anything."""
        rewards = [r for p in self._parts if (r := await p.reward()) is not None]
        return sum(rewards) if rewards else None

    async def fork(self) -> Session:
        """A session in the same state. Raises UserError where a tool's state cannot be copied."""
        forked: list[PartSession] = []
        try:
            for part in self._parts:
                forked.append(await part.fork())
        except BaseException:
            await asyncio.gather(*(p.close() for p in forked), return_exceptions=True)
            raise
        return Session(self._box, forked)

    async def close(self) -> None:
        """Release what the trajectory holds. Safe to call twice."""
        if not self._closed:
            self._closed = True
            await asyncio.gather(*(p.close() for p in self._parts), return_exceptions=True)

    async def _one(self, call: ToolCall) -> ToolResult:
        start = time.perf_counter()
        say = self._box.describe
        if call.error is not None:
            return ToolResult(say("invalid", call.error), "invalid")
        owned = self._tools.get(call.tool)
        if owned is None:
            names = ", ".join(self._tools) or "none"
            return ToolResult(say("invalid", f"there is no tool {call.tool!r}; the tools are: {names}"), "invalid")
        try:
            arguments = check_arguments(call.arguments, owned.tool.parameters)
        except ArgumentError as error:
            return ToolResult(say("invalid", f"{call.tool}: {error}"), "invalid")
        async with self._box.slots:
            start = time.perf_counter()
            result = await self._run(owned, arguments)
        return replace(result, seconds=time.perf_counter() - start)

    async def _run(self, owned: _Owned, arguments: Mapping[str, Any]) -> ToolResult:
        result = await self._attempt(owned, arguments)
        for attempt in range(RETRIES if owned.part.repeatable else 0):
            if result.status != "lost":
                break
            await asyncio.sleep(RETRY_PAUSE * 2**attempt)
            result = await self._attempt(owned, arguments)
        return result

    async def _attempt(self, owned: _Owned, arguments: Mapping[str, Any]) -> ToolResult:
        say = self._box.describe
        limit = None if owned.part.keeps_time else self._box.timeout
        try:
            async with asyncio.timeout(limit) as clock:
                return await owned.tool.run(arguments)
        except ArgumentError as error:
            return ToolResult(say("invalid", f"{owned.tool.name}: {error}"), "invalid")
        except TimeoutError as error:
            if clock.expired():
                return ToolResult(say("timeout", f"no answer within {limit:g} s"), "timeout")
            return ToolResult(say("timeout", str(error) or "the tool ran out of time"), "timeout")
        except (ToolLost, ConnectionError) as error:
            return ToolResult(say("lost", str(error) or type(error).__name__), "lost")
        except UserError:
            raise  # the machine lacks what the tool needs: no trajectory could go on
        except Exception as error:
            return ToolResult(say("error", f"{type(error).__name__}: {error}".rstrip(": ")), "error")


class Box:
    """The tools of a run. Made by `make_toolbox`."""

    def __init__(self, parts: Sequence[Part], timeout: float | None, max_concurrency: int, say: Describe) -> None:
        self.parts = list(parts)
        self.timeout = timeout
        self.describe = say
        self._max_concurrency = max_concurrency
        self.slots = asyncio.Semaphore(max_concurrency)
        # Nobody chose the names of a server's tools: they give way to the others.
        taken = {str(s["function"]["name"]) for p in parts if not isinstance(p, McpPart) for s in p.specs}
        for part in parts:
            if isinstance(part, McpPart):
                part.avoid(taken)
                taken |= {str(s["function"]["name"]) for s in part.specs}
        names = [str(s["function"]["name"]) for s in self.specs]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two tools are called {name!r}; rename one")

    @property
    def specs(self) -> list[dict[str, Any]]:
        """`Tool.spec()` of every tool, for the prompt."""
        return [s for p in self.parts for s in p.specs]

    async def start(self) -> None:
        """Start what the parts share. Raises UserError where a tool cannot work, which is told before any rollout."""
        self.slots = asyncio.Semaphore(self._max_concurrency)
        for part in self.parts:
            await part.start()

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[Session, str | None]:
        """A session for one trajectory of the question `row`, and text that an environment adds to the question."""
        sessions: list[PartSession] = []
        texts: list[str] = []
        try:
            for part in self.parts:
                session, text = await part.open(row, seed)
                sessions.append(session)
                if text:
                    texts.append(text)
        except BaseException:
            await asyncio.gather(*(s.close() for s in sessions), return_exceptions=True)
            raise
        return Session(self, sessions), "\n\n".join(texts) or None

    async def close(self) -> None:
        """Stop what the parts share. Safe to call twice."""
        await asyncio.gather(*(p.close() for p in self.parts), return_exceptions=True)


def make_toolbox(
    parts: Sequence[Any],
    *,
    timeout: float | None = 30.0,
    max_concurrency: int = 64,
    say: Describe = describe,
) -> Box:
    """A ToolBox over a mix of tools: functions, environment classes, `Tool` records and built-ins.

    timeout: seconds a call may take (None: no limit); the Python tool keeps its own, shorter one.
    max_concurrency: calls that run at once over all trajectories; the time a call waits is not counted.
    say: words for results that a tool did not write itself (`describe`).

    A class is taken for an environment: one object a trajectory, `reset(**row)`, every other public method a tool.
    Raises UserError where something is no tool, or two tools have one name.
    """
    if max_concurrency < 1:
        raise UserError(f"max_concurrency is {max_concurrency}, must be at least 1")
    return Box([_part(p) for p in parts], timeout, max_concurrency, say)


def _part(item: Any) -> Part:
    if isinstance(item, Tool):
        return StaticPart([item])
    if isinstance(item, type):
        return EnvironmentPart(item)
    if isinstance(item, Box | FaultyBox):
        raise UserError("a toolbox is no part of a toolbox; wrap the whole one with with_faults")
    if isinstance(item, Part):
        return item
    if callable(item):
        return StaticPart([from_function(item)])
    raise UserError(f"{item!r} is no tool: give a function, an environment class, a Tool or a built-in")
