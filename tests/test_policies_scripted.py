"""The scripted policy does what it is told, and stops where a real one would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentropy.policies.base import Generation, Policy, SamplingParams, Stop
from agentropy.policies.scripted import ScriptedPolicy, ScriptedTurn


def decode(ids: Any) -> bytes:
    return bytes(ids)


def generate(
    turn: ScriptedTurn, params: SamplingParams | None = None, stop: Stop | None = None, room: int = 99
) -> Generation:
    policy = ScriptedPolicy(lambda prompt, seed: [turn], 256, max_context=room, decode=decode)
    [sequence] = policy.open([1], [0])
    made = asyncio.run(policy.generate(sequence, [2], params or SamplingParams(), stop or Stop()))
    assert sequence.ids == [1, 2, *made.ids]
    assert sequence.length == 2 + len(made.ids)
    return made


def test_stops() -> None:
    turn = ScriptedTurn(tuple(b"one two three"))
    assert bytes(generate(turn, stop=Stop(frozenset({ord("w")}))).ids) == b"one tw"
    assert bytes(generate(turn, stop=Stop(strings=("two",))).ids) == b"one two"
    cut = generate(turn, SamplingParams(max_new_tokens=4), Stop(strings=("two",)))
    assert (bytes(cut.ids), cut.finish) == (b"one ", "length")
    exact = generate(turn, SamplingParams(max_new_tokens=7), Stop(strings=("two",)))
    assert (bytes(exact.ids), exact.finish) == (b"one two", "stop")
    full = generate(turn, room=6)
    assert (bytes(full.ids), full.finish) == (b"one ", "context_full")


def test_numbers_stand_beside_the_ids() -> None:
    turn = ScriptedTurn((5, 6, 7), (-1.0, -2.0, -3.0), (0.1, 0.2, 0.3))
    made = generate(turn, stop=Stop(frozenset({6})))
    assert (made.logprobs, made.entropies) == ((-1.0, -2.0), (0.1, 0.2))
    with pytest.raises(ValueError, match="3 ids but 1 logprobs"):
        ScriptedTurn((1, 2, 3), (0.0,))


def test_turns_follow_each_other_and_branches_part() -> None:
    policy: Policy = ScriptedPolicy(lambda prompt, seed: [ScriptedTurn((seed,)), ScriptedTurn((9,))], 256)

    async def main() -> None:
        first, second = policy.open([1], [3, 4])
        assert (await policy.generate(first, [], SamplingParams(), Stop())).ids == (3,)
        branch = policy.fork(first, 8)
        for sequence in (first, branch, first):
            assert (await policy.generate(sequence, [7], SamplingParams(), Stop())).ids == (9,)
        assert (branch.length, first.length, second.length) == (4, 6, 1)
        earlier = policy.fork(first, 5, at=2)
        fresh = policy.fork(first, 6, at=1)
        assert (await policy.generate(earlier, [7], SamplingParams(), Stop())).ids == (9,)
        assert (await policy.generate(fresh, [], SamplingParams(), Stop())).ids == (6,)
        policy.close(first)
        policy.close(first)
        with pytest.raises(ValueError, match="closed"):
            await policy.generate(first, [], SamplingParams(), Stop())

    asyncio.run(main())
