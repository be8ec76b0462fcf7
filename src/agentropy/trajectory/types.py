"""What an agent sampled, what its tools answered, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from agentropy.errors import UserError

SegmentKind = Literal["prompt", "reasoning", "call", "result"]
"""`reasoning` and `call` are the model's tokens; `prompt` and `result` are never trained on."""
Status = Literal["ok", "error", "timeout", "invalid", "lost"]
"""`lost` is a fault of ours (a dead sandbox, a search server that is down), never the policy's."""
StopReason = Literal["answer", "max_turns", "max_tokens", "context_full", "void", "error"]
EntropyKind = Literal["exact", "top-k"]
IdsKind = Literal["sampled", "none"]
"""`none`: the source gave no ids, as chat servers do; they are zeros then, one a token, and count tokens only."""

KINDS: tuple[str, ...] = get_args(SegmentKind)
ENTROPY_KINDS: tuple[str, ...] = get_args(EntropyKind)
IDS_KINDS: tuple[str, ...] = get_args(IdsKind)
STATUSES: tuple[str, ...] = get_args(Status)
STOPS: tuple[str, ...] = get_args(StopReason)
MODEL_KINDS = ("reasoning", "call")


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
    `tokens` is the text of each token and `alternatives` the likeliest tokens in its place, each with its
    log-probability, as the source gave them; None where it did not.
    """

    kind: SegmentKind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] | None = None
    alternatives: tuple[tuple[tuple[str, float], ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"segment kind {self.kind!r} is none of {', '.join(KINDS)}")
        for name in ("logprobs", "entropies", "tokens", "alternatives"):
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
    ids_kind: IdsKind = "sampled"

    def __post_init__(self) -> None:
        if self.stop not in STOPS:
            raise UserError(f"stop reason {self.stop!r} is none of {', '.join(STOPS)}")
        if self.entropy_kind not in ENTROPY_KINDS:
            raise UserError(f"entropy_kind {self.entropy_kind!r} is none of {', '.join(ENTROPY_KINDS)}")
        if self.ids_kind not in IDS_KINDS:
            raise UserError(f"ids_kind {self.ids_kind!r} is none of {', '.join(IDS_KINDS)}")
        if self.ids_kind == "none" and any(any(s.ids) for s in self.segments):
            raise UserError("ids_kind is 'none', but an id is not 0")
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
