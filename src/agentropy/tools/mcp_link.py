"""Connections to an MCP server: opened in a task of their own, closed without leftovers, opened again when broken."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from agentropy.errors import UserError
from agentropy.tools.parts import ToolLost
from agentropy.tools.schema import ArgumentError

if TYPE_CHECKING:
    import mcp

TRIES = 4
"""Times that a server is started for one call."""
PAUSE, MAX_PAUSE = 0.25, 10.0
"""Seconds before a server is started again; doubled while nothing succeeds, up to the second number."""
LIFE_SIGN = 5.0
"""Seconds in which a server must say that it lives, when a call has failed or run out of time."""
STDERR_CHARS = 2000

_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is: a command or a URL, with environment variables or headers."""

    command: tuple[str, ...] = ()
    url: str = ""
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_limit: float = 60.0

    @property
    def label(self) -> str:
        """The server in messages; without its settings, which may be secret."""
        return repr(self.url or shlex.join(self.command))

    @classmethod
    def parse(cls, text: str) -> Server:
        """From `[NAME=value …] command argument …` or `[Header=value …] https://…`. Raises UserError."""
        try:
            words = shlex.split(text)
            if len(words) == 1 and " " in words[0] and shutil.which(words[0]) is None:
                words = shlex.split(words[0])  # quoted as a whole, as a list of tools demands where there are commas
        except ValueError as error:
            raise UserError(f"mcp:{text}: {str(error).lower()}") from None
        settings: dict[str, str] = {}
        while words and (match := _SETTING.fullmatch(words[0])):
            settings[match[1]] = _VARIABLE.sub(_from_environment, match[2])
            words.pop(0)
        if not words:
            raise UserError('an MCP server is a command or a URL: mcp:"command argument …" or mcp:https://…')
        if words[0].startswith(("http://", "https://")):
            if len(words) > 1:
                raise UserError(f"mcp:{words[0]}: nothing may follow the URL; headers stand before it as NAME=value")
            return cls(url=words[0], settings=settings)
        return cls(command=tuple(words), settings=settings)


def _from_environment(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in os.environ:
        raise UserError(f"the environment has no variable {name}, which an mcp: tool names")
    return os.environ[name]


class _Stderr:
    """Reads what a process writes to its stderr, to the end, and keeps the last of it."""

    def __init__(self) -> None:
        self._tail = b""
        self._read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w")
        self._thread = threading.Thread(target=self._drain, daemon=True, name="agentropy-mcp-stderr")
        self._thread.start()

    def _drain(self) -> None:
        while chunk := os.read(self._read, 1 << 16):
            self._tail = (self._tail + chunk)[-STDERR_CHARS:]
        os.close(self._read)

    def finish(self) -> str:
        """The last lines in one, once the process has ended."""
        self.file.close()
        self._thread.join(timeout=0.5)  # a grandchild may hold the pipe open
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(line.strip() for line in lines[-3:])[-400:]


class Connection:
    """One connection. Its task enters and leaves the library's contexts, as they demand. Made by `connect`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self._stderr: _Stderr | None = None if server.url else _Stderr()
        self._scope: Any = None
        self._task = asyncio.create_task(self._live())
        self.suspect = False

    @property
    def client(self) -> mcp.Client:
        return self._ready.result()

    async def wait(self) -> None:
        """Until the server is ready. Raises what went wrong; the connection is closed then."""
        try:
            async with asyncio.timeout(self._server.start_limit):
                await asyncio.shield(self._ready)
        except BaseException:
            await self.close()
            raise

    async def answers(self) -> bool:
        """Whether the server still gives a sign of life."""
        try:
            async with asyncio.timeout(LIFE_SIGN):
                await self.client.list_tools(cache_mode="bypass")
        except Exception:
            return False
        return True

    async def close(self) -> str:
        """End the server's process, or its session. Returns the last words of its stderr."""
        self._stop.set()
        if self._scope is not None and not self._ready.done():
            self._scope.cancel()  # a native cancel could cut the library's clearing up short
        # Whoever waits here may be cancelled; the server is let go all the same.
        ended = asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(LIFE_SIGN):
                await asyncio.shield(ended)
        except TimeoutError:  # an HTTP server that hangs is told good-bye, and never answers
            if self._scope is not None:
                self._scope.cancel()
            await asyncio.shield(ended)
        return self._stderr.finish() if self._stderr is not None else ""

    async def _live(self) -> None:
        import anyio
        from mcp import Client

        if self._stop.is_set():
            return
        try:
            with anyio.CancelScope() as self._scope:
                async with AsyncExitStack() as stack:
                    client = Client(await self._transport(stack))
                    await stack.enter_async_context(client)
                    self._ready.set_result(client)
                    await self._stop.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(_first(error))
                self._ready.exception()  # seen, whether or not somebody still waits
            elif not isinstance(error, Exception):
                raise
        finally:
            self._ready.cancel()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._stderr is not None:
            command, *arguments = self._server.command
            settings = dict(self._server.settings)
            parameters = StdioServerParameters(
                command=command, args=arguments, env=settings, encoding_error_handler="replace"
            )
            return stdio_client(parameters, errlog=self._stderr.file)
        import httpx2

        # An answer may take as long as the call's own limit lets it.
        limits = httpx2.Timeout(30.0, read=None)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(self._server.settings), timeout=limits))
        return streamable_http_client(self._server.url, http_client=http)


def _first(error: BaseException) -> BaseException:
    """The first plain exception in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def connect(server: Server) -> Connection:
    """An open connection. Raises UserError with the reason and the end of the server's stderr."""
    # What the library logs (lines that are no messages, sessions that are gone) is in our results already.
    for name in ("mcp", "client"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
    connection = Connection(server)
    try:
        await connection.wait()
    except (TimeoutError, asyncio.CancelledError, Exception) as error:
        said = await connection.close()
        if isinstance(error, asyncio.CancelledError):
            raise
        raise UserError(f"MCP server {server.label} {_why(server, error)}{f': {said}' if said else ''}") from None
    return connection


def _why(server: Server, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"does not answer as an MCP server within {server.start_limit:g} s"
    if isinstance(error, FileNotFoundError) and not server.url:
        return "cannot be started: there is no such command"
    if isinstance(error, OSError) and not server.url:
        return f"cannot be started: {error.strerror or error}"
    text = " ".join(str(error).split()) or type(error).__name__
    if server.url:
        return f"cannot be reached ({text[:300]})"
    return f"ended or does not speak MCP ({text[:300]})"


class Link:
    """A connection that is opened when it is needed, and again when it broke.

    timeout: seconds a call may take, not counting a start. stateful: not started again, since its state would be lost.
    """

    def __init__(self, server: Server, timeout: float, *, stateful: bool = False) -> None:
        self._server = server
        self._timeout = timeout
        self._stateful = stateful
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._failures = 0
        self._failed_at = 0.0
        self._closed = False
        self.used = False

    async def open(self) -> None:
        """Connect now. Raises UserError."""
        async with self._lock:
            if self._connection is None:
                self._connection = await connect(self._server)

    async def close(self) -> None:
        """End the connection. Safe to call twice."""
        self._closed = True
        async with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp.types.CallToolResult:
        """Call a tool. Raises ArgumentError for arguments that the server refuses, TimeoutError, ToolLost, and
        RuntimeError for any other error that the server answers."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS
        from pydantic import ValidationError

        connection = await self._ready()
        self.used = True
        try:
            async with asyncio.timeout(self._timeout) as clock:
                result = await connection.client.call_tool(name, arguments)
        except TimeoutError:
            if not clock.expired():
                raise
            connection.suspect = True
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None
        except ValidationError:
            raise ToolLost("the MCP server's answer is no MCP") from None
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ArgumentError(error.message) from None
            if await connection.answers():
                raise RuntimeError(str(error) or type(error).__name__) from None
            await self._drop(connection)
            raise ToolLost(f"the MCP server broke off ({error or type(error).__name__})") from None
        self._failures = 0
        return result

    async def _ready(self) -> Connection:
        """The connection, checked where a call ran out of time, started again where it is gone."""
        connection = self._connection
        if connection is not None and connection.suspect:
            connection.suspect = False
            if not await connection.answers():
                await self._drop(connection)
        async with self._lock:
            if self._closed:
                raise ToolLost("the connection to the MCP server is closed")
            if self._connection is None and self._stateful and self.used:
                raise ToolLost("the MCP server ended, and its state with it")
            for attempt in range(TRIES):
                if self._connection is not None:
                    break
                await self._pause()
                try:
                    self._connection = await connect(self._server)
                except UserError as error:
                    self._fail()
                    if attempt == TRIES - 1:
                        raise ToolLost(str(error)) from None
            assert self._connection is not None
            return self._connection

    async def _pause(self) -> None:
        if self._failures:
            wait = min(MAX_PAUSE, PAUSE * 2 ** (self._failures - 1))
            await asyncio.sleep(max(0.0, self._failed_at + wait - time.monotonic()))

    def _fail(self) -> None:
        self._failures += 1
        self._failed_at = time.monotonic()

    async def _drop(self, connection: Connection) -> None:
        async with self._lock:
            if self._connection is connection:
                self._connection = None
                self._fail()
                await connection.close()
