"""Trajectories as JSON Lines: `agentropy.trajectory/1`, as docs/trajectory.md defines it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.trajectory.types import STATUSES, Segment, ToolCall, ToolResult, Trajectory, check_results

SCHEMA = "agentropy.trajectory/1"
ID_LIMIT = 2**63
"""Tensors hold ids below this."""


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as the JSON object of docs/trajectory.md. Unknown keys that were read are written back."""
    t = trajectory
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "question_id": t.question_id,
        "trajectory_id": t.trajectory_id,
        "question": t.question,
        "segments": [_segment_to_json(s) for s in t.segments],
        "answer": t.answer,
        "score": t.score,
        "stop": t.stop,
    }
    if t.entropy_kind != "exact":
        out["entropy_kind"] = t.entropy_kind
    if t.ids_kind != "sampled":
        out["ids_kind"] = t.ids_kind
    if t.parent_id is not None:
        out["parent_id"] = t.parent_id
    if t.fork_at is not None:
        out["fork_at"] = t.fork_at
    return {k: v for k, v in t.extra.items() if k not in _TRAJECTORY_KEYS} | out


def _segment_to_json(s: Segment) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": s.kind, "ids": list(s.ids)}
    if s.logprobs is not None:
        out["logprobs"] = list(s.logprobs)
    if s.entropies is not None:
        out["entropies"] = list(s.entropies)
    if s.tokens is not None:
        out["tokens"] = list(s.tokens)
    if s.alternatives is not None:
        out["alternatives"] = [[list(pair) for pair in token] for token in s.alternatives]
    if s.kind == "call":
        out["calls"] = [
            {"tool": c.tool, "arguments": dict(c.arguments)} | ({"error": c.error} if c.error is not None else {})
            for c in s.calls
        ]
    if s.kind == "result":
        out["results"] = [
            {"status": r.status, "output": r.content, "seconds": r.seconds}
            | ({"reward": r.reward} if r.reward is not None else {})
            | ({"stop": True} if r.stop else {})
            for r in s.results
        ]
    return {k: v for k, v in s.extra.items() if k not in _SEGMENT_KEYS} | out


_TRAJECTORY_KEYS = frozenset(
    {"schema", "question_id", "trajectory_id", "question", "segments", "answer", "score", "stop"}
    | {"entropy_kind", "parent_id", "fork_at", "ids_kind"}
)
_SEGMENT_KEYS = frozenset({"kind", "ids", "logprobs", "entropies", "calls", "results", "tokens", "alternatives"})


def from_json(data: Mapping[str, Any]) -> Trajectory:
    """Read one JSON object. Raises UserError that names the key at fault; unknown keys are kept in `extra`."""
    if not isinstance(data, Mapping):
        raise UserError(f"a trajectory is a JSON object, not a {type(data).__name__}")
    schema = data.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UserError(f"schema {schema!r} is not {SCHEMA!r}, the one this version reads")
    for key in ("question_id", "segments"):
        if data.get(key) is None:
            chat = "; chat messages are read by `agentropy analyze` and `agentropy show`" if "messages" in data else ""
            raise UserError(f"key {key!r} is missing{chat}")
    for key in ("question_id", "trajectory_id", "parent_id"):
        if isinstance(data.get(key), bool) or not isinstance(data.get(key, ""), str | int | None):
            raise UserError(f"{key} {data[key]!r} is no text")
    fork_at = data.get("fork_at")
    if fork_at is not None and (isinstance(fork_at, bool) or not isinstance(fork_at, int) or fork_at < 0):
        raise UserError(f"fork_at {fork_at!r} is no position")
    parent_id = data.get("parent_id")
    segments = data["segments"]
    if not isinstance(segments, list):
        raise UserError("key 'segments' is no list")
    answer, score = data.get("answer"), _number(data, "score")
    parsed = []
    for i, segment in enumerate(segments):
        try:
            parsed.append(_segment_from_json(segment))
        except UserError as error:
            raise UserError(f"segment {i}: {error}") from None
    trajectory = Trajectory(
        question_id=str(data["question_id"]),
        trajectory_id=str(_given(data, "trajectory_id", data["question_id"])),
        question=str(_given(data, "question", "")),
        segments=tuple(parsed),
        answer=None if answer is None else str(answer),
        score=score,
        stop=_given(data, "stop", "answer" if answer is not None or (score or 0) > 0 else "void"),
        entropy_kind=_given(data, "entropy_kind", "exact"),
        parent_id=None if parent_id is None else str(parent_id),
        fork_at=fork_at,
        extra={k: v for k, v in data.items() if k not in _TRAJECTORY_KEYS},
        ids_kind=_given(data, "ids_kind", "sampled"),
    )
    check_results(trajectory)
    return trajectory


def _given(data: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; null counts as missing."""
    value = data.get(key)
    return default if value is None else value


def _segment_from_json(data: Any) -> Segment:
    if not isinstance(data, Mapping):
        raise UserError("is no JSON object")
    if "kind" not in data or "ids" not in data:
        raise UserError("needs the keys 'kind' and 'ids'")
    ids = data["ids"]
    if not isinstance(ids, list) or not (set(map(type, ids)) <= {int} and (not ids or _within(ids))):
        raise UserError("'ids' is no list of token ids")
    return Segment(
        kind=data["kind"],
        ids=tuple(ids),
        logprobs=_floats(data, "logprobs"),
        entropies=_floats(data, "entropies"),
        calls=tuple(_call_from_json(c) for c in _list(data, "calls")),
        results=tuple(_result_from_json(r) for r in _list(data, "results")),
        extra={k: v for k, v in data.items() if k not in _SEGMENT_KEYS},
        tokens=_texts(data),
        alternatives=_alternatives(data),
    )


def _within(ids: list[int]) -> bool:
    return min(ids) >= 0 and max(ids) < ID_LIMIT


def _texts(data: Mapping[str, Any]) -> tuple[str, ...] | None:
    values = data.get("tokens")
    if values is None:
        return None
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise UserError("'tokens' is no list of texts")
    return tuple(values)


def _alternatives(data: Mapping[str, Any]) -> tuple[tuple[tuple[str, float], ...], ...] | None:
    values = data.get("alternatives")
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(token, list) for token in values):
        raise UserError("'alternatives' is no list with a list for each token")
    out = []
    for token in values:
        for pair in token:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and _is_finite(pair[1])):
                raise UserError(f"'alternatives' holds {pair!r}, which is no pair of a text and a log-probability")
            if pair[1] > TOLERANCE:
                raise UserError(f"'alternatives' holds {pair[1]!r}, but {_SIGNS['logprobs']}")
        out.append(tuple((text, float(logprob)) for text, logprob in token))
    return tuple(out)


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, Mapping) for v in value):
        raise UserError(f"{key!r} is no list of objects")
    return value


def _floats(data: Mapping[str, Any], key: str) -> tuple[float, ...] | None:
    values = data.get(key)
    if values is None:
        return None
    if not isinstance(values, list):
        raise UserError(f"{key!r} is no list")
    if values and set(map(type, values)) == {float} and math.isfinite(sum(values)):  # the common case, without a loop
        # A sum is finite only where every value is, so these comparisons meet no NaN.
        worst = min(values) if key == "entropies" else -max(values)
        if worst >= -TOLERANCE:
            return tuple(values)
    for v in values:
        if not _is_finite(v):
            raise UserError(f"{key!r} holds {v!r}, which is no finite number")
        if (v < -TOLERANCE) if key == "entropies" else (v > TOLERANCE):
            raise UserError(f"{key!r} holds {v!r}, but {_SIGNS[key]}")
    return tuple(float(v) for v in values)


TOLERANCE = 1e-3
"""Rounding may push an entropy of 0 below it, or a log-probability of 0 above it, by so much."""
_SIGNS = {"entropies": "an entropy is 0 or above", "logprobs": "a log-probability is 0 or below"}


def _is_finite(value: object) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if value is not None and not _is_finite(value):
        raise UserError(f"{key} {value!r} is no finite number")
    return None if value is None else float(value)


def _call_from_json(data: Mapping[str, Any]) -> ToolCall:
    arguments = data.get("arguments")
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"value": arguments}
    error = data.get("error")
    return ToolCall(str(_given(data, "tool", "")), arguments, None if error is None else str(error))


def _result_from_json(data: Mapping[str, Any]) -> ToolResult:
    status = data.get("status", "ok")
    if status not in STATUSES:
        raise UserError(f"result status {status!r} is none of {', '.join(STATUSES)}")
    return ToolResult(
        content=str(_given(data, "output", "")),
        status=status,
        reward=_number(data, "reward"),
        stop=bool(data.get("stop", False)),
        seconds=_number(data, "seconds") or 0.0,
    )


def dumps(trajectory: Trajectory) -> str:
    """One line of JSON, without the newline. Non-ASCII text stays as it is; NaN is refused."""
    data = to_json(trajectory)
    line = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        line.encode()
    except UnicodeEncodeError:  # a tool printed half a surrogate pair; only an escape can carry it
        line = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return line


def write_jsonl(path: Path | str, trajectories: Iterable[Trajectory]) -> None:
    """Write a file of trajectories; a crash leaves no half file. Raises UserError where it cannot be written."""
    write_lines(path, (dumps(t) for t in trajectories))


def write_lines(path: Path | str, lines: Iterable[str]) -> None:
    """Write a text file, each line with its newline, by a temporary file beside it and a rename.

    Raises UserError where the file cannot be written (no such folder, no right to it, disk full).
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        # Half a surrogate pair is no UTF-8; as an escape it stays the same JSON.
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.writelines(line + "\n" for line in lines)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_jsonl(path: Path | str) -> Iterator[Trajectory]:
    """Read a file of trajectories one by one. Raises UserError with the file's name and the line's number."""
    return (trajectory for _, trajectory in read_numbered(path))


def read_numbered(path: Path | str) -> Iterator[tuple[int, Trajectory]]:
    """As `read_jsonl`, each trajectory with the number of its line, from 1; blank lines are skipped."""
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    with file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                yield number, from_json(json.loads(raw))
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {number}: not UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None
            except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
                raise UserError(f"{path}, line {number}: not JSON that can be read") from None
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}") from None
