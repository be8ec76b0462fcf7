"""What samples tokens. A policy knows ids only; what they mean is the protocol's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agentropy.trajectory import EntropyKind

Finish = Literal["stop", "length", "context_full"]
"""`stop`: a stop token or string was sampled. `length`: `max_new_tokens` were. `context_full`: the window is."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled. `temperature=0` is greedy; its log-probabilities are those at temperature 1.

    Entropies and log-probabilities are those of the logits divided by `temperature`, before top-k and top-p cut the
    support: the trainer computes the same numbers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a turn ends. The token that completes a stop is kept, nothing after it is sampled.

    `strings` are looked for in the decoded turn, also where they lie across tokens.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn: ids with the log-probability and the full-vocabulary entropy (nats) of each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    finish: Finish
    entropy_kind: EntropyKind = "exact"


class PolicyLost(Exception):
    """A turn could not be sampled through no fault of the policy (a server that is down): the trajectory is lost.

    Raised by `Policy.generate`; a rollout ends that trajectory with `error` and goes on with the others.
    """


class SequenceHandle(Protocol):
    """A growing token sequence inside a policy (for the local engine: with its key-value cache)."""

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """What a policy says of itself, for the run directory and for checks."""

    name: str
    vocab_size: int
    max_context: int
    entropy_kind: EntropyKind
    notes: dict[str, str] = field(default_factory=dict)


class Policy(Protocol):
    """Samples turns for many sequences at once. All methods are called from one event loop.

    A sequence is opened, then alternates between `generate` and being away (its tools run), and is closed once.
    """

    info: PolicyInfo

    def open(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[SequenceHandle]:
        """Start `len(seeds)` sequences from one prompt, which is prefilled once. Returns at once."""
        ...

    async def generate(
        self, sequence: SequenceHandle, new_ids: Sequence[int], params: SamplingParams, stop: Stop
    ) -> Generation:
        """Append `new_ids` (a tool's result; empty for the first turn), then sample one turn."""
        ...

    def fork(self, sequence: SequenceHandle, seed: int, at: int | None = None) -> SequenceHandle:
        """A copy of a sequence that is away, cache included, which samples on with its own seed.

        `at` keeps only so many of its tokens: the state as it was there. It is due when the sequence itself is.
        """
        ...

    def close(self, sequence: SequenceHandle) -> None:
        """Give the sequence's cache back. Safe to call twice, and while `generate` is pending (which it cancels)."""
        ...
