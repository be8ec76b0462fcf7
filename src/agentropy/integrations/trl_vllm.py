"""TRL's vLLM as a policy of our loop: the turns that wait are sampled in one call.

TRL's object gives the ids and the log-probabilities of the sampled tokens and no entropies: the trainer computes both
once more, exactly, in a forward pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentropy.policies.base import Finish, Generation, PolicyInfo, SamplingParams, SequenceHandle, Stop

GATHER_SECONDS = 0.01
"""How long a turn waits for others to share its call."""


@dataclass(eq=False, slots=True)
class VllmSequence:
    """Everything that was fed and sampled."""

    ids: list[int]

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.ids)


@dataclass(frozen=True)
class _Waiting:
    prompt: list[int]
    room: int
    stop: Stop
    future: asyncio.Future[Generation]


@dataclass
class VllmPolicy:
    """A `Policy` on `trainer.vllm_generation`. One call of it samples every turn that waits at that time; it runs in a
    thread, so tools go on. Temperature, top-p and top-k are those of the trainer's configuration."""

    generation: Any
    tokenizer: Any
    info: PolicyInfo
    _queue: list[_Waiting] = field(default_factory=list)
    _driver: asyncio.Task[None] | None = None

    def open(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[SequenceHandle]:
        return [VllmSequence(list(prompt)) for _ in seeds]

    def fork(self, sequence: SequenceHandle, seed: int, at: int | None = None) -> SequenceHandle:
        assert isinstance(sequence, VllmSequence)
        return VllmSequence(sequence.ids[:at])

    def close(self, sequence: SequenceHandle) -> None:
        return None

    async def generate(
        self, sequence: SequenceHandle, new_ids: Sequence[int], params: SamplingParams, stop: Stop
    ) -> Generation:
        assert isinstance(sequence, VllmSequence)
        sequence.ids.extend(new_ids)
        room = min(params.max_new_tokens, self.info.max_context - len(sequence.ids))
        if room <= 0:
            return Generation((), (), (), "context_full")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(list(sequence.ids), room, stop, loop.create_future())
        self._queue.append(waiting)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        out = await waiting.future
        sequence.ids.extend(out.ids)
        return out

    async def _drive(self) -> None:
        while self._queue:
            await asyncio.sleep(GATHER_SECONDS)
            batch, self._queue = self._queue, []
            try:
                sampled = await asyncio.to_thread(self._sample, batch)
            except Exception as error:
                for w in batch:
                    if not w.future.done():
                        w.future.set_exception(error)
                continue
            for w, out in zip(batch, sampled, strict=True):
                if not w.future.done():
                    w.future.set_result(out)

    def _sample(self, batch: Sequence[_Waiting]) -> list[Generation]:
        g, stop = self.generation, batch[0].stop
        before = g.max_completion_length, g.generation_kwargs
        g.max_completion_length = max(w.room for w in batch)
        ending = {"stop": list(stop.strings), "include_stop_str_in_output": True}
        g.generation_kwargs = (before[1] or {}) | ending | {"stop_token_ids": sorted(stop.token_ids)}
        try:
            _, ids, logprobs, _ = g.generate([w.prompt for w in batch], None, 1)
        finally:
            g.max_completion_length, g.generation_kwargs = before
        return [self._generation(w, i, lp) for w, i, lp in zip(batch, ids, logprobs, strict=True)]

    def _generation(self, w: _Waiting, ids: Sequence[int], logprobs: Sequence[Sequence[float | None]]) -> Generation:
        """One turn, cut to its room. vLLM gives None for a log-probability that is no number."""
        ids = list(ids[: w.room])
        known = [float("nan") if lp[0] is None else lp[0] for lp in logprobs[: w.room]]
        ended = bool(ids) and (ids[-1] in w.stop.token_ids or self._ends_in(ids, w.stop.strings))
        finish: Finish = "stop" if ended else "length"
        return Generation(tuple(ids), tuple(known), (0.0,) * len(ids), finish)

    def _ends_in(self, ids: Sequence[int], strings: Sequence[str]) -> bool:
        text = self.tokenizer.decode(ids) if strings else ""
        return any(s in text for s in strings)
