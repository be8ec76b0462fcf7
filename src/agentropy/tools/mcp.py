"""The tools of an MCP server (Model Context Protocol, by the `mcp` library), over stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from agentropy.errors import UserError
from agentropy.tools.base import Tool
from agentropy.tools.clip import clip
from agentropy.tools.mcp_link import Link, Server, connect
from agentropy.tools.parts import PartSession
from agentropy.tools.schema import ArgumentError
from agentropy.trajectory import ToolResult

if TYPE_CHECKING:
    import mcp

MAX_PAGES = 100
"""Pages of a server's list of tools that are read."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool of a server: the name that our policy sees, and the server's own."""

    name: str
    remote: str
    description: str
    parameters: Mapping[str, Any]

    def tool(self, link: Link, lock: asyncio.Lock | None) -> Tool:
        """The tool over a connection. lock: held while a call runs, where calls of a turn must not overtake."""

        async def run(arguments: Mapping[str, Any]) -> ToolResult:
            check_text(arguments)
            if lock is None:
                return to_result(await link.call(self.remote, dict(arguments)))
            async with lock:
                return to_result(await link.call(self.remote, dict(arguments)))

        return Tool(self.name, self.description, self.parameters, run)


class McpPart:
    """The tools of one server. Made by `mcp_tools`."""

    def __init__(self, server: Server, name: str, offers: Sequence[Offer], each: bool, timeout: float) -> None:
        self._server = server
        self._name = name
        self._offers = tuple(offers)
        self._each = each
        self._timeout = timeout
        self._link: Link | None = None

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [Tool(o.name, o.description, o.parameters, _no_run).spec() for o in self._offers]

    def avoid(self, taken: Set[str]) -> None:
        """Give tools whose name is taken the server's name as a prefix, and a number where that is taken too."""
        used = set(taken)
        offers = []
        for offer in self._offers:
            name, number = offer.name, 1
            while name in used:
                suffix = f"_{number}" if number > 1 else ""
                name, number = f"{self._name}{suffix}_{offer.name}", number + 1
            used.add(name)
            offers.append(replace(offer, name=name))
        self._offers = tuple(offers)

    async def start(self) -> None:
        """Connect, so that a server which does not start is told before any rollout."""
        if not self._each:
            self._link = Link(self._server, self._timeout)
            await self._link.open()

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[PartSession, str | None]:
        if self._each:
            return _Session(self._offers, self._server, self._timeout), None
        if self._link is None:
            self._link = Link(self._server, self._timeout)
        return _Shared(self._offers, self._link), None

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


class _Shared:
    """Calls over the one connection that all trajectories use."""

    keeps_time = True
    repeatable = True

    def __init__(self, offers: Sequence[Offer], link: Link) -> None:
        self.tools: Sequence[Tool] = [o.tool(link, None) for o in offers]

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        return self

    async def close(self) -> None:
        return None


class _Session:
    """Calls over a connection of the trajectory's own, opened at the first call: what the server keeps is its state."""

    keeps_time = True
    repeatable = False

    def __init__(self, offers: Sequence[Offer], server: Server, timeout: float) -> None:
        self._offers = offers
        self._server = server
        self._timeout = timeout
        self._link = Link(server, timeout, stateful=True)
        lock = asyncio.Lock()
        self.tools: Sequence[Tool] = [o.tool(self._link, lock) for o in offers]

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        if self._link.used:
            raise UserError(
                f"the state of MCP server {self._server.label} cannot be copied for a branch; use mcp: for a server "
                "without state, or a method that does not branch"
            )
        return _Session(self._offers, self._server, self._timeout)

    async def close(self) -> None:
        await self._link.close()


def mcp_tools(server: str, *, each: bool = False, timeout: float = 30.0, start_limit: float = 60.0) -> McpPart:
    """The tools of an MCP server, which is asked for them right now.

    server: a command with its arguments (stdio), or an http(s) URL (streamable HTTP). Words `NAME=value` before it are
    variables of the command's environment, or headers of the requests; `$NAME` in a value is taken from our own
    environment. each: a connection (and a process) for every trajectory, for a server that keeps state; else all share
    one. timeout: seconds a call may take. start_limit: seconds a server may take to start.

    Raises UserError where the `mcp` library is missing, or the server does not start, speak MCP, or have tools.
    """
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise UserError("tools of MCP servers need the package mcp: pip install 'agentropy[mcp]'") from None
    if timeout <= 0 or start_limit <= 0:
        raise UserError("the time limits of an MCP server must be above 0 seconds")
    parsed = replace(Server.parse(server), start_limit=start_limit)
    name, tools = _run_here(_ask(parsed))
    if not tools:
        raise UserError(f"MCP server {parsed.label} has no tools")
    part = McpPart(parsed, name, tools, each, timeout)
    part.avoid(frozenset())  # two names of a server may have become one
    return part


async def _ask(server: Server) -> tuple[str, list[Offer]]:
    """The server's name and its tools."""
    connection = await connect(server)
    try:
        async with asyncio.timeout(server.start_limit):
            tools: list[mcp.Tool] = []
            cursor = None
            for _ in range(MAX_PAGES):
                page = await connection.client.list_tools(cursor=cursor, cache_mode="bypass")
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
            info = connection.client.server_info
    except TimeoutError:
        raise UserError(f"MCP server {server.label} does not list its tools in {server.start_limit:g} s") from None
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"MCP server {server.label} does not list its tools: {why[:300]}") from None
    finally:
        await connection.close()
    return _name(info.name if info else "mcp"), [_offer(t) for t in tools]


def _run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run to its end, in a thread where an event loop is running already (a part's tools are known before `start`)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="agentropy-mcp")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return done[0]


def _name(text: str) -> str:
    """A name that every chat template and server takes: letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:64] or "tool"


def _offer(tool: mcp.Tool) -> Offer:
    from jsonschema import Draft202012Validator, SchemaError

    schema: Mapping[str, Any] = tool.input_schema
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        schema = {"type": "object"}  # the server will say what it thinks of the arguments
    description = " ".join((tool.description or tool.title or tool.name).split(" "))
    return Offer(_name(tool.name), tool.name, clip(description, 4000), _plain(schema))


def _plain(schema: Any) -> Any:
    """The schema with `true`, which allows anything, written `{}`, as our check of arguments reads it."""
    if isinstance(schema, list):
        return [_plain(s) for s in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            out[key] = {n: {} if s is True else _plain(s) for n, s in value.items()}
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            out[key] = [{} if s is True else _plain(s) for s in value]
        else:
            out[key] = value if key in ("enum", "const", "default", "examples") else _plain(value)
    return out


def check_text(arguments: Mapping[str, Any]) -> None:
    """Raises ArgumentError for what is no Unicode text, which would end the connection instead of the call."""
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError):
        raise ArgumentError("the arguments are not valid Unicode text") from None


def to_result(result: mcp.types.CallToolResult) -> ToolResult:
    """Texts joined by line breaks, other content named in a word; structured content as JSON where there is no text."""
    shown = [_block(block) for block in result.content]
    if result.structured_content is not None and not any(block.type == "text" for block in result.content):
        shown.insert(0, json.dumps(result.structured_content, ensure_ascii=False))
    return ToolResult(clip("\n".join(shown)), "error" if result.is_error else "ok")


def _block(block: mcp.types.ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[resource {block.resource.uri}]"
    return f"[{block.type}, {block.mime_type}]"


async def _no_run(arguments: Mapping[str, Any]) -> ToolResult:
    raise AssertionError("this record only describes the tool")
