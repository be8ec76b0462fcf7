"""Shape checks at run time: a function under test wrapped so that jaxtyping and beartype check what goes in and out."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype
from torch import Tensor


def shape(text: str) -> Any:
    """`"Float32 T"` as the jaxtyping annotation `Float32[Tensor, "T"]`."""
    kind, _, axes = text.partition(" ")
    return getattr(jaxtyping, kind)[Tensor, axes]


def typed(function: Callable[..., Any], result: Any, **arguments: Any) -> Callable[..., Any]:
    """A copy of `function` whose named arguments and result are checked; axis names must agree within a call."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    annotations = arguments | {"return": result}
    copy.__annotations__ = {k: shape(v) if isinstance(v, str) else v for k, v in annotations.items()}
    return jaxtyping.jaxtyped(typechecker=beartype)(copy)  # type: ignore[no-any-return]
