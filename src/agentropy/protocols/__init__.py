"""How prompts, calls, results and answers look in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentropy.errors import UserError
from agentropy.protocols.base import Dialect, Turn
from agentropy.protocols.fence import FenceDialect
from agentropy.protocols.hermes import HermesDialect
from agentropy.protocols.tags import TagsDialect

DIALECTS: dict[str, Callable[..., Dialect]] = {"hermes": HermesDialect, "fence": FenceDialect, "tags": TagsDialect}


def make_dialect(name: str, tokenizer: Any, **options: Any) -> Dialect:
    """The protocol `name` bound to a tokenizer; options: see the class.

    Raises UserError for an unknown name or option.
    """
    if name not in DIALECTS:
        raise UserError(f"protocol {name!r} is none of {', '.join(DIALECTS)}")
    try:
        return DIALECTS[name](tokenizer, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"protocol {name!r}: {str(error).partition(') ')[2] or error}") from None


__all__ = ["DIALECTS", "Dialect", "Turn", "make_dialect"]
