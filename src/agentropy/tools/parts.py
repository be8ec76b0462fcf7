"""What a toolbox is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentropy.tools.base import Tool


class ToolLost(Exception):
    """A tool failed by our fault or its server's, not the caller's: the result is `lost`, after repetitions."""


class PartSession(Protocol):
    """What a part gives one trajectory."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def keeps_time(self) -> bool:
        """True where the tools limit their own time, so that waiting for a slot is not blamed on the policy."""
        ...

    @property
    def repeatable(self) -> bool:
        """True where a lost call can be run again: no state is half changed."""
        ...

    async def reward(self) -> float | None: ...

    async def fork(self) -> PartSession: ...

    async def close(self) -> None: ...


@runtime_checkable
class Part(Protocol):
    """Tools that live and die together. `specs` are known before `start`."""

    @property
    def specs(self) -> list[dict[str, Any]]: ...

    async def start(self) -> None: ...

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[PartSession, str | None]: ...

    async def close(self) -> None: ...


class StaticPart:
    """Tools without state: one session for all trajectories."""

    def __init__(self, tools: Sequence[Tool], *, keeps_time: bool = False, repeatable: bool = True) -> None:
        self.tools = tuple(tools)
        self.keeps_time = keeps_time
        self.repeatable = repeatable

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [t.spec() for t in self.tools]

    async def start(self) -> None:
        return None

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[PartSession, str | None]:
        return self, None

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        return self

    async def close(self) -> None:
        return None
