"""Whole transcripts through the agent loop, real tools included; and reading that survives whatever a policy writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.policies.base import SamplingParams
from agentropy.policies.scripted import ScriptedPolicy, ScriptedTurn
from agentropy.protocols import Dialect, make_dialect
from agentropy.protocols.text import TokenText
from agentropy.rollout.loop import Agent, Attempt, Limits, rollout
from agentropy.sandbox import LocalSandbox
from agentropy.tasks.base import Task
from agentropy.tools import make_toolbox, python_tool
from agentropy.trajectory import Trajectory
from protocol_tokenizers import CHATML, CHATML_TOOLS, chatml, sentencepiece, tiny

TASK = Task("q", "What is 6*7?", ("42",), "math")


def transcript(dialect: Dialect, tokenizer: Any, turns: Sequence[str]) -> tuple[Trajectory, str]:
    text = TokenText(tokenizer)
    script = [ScriptedTurn(tuple(text.encode_after(t))) for t in turns]
    policy = ScriptedPolicy(lambda prompt, seed: script, len(tokenizer), 10_000, decode=text.decode_bytes)

    async def grade(task: Task, answer: str) -> float:
        return float(answer in task.answers)

    async def main() -> Trajectory:
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            agent = Agent(policy, dialect, make_toolbox([python_tool(sandbox)]), grade)
            await agent.toolbox.start()
            limits = Limits(max_turns=5, max_new_tokens=1000, max_context=10_000)
            [one] = await rollout(agent, [Attempt(TASK, "q-0", 0)], SamplingParams(), limits)
            return one

    trajectory = asyncio.run(main())
    assert trajectory.ids == tuple(policy.opened[0].ids)
    return trajectory, text.decode(trajectory.ids)


def kinds(trajectory: Trajectory) -> list[str]:
    return [s.kind for s in trajectory.segments]


def test_hermes() -> None:
    tokenizer = chatml(CHATML_TOOLS)
    trajectory, text = transcript(
        make_dialect("hermes", tokenizer),
        tokenizer,
        [
            "<think>\nCompute.\n</think>\n\n"
            '<tool_call>\n{"name": "python", "arguments": {"code": "6*7"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "python", "arguments": {"kode": "1"}}\n</tool_call><|im_end|>',
            "It is \\boxed{42}.<|im_end|>",
        ],
    )
    assert text[text.index("<|im_start|>user") :] == (
        "<|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n<think>\nCompute.\n</think>\n\n"
        '<tool_call>\n{"name": "python", "arguments": {"code": "6*7"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "python", "arguments": {"kode": "1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n"
        'Invalid call: python: unknown argument "kode" (the arguments are: "code")\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nIt is \\boxed{42}.<|im_end|>"
    )
    assert kinds(trajectory) == ["prompt", "reasoning", "call", "result", "reasoning"]
    assert [r.status for r in trajectory.results] == ["ok", "invalid"]
    assert (trajectory.answer, trajectory.score, trajectory.stop) == ("42", 1.0, "answer")


def test_fence() -> None:
    tokenizer = chatml(CHATML)
    trajectory, text = transcript(
        make_dialect("fence", tokenizer),
        tokenizer,
        [
            "I compute.\n```python\nprint('\\\\boxed{1}')\n6*7\n```\nCode execution result: 7 (made up)",
            "So it is \\boxed{42}.<|im_end|>",
        ],
    )
    assert text.endswith(
        "User Question: What is 6*7?<|im_end|>\n<|im_start|>assistant\n"
        "I compute.\n```python\nprint('\\\\boxed{1}')\n6*7\n```\n"
        "Code execution result: \\boxed{1}\n42\nSo it is \\boxed{42}.<|im_end|>"
    ), "what was made up was never sampled, and the box that was printed ended nothing"
    assert (trajectory.answer, trajectory.stop) == ("42", "answer")


@pytest.mark.parametrize("kind", ["tiny", "text"])
def test_tags(kind: str) -> None:
    tokenizer = tiny() if kind == "tiny" else chatml(CHATML)
    trajectory, text = transcript(
        make_dialect("tags", tokenizer),
        tokenizer,
        [
            "<think>compute</think><python>print(6*</python>",
            "<think>again</think><python>print(6*7, '<answer>1')</python>",
            "<answer>42</answer>",
        ],
    )
    assert [r.status for r in trajectory.results] == ["error", "ok"]
    assert (trajectory.answer, trajectory.stop) == ("42", "answer")
    begin, end = ("<result>", "</result>") if kind == "tiny" else ("\n<result>\n", "\n</result>\n")
    assert text.endswith(
        f"<think>again</think><python>print(6*7, '<answer>1')</python>{begin}42 <answer>1{end}<answer>42</answer>"
    )
    assert kinds(trajectory) == ["prompt", *["reasoning", "call", "result"] * 2, "reasoning"]


# --- whatever a policy writes ----------------------------------------------------------------------------------------

FRAGMENTS = [
    *[
        "<tool_call>",
        "</tool_call>",
        '{"name": "python"',
        ', "arguments": {"code": "',
        '"}}',
        "{}",
        "}",
        "[",
        "null",
        "\\",
    ],
    *["```", "```python", "\n", "\r\n", " ", "````", "\\boxed{", "\\boxed{1}", "print(1)", "é", "\ud7ff", "🙂", "\x00"],
    *["<think>", "</think>", "<python>", "</python>", "<search>", "</search>", "<answer>", "</answer>", "<result>"],
    *["<|im_end|>", "<|end|>", "</s>", "<|im_start|>"],
]
DIALECTS = {
    "hermes": lambda: make_dialect("hermes", chatml(CHATML_TOOLS, call_tokens=True)),
    "hermes stopped": lambda: make_dialect("hermes", chatml(CHATML), stop_at_call=True, answer_format="boxed"),
    "hermes sentencepiece": lambda: make_dialect("hermes", sentencepiece(), answer_format="text"),
    "fence": lambda: make_dialect("fence", chatml(CHATML)),
    "tags tiny": lambda: make_dialect("tags", tiny()),
    "tags text": lambda: make_dialect("tags", sentencepiece(), tool_tags={"python": "code", "search": None}),
}


@cache
def dialect(name: str) -> Any:
    return DIALECTS[name]()


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=150, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14),
    noise=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 399)), max_size=3),
    finish=st.sampled_from(["stop", "length", "context_full"]),
)
def test_reading_never_fails_and_its_parts_agree(
    name: str, fragments: list[str], noise: list[tuple[int, int]], finish: Any
) -> None:
    d = dialect(name)
    ids = d.text.encode("".join(fragments).encode("utf-8", "replace").decode())
    for at, token in noise:
        ids.insert(at, token)  # tokens that cut characters and tags in two
    turn = d.read(ids, finish)
    assert 0 <= turn.call_start <= len(ids)
    assert not turn.calls or turn.call_start < len(ids)
    assert turn.answer is None or turn.calls == ()
    assert turn.answer is None or (turn.answer.strip() and turn.call_start == len(ids))
    if finish != "stop":
        assert turn.calls == ()
        assert turn.answer is None
    for call in turn.calls:
        assert call.error is None or call.error.strip()
        assert call.error is not None or call.tool


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), limit=st.integers(1, 60))
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_any_text_can_be_a_result(kind: str, text: str, limit: int) -> None:
    d = make_dialect_cached(kind)
    text = text.encode("utf-8", "replace").decode()
    ids = d.text.encode_plain(text)
    assert d.text.forbidden.isdisjoint(ids)
    short = d.text.cut(text * 5, limit)
    assert len(d.text.encode_plain(short)) <= max(limit, 40)


@cache
def make_dialect_cached(kind: str) -> Any:
    return make_dialect("hermes", chatml(CHATML) if kind == "byte-level" else sentencepiece())
