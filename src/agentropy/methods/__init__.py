"""Methods by name, and `make_method`, which builds one from options as they come from a file or the command line."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from agentropy.algorithms.losses import LossConfig, LossInputs, LossStats
from agentropy.errors import UserError
from agentropy.methods.aepo import aepo
from agentropy.methods.arpo import arpo
from agentropy.methods.base import Method, Shaped
from agentropy.methods.grpo import grpo
from agentropy.methods.simpletir import simpletir
from agentropy.methods.tao_rl import tao_rl
from agentropy.methods.tepo import tepo_dense, tepo_sparse

METHODS: dict[str, Callable[..., Method]] = {
    "grpo": grpo,
    "simpletir": simpletir,
    "arpo": arpo,
    "aepo": aepo,
    "tao-rl": tao_rl,
    "tepo-sparse": tepo_sparse,
    "tepo-dense": tepo_dense,
}


def make_method(name: str, **options: Any) -> Method:
    """Build a method by name. Options are those of its function and the fields of `LossConfig`, as values or as text.

    Raises: UserError for an unknown method or option (names the nearest), a value of the wrong type or out of range.
    """
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{_nearest(name, METHODS)}")
    known = method_options(name)
    loss_names = {f.name for f in dataclasses.fields(LossConfig)}
    values: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    for key, value in options.items():
        option = key.replace("-", "_")
        if option not in known:
            raise UserError(f"method {name} has no option {key!r}{_nearest(option, known)}")
        (loss if option in loss_names else values)[option] = _convert(option, value, known[option][0])
    try:
        config = dataclasses.replace(_loss_of(name), **loss)
    except ValueError as error:
        raise UserError(f"method {name}: {error}") from None
    method = METHODS[name](**values, loss=config)
    defaults = {option: default for option, (_, default) in known.items()}
    return dataclasses.replace(method, options=defaults | values | loss)


def method_options(name: str) -> dict[str, tuple[Any, Any]]:
    """Every option of a method with its type and default, in the order of its signature; the loss options come last."""
    build = METHODS[name]
    hints = get_type_hints(build)
    own = {key: (hints[key], p.default) for key, p in inspect.signature(build).parameters.items() if key != "loss"}
    loss_hints, loss = get_type_hints(LossConfig), _loss_of(name)
    return own | {f.name: (loss_hints[f.name], getattr(loss, f.name)) for f in dataclasses.fields(LossConfig)}


def _loss_of(name: str) -> LossConfig:
    """The loss that a method has where nothing else is said."""
    loss = inspect.signature(METHODS[name]).parameters["loss"].default
    assert isinstance(loss, LossConfig)
    return loss


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    begun = [n for n in names if n.startswith(name)]
    near = difflib.get_close_matches(name, begun or names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"


def _convert(name: str, value: Any, kind: Any) -> Any:
    """The value as its annotated type; text is parsed. Raises UserError that says what the option takes."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (inner,) = [k for k in get_args(kind) if k is not type(None)]
        return None if value is None or value in ("none", "null", "None") else _convert(name, value, inner)
    if origin is Literal:
        if value in get_args(kind):
            return value
        raise UserError(f"option {name}={value!r} is none of {', '.join(map(str, get_args(kind)))}")
    if kind is bool:
        text = value.lower() if isinstance(value, str) else value
        if text in (True, "true", "yes", "on", "1"):
            return True
        if text in (False, "false", "no", "off", "0"):
            return False
        raise UserError(f"option {name}={value!r} is neither true nor false")
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise UserError(f"option {name}={value!r} is no {'whole ' if kind is int else ''}number") from None


__all__ = [
    "METHODS",
    "LossConfig",
    "LossInputs",
    "LossStats",
    "Method",
    "Shaped",
    "aepo",
    "arpo",
    "grpo",
    "make_method",
    "method_options",
    "simpletir",
    "tao_rl",
    "tepo_dense",
    "tepo_sparse",
]
