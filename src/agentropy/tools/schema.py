"""Checking a call's arguments against the JSON schema of its tool, in words that help the model to repair the call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict, Mapping),
    "null": (type(None),),
}
_INTEGER = re.compile(r"[+-]?\d{1,4000}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")


class ArgumentError(Exception):
    """The arguments do not fit; the message is for the model. A tool may raise it for what no schema can say."""


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, coerced where only one reading is possible ("3" for an integer, 3.0 for 3, "true").

    Unlike in JSON Schema at large, arguments that `properties` does not name are refused, unless `additionalProperties`
    says otherwise: a misspelt name must be told. Understands what `transformers.utils.get_json_schema` writes: type
    (also a list of types), nullable, enum, items, properties, required, additionalProperties, anyOf. Raises
    ArgumentError, which names the argument at fault.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    known = ", ".join(f'"{p}"' for p in properties) or "none"
    open_ended = schema.get("additionalProperties", "properties" not in schema)
    for name in arguments:
        if name not in properties and not open_ended:
            raise ArgumentError(f'unknown argument "{name}" (the arguments are: {known})')
    for name in schema.get("required") or ():
        if name not in arguments:
            raise ArgumentError(f'argument "{name}" is missing (the arguments are: {known})')
    return {n: _check(v, properties[n], f'argument "{n}"') if n in properties else v for n, v in arguments.items()}


def _types(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type")
    types = [given] if isinstance(given, str) else list(given or ())
    return [*types, "null"] if types and schema.get("nullable") else types


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(kind, (object,)))


def _check(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        for strict in (True, False):
            for alternative in alternatives:
                if strict and not any(_is(value, t) for t in _types(alternative)):
                    continue
                try:
                    return _check(value, alternative, where)
                except ArgumentError:
                    continue
        raise ArgumentError(f"{where} fits none of its allowed forms")
    types = _types(schema)
    if types and not any(_is(value, t) for t in types):
        value = _coerce(value, types, where)
    # In Python True == 1, in JSON it is not.
    if "enum" in schema and not any(
        value == e and isinstance(value, bool) == isinstance(e, bool) for e in schema["enum"]
    ):
        raise ArgumentError(f"{where} must be one of {', '.join(map(repr, schema['enum']))}")
    if isinstance(value, list | tuple) and isinstance(schema.get("items"), Mapping):
        return [_check(v, schema["items"], f"{where}, item {i}") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return _check_object(value, schema, where)
    return value


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    properties, extra = schema.get("properties"), schema.get("additionalProperties")
    for name in schema.get("required") or ():
        if name not in value:
            raise ArgumentError(f'{where} lacks "{name}"')
    out = {}
    for name, inner in value.items():
        inner_schema = (properties or {}).get(name, extra if isinstance(extra, Mapping) else {})
        if properties is not None and name not in properties and extra is False:
            raise ArgumentError(f'{where} has an unknown key "{name}"')
        out[name] = _check(inner, inner_schema, f'{where}, "{name}"')
    return out


def _coerce(value: Any, types: list[str], where: str) -> Any:
    if isinstance(value, str):
        word = value.strip()
        if "integer" in types and _INTEGER.fullmatch(word):
            return int(word)
        if "number" in types and _NUMBER.fullmatch(word):
            return float(word)
        if "boolean" in types and word.lower() in ("true", "false"):
            return word.lower() == "true"
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return int(value)
    if types == ["string"] and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    wanted = " or ".join(types)
    raise ArgumentError(f"{where} must be of type {wanted}, not {_name(value)}")


def _name(value: Any) -> str:
    for kind in ("boolean", "null", "string", "integer", "number", "array", "object"):
        if _is(value, kind):
            return kind
    return type(value).__name__
