"""Reading JSON calls, with words for the model where they cannot be read."""

from __future__ import annotations

import json
from typing import Any

from agentropy.trajectory import ToolCall


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def explain(error: Exception) -> str:
    """A JSON error in one line that helps to write the call anew."""
    if isinstance(error, json.JSONDecodeError):
        if "control character" in error.msg:
            return f"not JSON: a string holds a raw line break or tab at character {error.pos}; write \\n or \\t"
        return f"not JSON: {error.msg} at character {error.pos}"
    return "not JSON: nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"


def json_arguments(tool: str, text: str) -> ToolCall:
    """A call whose arguments are the JSON object `text`."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        return ToolCall(tool, error=explain(error))
    if not isinstance(value, dict):
        return ToolCall(tool, error="the arguments are no JSON object")
    return ToolCall(tool, value)


def json_call(value: Any) -> ToolCall:
    """A call from `{"name": …, "arguments": {…}}`. Arguments may be a string that holds the object (OpenAI's API)."""
    if not isinstance(value, dict):
        return ToolCall("", error='a call is a JSON object {"name": …, "arguments": {…}}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", error='the call has no "name"')
    if unknown := sorted(set(value) - {"name", "arguments", "id", "type"}):
        return ToolCall(name, error=f'unknown key {unknown[0]!r} beside "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return json_arguments(name, arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, error='"arguments" is no JSON object')
    return ToolCall(name, arguments)
