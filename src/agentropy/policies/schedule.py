"""Who decodes next: sequences, their states, and the virtual clock by which they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from agentropy.policies.base import Generation, SamplingParams

if TYPE_CHECKING:
    from agentropy.policies.slots import Slots


class State(Enum):
    """Where a sequence is. It goes round AWAY, QUEUED, ACTIVE, AWAY, ... until CLOSING and CLOSED."""

    AWAY = "away"
    QUEUED = "waiting for its turn"
    ACTIVE = "being sampled"
    CLOSING = "about to be closed"
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class Group:
    """Sequences that began with the same prompt, so that they can copy each other's caches. `open`: how many are
    open."""

    open: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a `generate` call asked for, and where its answer goes."""

    new_ids: Sequence[int]
    params: SamplingParams
    stop: int
    future: asyncio.Future[Generation]


@dataclass(eq=False, slots=True)
class LocalSequence:
    """One sequence. `key` orders sequences by birth, forks after their parent; `row` is its slot, if it has one; the
    slot's cache holds the first `cached` tokens. `due`: the step at which it is expected back."""

    key: tuple[int, ...]
    seed: int
    group: Group
    tokens: list[int]
    due: int
    state: State = State.AWAY
    row: int | None = None
    cached: int = 0
    forks: int = 0
    request: Request | None = None
    error: Exception | None = None
    cancelled: bool = False

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.tokens)


@dataclass(slots=True)
class Schedule:
    """The clock and the open sequences (a dict for its order and its fast removal)."""

    deterministic: bool
    result_delay: int
    admit_every: int
    clock: int = 0
    active: int = 0
    """Sequences being decoded."""
    sequences: dict[LocalSequence, None] = field(default_factory=dict)
    _next: int = 0
    """No sequence changes state by the clock before this step."""

    def add(self, sequence: LocalSequence) -> None:
        self.sequences[sequence] = None
        sequence.group.open += 1
        self._next = min(self._next, sequence.due)

    def submit(self, sequence: LocalSequence, request: Request) -> None:
        sequence.request = request
        sequence.state = State.QUEUED
        self._resolved(sequence)

    def close(self, sequence: LocalSequence) -> None:
        """Close at the sequence's due step; a pending one is cancelled and closed before the next step."""
        request = sequence.request
        if sequence.state in (State.QUEUED, State.ACTIVE):
            assert request is not None
            request.future.cancel()
            sequence.due = self.clock
            self._next = self.clock
            sequence.cancelled = True
        sequence.state = State.CLOSING
        self._resolved(sequence)

    def _resolved(self, sequence: LocalSequence) -> None:
        if not self.deterministic:
            sequence.due = min(sequence.due, self.clock)
            self._next = min(self._next, self.clock)

    def went_away(self, sequence: LocalSequence) -> None:
        """A turn of the sequence has just ended."""
        if sequence.state is State.CLOSING:
            return
        self.active -= 1
        sequence.state = State.AWAY
        sequence.request = None
        sequence.due = self.clock
        if self.deterministic:
            sequence.due = -(-(self.clock + self.result_delay) // self.admit_every) * self.admit_every
            self._next = min(self._next, sequence.due)

    def release(self, sequence: LocalSequence, slots: Slots) -> None:
        """The sequence is closed: its slot is free."""
        del self.sequences[sequence]
        sequence.group.open -= 1
        sequence.state = State.CLOSED
        slots.free(sequence)
        sequence.request = None
        if not self.sequences:
            self.clock = self._next = self.active = 0

    def waiting_for(self) -> list[LocalSequence]:
        """The sequences without which the clock cannot go on."""
        if not self.deterministic:
            return []
        return [s for s in self.sequences if s.state is State.AWAY and s.due <= self.clock]

    def settle(self, slots: Slots) -> list[LocalSequence] | None:
        """Bring everything up to the clock, which jumps when nobody is decoding.

        Returns:
            The sequences to admit before the next step, in order, each with a slot or room for one. None when there
            is nothing to do until a sequence is generated from, closed or opened.
        """
        if self.active and self.clock < self._next:
            return []
        for sequence in [s for s in self.sequences if s.cancelled]:
            self.release(sequence, slots)
        while True:
            if self.waiting_for():
                return None
            for sequence in [s for s in self.sequences if s.state is State.CLOSING and s.due <= self.clock]:
                self.release(sequence, slots)
            queued = sorted(
                (s for s in self.sequences if s.state is State.QUEUED and s.due <= self.clock), key=lambda s: s.key
            )
            admitted = slots.room_for(queued)
            for sequence in admitted:
                sequence.state = State.ACTIVE
            later = [s.due for s in self.sequences if self._moves_later(s)]
            self._next = min(later, default=1 << 62)
            self.active = sum(s.state is State.ACTIVE for s in self.sequences)
            if self.active:
                return admitted
            if not later:
                self._next = self.clock
                return None
            self.clock = self._next

    def _moves_later(self, sequence: LocalSequence) -> bool:
        moving = sequence.state in (State.QUEUED, State.CLOSING) or (
            self.deterministic and sequence.state is State.AWAY
        )
        return moving and sequence.due > self.clock
