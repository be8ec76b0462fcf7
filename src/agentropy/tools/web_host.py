"""Manners towards web servers: a pause between requests, few at once, a name that says who asks, waiting when told."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import metadata

LONGEST_WAIT = 60.0
"""Seconds that we wait because a server says so; one that asks for more counts as failed."""


def user_agent() -> str:
    """How our requests name themselves."""
    try:
        version = metadata.version("agentropy")
    except metadata.PackageNotFoundError:
        version = "0"
    return f"agentropy/{version} (a tool of a language-model agent)"


@dataclass
class _Host:
    slots: asyncio.Semaphore
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    next: float = 0.0


class Pacer:
    """Spaces requests by host. interval: seconds between two starts; concurrency: requests that run at once."""

    def __init__(self, interval: float, concurrency: int) -> None:
        self._interval = interval
        self._concurrency = concurrency
        self._hosts: dict[str, _Host] = {}

    def _host(self, host: str) -> _Host:
        if host not in self._hosts:
            self._hosts[host] = _Host(asyncio.Semaphore(self._concurrency))
        return self._hosts[host]

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Wait for a turn at the host, and hold it."""
        state = self._host(host)
        async with state.slots:
            async with state.lock:
                await asyncio.sleep(max(0.0, state.next - time.monotonic()))
                state.next = time.monotonic() + self._interval
            yield

    def rest(self, host: str, seconds: float) -> None:
        """Send nothing to the host for a while."""
        state = self._host(host)
        state.next = max(state.next, time.monotonic() + seconds)


def retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header, which holds a number or a date; None where it says nothing sensible."""
    if not value:
        return None
    if value.strip().isdecimal():
        return float(value.strip()[:9])
    try:
        then = email.utils.parsedate_to_datetime(value)
        return max(0.0, then.timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
