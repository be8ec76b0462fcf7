"""The engine among coroutines: cancelling, closing, errors, limits, and a loop that stays awake."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

from agentropy.errors import UserError
from agentropy.policies.base import Generation, SamplingParams, SequenceHandle, Stop
from agentropy.policies.local import LocalPolicy
from engine_models import VOCAB, tiny_model

T = TypeVar("T")
NEVER = Stop()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 90))


def policy_of(kind: str = "llama", **options: Any) -> LocalPolicy:
    return LocalPolicy(tiny_model(kind), **options)


async def turn(policy: LocalPolicy, handle: SequenceHandle, most: int = 8, new: tuple[int, ...] = ()) -> Generation:
    return await policy.generate(handle, new, SamplingParams(max_new_tokens=most), NEVER)


def test_lengths_and_finishes() -> None:
    async def work() -> None:
        policy = policy_of(max_context=32, result_delay=None)
        a, b = policy.open([1, 2, 3], [1, 2])
        short, full = await asyncio.gather(turn(policy, a, 5), turn(policy, b, 100))
        assert (len(short.ids), short.finish) == (5, "length")
        assert (len(full.ids), full.finish) == (29, "context_full")
        assert b.length == 32
        policy.close(b)
        rest = await turn(policy, a, 100, tuple(range(20)))
        assert (len(rest.ids), rest.finish) == (4, "context_full")
        nothing = await turn(policy, a)
        assert nothing == Generation((), (), (), "context_full")
        assert a.length == 32
        policy.close(a)
        policy.end()

    run(work())


def test_result_too_long_for_the_window_leaves_the_sequence_as_it_was() -> None:
    async def work() -> None:
        policy = policy_of(max_context=16)
        (a,) = policy.open([1, 2, 3], [1])
        out = await turn(policy, a, 4, tuple(range(13)))
        assert out.finish == "context_full"
        assert a.length == 3
        assert len((await turn(policy, a, 4)).ids) == 4
        policy.close(a)

    run(work())


def test_cancelled_generate_closes_its_sequence_and_no_other() -> None:
    async def work() -> None:
        policy = policy_of()
        a, b = policy.open([1, 2, 3], [1, 2])
        first = asyncio.create_task(turn(policy, a, 200))
        second = asyncio.create_task(turn(policy, b, 40))
        for _ in range(20):
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert len((await second).ids) == 40
        with pytest.raises(RuntimeError, match="closed"):
            await turn(policy, a)
        policy.close(a)
        policy.close(b)
        policy.end()

    run(work())


def test_close_cancels_a_pending_generate() -> None:
    async def work() -> None:
        policy = policy_of()
        a, b = policy.open([1, 2, 3], [1, 2])
        first = asyncio.create_task(turn(policy, a, 200))
        other = asyncio.create_task(turn(policy, b, 30))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        policy.close(a)
        policy.close(a)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert len((await other).ids) == 30
        policy.close(b)
        policy.end()

    run(work())


def test_a_freed_slot_goes_to_the_next_in_line() -> None:
    async def work() -> list[int]:
        policy = policy_of(max_slots=2)
        handles = [policy.open([i + 1, 2, 3], [i])[0] for i in range(6)]
        done: list[int] = []

        async def one(i: int) -> None:
            await turn(policy, handles[i], 5)
            done.append(i)
            policy.close(handles[i])

        await asyncio.gather(*(one(i) for i in range(6)))
        return done

    assert run(work()) == list(range(6))


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_in_the_model_reaches_everybody(threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if threaded:
        monkeypatch.setattr("agentropy.policies.local.INLINE_SECONDS", 0.0)
    policy = policy_of()
    calls = 0

    def fail(module: Any, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise ArithmeticError("out of luck")

    async def work() -> None:
        handles = policy.open([1, 2, 3], [1, 2, 3])
        hook = policy.model.lm_head.register_forward_hook(fail)  # type: ignore[operator, union-attr]
        outs = await asyncio.gather(*(turn(policy, h, 50) for h in handles), return_exceptions=True)
        hook.remove()
        assert [type(o) for o in outs] == [ArithmeticError] * 3
        with pytest.raises(RuntimeError, match="closed") as caught:
            await turn(policy, handles[0])
        assert isinstance(caught.value.__cause__, ArithmeticError)
        for handle in handles:
            policy.close(handle)
        (again,) = policy.open([1, 2, 3], [4])
        assert len((await turn(policy, again, 5)).ids) == 5
        policy.close(again)
        policy.end()

    run(work())


@pytest.mark.parametrize("threaded", [False, True])
def test_other_coroutines_run_meanwhile(threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if threaded:
        monkeypatch.setattr("agentropy.policies.local.INLINE_SECONDS", 0.0)

    async def work() -> int:
        policy = policy_of()
        (a,) = policy.open([1, 2, 3], [1])
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await turn(policy, a, 50)
        ticking.cancel()
        policy.close(a)
        return ticks

    assert run(work()) >= 50


def test_a_lost_loop_does_not_break_the_next_rollout() -> None:
    policy = policy_of()

    async def abandon() -> None:
        for handle in policy.open([1, 2, 3], [1, 2]):
            task = asyncio.create_task(turn(policy, handle, 200))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        for _ in range(10):
            await asyncio.sleep(0)

    async def use() -> int:
        with policy.rollout():
            (a,) = policy.open([1, 2, 3], [1])
            n = len((await turn(policy, a, 7)).ids)
            policy.close(a)
            return n

    run(abandon())
    assert run(use()) == 7


def test_rollout_needs_all_sequences_closed_and_restores_the_mode() -> None:
    policy = policy_of()
    policy.model.train()
    policy.open([1, 2], [1])
    assert not policy.model.training
    with pytest.raises(RuntimeError, match="1 sequences are still open"):
        policy.begin()
    policy.close_all()

    def break_off() -> None:
        with policy.rollout():
            policy.open([1, 2], [1])
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert policy.model.training


def test_misuse_is_told() -> None:
    async def work() -> None:
        policy = policy_of(max_context=16)
        with pytest.raises(UserError, match="empty prompt"):
            policy.open([], [1])
        with pytest.raises(UserError, match="does not fit"):
            policy.open([1] * 16, [1])
        with pytest.raises(UserError, match="outside the model's vocabulary"):
            policy.open([VOCAB], [1])
        (a,) = policy.open([1, 2], [1])
        with pytest.raises(UserError, match="impossible sampling"):
            await policy.generate(a, (), SamplingParams(top_p=0.0), NEVER)
        with pytest.raises(UserError, match="outside the model's vocabulary"):
            await turn(policy, a, 4, (-1,))
        pending = asyncio.create_task(turn(policy, a, 5))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="needs one that is away"):
            await turn(policy, a, 5)
        with pytest.raises(RuntimeError, match="needs one that is away"):
            policy.fork(a, 2)
        await pending
        policy.close(a)

    run(work())


def test_waiting_for_one_that_does_not_come_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentropy.policies.local.PATIENCE_SECONDS", 0.01)

    async def work() -> None:
        policy = policy_of()
        a, b = policy.open([1, 2, 3], [1, 2])
        waiting = asyncio.create_task(turn(policy, a, 5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        policy.close(b)
        assert len((await waiting).ids) == 5
        policy.close(a)

    run(work())
    assert "waited" in caplog.text


def test_without_the_clock_nobody_is_waited_for() -> None:
    async def work() -> None:
        policy = policy_of(deterministic=False)
        a, b = policy.open([1, 2, 3], [1, 2])
        first = await turn(policy, a, 5)
        second = await turn(policy, b, 5)
        assert len(first.ids) == len(second.ids) == 5
        policy.close(a)
        policy.close(b)

    run(work())


def test_prompt_is_prefilled_once_and_forks_not_at_all() -> None:
    async def work() -> None:
        policy = policy_of()
        prompt = list(range(1, 41))
        handles = policy.open(prompt, range(6))
        await asyncio.gather(*(turn(policy, h, 10) for h in handles))
        assert policy.statistics()["prefilled_tokens"] == 39
        child = policy.fork(handles[0], 99)
        policy.close(handles[0])
        outs = await asyncio.gather(*(turn(policy, h, 10) for h in [child, *handles[1:]]))
        assert policy.statistics()["prefilled_tokens"] == 39
        assert child.length == 60
        grand = [policy.fork(child, seed) for seed in (1, 1, 2)]
        for handle in [child, *handles[1:]]:
            policy.close(handle)
        a, b, c = await asyncio.gather(*(turn(policy, h, 10, (3, 4, 5)) for h in grand))
        assert a == b != c
        # The last sampled token and two of the three appended ones, three times.
        assert policy.statistics()["prefilled_tokens"] == 39 + 9
        assert outs[0].ids
        for handle in grand:
            policy.close(handle)
        policy.end()

    run(work())


def test_an_earlier_state_is_forked_without_prefill() -> None:
    async def work() -> None:
        policy = policy_of()
        (handle,) = policy.open(list(range(1, 31)), [5])
        await turn(policy, handle, 6)
        second = await turn(policy, handle, 12, (3, 4, 5))
        place = handle.length - len(second.ids)
        done = policy.statistics()["prefilled_tokens"]
        same, other, fresh = (policy.fork(handle, seed, at) for seed, at in ((5, place), (6, place), (6, 30)))
        assert [h.length for h in (same, other, fresh)] == [place, place, 30]
        policy.close(handle)
        again, apart, first = await asyncio.gather(*(turn(policy, h, 12) for h in (same, other, fresh)))
        assert policy.statistics()["prefilled_tokens"] == done
        assert again.ids == second.ids != apart.ids
        assert again.logprobs == pytest.approx(second.logprobs, abs=1e-5)
        for h in (same, other, fresh):
            policy.close(h)
        [new] = policy.open(list(range(1, 31)), [6])
        assert (await turn(policy, new, 12)).ids == first.ids
        for wrong in (0, 99):
            with pytest.raises(ValueError, match="cannot be forked at"):
                policy.fork(new, 1, wrong)
        policy.close(new)
        policy.end()

    run(work())


def test_slots_refilled_from_a_group_whose_members_have_left_need_no_prefill() -> None:
    async def work() -> None:
        policy = policy_of(max_slots=2)
        handles = policy.open(list(range(1, 31)), range(7))

        async def one(handle: SequenceHandle) -> None:
            await turn(policy, handle, 6)
            policy.close(handle)

        await asyncio.gather(*(one(h) for h in handles))
        assert policy.statistics()["prefilled_tokens"] == 29

    run(work())


def test_cache_memory_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentropy.policies.engine.KEPT_BYTES", 0)

    async def work() -> None:
        policy = policy_of(max_slots=4, max_context=128)
        handles = [policy.open([1, 2, 3], [i])[0] for i in range(12)]

        async def one(handle: SequenceHandle) -> None:
            await turn(policy, handle, 120)
            policy.close(handle)

        await asyncio.gather(*(one(h) for h in handles))
        # 3 layers, keys and values, 2 heads of 8 float32; one scratch column; 20 bytes of buffers a token.
        per_token = 3 * 2 * 2 * 8 * 4
        assert 0 < policy.memory_bytes() <= 4 * (129 * per_token + 130 * 20 + 100)
        policy.end()
        assert policy.memory_bytes() == 0

    run(work())


def test_gradients_are_not_recorded() -> None:
    async def work() -> None:
        policy = policy_of("lora")
        (a,) = policy.open([1, 2, 3], [1])
        await turn(policy, a, 5)
        assert torch.is_grad_enabled()
        assert all(not x.requires_grad for x in policy._engine.cache.keys)
        policy.close(a)

    run(work())
