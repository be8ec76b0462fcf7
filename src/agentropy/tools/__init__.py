"""What an agent can call."""

from __future__ import annotations

from agentropy.tools.base import Tool, ToolBox, ToolSession
from agentropy.tools.faults import Fault, delay, outage, with_faults, wrong
from agentropy.tools.functions import from_environment, from_function
from agentropy.tools.mcp import mcp_tools
from agentropy.tools.parts import ToolLost
from agentropy.tools.python import python_tool
from agentropy.tools.schema import ArgumentError
from agentropy.tools.search import Document, Hit, SearchIndex, search_tool, show_best, show_hits
from agentropy.tools.session import make_toolbox

__all__ = [
    "ArgumentError",
    "Document",
    "Fault",
    "Hit",
    "SearchIndex",
    "Tool",
    "ToolBox",
    "ToolLost",
    "ToolSession",
    "delay",
    "from_environment",
    "from_function",
    "make_toolbox",
    "mcp_tools",
    "outage",
    "python_tool",
    "search_tool",
    "show_best",
    "show_hits",
    "with_faults",
    "wrong",
]
