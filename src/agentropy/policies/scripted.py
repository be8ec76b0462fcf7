"""A policy that says what it was told to: for tests of whatever talks to a policy, and for replaying recorded turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentropy.policies.base import Finish, Generation, PolicyInfo, SamplingParams, Stop


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """What one `generate` samples. Log-probabilities and entropies default to the policy's `logprob` and `entropy`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("logprobs", "entropies"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.ids):
                raise ValueError(f"{len(self.ids)} ids but {len(values)} {name}")


Script = Callable[[Sequence[int], int], Sequence[ScriptedTurn]]
"""Gives the turns of a trajectory from its prompt and its seed."""


@dataclass(slots=True)
class ScriptedSequence:
    """`ids` is everything that was fed and sampled; `turn` counts the turns."""

    ids: list[int]
    turns: Sequence[ScriptedTurn]
    turn: int = 0
    closed: bool = False
    prompt: tuple[int, ...] = ()
    ends: list[int] = field(default_factory=list)
    """Length after each turn."""

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.ids)


@dataclass
class ScriptedPolicy:
    """Implements `policies.base.Policy`. A turn ends early at a stop, at `max_new_tokens` or at the end of the context.

    `script` gives each trajectory its turns; a trajectory that wants more turns than it has gets its last one again.
    `decode` (bytes of a run of ids) is needed for stop strings only. `opened` keeps every sequence, for tests.
    """

    script: Script
    vocab_size: int
    max_context: int = 4096
    decode: Callable[[Sequence[int]], bytes] | None = None
    logprob: float = -0.5
    entropy: float = 0.7
    opened: list[ScriptedSequence] = field(default_factory=list)

    @property
    def info(self) -> PolicyInfo:
        """What the policy says of itself."""
        return PolicyInfo("scripted", self.vocab_size, self.max_context, "exact")

    def open(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[ScriptedSequence]:
        """Start one sequence a seed."""
        made = [ScriptedSequence(list(prompt), self.script(prompt, seed), prompt=tuple(prompt)) for seed in seeds]
        self.opened += made
        return made

    async def generate(
        self, sequence: ScriptedSequence, new_ids: Sequence[int], params: SamplingParams, stop: Stop
    ) -> Generation:
        """Append `new_ids`, then give the next turn."""
        if sequence.closed:
            raise ValueError("the sequence is closed")
        sequence.ids += new_ids
        turn = sequence.turns[min(sequence.turn, len(sequence.turns) - 1)]
        sequence.turn += 1
        await asyncio.sleep(turn.delay)
        count, finish = self._end(turn.ids, params, stop, self.max_context - sequence.length)
        sequence.ids += turn.ids[:count]
        sequence.ends.append(sequence.length)
        return Generation(
            turn.ids[:count],
            (turn.logprobs or (self.logprob,) * len(turn.ids))[:count],
            (turn.entropies or (self.entropy,) * len(turn.ids))[:count],
            finish,
        )

    def _end(self, ids: Sequence[int], params: SamplingParams, stop: Stop, room: int) -> tuple[int, Finish]:
        """How many ids are sampled, and why no more."""
        strings = [s.encode() for s in stop.strings]
        if strings and self.decode is None:
            raise ValueError("stop strings need `decode`")
        for i, token in enumerate(ids):
            if i >= min(params.max_new_tokens, room):
                return i, "length" if params.max_new_tokens <= room else "context_full"
            if token in stop.token_ids:
                return i + 1, "stop"
            if strings and self.decode is not None and any(s in self.decode(ids[: i + 1]) for s in strings):
                return i + 1, "stop"
        return len(ids), "length"

    def fork(self, sequence: ScriptedSequence, seed: int, at: int | None = None) -> ScriptedSequence:
        """A copy that goes on with the same script; with `at`, with the script of its own seed from the turn after."""
        turns, prompt = sequence.turns, sequence.prompt
        ends = [end for end in sequence.ends if at is None or end <= at]
        if at is not None:
            turns = self.script(prompt, seed)
        copied = ScriptedSequence(sequence.ids[:at], turns, len(ends), prompt=prompt, ends=ends)
        self.opened.append(copied)
        return copied

    def close(self, sequence: ScriptedSequence) -> None:
        """No more turns of this sequence."""
        sequence.closed = True
