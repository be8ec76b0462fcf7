"""Built-in tools by the names that the command line and configurations give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.tools.mcp import mcp_tools
from agentropy.tools.page import page_tool
from agentropy.tools.python import python_tool
from agentropy.tools.search import search_tool
from agentropy.tools.web import web_search_tool

NAMES = (
    "python, python:stateful, search, search:FILE.jsonl, web-search:URL, read-page, mcp:COMMAND, mcp:URL, "
    "mcp-each:COMMAND and mcp-each:URL"
)


def tool_by_name(name: str, timeout: float, tasks: str | None = None) -> Any:
    """A built-in tool by its name, `KIND` or `KIND:ARGUMENT`; docs/tools.md lists them.

    timeout: seconds a call may take. tasks: the questions' file; `search` alone takes `corpus.jsonl` from its folder.
    Raises UserError for a name that is none, and for a tool that cannot be had.
    """
    kind, _, argument = name.partition(":")
    if kind == "python" and argument in ("", "stateful"):
        return python_tool(timeout=timeout, stateful=bool(argument))
    if kind == "search":
        beside = Path((tasks or "").partition("?")[0]).with_name("corpus.jsonl") if tasks else None
        if not argument and (beside is None or not beside.is_file()):
            missing = f" (there is no {beside})" if beside else ""
            raise UserError(
                f"tool search needs a corpus: search:FILE.jsonl, one {{title, text}} object a line{missing}"
            )
        return search_tool(Path(argument) if argument else beside or Path())
    if kind == "web-search":
        if not argument:
            raise UserError("tool web-search needs the address of a SearXNG: web-search:URL")
        return web_search_tool(argument)
    if name == "read-page":
        return page_tool()
    if kind in ("mcp", "mcp-each"):
        return mcp_tools(argument, each=kind == "mcp-each", timeout=timeout)
    raise UserError(f"no built-in tool {name!r}; there are {NAMES}")
