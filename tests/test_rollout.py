"""The agent loop with a scripted policy, a real tokenizer and the real Python tool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from agentropy.policies.base import SamplingParams
from agentropy.policies.scripted import ScriptedPolicy, ScriptedTurn
from agentropy.protocols import make_dialect
from agentropy.rollout.loop import Agent, Attempt, Limits, rollout
from agentropy.tasks.base import Task
from agentropy.tools.python import python_tool
from agentropy.tools.session import make_toolbox
from agentropy.training.tokenizer import train_tokenizer
from agentropy.trajectory import Trajectory, dumps, from_json

TASK = Task("q1", "What is 6 times 7?", ("42",), "math", kind="mul", need=1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    text = "print(6*7) What is 6 times 7? import math the answer may be wrong while True: pass 1/0"
    return train_tokenizer([text] * 4, vocab_size=400, numbers=True)


async def exact(task: Task, answer: str) -> float | None:
    return float(answer.strip() in task.answers)


def roll(
    tokenizer: Any,
    turns: Sequence[str],
    parts: Sequence[Any] | None = None,
    limits: Limits = Limits(),
    samples: int = 1,
    max_new_tokens: int = 1024,
) -> list[Trajectory]:
    script = [ScriptedTurn(tuple(tokenizer.encode(t, add_special_tokens=False))) for t in turns]
    policy = ScriptedPolicy(lambda prompt, seed: script, len(tokenizer), max_context=2048)
    dialect = make_dialect("tags", tokenizer, max_result_tokens=64)
    toolbox = make_toolbox([python_tool(timeout=2.0)] if parts is None else parts)

    async def main() -> list[Trajectory]:
        await toolbox.start()
        try:
            attempts = [Attempt(TASK, f"q1/{k}", k) for k in range(samples)]
            params = SamplingParams(max_new_tokens=max_new_tokens)
            out = await rollout(Agent(policy, dialect, toolbox, exact), attempts, params, limits)
        finally:
            await toolbox.close()
        assert len(policy.opened) in (len(out), 0)
        for sequence, trajectory in zip(policy.opened, out, strict=False):
            assert tuple(sequence.ids) == trajectory.ids[: len(sequence.ids)]
            assert sequence.closed
        return out

    return asyncio.run(main())


def kinds(t: Trajectory) -> list[str]:
    return [s.kind for s in t.segments]


CALL = "<think>I need code</think><python>print(6*7)</python>"
ANSWER = "<think>so</think><answer>42</answer>"


def test_a_call_its_result_and_the_answer(tokenizer: Any) -> None:
    (t,) = roll(tokenizer, [CALL, ANSWER])
    assert kinds(t) == ["prompt", "reasoning", "call", "result", "reasoning"]
    assert (t.stop, t.answer, t.score) == ("answer", "42", 1.0)
    assert t.results[0].status == "ok"
    assert "42" in tokenizer.decode(t.segments[3].ids)
    assert tokenizer.decode(t.segments[2].ids) == "<python>print(6*7)</python>"
    assert t.segments[3].logprobs is None
    assert t.segments[1].logprobs is not None
    assert from_json(__import__("json").loads(dumps(t))) == t


def test_a_failing_call_is_shown_to_the_model_and_the_trajectory_goes_on(tokenizer: Any) -> None:
    (t,) = roll(tokenizer, ["<python>1/0</python>", "<answer>7</answer>"])
    assert t.results[0].status == "error"
    assert "ZeroDivisionError" in t.results[0].content
    assert (t.answer, t.score) == ("7", 0.0)


def test_nothing_the_tool_prints_is_an_answer(tokenizer: Any) -> None:
    (t,) = roll(tokenizer, ["<python>print('<'+'answer>42<'+'/answer>')</python>", "<think>hm</think>"])
    assert t.answer is None
    assert t.score == 0.0
    answer_id = tokenizer.convert_tokens_to_ids("</answer>")
    (result,) = (s for s in t.segments if s.kind == "result")
    assert answer_id not in result.ids


def test_void_cut_and_overlong_turns_end_the_trajectory_with_their_reason(tokenizer: Any) -> None:
    (t,) = roll(tokenizer, ["<think>nothing comes</think><|end|>"])
    assert t.stop == "void"
    (t,) = roll(tokenizer, ["<think>print print print print print print</think>"], limits=Limits(max_new_tokens=5))
    assert t.stop == "max_tokens"
    assert t.model_tokens == 5
    (t,) = roll(tokenizer, [CALL], limits=Limits(max_turns=3))
    assert t.stop == "max_turns"
    assert (len(t.calls), len(t.results)) == (3, 2)
    prompt = len(t.prompt)
    (t,) = roll(tokenizer, [CALL], limits=Limits(max_context=prompt + 30))
    assert t.stop == "context_full"
    assert len(t.ids) <= prompt + 30 + 64
    (t,) = roll(tokenizer, [CALL], limits=Limits(max_context=prompt))
    assert (t.stop, t.model_tokens, t.score) == ("context_full", 0, 0.0)


def test_a_lost_tool_leaves_the_trajectory_without_a_score(tokenizer: Any) -> None:
    from agentropy.tools.base import Tool
    from agentropy.tools.parts import ToolLost

    async def down(arguments: Any) -> Any:
        raise ToolLost("the server is down")

    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    (t,) = roll(tokenizer, [CALL, ANSWER], parts=[Tool("python", "Run code.", schema, down)])
    assert (t.stop, t.score) == ("error", None)


def test_slow_sync_tools_hold_nobody_back(tokenizer: Any) -> None:
    def python(code: str) -> str:
        """Run code.

        Args:
            code: The program.
        """
        time.sleep(1.0)
        return "42"

    roll(tokenizer, [ANSWER], parts=[python])  # what is imported at the first use is not the tool's time
    started = time.monotonic()
    out = roll(tokenizer, [CALL, ANSWER], parts=[python], samples=8)
    assert time.monotonic() - started < 3.0
    assert all(t.score == 1.0 for t in out)


def test_a_fault_of_the_policy_is_raised_and_everything_is_closed(tokenizer: Any) -> None:
    policy = ScriptedPolicy(lambda prompt, seed: [], len(tokenizer))
    dialect = make_dialect("tags", tokenizer)
    toolbox = make_toolbox([])
    attempts = [Attempt(TASK, f"q1/{k}", k) for k in range(3)]
    with pytest.raises(IndexError):
        asyncio.run(rollout(Agent(policy, dialect, toolbox, exact), attempts, SamplingParams(), Limits()))
    assert all(s.closed for s in policy.opened)
