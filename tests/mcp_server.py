"""A real MCP server with good and bad tools, over stdio, or over HTTP on a port that it prints.

python mcp_server.py [stdio|http|mute|flood|crash|empty] [PORT]
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else "stdio"

if MODE == "mute":
    time.sleep(1000)
if MODE == "flood":
    while True:
        print("this is no message")
if MODE == "crash":
    print("first line", file=sys.stderr)
    sys.exit("cannot open the database: größe 東京")

from mcp.server.mcpserver import MCPServer  # noqa: E402
from mcp.types import (  # noqa: E402
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

server = MCPServer("Demo server")
count = 0


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def search(query: str) -> str:
    """Looks something up."""
    return f"found {query}"


async def hang() -> str:
    """Never answers."""
    await asyncio.sleep(1000)
    return ""


async def block() -> str:
    """Keeps the whole server busy."""
    time.sleep(1000)
    return ""


def die() -> str:
    """Ends the server in the middle of the call."""
    os._exit(3)


def die_once(marker: str) -> str:
    """Ends the server unless the file `marker` is there, which it writes."""
    if os.path.exists(marker):
        return "alive"
    with open(marker, "w"):
        pass
    os._exit(3)


def fail(why: str) -> str:
    """Raises an exception."""
    raise ValueError(why)


def flood(size: int) -> str:
    """A long text."""
    return "x" * size + "end"


def chatter(size: int) -> str:
    """Writes much to stderr."""
    print("y" * size, file=sys.stderr, flush=True)
    return "done"


def echo(text: str) -> str:
    """Says the text again."""
    return text


def counter() -> int:
    """How often it was called."""
    global count
    count += 1
    return count


def pid() -> int:
    """The server's process."""
    return os.getpid()


def variable(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "unset")


def mixed() -> CallToolResult:
    """Content of many kinds."""
    blob = BlobResourceContents(uri="file:///data.bin", mime_type="application/octet-stream", blob="AAAA")
    return CallToolResult(
        content=[
            TextContent(type="text", text="one"),
            ImageContent(type="image", data="AAAA", mime_type="image/png"),
            ResourceLink(type="resource_link", name="link", uri="https://example.org/a"),
            EmbeddedResource(type="resource", resource=blob),
            TextContent(type="text", text="two"),
        ]
    )


def structured() -> CallToolResult:
    """Only structured content."""
    return CallToolResult(content=[], structured_content={"größe": [1, 2]})


def refuse(point: dict[str, Any]) -> CallToolResult:
    """An error that the server reports."""
    return CallToolResult(content=[TextContent(type="text", text="no such point")], is_error=True)


if MODE != "empty":
    for function in (add, search, hang, block, die, die_once, fail, flood, chatter, echo, counter, pid, variable):
        server.tool()(function)
    for function in (mixed, structured, refuse):
        server.tool(structured_output=False)(function)
    server.tool(name="odd name/é")(echo)

if MODE == "http":
    import socket

    import uvicorn

    listener = socket.create_server(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listener])
else:
    server.run("stdio")
