"""What an agent can call, reduced to two records and one session object a trajectory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentropy.trajectory import ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class Tool:
    """A named function with a JSON schema of its parameters. `run` may raise; the session turns that into a result."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], Awaitable[ToolResult]]

    def spec(self) -> dict[str, Any]:
        """The tool in the form that OpenAI's API and chat templates take."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


class ToolSession(Protocol):
    """The tools of one trajectory, with whatever state they keep."""

    async def call(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one turn, concurrently, one result each and in order. Never raises for a call's fault:
        an unknown tool, wrong arguments or an unreadable call give `invalid`, an exception `error`, a time limit
        `timeout`, a fault of ours `lost`."""
        ...

    async def fork(self) -> ToolSession:
        """A session in the same state, for a branch. Raises UserError where a tool's state cannot be copied."""
        ...

    async def reward(self) -> float | None:
        """What the trajectory earned by its tools' own account; None where no tool keeps one."""
        ...

    async def close(self) -> None:
        """Release everything. Safe to call twice."""
        ...


class ToolBox(Protocol):
    """The tools of a run: what is shared by all trajectories (a sandbox pool, a search index)."""

    @property
    def specs(self) -> list[dict[str, Any]]:
        """`Tool.spec()` of every tool, for the prompt."""
        ...

    async def start(self) -> None: ...

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[ToolSession, str | None]:
        """A session for one trajectory of the question `row`, and text that a stateful tool adds to the question."""
        ...

    async def close(self) -> None: ...
