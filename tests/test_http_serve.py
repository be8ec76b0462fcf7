"""A real server, `transformers serve` with SmolLM2, beside the local engine with the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.policies.base import SamplingParams
from agentropy.policies.http import connect
from agentropy.policies.http_chat import ChatPolicy
from agentropy.policies.loading import converted, find_smollm2, load_model
from agentropy.policies.local import LocalPolicy
from agentropy.protocols import make_dialect
from agentropy.rollout.chat import ChatAgent, rollout_chat
from agentropy.rollout.loop import Agent, Attempt, Limits, rollout
from agentropy.tasks.base import Task
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import Trajectory

QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("What is 3 plus 4?", "7"),
    ("Which planet do we live on?", "Earth"),
    ("How many days has a week?", "7"),
)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    for package in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"transformers serve needs {package}: pip install 'agentropy[serve-test]'")
    try:
        return converted(find_smollm2())
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(checkpoint), "--host", "127.0.0.1"]
    command += ["--port", "0", "--device", "cpu", "--dtype", "float32"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            began = time.monotonic()
            while not (found := re.search(r"running on (http://[\d.:]+)", log.read_text(errors="replace"))):
                assert process.poll() is None, log.read_text(errors="replace")[-2000:]
                assert time.monotonic() - began < 300
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def attempts() -> list[Attempt]:
    return [Attempt(Task(f"q{i}", q, (a,), "em"), f"q{i}", i) for i, (q, a) in enumerate(QUESTIONS)]


async def holds(task: Task, answer: str) -> float | None:
    return float(task.answers[0].lower() in answer.lower())


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: one
        b: other
    """
    return a * b


LIMITS = Limits(max_turns=3, max_new_tokens=60, max_context=2048)


def chat(
    url: str, params: SamplingParams, parts: list[Any], concurrency: int = 4
) -> tuple[list[Trajectory], ChatPolicy]:
    policy = connect(url, concurrency=concurrency)
    assert isinstance(policy, ChatPolicy)

    async def main() -> list[Trajectory]:
        try:
            return await rollout_chat(ChatAgent(policy, make_toolbox(parts), holds), attempts(), params, LIMITS)
        finally:
            await policy.aclose()

    return asyncio.run(main()), policy


@pytest.mark.slow
@pytest.mark.parametrize("tools", [False, True])
def test_greedy_answers_and_scores_are_those_of_the_local_engine(url: str, checkpoint: Path, tools: bool) -> None:
    parts = [multiply] if tools else []
    params = SamplingParams(0.0, max_new_tokens=60)
    got, policy = chat(url, params, parts)
    assert policy.info.notes["server"] == "transformers"
    assert policy.no_tools == "does not show its model the tools"  # so they stand in the prompt, as with hermes here

    model, tokenizer = load_model(checkpoint)
    engine = LocalPolicy(model, tokenizer, max_context=2048)
    dialect = make_dialect("hermes", tokenizer)
    with engine.rollout():
        agent = Agent(engine, dialect, make_toolbox(parts), holds)
        expected = asyncio.run(rollout(agent, attempts(), params, LIMITS))

    assert [(t.answer, t.score, t.stop) for t in got] == [(t.answer, t.score, t.stop) for t in expected]
    assert sum(t.score or 0 for t in got) >= 2
    for mine, other in zip(got, expected, strict=True):
        assert mine.model_tokens == other.model_tokens
        assert mine.segments[-1].entropies is None  # this server gives no log-probabilities
    usage = policy.usage
    assert usage.completion_tokens == sum(t.model_tokens for t in got)
    assert usage.prompt_tokens == sum(len(t.prompt) for t in expected)
    assert (usage.retries, usage.lost) == ({}, 0)


@pytest.mark.slow
def test_sampling_is_sampling_and_seeds_hold(url: str) -> None:
    """Its default is greedy and top-k 50 whatever the temperature; one request at a time, its seed counts."""
    warm = SamplingParams(1.0, max_new_tokens=12)
    first, _ = chat(url, warm, [], concurrency=1)
    again, _ = chat(url, warm, [], concurrency=1)
    greedy, _ = chat(url, SamplingParams(0.0, max_new_tokens=12), [])
    assert [t.segments[-1].tokens for t in first] == [t.segments[-1].tokens for t in again]
    assert [t.segments[-1].tokens for t in first] != [t.segments[-1].tokens for t in greedy]


@pytest.mark.slow
def test_completions_with_ids_are_refused_with_the_reason(url: str) -> None:
    with pytest.raises(UserError, match=r"gives no token ids.*HTTP 422.*use --api chat"):
        connect(url, api="completions")
    with pytest.raises(UserError, match=r"no model 'other/model'.*pinned"):
        connect(url, "other/model", api="chat")
