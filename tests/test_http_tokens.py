"""Completions with token ids: the local engine and servers with the same model say the same, token by token."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from agentropy.algorithms.branching import Branching
from agentropy.algorithms.entropy import entropy_from_top_k
from agentropy.errors import UserError
from agentropy.policies.base import Generation, PolicyLost, SamplingParams, Stop
from agentropy.policies.http import connect
from agentropy.policies.http_client import Patience
from agentropy.policies.http_tokens import HttpPolicy
from agentropy.policies.http_wire import at_temperature
from agentropy.policies.local import LocalPolicy
from agentropy.rollout.branching import branching_rollout
from agentropy.rollout.loop import Agent, Limits, rollout
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import Trajectory
from branching_agents import IdDialect, attempts_of, bare, check_tree, even, slow_tool
from engine_models import tiny_model
from fake_vllm import TinyServer, ascii_tokenizer
from faulty_server import Faults, Refuse, Served, serve

QUICK = Patience(timeout=20.0, tries=6, pause=0.01)
TOKENIZER = ascii_tokenizer()
PROMPT = [ord(c) - 32 for c in "Question: what?"]


def server(kind: str = "vllm", **options: Any) -> TinyServer:
    return TinyServer(tiny_model("qwen3"), TOKENIZER, kind, **options)


def connected(
    brain: Any,
    work: Callable[[HttpPolicy, Served], Awaitable[Any]],
    faults: Faults | None = None,
    patience: Patience = QUICK,
    top: int = 97,
    concurrency: int = 8,
) -> Any:
    """Run `work` with a policy that is connected without faults; they begin afterwards."""

    async def main() -> Any:
        async with serve(brain) as served:
            policy = await asyncio.to_thread(
                connect, served.url, "tiny", "completions", None, concurrency, TOKENIZER, top_logprobs=top,
                patience=patience,
            )  # fmt: skip
            assert isinstance(policy, HttpPolicy)
            if faults is not None:
                served.faults = faults
            try:
                return await work(policy, served)
            finally:
                await policy.aclose()

    return asyncio.run(main())


async def turns(policy: Any, seeds: Sequence[int], params: SamplingParams, stop: Stop) -> list[Generation]:
    """Two turns for each seed, with a result between them."""

    async def one(handle: Any) -> list[Generation]:
        first = await policy.generate(handle, [], params, stop)
        assert handle.length == len(PROMPT) + len(first.ids)
        second = await policy.generate(handle, [1, 2, 3], params, stop)
        assert handle.length == len(PROMPT) + len(first.ids) + 3 + len(second.ids)
        policy.close(handle)
        return [first, second]

    return [g for pair in await asyncio.gather(*map(one, policy.open(PROMPT, seeds))) for g in pair]


def local(params: SamplingParams, stop: Stop) -> list[Generation]:
    policy = LocalPolicy(tiny_model("qwen3"), TOKENIZER, max_context=200)
    with policy.rollout():
        found: list[Generation] = asyncio.run(turns(policy, [0, 1], params, stop))
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_greedy_turns_are_those_of_the_local_engine(kind: str) -> None:
    params, stop = SamplingParams(0.0, max_new_tokens=30), Stop(frozenset({40, 41, 42}), ("a", "zz"))
    expected = local(params, stop)
    got = connected(server(kind), lambda policy, _: turns(policy, [0, 1], params, stop))
    assert {g.finish for g in expected} == {"stop"}
    for mine, other in zip(got, expected, strict=True):
        assert mine.ids == other.ids
        assert mine.finish == other.finish
        assert mine.entropy_kind == "top-k"
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.entropies == pytest.approx(other.entropies, abs=1e-5)  # all 97 tokens are listed


@pytest.mark.parametrize("mode", ["raw", "scaled"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_numbers_are_those_at_the_sampling_temperature(mode: str, temperature: float) -> None:
    """Whichever the server gives: with all alternatives listed they are those of the trainer's own forward."""
    params = SamplingParams(temperature, max_new_tokens=20)

    async def work(policy: HttpPolicy, served: Served) -> None:
        assert policy.mode == mode
        first, second = (await turns(policy, [3], params, Stop()))[:2]
        ids = [*PROMPT, *first.ids, 1, 2, 3, *second.ids]
        with torch.no_grad():
            logits = policy_model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
        expected = logits.log_softmax(-1)
        for turn, at in ((first, len(PROMPT)), (second, len(PROMPT) + len(first.ids) + 3)):
            for i, token in enumerate(turn.ids):
                row = expected[at + i - 1]
                assert turn.logprobs[i] == pytest.approx(float(row[token]), abs=1e-5)
                assert turn.entropies[i] == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-5)

    policy_model = tiny_model("qwen3")
    connected(server(mode=mode), work)


def test_estimates_from_ten_of_97_tokens() -> None:
    logits = torch.randn(50, 97, generator=torch.Generator().manual_seed(0)).double() * 2.5
    raw = logits.log_softmax(-1)
    top = raw.topk(10).values
    error = {}
    for temperature in (0.5, 1.0, 1.5):
        truth = (logits / temperature).log_softmax(-1)
        exact = -(truth.exp() * truth).sum(-1)
        logprobs, estimate = at_temperature(top[:, 0].tolist(), top.tolist(), temperature, "raw", 97)
        error[temperature] = float((exact - torch.tensor(estimate)).abs().mean())
        lumped = float((exact - entropy_from_top_k(truth.topk(10).values)).abs().mean())
        assert temperature < 1 or error[temperature] < lumped / 3
        off = torch.tensor(logprobs).sub(truth.max(-1).values).abs().mean()
        assert off < {0.5: 0.03, 1.0: 1e-6, 1.5: 0.3}[temperature]
    assert error[1.0] < 0.05
    assert error[0.5] < 0.15  # what is not listed counts for too much there


def test_the_same_seed_gives_the_same_turn_and_another_one_another() -> None:
    params = SamplingParams(1.0, max_new_tokens=12)

    async def work(policy: HttpPolicy, served: Served) -> None:
        a, _, b, _, c, _ = await turns(policy, [1, 1, 2], params, Stop())
        assert a == b
        assert a.ids != c.ids
        assert len({body["seed"] for body in served.bodies[-6:]}) == 4  # two turns of two seeds

    connected(server(), work)


def test_every_sampling_field_is_said_so_that_generation_config_json_counts_for_nothing() -> None:
    async def work(policy: HttpPolicy, served: Served) -> None:
        [handle] = policy.open(PROMPT, [0])
        await policy.generate(handle, [], SamplingParams(0.7, 0.9, 5, 3), Stop(frozenset({7, 3}), ("x",)))
        body = served.bodies[-1]
        assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.7, 0.9, 5, 3)
        assert (body["min_p"], body["repetition_penalty"], body["presence_penalty"]) == (0.0, 1.0, 0.0)
        assert body["prompt"] == PROMPT
        assert (body["stop_token_ids"], body["stop"]) == ([3, 7], ["x"])
        await policy.generate(handle, [9], SamplingParams(), Stop())
        assert served.bodies[-1]["top_k"] == -1
        assert served.bodies[-1]["prompt"][-1] == 9

    connected(server(), work)


def test_ids_behind_a_stop_are_dropped() -> None:
    """A server that does not know our stop tokens goes on, and the turn ends where it must."""
    stop = Stop(frozenset(range(5, 11)))
    params = SamplingParams(1.0, max_new_tokens=40)

    async def work(policy: HttpPolicy, served: Served) -> None:
        for turn in await turns(policy, [0, 1, 2], params, stop):
            assert turn.finish == "stop"
            assert turn.ids[-1] in stop.token_ids
            assert not stop.token_ids.intersection(turn.ids[:-1])
            assert len(turn.ids) == len(turn.logprobs) == len(turn.entropies) < 40

    connected(server(deaf=True), work)


def test_limits_and_windows() -> None:
    async def work(policy: HttpPolicy, served: Served) -> None:
        assert policy.info.max_context == 40
        [handle] = policy.open(PROMPT, [0])
        out = await policy.generate(handle, [], SamplingParams(max_new_tokens=5), Stop())
        assert (len(out.ids), out.finish) == (5, "length")
        out = await policy.generate(handle, [], SamplingParams(max_new_tokens=50), Stop())
        assert (handle.length, out.finish) == (40, "context_full")
        out = await policy.generate(handle, [1], SamplingParams(max_new_tokens=50), Stop())
        assert (out.ids, out.finish) == ((), "context_full")
        with pytest.raises(UserError, match="does not fit a context of 40"):
            policy.open([1] * 40, [0])
        with pytest.raises(UserError, match="empty prompt"):
            policy.open([], [0])
        # A server that has less room than it said is understood.
        policy.info = dataclasses.replace(policy.info, max_context=100)
        [handle] = policy.open([1] * 60, [0])
        out = await policy.generate(handle, [], SamplingParams(max_new_tokens=5), Stop())
        assert (out.ids, out.finish) == ((), "context_full")

    connected(server(window=40), work)


def test_forks_go_on_from_where_they_left() -> None:
    params = SamplingParams(1.0, max_new_tokens=10)

    async def work(policy: HttpPolicy, served: Served) -> None:
        [handle] = policy.open(PROMPT, [0])
        await policy.generate(handle, [], params, Stop())
        fork, early = policy.fork(handle, 7), policy.fork(handle, 7, at=len(PROMPT) + 4)
        assert (fork.length, early.length) == (handle.length, len(PROMPT) + 4)
        mine = await policy.generate(handle, [5], params, Stop())
        other = await policy.generate(fork, [5], params, Stop())
        assert mine.ids != other.ids
        assert served.bodies[-1]["prompt"] == served.bodies[-2]["prompt"]
        await policy.generate(early, [5], params, Stop())
        assert served.bodies[-1]["prompt"] == [*served.bodies[-2]["prompt"][: len(PROMPT) + 4], 5]
        policy.close(fork)
        policy.close(fork)
        with pytest.raises(ValueError, match="closed"):
            await policy.generate(fork, [], params, Stop())

    connected(server(), work)


def test_closing_cancels_a_pending_turn() -> None:
    async def main() -> None:
        async with serve(server(), delay=0.3) as served:
            policy = await asyncio.to_thread(connect, served.url, "tiny", "completions", tokenizer=TOKENIZER)
            assert isinstance(policy, HttpPolicy)
            [handle] = policy.open(PROMPT, [0])
            waiting = asyncio.create_task(policy.generate(handle, [], SamplingParams(max_new_tokens=3), Stop()))
            await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="being generated from"):
                await policy.generate(handle, [], SamplingParams(), Stop())
            began = time.monotonic()
            policy.close(handle)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert time.monotonic() - began < 0.2
            await policy.aclose()

    asyncio.run(main())


# -- the agent loop, and trees ----------------------------------------------------------------------------------------


async def roll(policy: Any, rolled: Any, attempts: Any, params: SamplingParams) -> list[Trajectory]:
    toolbox = make_toolbox([slow_tool()])
    await toolbox.start()
    try:
        limits = Limits(4, 60, 180)
        out: list[Trajectory] = await rolled(Agent(policy, IdDialect(), toolbox, even), attempts, params, limits)
        return out
    finally:
        await toolbox.close()


def test_the_agent_loop_makes_the_trajectories_of_the_local_engine() -> None:
    params = SamplingParams(0.0, max_new_tokens=25)
    attempts = attempts_of(4, 1)
    engine = LocalPolicy(tiny_model("qwen3"), TOKENIZER, max_context=200)
    with engine.rollout():
        expected = asyncio.run(roll(engine, rollout, attempts, params))
    got = connected(server(), lambda policy, _: roll(policy, rollout, attempts, params))
    assert {s.kind for t in expected for s in t.segments} == {"prompt", "reasoning", "call", "result"}
    for mine, other in zip(got, expected, strict=True):
        assert mine.entropy_kind == "top-k"
        assert (mine.ids, mine.answer, mine.score, mine.stop) == (other.ids, other.answer, other.score, other.stop)
        for a, b in zip(mine.segments, other.segments, strict=True):
            assert a.kind == b.kind
            assert a.entropies == (b.entropies if b.entropies is None else pytest.approx(b.entropies, abs=1e-5))


def test_trees_grow_over_http() -> None:
    spec = Branching("arpo", roots=2, beam=2, base=0.9)
    rolled = functools.partial(branching_rollout, spec, 6)
    params = SamplingParams(max_new_tokens=20)
    leaves = connected(server(), lambda policy, _: roll(policy, rolled, attempts_of(1, 6), params))
    check_tree(leaves, 6)
    assert any(t.parent_id for t in leaves)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_one_call_in_five_fails_and_no_answer_differs() -> None:
    attempts, params = attempts_of(9, 2), SamplingParams(max_new_tokens=10)
    expected = connected(server(), lambda policy, _: roll(policy, rollout, attempts, params))
    faults = Faults(every=5, stall=9.0)
    patience = dataclasses.replace(QUICK, timeout=2.5)

    async def work(policy: HttpPolicy, served: Served) -> list[Trajectory]:
        out = await roll(policy, rollout, attempts, params)
        usage = policy.usage
        # On a busy machine a call that was to be answered may take too long as well.
        assert sum(usage.retries.values()) >= sum(faults.made.values()) >= 9
        assert {"connection", "timeout", "429", "500", "rubbish", "incomplete"} == set(usage.retries)
        assert usage.lost == 0
        model_tokens = sum(t.model_tokens for t in out)
        assert usage.completion_tokens == model_tokens
        assert usage.requests == sum(1 for t in out for s in t.segments if s.kind == "result") + len(out)
        return out

    # Few at once: on a busy machine the model behind the server takes its time, and that is no fault to count.
    got = connected(server(), work, faults, patience, concurrency=2)
    assert [bare(t) for t in got] == [bare(t) for t in expected]


def test_a_server_that_dies_for_good_costs_trajectories_not_the_run() -> None:
    attempts, params = attempts_of(6, 1), SamplingParams(max_new_tokens=20)
    faults = Faults()

    async def work(policy: HttpPolicy, served: Served) -> list[Trajectory]:
        fine = await roll(policy, rollout, attempts[:2], params)
        faults.dead = True
        return fine + await roll(policy, rollout, attempts[2:], params)

    got = connected(server(), work, faults, dataclasses.replace(QUICK, tries=3))
    assert [t.question_id for t in got] == [f"q{i}" for i in range(6)]
    assert all((t.stop != "error" and t.score is not None) or t.answer is None for t in got[:2])
    assert all(t.stop == "error" and t.score is None for t in got[2:])


def test_trees_with_lost_turns_have_all_their_leaves() -> None:
    spec = Branching("arpo", roots=2, beam=2, base=0.9)
    faults = Faults(every=3, kinds=["error"])
    rolled = functools.partial(branching_rollout, spec, 6)
    params = SamplingParams(max_new_tokens=20)
    patience = dataclasses.replace(QUICK, tries=1)
    leaves = connected(server(), lambda policy, _: roll(policy, rolled, attempts_of(1, 6), params), faults, patience)
    assert len(leaves) == 6
    assert any(t.stop == "error" and t.score is None for t in leaves)
    assert any(t.stop != "error" for t in leaves)


def test_a_later_refusal_costs_one_trajectory_and_a_refused_key_the_run() -> None:
    tiny, state = server(), {"refuse": 0}

    def brain(path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        if state["refuse"] and path == "/v1/completions":
            raise Refuse(state["refuse"], {"error": {"message": "bad luck"}})
        return tiny(path, body, headers)

    async def work(policy: HttpPolicy, served: Served) -> None:
        params = SamplingParams(max_new_tokens=5)
        one, two, three = policy.open(PROMPT, [0, 1, 2])
        state["refuse"] = 400
        with pytest.raises(UserError, match="refuses the request: HTTP 400: bad luck"):
            await policy.generate(one, [], params, Stop())
        state["refuse"] = 0
        await policy.generate(two, [], params, Stop())
        state["refuse"] = 400
        with pytest.raises(PolicyLost, match="bad luck"):
            await policy.generate(two, [], params, Stop())
        assert policy.usage.lost == 1
        state["refuse"] = 401
        with pytest.raises(UserError, match="refuses the API key"):
            await policy.generate(three, [], params, Stop())
        assert policy.usage.retries == {}

    connected(brain, work)


# -- connecting -------------------------------------------------------------------------------------------------------


def test_older_servers_give_ids_by_name() -> None:
    async def work(policy: HttpPolicy, served: Served) -> None:
        [handle] = policy.open(PROMPT, [0])
        assert len((await policy.generate(handle, [], SamplingParams(max_new_tokens=4), Stop())).ids) == 4

    connected(server(names_only=True), work)


def wrong(brain: Any, match: str, **options: Any) -> None:
    async def main() -> None:
        async with serve(brain) as served:
            arguments = {"model": "tiny", "api": "completions", "tokenizer": TOKENIZER, "patience": QUICK} | options
            with pytest.raises(UserError, match=match):
                await asyncio.to_thread(functools.partial(connect, served.url, **arguments))

    asyncio.run(main())


def test_what_cannot_work_is_said_when_connecting() -> None:
    wrong(server(), r"no model 'huge' .*it serves tiny", model="huge")
    wrong(server(max_logprobs=5), "Requested sample logprobs of 20", top_logprobs=20)
    shifted = ascii_tokenizer()
    shifted.decode = lambda ids, **_: TOKENIZER.decode([(i + 1) % 95 for i in ids])
    wrong(server(), "the tokenizer is not that of the server", tokenizer=shifted)
    wrong(server(), "name it with --tokenizer", tokenizer="/nowhere/at/all")
    wrong(server(), "name it with --tokenizer", tokenizer=None)

    def changed(path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        answer = server()(path, body, headers)
        for choice in answer.get("choices", []):
            choice["prompt_token_ids"] = [0, *choice["prompt_token_ids"]]
        return answer

    wrong(changed, "prompt_token_ids differ")


def test_the_only_model_needs_no_name() -> None:
    async def main() -> None:
        async with serve(server()) as served:
            policy = await asyncio.to_thread(connect, served.url + "/v1/", tokenizer=TOKENIZER)
            assert isinstance(policy, HttpPolicy)
            assert (policy.model, policy.info.vocab_size, policy.info.entropy_kind) == ("tiny", 97, "top-k")
            assert policy.info.notes["api"] == "completions"

    asyncio.run(main())
