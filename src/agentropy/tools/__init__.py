"""What an agent can call."""

from __future__ import annotations

from agentropy.tools.base import Tool, ToolBox, ToolSession
from agentropy.tools.faults import Fault, delay, outage, with_faults, wrong
from agentropy.tools.functions import from_environment, from_function
from agentropy.tools.mcp import mcp_tools
from agentropy.tools.page import page_tool
from agentropy.tools.parts import ToolLost
from agentropy.tools.python import python_tool
from agentropy.tools.schema import ArgumentError
from agentropy.tools.search import Document, Hit, SearchIndex, search_tool, show_best, show_hits
from agentropy.tools.session import make_toolbox
from agentropy.tools.web import SearchEngine, SearxNG, WebResult, show_results, web_search_tool

__all__ = [
    "ArgumentError",
    "Document",
    "Fault",
    "Hit",
    "SearchEngine",
    "SearchIndex",
    "SearxNG",
    "Tool",
    "ToolBox",
    "ToolLost",
    "ToolSession",
    "WebResult",
    "delay",
    "from_environment",
    "from_function",
    "make_toolbox",
    "mcp_tools",
    "outage",
    "page_tool",
    "python_tool",
    "search_tool",
    "show_best",
    "show_hits",
    "show_results",
    "web_search_tool",
    "with_faults",
    "wrong",
]
