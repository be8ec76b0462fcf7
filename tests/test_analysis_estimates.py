"""A chat log with `logprobs=true, top_logprobs=20` gives nearly the dH that the whole distributions give."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentropy.algorithms.entropy import entropy_change, entropy_from_logits
from agentropy.analysis.effects import call_rows
from agentropy.analysis.imports import read
from agentropy.batch import make_batch
from agentropy.config import RunConfig
from agentropy.errors import UserError
from agentropy.policies.base import SamplingParams
from agentropy.protocols.text import TokenText
from agentropy.rollout.loop import Attempt, rollout
from agentropy.training.setup import build
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory

TOP = 20
WITHIN = 0.05
"""Of the larger of the two segment entropies that a dH compares."""


def message(data: Sequence[bytes], logprobs: Tensor, ids: Sequence[int], pieces: Any) -> dict[str, Any]:
    """What a server returns of some sampled tokens: each with its log-probability and those of the 20 likeliest."""

    def one(token: bytes, value: float) -> dict[str, Any]:
        return {"token": token.decode("utf-8", "replace"), "bytes": list(token), "logprob": value}

    likely = logprobs.topk(TOP, -1)
    content = []
    for i, token in enumerate(data):
        top = [one(pieces(t), v) for t, v in zip(likely.indices[i].tolist(), likely.values[i].tolist(), strict=True)]
        content.append(one(token, float(logprobs[i, ids[i]])) | {"top_logprobs": top})
    text = b"".join(data).decode("utf-8", "replace")
    return {"role": "assistant", "content": text, "logprobs": {"content": content}}


def chat_log(t: Trajectory, logits: Tensor, pieces: Any) -> dict[str, Any]:
    """The conversation that a server with the same model would have logged. `logits[T, V]` predict the next token."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": t.question}]
    logprobs = logits.log_softmax(-1)
    at, first = 0, 0
    turn_ids: list[int] = []
    spoken: list[int] = []
    calls: tuple[ToolCall, ...] = ()

    def close() -> None:
        if turn_ids:
            data = [pieces(i) for i in turn_ids]
            sent = message(data, logprobs[first - 1 : first - 1 + len(turn_ids)], turn_ids, pieces)
            if calls:  # a server takes the call out of the text that it returns, but not out of the tokens
                sent["content"] = b"".join(map(pieces, spoken)).decode("utf-8", "replace")
            made = [
                {"id": str(i), "function": {"name": c.tool, "arguments": json.dumps(dict(c.arguments))}}
                for i, c in enumerate(calls)
            ]
            messages.append(sent | ({"tool_calls": made} if made else {}))

    for s in t.segments:
        if s.is_model:
            if not turn_ids:
                first = at
            turn_ids = [*turn_ids, *s.ids]
            spoken = [*spoken, *(s.ids if s.kind == "reasoning" else ())]
            calls = (*calls, *s.calls)
        elif s.kind == "result":
            close()
            turn_ids, spoken, calls = [], [], ()
            messages += [
                {"role": "tool", "tool_call_id": str(i), "content": r.content, "status": r.status}
                for i, r in enumerate(s.results)
            ]
        at += len(s.ids)
    close()
    return {"id": t.trajectory_id, "question_id": t.question_id, "messages": messages, "score": t.score}


def compare(exact: Sequence[Trajectory], estimated: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Errors of dH over calls in shares of the larger segment entropy, and the true changes."""
    true, guess = entropy_change(make_batch(exact)), entropy_change(make_batch(estimated))
    assert true.change.isnan().tolist() == guess.change.isnan().tolist()
    known = ~true.change.isnan()
    size = torch.maximum(true.before, true.after)[known]
    return (true.change - guess.change)[known].abs() / size, true.change[known]


def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([list(ids)])).logits[0].double()
    return found


@pytest.mark.parametrize(("world", "most"), [("facts", WITHIN), ("arithmetic", 0.15)])
def test_the_embedded_agents(world: str, most: float, tmp_path: Path) -> None:
    """In arithmetic the likeliest 20 of a thousand numbers hold a tenth of the mass, and no estimate can be good."""
    setup = build(RunConfig.model_validate({"world": world}))
    tasks = setup.tasks.split("validation")[:16]
    attempts = [Attempt(task, f"{task.id}/{k}", seed=10 * i + k) for i, task in enumerate(tasks) for k in range(2)]
    params = SamplingParams(max_new_tokens=setup.limits.max_new_tokens)

    async def sample() -> list[Trajectory]:
        await setup.agent.toolbox.start()
        try:
            return await rollout(setup.agent, attempts, params, setup.limits)
        finally:
            await setup.close()

    exact = asyncio.run(sample())
    pieces = TokenText(setup.tokenizer).pieces.__getitem__
    log = tmp_path / "log.jsonl"
    with log.open("w") as file:
        for t in exact:
            file.write(json.dumps(chat_log(t, logits_of(setup.model, t.ids), pieces)) + "\n")
    estimated = list(read(log))
    assert all(t.entropy_kind == "top-k" for t in estimated)
    assert [r["estimated"] for r in call_rows(estimated)] == [True] * sum(len(t.results) for t in exact)
    assert [t.model_tokens for t in estimated] == [t.model_tokens for t in exact]
    errors, changes = compare(exact, estimated)
    assert len(errors) > 20
    assert changes.abs().max() > 0.3
    print(f"{world}: error of dH {errors.mean():.2%} on average, {errors.max():.2%} at most, {len(errors)} calls")
    assert errors.mean() < WITHIN
    assert errors.max() < most


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2(tmp_path: Path) -> None:
    """A model with 49,152 tokens and wide distributions; its calls are put in its mouth."""
    from agentropy.policies.loading import load_model

    try:
        model, tokenizer = load_model("smollm2")
    except UserError as error:
        pytest.skip(str(error))
    model = model.float().eval()
    pieces = TokenText(tokenizer).pieces.__getitem__
    torch.manual_seed(1)
    exact, log = [], tmp_path / "log.jsonl"

    def go_on(ids: list[int]) -> list[int]:
        start = torch.tensor([ids])
        out = model.generate(start, do_sample=True, top_k=0, min_new_tokens=30, max_new_tokens=30, pad_token_id=0)
        return list(out[0, len(ids) :].tolist())

    with log.open("w") as file:
        for i, question in enumerate(QUESTIONS):
            chat = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            first = go_on(prompt)
            call = tokenizer.encode('\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', add_special_tokens=False)
            result = tokenizer.encode("\nThe answer is 42.\n", add_special_tokens=False)
            second = go_on([*prompt, *first, *call, *result])
            ids = [*prompt, *first, *call, *result, *second]
            logits = logits_of(model, ids)
            entropies = entropy_from_logits(logits).tolist()
            at = len(prompt)
            segments = [Segment("prompt", tuple(prompt))]
            for kind, part in (("reasoning", first), ("call", call), ("result", result), ("reasoning", second)):
                known = tuple(entropies[at - 1 : at - 1 + len(part)]) if kind != "result" else None
                made = (ToolCall("f"),) if kind == "call" else ()
                got = (ToolResult("The answer is 42."),) if kind == "result" else ()
                segments.append(Segment(kind, tuple(part), None, known, made, got))  # type: ignore[arg-type]
                at += len(part)
            exact.append(Trajectory(f"q{i}", f"q{i}", question, tuple(segments), None, None, "void"))
            file.write(json.dumps(chat_log(exact[-1], logits, pieces)) + "\n")
    estimated = list(read(log))
    assert [t.model_tokens for t in estimated] == [t.model_tokens for t in exact]
    errors, _ = compare(exact, estimated)
    print(f"SmolLM2: error of dH {errors.mean():.2%} on average, {errors.max():.2%} at most, {len(errors)} calls")
    assert errors.max() < WITHIN


QUESTIONS = (
    "What should I cook for six guests?",
    "Why is the sky blue?",
    "Write a poem about rain.",
    "How do I reverse a list in Python?",
    "Which planet has the most moons?",
    "Tell me about the history of Rome.",
    "What is 12 * 12?",
    "Give me a name for a cat.",
)
