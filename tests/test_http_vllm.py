r"""A real vLLM with SmolLM2 beside the local engine, where somebody runs one.

It is no dependency of ours, so this is skipped unless AGENTROPY_VLLM is its URL. To start one, on a CPU too:

    python -m vllm.entrypoints.openai.api_server --model ~/.cache/agentropy/converted/… --served-model-name smollm2 \
        --dtype float32 --max-model-len 512 --max-logprobs 50 --enforce-eager [--logprobs-mode processed_logprobs]
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from agentropy.errors import UserError
from agentropy.policies.base import Generation, SamplingParams, Stop
from agentropy.policies.http import connect
from agentropy.policies.http_chat import ChatPolicy
from agentropy.policies.http_tokens import HttpPolicy
from agentropy.policies.loading import load_model
from agentropy.policies.local import LocalPolicy
from agentropy.policies.scoring import score
from agentropy.protocols import make_dialect
from agentropy.rollout.chat import ChatAgent, rollout_chat
from agentropy.rollout.loop import Agent, Attempt, Limits, rollout
from agentropy.tasks.base import Task
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import Trajectory

URL = os.environ.get("AGENTROPY_VLLM", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not URL, reason="AGENTROPY_VLLM names no vLLM server")]
LIMITS = Limits(2, 24, 500)
GREEDY = SamplingParams(0.0, max_new_tokens=24)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def policy() -> HttpPolicy:
    found = connect(URL, tokenizer="smollm2", top_logprobs=50)
    assert isinstance(found, HttpPolicy)
    return found


async def holds(task: Task, answer: str) -> float | None:
    return float(task.answers[0].lower() in answer.lower())


def attempts() -> list[Attempt]:
    questions = (("What is the capital of France?", "Paris"), ("How many days has a week?", "7"))
    return [Attempt(Task(f"q{i}", q, (a,), "em"), f"q{i}", i) for i, (q, a) in enumerate(questions)]


def expected(model: Any) -> list[Trajectory]:
    network, tokenizer = model
    engine = LocalPolicy(network, tokenizer, max_context=500)
    with engine.rollout():
        agent = Agent(engine, make_dialect("hermes", tokenizer), make_toolbox([]), holds)
        return asyncio.run(rollout(agent, attempts(), GREEDY, LIMITS))


def test_greedy_ids_and_log_probabilities(model: Any, policy: HttpPolicy) -> None:
    async def main() -> list[Trajectory]:
        agent = Agent(policy, make_dialect("hermes", policy.tokenizer), make_toolbox([]), holds)
        out = await rollout(agent, attempts(), GREEDY, LIMITS)
        await policy.aclose()
        return out

    for mine, other in zip(asyncio.run(main()), expected(model), strict=True):
        assert (mine.ids, mine.answer, mine.stop) == (other.ids, other.answer, other.stop)
        for a, b in zip(mine.segments[1:], other.segments[1:], strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
            assert all(x <= y + 1e-4 for x, y in zip(a.entropies or (), b.entropies or (), strict=True))


def test_numbers_at_another_temperature_stops_and_seeds(model: Any, policy: HttpPolicy) -> None:
    network, tokenizer = model
    prompt = tokenizer.encode("The capital of France is Paris, and that of Italy")
    stop = Stop(frozenset({tokenizer.eos_token_id}), (" is",))

    async def main() -> tuple[list[Generation], Generation]:
        handles = policy.open(prompt, [1, 1, 2])
        params = SamplingParams(0.7, max_new_tokens=12)
        turns = [await policy.generate(h, [], params, stop) for h in handles]
        [long] = policy.open([5] * (policy.info.max_context - 7), [0])
        full = await policy.generate(long, [], SamplingParams(max_new_tokens=50), Stop())
        await policy.aclose()
        return turns, full

    turns, full = asyncio.run(main())
    assert turns[0] == turns[1]
    assert (full.finish, len(full.ids)) == ("context_full", 7)
    off = 1e-4 if policy.mode == "scaled" else 0.25
    for turn in turns:
        text = tokenizer.decode(turn.ids)
        assert (" is" in text) == (turn.finish == "stop" and turn.ids[-1] != tokenizer.eos_token_id)
        assert " is" not in tokenizer.decode(turn.ids[:-1])
        with torch.no_grad():
            found = score(network, [[*prompt, *turn.ids]], temperature=0.7)
        count = len(turn.ids)
        assert (found.logprobs[-count:] - torch.tensor(turn.logprobs)).abs().max() < off


def test_chat(model: Any) -> None:
    policy = connect(URL, api="chat")
    assert isinstance(policy, ChatPolicy)

    async def main() -> list[Trajectory]:
        agent = ChatAgent(policy, make_toolbox([]), holds)
        out = await rollout_chat(agent, attempts(), GREEDY, LIMITS)
        # Together with the limit it does not fit, alone it does; then not even alone.
        tasks = [Task(str(n), "word " * n, ("x",), "em") for n in (430, 520)]
        long = [Attempt(t, t.id, 0) for t in tasks]
        out += await rollout_chat(agent, long, SamplingParams(0.0, max_new_tokens=200), Limits(1, 200, 4096))
        await policy.aclose()
        return out

    *short, fits, too_long = asyncio.run(main())
    for mine, other in zip(short, expected(model), strict=True):
        assert (mine.answer, mine.stop, mine.model_tokens) == (other.answer, other.stop, other.model_tokens)
        assert mine.segments[1].logprobs == pytest.approx(other.segments[1].logprobs, abs=1e-4)
    assert fits.model_tokens > 0
    assert (too_long.stop, too_long.model_tokens) == ("context_full", 0)


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match=r"no model 'nope'.*it serves"):
        connect(URL, "nope")
    with pytest.raises(UserError, match="Requested sample logprobs of 90"):
        connect(URL, api="completions", tokenizer="smollm2", top_logprobs=90)
