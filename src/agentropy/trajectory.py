"""Trajectories: what an agent sampled, what its tools answered, and what came of it; JSON Lines in and out.

The file format (`agentropy.trajectory/1`, docs/trajectory.md) is a public interface that other agents write too. A
trajectory holds the token ids as they were sampled; text is only a view. Nothing here knows tensors or models.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agentropy.errors import UserError

SCHEMA = "agentropy.trajectory/1"

SegmentKind = Literal["prompt", "reasoning", "call", "result"]
"""`reasoning` and `call` are the model's tokens; `prompt` and `result` are never trained on."""
Status = Literal["ok", "error", "timeout", "invalid", "lost"]
"""`lost` is a fault of ours (a dead sandbox, a search server that is down), never the policy's."""
StopReason = Literal["answer", "max_turns", "max_tokens", "context_full", "void", "error"]
EntropyKind = Literal["exact", "top-k"]

KINDS: tuple[str, ...] = get_args(SegmentKind)
ENTROPY_KINDS: tuple[str, ...] = get_args(EntropyKind)
STATUSES: tuple[str, ...] = get_args(Status)
STOPS: tuple[str, ...] = get_args(StopReason)
MODEL_KINDS = ("reasoning", "call")
ID_LIMIT = 2**63
"""Tensors hold ids below this."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the protocol read it. `error` says why it could not be read; such a call's result is `invalid`."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. `content` is what the model sees; `reward` and `stop` are the tool's own, if it has any."""

    content: str
    status: Status = "ok"
    reward: float | None = None
    stop: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind.

    `logprobs` and `entropies` (nats, at the sampling temperature) stand beside `ids` in segments of the model and are
    None elsewhere, or where the writer did not record them. `calls` belong to a `call`, `results` to a `result`.
    """

    kind: SegmentKind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"segment kind {self.kind!r} is none of {', '.join(KINDS)}")
        for name in ("logprobs", "entropies"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.ids):
                raise UserError(f"{self.kind} segment has {len(self.ids)} ids but {len(values)} {name}")
        if self.calls and self.kind != "call":
            raise UserError(f"a {self.kind} segment cannot hold calls")
        if self.results and self.kind != "result":
            raise UserError(f"a {self.kind} segment cannot hold results")

    @property
    def is_model(self) -> bool:
        """True where the policy sampled the tokens."""
        return self.kind in MODEL_KINDS


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at one question. `score` is the outcome in [0, 1], None when it could not be graded."""

    question_id: str
    trajectory_id: str
    question: str
    segments: tuple[Segment, ...]
    answer: str | None
    score: float | None
    stop: StopReason
    entropy_kind: EntropyKind = "exact"
    parent_id: str | None = None
    fork_at: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stop not in STOPS:
            raise UserError(f"stop reason {self.stop!r} is none of {', '.join(STOPS)}")
        if self.entropy_kind not in ENTROPY_KINDS:
            raise UserError(f"entropy_kind {self.entropy_kind!r} is none of {', '.join(ENTROPY_KINDS)}")
        if self.score is not None and not math.isfinite(self.score):
            raise UserError(f"score {self.score} is no finite number")

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids in order, as they were fed to the policy."""
        return tuple(i for s in self.segments for i in s.ids)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Every call that the protocol read, executed or not."""
        return tuple(c for s in self.segments for c in s.calls)

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Every result, in the order of the executed calls."""
        return tuple(r for s in self.segments for r in s.results)

    @property
    def model_tokens(self) -> int:
        """Number of tokens that the policy sampled (Len@K counts these)."""
        return sum(len(s.ids) for s in self.segments if s.is_model)

    @property
    def own_model_tokens(self) -> int:
        """As `model_tokens`, without those that were inherited from the parent."""
        return self.model_tokens - sum(len(s.ids) for s in self.inherited if s.is_model)

    @property
    def inherited(self) -> tuple[Segment, ...]:
        """The segments before `fork_at`; none for a trajectory that began at the prompt."""
        out, place = [], 0
        for s in self.segments if self.parent_id is not None else ():
            place += len(s.ids)
            if place > (self.fork_at or 0):
                break
            out.append(s)
        return tuple(out)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids of everything before the first sampled token."""
        out: list[int] = []
        for s in self.segments:
            if s.kind != "prompt":
                break
            out.extend(s.ids)
        return tuple(out)


def check_results(trajectory: Trajectory) -> None:
    """Raise UserError unless every result answers a call of the turn before it (results may be fewer than calls).

    A `call` segment whose writer did not record its calls may have any number of results.
    """
    waiting: float = 0
    after_result = True
    for s in trajectory.segments:
        if s.is_model:
            unrecorded = s.kind == "call" and not s.calls
            waiting = (0 if after_result else waiting) + (math.inf if unrecorded else len(s.calls))
            after_result = False
        elif s.kind == "result":
            if len(s.results) > waiting:
                raise UserError(
                    f"trajectory {trajectory.trajectory_id!r}: "
                    f"{len(s.results)} results where {waiting} calls wait for one"
                )
            waiting -= len(s.results)
            after_result = True


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
    | {"entropy_kind", "parent_id", "fork_at"}
)
_SEGMENT_KEYS = frozenset({"kind", "ids", "logprobs", "entropies", "calls", "results"})


def from_json(data: Mapping[str, Any]) -> Trajectory:
    """Read one JSON object. Raises UserError that names the key at fault; unknown keys are kept in `extra`."""
    if not isinstance(data, Mapping):
        raise UserError(f"a trajectory is a JSON object, not a {type(data).__name__}")
    schema = data.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UserError(f"schema {schema!r} is not {SCHEMA!r}, the one this version reads")
    for key in ("question_id", "segments"):
        if data.get(key) is None:
            raise UserError(f"key {key!r} is missing")
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
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < ID_LIMIT for i in ids):
        raise UserError("'ids' is no list of token ids")
    return Segment(
        kind=data["kind"],
        ids=tuple(ids),
        logprobs=_floats(data, "logprobs"),
        entropies=_floats(data, "entropies"),
        calls=tuple(_call_from_json(c) for c in _list(data, "calls")),
        results=tuple(_result_from_json(r) for r in _list(data, "results")),
        extra={k: v for k, v in data.items() if k not in _SEGMENT_KEYS},
    )


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
