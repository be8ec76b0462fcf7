"""Pieces of trajectories whose source has text instead of token ids, and what only the text can tell."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.trajectory import Segment, SegmentKind, Status, ToolCall, ToolResult

FAILED = re.compile(r"\s*(?:\w*error\b|exception\b|traceback \(most recent call last\)|failed\b)", re.IGNORECASE)
TRACEBACK = "Traceback (most recent call last):"
TIMED_OUT = re.compile(r"\s*(?:error: ?)?(?:\w+ )?(?:timeout|timed out|time limit)", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """What a user may say of a source: `score` names the key or column that holds the outcome."""

    score: str | None = None


def text_segment(
    kind: SegmentKind, text: str, calls: Sequence[ToolCall] = (), results: Sequence[ToolResult] = ()
) -> Segment:
    """A segment of which only the text is known: one entry that holds the whole text, none where it is empty."""
    n = 1 if text else 0
    return Segment(kind, (0,) * n, calls=tuple(calls), results=tuple(results), tokens=(text,) * n)


def status_of(text: str) -> Status:
    """What a result's text says of how its call went; "ok" unless it says otherwise (docs/analysis.md has the rule)."""
    head = text[:200]
    if TIMED_OUT.match(head):
        return "timeout"
    if FAILED.match(head) or TRACEBACK in text[-20_000:]:
        return "error"
    if head.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return "ok"
        if isinstance(data, dict) and data.get("error"):
            return "error"
    return "ok"


def key_of(*parts: str) -> str:
    """A short name for a question that its source does not name: the same text gives the same name."""
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=6)
    return f"q-{digest.hexdigest()}"


def number(value: Any) -> float | None:
    """A number or a flag as a float; None for anything else, and for NaN."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def score_in(data: Mapping[str, Any], options: Options, names: Sequence[str]) -> float | None:
    """The outcome of a row: under the name that the user gave, else the first of `names` that holds something.

    Raises UserError for an outcome that is no number: taken as missing, it would turn up as "not graded" unseen.
    """
    if options.score is not None:
        if options.score not in data:
            raise UserError(f"there is no {options.score!r} (named by --score); there are {', '.join(map(str, data))}")
        names = (options.score,)
    for name in names:
        value = _unquoted(data.get(name))
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        found = number(value)
        if found is None:
            raise UserError(
                f"the outcome {name!r} is {str(value)[:60]!r}, which is no number; --score names another key"
            )
        return found
    return None


def _unquoted(value: Any) -> Any:
    """The number or flag that a text holds; None for an empty text."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in ("", "true", "false"):
        return {"": None, "true": True, "false": False}[word]
    with contextlib.suppress(ValueError):
        return float(word)
    return value


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line of a JSON Lines file, or each object of a JSON array, with its number from 1.

    Raises UserError that names file and line.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    with file:
        if path.suffix == ".json":
            whole = parse(file.read(), str(path))
            yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
            return
        for line, raw in enumerate(file, 1):
            if raw.strip():
                yield line, parse(raw, f"{path}, line {line}")


def parse(raw: bytes, where: str) -> Any:
    """JSON as Python's own parser reads it, faster where orjson is there. Raises UserError that begins with `where`."""
    if _fast_loads is not None:
        try:
            return _fast_loads(raw)
        except ValueError:
            pass
    try:
        return json.loads(raw)  # half surrogate pairs, NaN, and the words of the error
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno})") from None
    except (RecursionError, ValueError):
        raise UserError(f"{where}: not JSON that can be read") from None


def _fast_parser() -> Callable[[bytes], Any] | None:
    try:
        from orjson import loads
    except ImportError:
        return None
    return loads


_fast_loads = _fast_parser()
