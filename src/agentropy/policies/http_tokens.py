"""A `Policy` on a server that samples from token ids: token in, token out, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from agentropy.errors import UserError
from agentropy.policies.base import Finish, Generation, PolicyInfo, PolicyLost, SamplingParams, SequenceHandle, Stop
from agentropy.policies.http_client import Client, Refused, Usage
from agentropy.policies.http_wire import LogprobsMode, Sampled, Wire, at_temperature
from agentropy.policies.stops import StopTable
from agentropy.seeds import derive


@dataclass(eq=False, slots=True)
class HttpSequence:
    """Everything that was fed and sampled; the server keeps no state that matters (its prefix cache is its own)."""

    ids: list[int]
    seed: int
    closed: bool = False
    pending: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.ids)


class HttpPolicy:
    """Implements `policies.base.Policy`. Made by `http.connect`.

    Each turn is one request with all ids so far and a seed made of the sequence's seed and its length, so that a server
    that is deterministic gives the same turn again after a retry or in a resumed run. Entropies are estimates from the
    `top` likeliest tokens (`entropy_kind` is `top-k`).

    A turn also ends at the server's own end-of-sequence token, in the stop or not. Ids that a server sampled behind a
    stop are dropped. A sequence that does not fit the server's window gives an empty turn with `context_full`.

    `generate` raises PolicyLost where the server gave no answer after all tries, or refused this request though it
    served others; UserError where it refuses the key or every request.
    """

    def __init__(
        self, client: Client, wire: Wire, model: str, tokenizer: Any, info: PolicyInfo, mode: LogprobsMode, top: int
    ) -> None:
        self.client = client
        self.wire = wire
        self.model = model
        self.tokenizer = tokenizer
        self.info = info
        self.mode = mode
        self.top = top
        self._stops = StopTable(tokenizer, info.vocab_size, torch.device("cpu"))

    @property
    def usage(self) -> Usage:
        """Requests, tokens and retries so far."""
        return self.client.usage

    def open(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[SequenceHandle]:
        """Start one sequence a seed. Raises UserError for an empty prompt or one that fills the window."""
        ids = [int(i) for i in prompt]
        if not ids:
            raise UserError("an empty prompt: the model needs at least one token to start from")
        if len(ids) >= self.info.max_context:
            raise UserError(f"a prompt of {len(ids)} tokens does not fit a context of {self.info.max_context} tokens")
        return [HttpSequence(list(ids), int(seed)) for seed in seeds]

    async def generate(
        self, sequence: SequenceHandle, new_ids: Sequence[int], params: SamplingParams, stop: Stop
    ) -> Generation:
        """Append `new_ids`, then sample one turn."""
        assert isinstance(sequence, HttpSequence)
        if sequence.closed:
            raise ValueError("the sequence is closed")
        if sequence.pending:
            raise ValueError("the sequence is being generated from")
        sequence.ids += map(int, new_ids)
        room = min(params.max_new_tokens, self.info.max_context - sequence.length)
        if room <= 0:
            return _empty("length" if params.max_new_tokens <= 0 else "context_full")
        # A task of its own, so that `close` can cancel the request without knowing who waits for it.
        request = asyncio.ensure_future(self._sample(sequence, replace(params, max_new_tokens=room), stop))
        sequence.pending.add(request)
        try:
            sampled = await request
        finally:
            request.cancel()
            sequence.pending.discard(request)
        if sampled is None:
            return _empty("context_full")
        self.usage.count(sampled.prompt_tokens, len(sampled.ids))
        count, stopped = self._stops.end(sampled.ids, stop)
        finish: Finish = "stop" if stopped or not sampled.cut else "length"
        if finish == "length" and count < params.max_new_tokens:
            finish = "context_full"
        listed = sampled.alternatives[:count]
        logprobs, entropies = at_temperature(
            sampled.logprobs[:count], listed, params.temperature, self.mode, self.info.vocab_size
        )
        sequence.ids += sampled.ids[:count]
        return Generation(sampled.ids[:count], logprobs, entropies, finish, "top-k")

    async def _sample(self, sequence: HttpSequence, params: SamplingParams, stop: Stop) -> Sampled | None:
        """One request; None where the sequence does not fit the window."""
        ids = tuple(sequence.ids)
        seed = derive(sequence.seed, "turn", len(ids))
        body = self.wire.request(self.model, ids, params, stop, seed, self.top)
        try:
            return await self.client.post(self.wire.path, body, lambda answer: self.wire.read(answer, ids))
        except Refused as error:
            if error.is_context:
                return None
            raise lost_or_wrong(error, self.client) from None

    def fork(self, sequence: SequenceHandle, seed: int, at: int | None = None) -> SequenceHandle:
        """A sequence that goes on from the first `at` ids (None: all) with its own seed."""
        assert isinstance(sequence, HttpSequence)
        return HttpSequence(sequence.ids[:at], int(seed))

    def close(self, sequence: SequenceHandle) -> None:
        """No more turns; a pending one is cancelled. Safe to call twice."""
        assert isinstance(sequence, HttpSequence)
        sequence.closed = True
        for request in sequence.pending:
            request.cancel()

    async def aclose(self) -> None:
        """Close the connections. Safe to call twice."""
        await self.client.close()


def lost_or_wrong(error: Refused, client: Client) -> Exception:
    """What a refusal means: of the first request, that all will be refused; later, that this trajectory is lost."""
    if client.usage.requests == 0:
        return UserError(f"{client.root} refuses the request: {error}")
    client.usage.lost += 1
    return PolicyLost(f"{client.root} refuses a request: {error}")


def _empty(finish: Finish) -> Generation:
    return Generation((), (), (), finish, "top-k")
