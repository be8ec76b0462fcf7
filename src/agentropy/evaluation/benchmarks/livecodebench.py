"""Rows of LiveCodeBench: tests as its publisher packs them.

A row's private tests are JSON inside a pickle inside zlib inside base64. A pickle from elsewhere can run any code when
it is loaded, so it never is: the one string in it is read off its opcodes, and anything but a string is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from agentropy.errors import UserError

PACKED = "livecodebench"
"""The key under which a task keeps its tests packed: unpacked they are several times as large."""
MAX_BYTES = 1 << 30
"""Unpacked tests of one problem beyond this are no tests but an attack on memory."""
MAX_OPCODES = 1000
"""A pickle of one string has half a dozen."""
_STRING_OPCODES = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"})

PRELUDE = """
import sys, io, os, re, math, cmath, heapq, bisect, random, string, operator, itertools, functools, collections
import datetime, time, copy, json, fractions, decimal, statistics
from math import *
from heapq import *
from bisect import *
from string import *
from operator import *
from itertools import *
from functools import *
from collections import *
from fractions import Fraction
from decimal import Decimal
from typing import *
from builtins import *
sys.setrecursionlimit(50000)
""".lstrip()
"""Names that the publisher's own checker puts before a program; starter code relies on `List` and the like."""


def packed_tests(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The tests of a row as they are, for `Task.row["tests"]`. Raises UserError where they cannot be read."""
    packed = {name: row.get(name) or "" for name in ("public_test_cases", "private_test_cases", "metadata")}
    tests = {PACKED: packed}
    try:
        unpack(tests)
    except ValueError as error:
        raise UserError(f"{where}: the tests cannot be read ({error})") from None
    return tests


def unpack(tests: Mapping[str, Any]) -> tuple[list[dict[str, str]], str]:
    """(tests as a code grader takes them, what goes before the program) of `packed_tests`. Raises ValueError."""
    packed = tests[PACKED]
    cases = [*_cases(packed["public_test_cases"]), *_cases(packed["private_test_cases"])]
    metadata = packed["metadata"]
    details = _json(metadata) if isinstance(metadata, str) and metadata.strip() else metadata
    function = details.get("func_name") if isinstance(details, Mapping) else None
    if not cases:
        raise ValueError("there are none")
    return [_test(case, function) for case in cases], PRELUDE


def _cases(packed: Any) -> Sequence[Mapping[str, Any]]:
    """The list of test cases in a column: JSON, packed JSON, or a list already."""
    cases = packed
    if isinstance(packed, str):
        if not packed.strip():
            return ()
        cases = _json(packed if packed.lstrip().startswith("[") else _unpickled(packed))
    if not isinstance(cases, list) or not all(isinstance(c, Mapping) for c in cases):
        raise ValueError("they are no list of objects")
    return cases


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None


def _unpickled(packed: str) -> str:
    """The one string in base64(zlib(pickle)), without unpickling."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(packed, validate=True), MAX_BYTES)
        if not inflate.eof:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB, or cut off")
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"neither JSON nor packed JSON: {error}") from None
    try:
        operations = [(opcode.name, argument) for opcode, argument, _ in islice(pickletools.genops(raw), MAX_OPCODES)]
    except (ValueError, IndexError) as error:
        raise ValueError(f"a broken pickle: {error}") from None
    for name, _ in operations:
        if name not in _STRING_OPCODES | _HARMLESS_OPCODES:
            raise ValueError(f"the pickle holds {name}, which is no string; it was not loaded")
    strings = [str(argument) for name, argument in operations if name in _STRING_OPCODES]
    if len(strings) != 1:
        raise ValueError(f"the pickle holds {len(strings)} strings instead of one")
    return strings[0]


def _test(case: Mapping[str, Any], function: Any) -> dict[str, str]:
    given, wanted = case.get("input"), case.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise ValueError("a test without input or output")
    if case.get("testtype") != "functional":
        return {"stdin": given, "stdout": wanted}
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"a functional test, but the function's name is {function!r}")
    arguments = [_json(line) for line in given.split("\n") if line.strip()]
    return {"entry_point": function, "test": _call(function, arguments, _json(wanted))}


def _call(function: str, arguments: Sequence[Any], wanted: Any) -> str:
    """Assertions on one call of the solution, a method of `Solution` or a function; tuples count as lists."""
    packed = json.dumps([list(arguments), wanted])
    return (
        "import json as _json\n"
        "def _plain(value):\n"
        "    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value\n"
        f"_arguments, _wanted = _json.loads({packed!r})\n"
        f"_function = getattr(Solution(), {function!r}) if 'Solution' in globals() else {function}\n"
        "_given = _plain(_function(*_arguments))\n"
        "assert _given == _wanted, f'{str(_given)[:80]} instead of {str(_wanted)[:80]}'\n"
    )


def question(row: Mapping[str, Any]) -> str:
    """The problem as it is put: statement, what to read and print, and the starter code where there is one."""
    text = str(row["question_content"]).strip()
    starter = str(row.get("starter_code") or "").strip()
    if starter:
        return f"{text}\n\nComplete this code; it is called by the tests:\n\n```python\n{starter}\n```"
    return f"{text}\n\nRead the input from stdin and print the answer to stdout."
