"""How prompts, calls, results and answers look in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentropy.errors import UserError
from agentropy.protocols.base import Dialect, Turn
from agentropy.protocols.fence import FenceDialect
from agentropy.protocols.hermes import HermesDialect
from agentropy.protocols.tags import TagsDialect

DIALECTS: dict[str, Callable[..., Dialect]] = {"hermes": HermesDialect, "fence": FenceDialect, "tags": TagsDialect}


def make_dialect(name: str, tokenizer: Any, **options: Any) -> Dialect:
    """The protocol `name` bound to a tokenizer; options: see the class.

    Raises UserError for an unknown name or option, or a value of the wrong type.
    """
    if name not in DIALECTS:
        raise UserError(f"protocol {name!r} is none of {', '.join(DIALECTS)}")
    known = get_type_hints(DIALECTS[name].__init__)
    for key, value in options.items():
        if key not in known or key == "tokenizer":
            raise UserError(f"protocol {name!r} has no option {key!r}")
        try:
            TypeAdapter(known[key]).validate_python(value)
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            raise UserError(f"protocol {name!r}: option {key}={value!r}: {what[0].lower()}{what[1:]}") from None
    return DIALECTS[name](tokenizer, **options)


__all__ = ["DIALECTS", "Dialect", "Turn", "make_dialect"]
