"""The local engine: samples turns for many sequences at once from a transformers causal LM in this process.

Who decodes when is decided on a virtual clock of decode steps, so that the tokens do not depend on how long tools take
(see `LocalPolicy`). The decoding itself is in `engine.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from agentropy.errors import UserError
from agentropy.policies.base import Generation, PolicyInfo, SamplingParams, SequenceHandle, Stop
from agentropy.policies.engine import Engine, Finished, Turn, finish_of
from agentropy.policies.parts import check_parts, split_model
from agentropy.policies.schedule import Group, LocalSequence, Request, Schedule, State
from agentropy.policies.slots import Slots
from agentropy.policies.stops import StopTable

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_SECONDS = 0.02
"""Steps shorter than this run on the event loop's own thread: handing each one to another costs more than it frees."""
PATIENCE_SECONDS = 60.0
FAR = 1 << 40


class LocalPolicy:
    """A `Policy` on a torch module.

    Args:
        model: a transformers causal LM, plain or with LoRA by peft, in float32 or bfloat16. The trainer may change
            its weights in place whenever no sequence is open.
        tokenizer: for stop strings; None when only token ids stop.
        max_slots: sequences that hold a cache at once; others wait for one.
        max_context: longest sequence in tokens; by default the model's own limit.
        device: where to move the model; by default it stays.
        deterministic: admit returning sequences by the virtual clock. The same seeds and inputs then give the same
            tokens and bit-equal log-probabilities whatever the tools' timing, on one machine with the same versions.
        result_delay: decode steps after which a sequence that is away is expected back. None: when nobody is decoding
            any more, which suits loops that wait for all turns of a round before they begin the next.
        admit_every: the clock is looked at every so many steps, so that returning sequences share a prefill.

    With `deterministic`, a sequence that went away at step s comes back, or is closed, exactly at the first multiple of
    `admit_every` that is at least s + `result_delay`: the engine waits there if it must, and jumps there if nobody is
    decoding. So every sequence must be generated from or closed, and none may wait for another: two sequences opened
    together must be generated from concurrently. New sequences and forks are expected at once.

    Cancelling a pending `generate` closes its sequence. When the model raises, every pending `generate` raises the
    same error and all sequences are closed.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_slots: int = 128,
        max_context: int | None = None,
        device: str | torch.device | None = None,
        deterministic: bool = True,
        result_delay: int | None = 16,
        admit_every: int = 8,
        name: str = "local",
    ) -> None:
        delay = FAR if result_delay is None else result_delay
        if max_slots < 1 or delay < 0 or admit_every < 1:
            raise UserError("max_slots and admit_every must be at least 1 and result_delay at least 0")
        if device is not None:
            model.to(torch.device(device))
        self.model = model
        self.tokenizer = tokenizer
        self.parts = split_model(model)
        check_parts(self.parts)
        context = min(max_context or self.parts.max_context, self.parts.max_context)
        self.info = PolicyInfo(name, self.parts.vocab_size, context, "exact", {"dtype": str(self.parts.dtype)})
        self._stops = StopTable(tokenizer, self.parts.vocab_size, self.parts.device)
        self._engine = Engine(self.parts, self._stops, max_slots, context)
        self._slots = Slots(max_slots)
        self._schedule = Schedule(deterministic, delay, admit_every)
        self._driver: asyncio.Task[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._seconds = 0.0
        self._was_training: bool | None = None
        self._opened = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- between rollouts ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a rollout: evaluation mode, no caches from before (the weights may have changed), clock at zero.

        Raises:
            RuntimeError: a sequence is still open, so the weights must not have changed under it.
        """
        self._require_quiet()
        if self._was_training is None:
            self._was_training = self.model.training
        self.model.eval()

    def end(self) -> None:
        """End a rollout: the model's training mode as it was before, the caches' memory freed."""
        self._require_quiet()
        self._engine.reset()
        self._slots.reset()
        if self._was_training is not None:
            self.model.train(self._was_training)
            self._was_training = None

    @contextlib.contextmanager
    def rollout(self) -> Iterator[LocalPolicy]:
        """`begin` and `end` around a block; sequences left open by an error in the block are closed."""
        self.begin()
        try:
            yield self
        except BaseException:
            self.close_all()
            self.end()
            raise
        self.end()

    def _require_quiet(self) -> None:
        if any(s.state is not State.CLOSING for s in self._schedule.sequences):
            raise RuntimeError(f"{len(self._schedule.sequences)} sequences are still open: close them first")
        self.close_all()

    def close_all(self) -> None:
        """Close every sequence at once; pending `generate` calls are cancelled."""
        driver, self._driver = self._driver, None
        if driver is not None and not driver.done() and not driver.get_loop().is_closed():
            driver.cancel()
        self._join_worker()
        if self._schedule.sequences:
            self._abandon(None)

    def memory_bytes(self) -> int:
        """Bytes held now by caches and row buffers. Never more than max_slots times `info.max_context` tokens of cache
        plus 20 bytes of buffers for each."""
        return self._engine.memory_bytes()

    def statistics(self) -> dict[str, int]:
        """Counts since the policy was made: decode steps, rows computed in them, tokens prefilled."""
        engine = self._engine
        return {
            "steps": engine.steps,
            "computed_rows": engine.computed_rows,
            "prefilled_tokens": engine.prefilled_tokens,
        }

    # -- the Policy protocol ------------------------------------------------------------------------------------------

    def open(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[SequenceHandle]:
        """Start `len(seeds)` sequences from one prompt. Raises UserError for an empty prompt or one that fills the
        window."""
        tokens = [int(t) for t in prompt]
        if not tokens:
            raise UserError("an empty prompt: the model needs at least one token to start from")
        if len(tokens) >= self.info.max_context:
            raise UserError(
                f"a prompt of {len(tokens)} tokens does not fit a context of {self.info.max_context} tokens"
            )
        self._check_ids(tokens)
        if not self._schedule.sequences and self.model.training:
            self.begin()
        group = Group()
        opened: list[SequenceHandle] = []
        for seed in seeds:
            sequence = LocalSequence((self._opened,), int(seed), group, list(tokens), self._schedule.clock)
            self._opened += 1
            self._schedule.add(sequence)
            opened.append(sequence)
        return opened

    async def generate(
        self, sequence: SequenceHandle, new_ids: Sequence[int], params: SamplingParams, stop: Stop
    ) -> Generation:
        """Append `new_ids`, then sample one turn. If nothing can be sampled since the window is full, `ids` is
        empty."""
        own = self._own(sequence)
        if own.state is not State.AWAY:
            raise RuntimeError(f"this sequence is {own.state.value}: generate needs one that is away") from own.error
        if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
            raise UserError(f"impossible sampling parameters: {params}")
        appended = [int(t) for t in new_ids]
        self._check_ids(appended)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        self._schedule.submit(own, Request(appended, params, self._stops.index(stop), future))
        self._kick(loop)
        try:
            return await future
        except asyncio.CancelledError:
            self.close(own)
            raise

    def fork(self, sequence: SequenceHandle, seed: int, at: int | None = None) -> SequenceHandle:
        """A copy of a sequence that is away, or of its first `at` tokens.

        Its cache is copied when it is first generated from: no token is prefilled again, no slot is taken until then.
        """
        own = self._own(sequence)
        if own.state is not State.AWAY:
            raise RuntimeError(f"this sequence is {own.state.value}: fork needs one that is away") from own.error
        if at is not None and not 1 <= at <= own.length:
            raise ValueError(f"a sequence of {own.length} tokens cannot be forked at {at}")
        child = LocalSequence((*own.key, own.forks), int(seed), own.group, own.tokens[:at], own.due)
        own.forks += 1
        self._schedule.add(child)
        return child

    def close(self, sequence: SequenceHandle) -> None:
        """Give the cache back (with `deterministic`, at the step at which the sequence was expected back)."""
        own = self._own(sequence)
        if own.state in (State.CLOSING, State.CLOSED):
            return
        self._schedule.close(own)
        # Without a running loop the sequence is released by the next `generate`, `begin` or `end`.
        with contextlib.suppress(RuntimeError):
            self._kick(asyncio.get_running_loop())

    def _own(self, sequence: SequenceHandle) -> LocalSequence:
        if not isinstance(sequence, LocalSequence):
            raise TypeError(f"{type(sequence).__name__} is no sequence of a local policy")
        return sequence

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.info.vocab_size):
            raise UserError(f"token ids outside the model's vocabulary of {self.info.vocab_size}")

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _kick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())

    async def _drive(self) -> None:
        """Step until nobody can go on without something from outside; `generate` and `close` start it again."""
        try:
            while True:
                admitted = self._schedule.settle(self._slots)
                if admitted is None:
                    self._watch()
                    return
                self._engine.idle(self._slots.take_stopped())
                starting = [sequence for sequence in admitted if not self._is_full(sequence)]
                if starting:
                    await self._run(functools.partial(self._admit, starting))
                if self._schedule.active:
                    finished = await self._run(self._step)
                    self._schedule.clock += 1
                    for f in finished:
                        self._deliver(f)
        except BaseException as error:
            if asyncio.current_task() is self._driver:
                self._join_worker()
                self._abandon(error)
            if not isinstance(error, Exception):
                raise

    async def _run(self, work: Callable[[], T]) -> T:
        def timed() -> T:
            began = time.perf_counter()
            result = work()
            self._seconds += 0.2 * (time.perf_counter() - began - self._seconds)
            return result

        if self._seconds < INLINE_SECONDS:
            result = timed()
            await asyncio.sleep(0)
            return result
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "agentropy-decode")
        return await asyncio.get_running_loop().run_in_executor(self._pool, timed)

    def _join_worker(self) -> None:
        # A cancelled driver leaves its step running in the worker; nothing may touch the rows before that is over.
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _step(self) -> list[Finished]:
        self._slots.swap(self._engine.compact())
        return self._engine.step()

    def _is_full(self, sequence: LocalSequence) -> bool:
        request = sequence.request
        assert request is not None
        if sequence.length + len(request.new_ids) < self.info.max_context:
            return False
        self._schedule.went_away(sequence)
        if not request.future.done():
            request.future.set_result(Generation((), (), (), "context_full"))
        return True

    def _admit(self, admitted: Sequence[LocalSequence]) -> None:
        for sequence in admitted:
            assert sequence.request is not None
            sequence.tokens.extend(sequence.request.new_ids)
        waiting: Sequence[LocalSequence] = admitted
        while waiting:
            placed, copies, waiting = self._slots.place(waiting)
            self._engine.copy(copies)
            self._engine.start([self._turn(sequence) for sequence in placed])
            for sequence in placed:
                sequence.cached = len(sequence.tokens) - 1

    def _turn(self, sequence: LocalSequence) -> Turn:
        request, row, length = sequence.request, sequence.row, len(sequence.tokens)
        assert request is not None
        assert row is not None
        end = min(length + request.params.max_new_tokens, self.info.max_context)
        pending = sequence.tokens[sequence.cached :]
        return Turn(row, sequence.cached, pending, end, sequence.seed, request.params, request.stop)

    def _deliver(self, finished: Finished) -> None:
        sequence = self._slots.owner(finished.row)
        request = sequence.request
        assert request is not None
        sequence.tokens.extend(finished.ids)
        sequence.cached = len(sequence.tokens) - 1
        self._schedule.went_away(sequence)
        if request.future.done():
            return
        request.future.set_result(
            Generation(
                tuple(finished.ids),
                tuple(finished.logprobs),
                tuple(finished.entropies),
                finish_of(finished, len(sequence.tokens), self.info.max_context),
            )
        )

    def _abandon(self, error: BaseException | None) -> None:
        for sequence in list(self._schedule.sequences):
            request = sequence.request
            sequence.error = error if isinstance(error, Exception) else None
            if request is not None and not request.future.done():
                if isinstance(error, Exception):
                    request.future.set_exception(error)
                else:
                    request.future.cancel()
            self._schedule.release(sequence, self._slots)
        self._engine.reset()
        self._slots.reset()

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._schedule.waiting_for():
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._warn, self._engine.steps)

    def _warn(self, steps: int) -> None:
        waiting = self._schedule.waiting_for()
        if waiting and steps == self._engine.steps:
            log.warning(
                "the engine has waited %d s for %d sequences to be generated from or closed; %d more wait behind them",
                PATIENCE_SECONDS,
                len(waiting),
                sum(s.state is State.QUEUED for s in self._schedule.sequences),
            )
