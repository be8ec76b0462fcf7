"""A server on loopback that speaks the OpenAI API over real sockets, and can be made to fail in every way.

`serve(brain)` answers with what the brain says; a `Faults` plan decides which calls fail, and how. A call that failed
is answered properly when it is repeated, so a client that tries again must end with the answers of a faultless run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("dies", "dies-mid-body", "stalls", "rubbish", "busy", "error", "half-json", "no-choices", "stalls-mid-body")
"""Ways to fail, in the order in which a plan takes them."""


class Refuse(Exception):
    """Raised by a brain: an HTTP error with this body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


Brain = Callable[[str, dict[str, Any] | None, dict[str, str]], Any]
"""(path, body, headers) to the JSON of the answer. May raise Refuse."""


@dataclass
class Faults:
    """Every `every`-th POST fails (0: none), in the ways of `kinds` in turn; `stall`: seconds that a silent one takes.

    `dead` makes every call fail from then on.
    """

    every: int = 0
    kinds: Sequence[str] = KINDS
    stall: float = 5.0
    retry_after: str = "0.05"
    dead: bool = False
    calls: int = 0
    made: Counter[str] = field(default_factory=Counter)

    def next(self) -> str | None:
        """How the call that comes now fails; None: it does not."""
        self.calls += 1
        kind = None
        if self.dead:
            kind = "dies"
        elif self.every and self.calls % self.every == 0:
            kind = self.kinds[(self.calls // self.every - 1) % len(self.kinds)]
        if kind is not None:
            self.made[kind] += 1
        return kind


@dataclass
class Served:
    """A running server. `connections` counts what clients opened, `most` requests that were worked on at once."""

    url: str
    faults: Faults
    connections: int = 0
    running: int = 0
    most: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def serve(brain: Brain, faults: Faults | None = None, port: int = 0, delay: float = 0.0) -> AsyncIterator[Served]:
    """Listen on loopback until the block ends. `delay`: seconds that each answer takes."""
    served = Served("", faults or Faults())
    writers: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        writers.add(writer)
        try:
            while await _one(reader, writer, brain, served, delay):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # whoever ends the event loop cancels this, and nobody waits for it
        finally:
            writers.discard(writer)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        for writer in [*writers]:
            writer.close()


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, brain: Brain, served: Served, delay: float
) -> bool:
    """Answer one request; False where the connection is over."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return False
    first, *lines = head.split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines) if k}
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    body = json.loads(raw) if raw else None
    method, path, _ = first.split(" ")
    served.running += 1
    served.most = max(served.most, served.running)
    try:
        fault = served.faults.next() if method == "POST" else "dies" if served.faults.dead else None
        if fault == "dies":
            return False
        if fault == "stalls":
            await asyncio.sleep(served.faults.stall)
            return False
        if fault in ("busy", "error", "rubbish"):
            status = {"busy": 429, "error": 500, "rubbish": 200}[fault]
            extra = f"retry-after: {served.faults.retry_after}\r\n" if fault == "busy" else ""
            await _send(writer, status, b"<html>\xff\x00 gateway says no" if fault == "rubbish" else b"{}", extra)
            return True
        if body is not None:
            served.bodies.append(body)
            served.headers.append(headers)
        await asyncio.sleep(delay)
        try:
            status, answer = 200, brain(path, body, headers)
        except Refuse as refusal:
            status, answer = refusal.status, refusal.body
        if fault == "no-choices":
            answer = {"object": "error"}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if fault == "half-json":
            data = data[: len(data) // 2]
        if fault in ("dies-mid-body", "stalls-mid-body"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data[: len(data) // 2])
            await writer.drain()
            if fault == "stalls-mid-body":
                await asyncio.sleep(served.faults.stall)
            return False
        await _send(writer, status, data)
        return True
    finally:
        served.running -= 1


async def _send(writer: asyncio.StreamWriter, status: int, data: bytes, extra: str = "") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
