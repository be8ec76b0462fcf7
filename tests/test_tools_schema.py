"""Checking arguments: nothing but ArgumentError, and what passes fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.tools.schema import ArgumentError, check_arguments

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PROPERTIES: dict[str, Any] = {
    "a": {"type": "integer"},
    "b": {"type": "number", "nullable": True},
    "c": {"type": ["string", "boolean"]},
    "d": {"type": "array", "items": {"type": "integer"}},
    "e": {"type": "object", "additionalProperties": {"type": "string"}},
    "f": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
    "g": {"enum": ["x", 1]},
    "h": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["a"]}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """JSON Schema's own rules, written a second time."""
    if "anyOf" in schema:
        return any(fits(value, s) for s in schema["anyOf"])
    if "enum" in schema:
        return any(value == e and isinstance(value, bool) == isinstance(e, bool) for e in schema["enum"])
    types = schema.get("type", ["any"])
    names = [types] if isinstance(types, str) else list(types)
    names += ["null"] if schema.get("nullable") else []
    kinds = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "null": value is None,
        "any": True,
    }
    if not any(kinds[n] for n in names):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(fits(v, schema["items"]) for v in value)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return all(fits(v, schema["additionalProperties"]) for v in value.values())
    return True


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*PROPERTIES, "z"]), JSON, max_size=5))
def test_what_passes_fits_and_what_fits_passes_unchanged(arguments: dict[str, Any]) -> None:
    before = repr(arguments)
    fit = "z" not in arguments and "a" in arguments and all(fits(v, PROPERTIES[n]) for n, v in arguments.items())
    try:
        checked = check_arguments(arguments, SCHEMA)
    except ArgumentError:
        assert not fit
    else:
        assert "z" not in checked
        assert all(fits(v, PROPERTIES[n]) for n, v in checked.items())
        if fit:
            assert checked == arguments
    assert repr(arguments) == before


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        (" 12 ", {"type": "integer"}, 12),
        ("-3", {"type": "number"}, -3.0),
        ("1e3", {"type": "number"}, 1000.0),
        ("TRUE", {"type": "boolean"}, True),
        (2.0, {"type": "integer"}, 2),
        (1.5, {"type": "string"}, "1.5"),
        ("7", {"type": ["integer", "null"]}, 7),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7"),
    ],
)
def test_coercion(value: Any, schema: dict[str, Any], expected: Any) -> None:
    checked = check_arguments({"a": value}, {"properties": {"a": schema}})["a"]
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("1.5", {"type": "integer"}),
        ("0x10", {"type": "integer"}),
        ("one", {"type": "number"}),
        ("nan", {"type": "number"}),
        ("yes", {"type": "boolean"}),
        (1, {"type": "boolean"}),
        (float("inf"), {"type": "integer"}),
        (True, {"type": "string"}),
        (None, {"type": "string"}),
        ("9" * 5000, {"type": "integer"}),
        ("[1]", {"type": "array"}),
        (True, {"enum": [1]}),
    ],
)
def test_no_guessing(value: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match='argument "a"'):
        check_arguments({"a": value}, {"properties": {"a": schema}})


def test_nested_objects() -> None:
    inner = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    schema = {"properties": {"a": inner}}
    assert check_arguments({"a": {"x": "1"}}, schema) == {"a": {"x": 1}}
    with pytest.raises(ArgumentError, match='lacks "x"'):
        check_arguments({"a": {}}, schema)
    with pytest.raises(ArgumentError, match='unknown key "y"'):
        check_arguments({"a": {"x": 1, "y": 2}}, schema)
