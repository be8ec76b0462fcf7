"""Tools that fail now and then, on purpose: to learn and to test how an agent deals with it.

Which call fails depends on the seed of the trajectory and the number of the call in it, and on nothing else, so a run
repeats itself exactly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentropy.errors import UserError
from agentropy.tools.base import ToolBox, ToolSession
from agentropy.trajectory import Status, ToolCall, ToolResult

Corrupt = Callable[[str, random.Random], str]
MAX_DIGITS = 1000
"""Of a longer number only so many leading digits are changed: Python refuses to convert very long ones."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail: with `corrupt` the tool runs and its output is changed, else it only says `content`."""

    probability: float
    status: Status
    content: str = ""
    corrupt: Corrupt | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise UserError(f"a fault's probability is between 0 and 1, not {self.probability}")


def outage(probability: float, content: str = "Error: service unavailable") -> Fault:
    """The call fails as if its server were down, and says so; status `error`."""
    return Fault(probability, "error", content)


def delay(probability: float, content: str = "Timeout: no answer") -> Fault:
    """The call reports a timeout (without taking the time)."""
    return Fault(probability, "timeout", content)


def wrong(probability: float, corrupt: Corrupt | None = None) -> Fault:
    """The call answers, status `ok`, with something else than what is true.

    corrupt: makes the lie from the true output and a random state; None: `change_digit`.
    """
    return Fault(probability, "ok", corrupt=corrupt or change_digit)


def change_digit(text: str, rng: random.Random) -> str:
    """The text with one of its digits replaced by another; empty where it has none."""
    places = [i for i, c in enumerate(text) if c in "0123456789"]
    if not places:
        return ""
    at = rng.choice(places)
    digit = rng.choice([d for d in "0123456789" if d != text[at]])
    return text[:at] + digit + text[at + 1 :]


def shift_number(text: str, rng: random.Random) -> str:
    """The text with its last whole number off by up to a tenth, at least 1; the same text where it has none."""
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    m = found[-1]
    value = int(m.group()[:MAX_DIGITS])
    off = rng.randint(1, max(2, value // 10))
    changed = value - off if value > off and rng.random() < 0.5 else value + off
    return f"{text[: m.start()]}{changed}{m.group()[MAX_DIGITS:]}{text[m.end() :]}"


class FaultyBox:
    """A toolbox whose calls fail with the given probabilities. Made by `with_faults`."""

    def __init__(self, box: ToolBox, faults: Sequence[Fault], seed: int, tools: frozenset[str] | None) -> None:
        self._box = box
        self._faults = tuple(faults)
        self._seed = seed
        self._tools = tools

    @property
    def specs(self) -> list[dict[str, Any]]:
        """As those of the toolbox inside."""
        return self._box.specs

    async def start(self) -> None:
        await self._box.start()

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[ToolSession, str | None]:
        """A session whose faults depend on the box's seed and this one."""
        session, text = await self._box.open(row, seed)
        known = frozenset(str(s["function"]["name"]) for s in self.specs)
        hit = known if self._tools is None else known & self._tools
        return _FaultySession(session, self._faults, f"{self._seed}/{seed}", hit), text

    async def close(self) -> None:
        await self._box.close()


class _FaultySession:
    def __init__(
        self, session: ToolSession, faults: Sequence[Fault], key: str, tools: frozenset[str], index: int = 0
    ) -> None:
        self._session = session
        self._faults = faults
        self._key = key
        self._tools = tools
        self._index = index

    async def call(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        drawn = [self._draw(c) for c in calls]
        running = [c for c, (fault, _) in zip(calls, drawn, strict=True) if fault is None or fault.corrupt]
        ran = iter(await self._session.call(running) if running else [])
        out = []
        for fault, rng in drawn:
            if fault is None:
                out.append(next(ran))
            elif fault.corrupt is None:
                out.append(ToolResult(fault.content, fault.status))
            else:
                result = next(ran)
                # A call that failed by itself stays as it is: its output is no answer that could be wrong.
                changed = replace(result, content=fault.corrupt(result.content, rng), status=fault.status)
                out.append(changed if result.status == "ok" else result)
        return out

    def _draw(self, call: ToolCall) -> tuple[Fault | None, random.Random]:
        rng = random.Random(f"{self._key}/{self._index}")
        self._index += 1
        if call.error is not None or call.tool not in self._tools:
            return None, rng
        place = rng.random()
        for fault in self._faults:
            if place < fault.probability:
                return fault, rng
            place -= fault.probability
        return None, rng

    async def reward(self) -> float | None:
        inner = getattr(self._session, "reward", None)
        return None if inner is None else await inner()

    async def fork(self) -> ToolSession:
        """The branch has the same faults ahead as the trunk: its calls have the same numbers."""
        return _FaultySession(await self._session.fork(), self._faults, self._key, self._tools, self._index)

    async def close(self) -> None:
        await self._session.close()


def with_faults(
    box: ToolBox, faults: Sequence[Fault], *, seed: int = 0, tools: Sequence[str] | None = None
) -> FaultyBox:
    """A toolbox around another in which calls fail. At most one fault hits a call; probabilities add up to at most 1.

    tools: names of the tools that may fail; None: all. Raises UserError for an unknown name or a sum above 1.
    """
    if sum(f.probability for f in faults) > 1 + 1e-9:
        raise UserError("the probabilities of the faults add up to more than 1")
    known = {str(s["function"]["name"]) for s in box.specs}
    for name in tools or ():
        if name not in known:
            raise UserError(f"no tool {name!r} to make faulty; the tools are: {', '.join(sorted(known))}")
    return FaultyBox(box, faults, seed, None if tools is None else frozenset(tools))
