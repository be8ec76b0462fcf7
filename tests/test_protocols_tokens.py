"""Token in, token out: over thousands of random trajectories nothing that was sampled is ever encoded again.

The policy samples random, non-canonical tokenizations (`encode(decode(ids)) != ids`), multi-byte characters split over
tokens, and stop strings that lie across tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentropy.policies.base import SamplingParams
from agentropy.policies.scripted import ScriptedPolicy, ScriptedTurn
from agentropy.protocols import Dialect, make_dialect
from agentropy.protocols.text import TokenText
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory
from protocol_tokenizers import CHATML, chatml, scramble, sentencepiece, tiny

LETTERS = "abcdefgh \n\t(){}\"'\\0123456789=+éüß東京日本語🙂👩‍👩‍👧<>/`"


class Spy:
    """A tokenizer that records what it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.encoded.append(text)
        return self._tokenizer(text, **options)

    def encode(self, text: str, **options: Any) -> Any:
        self.encoded.append(text)
        return self._tokenizer.encode(text, **options)


def words(rng: random.Random, size: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(size))


def script(name: str, text: TokenText, rng: random.Random, single: bool) -> tuple[list[ScriptedTurn], list[str | None]]:
    """Turns that call with random arguments (None: the answer), each followed by tokens that must never be sampled."""
    turns, codes = [], []
    for turn in range(rng.randrange(1, 4) + 1):
        code: str | None = None if turn and rng.random() < 0.4 else "x" + words(rng, 12).replace("`", "") + "x"
        before = words(rng, rng.randrange(0, 8)).replace("<", "").replace("`", "")
        if name == "hermes":
            body = json.dumps({"name": "python", "arguments": {"code": code}}, ensure_ascii=rng.random() < 0.3)
            said = before + ("\\boxed{7}" if code is None else f"<tool_call>{body}</tool_call>")
            ids = [*scramble(text, said.encode(), rng), text.tokenizer.eos_token_id]
        elif name == "fence":
            code = None if code is None else code.replace("\r", "") + "\n"
            said = before + ("\\boxed{7}" if code is None else f"\n```python\n{code}```\n")
            ids = scramble(text, said.encode(), rng) + ([text.tokenizer.eos_token_id] if code is None else [])
        else:
            code = None if code is None else code.replace("<", "")
            tag, inner = ("answer", "7") if code is None else ("python", code)
            opening, closing = f"<{tag}>", f"</{tag}>"
            if single:
                ids = scramble(text, before.encode(), rng)
                ids += [text.single(opening) or 0, *scramble(text, inner.encode(), rng), text.single(closing) or 0]
            else:
                ids = scramble(text, f"{before}{opening}{inner}{closing}".encode(), rng)
        turns.append(ScriptedTurn(tuple(ids + scramble(text, words(rng, 5).encode(), rng))))
        codes.append(code)
        if code is None:
            break
    return turns, codes


async def roll(d: Dialect, policy: ScriptedPolicy, seed: int, rng: random.Random) -> tuple[Trajectory, list[ToolCall]]:
    prompt = d.prompt("Question " + words(rng, 10), [])
    [sequence] = policy.open(prompt, [seed])
    segments, calls, answer = [Segment("prompt", tuple(prompt))], list[ToolCall](), None
    new: Sequence[int] = ()
    for left in reversed(range(len(sequence.turns))):
        made = await policy.generate(sequence, new, SamplingParams(), d.stop)
        turn = d.read(made.ids, made.finish)
        for kind, part in (("reasoning", made.ids[: turn.call_start]), ("call", made.ids[turn.call_start :])):
            if part:
                segments.append(Segment(kind, tuple(part), calls=turn.calls if kind == "call" else ()))
        answer = turn.answer
        calls += turn.calls
        if not turn.calls or not left:
            break
        new = d.results([ToolResult(words(rng, rng.randrange(0, 30))) for _ in turn.calls], made.ids[-1])
        segments.append(Segment("result", tuple(new), results=(ToolResult(""),) * len(turn.calls)))
    return Trajectory("q", str(seed), "", tuple(segments), answer, None, "answer"), calls


CASES = [
    ("hermes", "byte-level", {}),
    ("hermes", "byte-level", {"stop_at_call": True}),
    ("hermes", "sentencepiece", {}),
    ("fence", "byte-level", {}),
    ("fence", "sentencepiece", {}),
    ("tags", "byte-level", {}),
    ("tags", "sentencepiece", {}),
    ("tags", "tiny", {}),
]


@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_no_sampled_id_is_ever_encoded_again(name: str, kind: str, options: dict[str, Any]) -> None:
    base = {"byte-level": lambda: chatml(CHATML), "sentencepiece": sentencepiece, "tiny": tiny}[kind]()
    spy = Spy(base)
    d = make_dialect(name, spy, **options)
    text = TokenText(base)
    rng = random.Random(f"{name}/{kind}/{options}")
    plans = {seed: script(name, text, rng, kind == "tiny") for seed in range(500)}
    policy = ScriptedPolicy(lambda _, seed: plans[seed][0], len(base), 100_000, decode=text.decode_bytes)

    reads: list[tuple[int, ...]] = []
    read, encoded_while_reading = d.read, [0]

    def watched(ids: Sequence[int], finish: Any) -> Any:
        before = len(spy.encoded)
        turn = read(ids, finish)
        encoded_while_reading[0] += len(spy.encoded) - before
        reads.append(tuple(ids))
        return turn

    d.read = watched  # type: ignore[method-assign]
    changed = 0
    for seed, (_, codes) in plans.items():
        trajectory, calls = asyncio.run(roll(d, policy, seed, rng))
        assert trajectory.ids == tuple(policy.opened[-1].ids), "what is kept is what was fed and sampled"
        expected = [c for c in codes if c is not None]
        got = [str(c.arguments.get("code")) for c in calls]
        if name == "tags":
            assert [g.strip() for g in got] == [e.strip("\r\n").strip() for e in expected]
        else:
            assert got == expected
        assert all(c.error is None for c in calls)
        assert trajectory.answer == ("7" if codes[-1] is None else None)
        for segment in trajectory.segments:
            if segment.kind == "call":
                opening = {"hermes": b"<tool_call>", "fence": b"```python", "tags": b"<python>"}[name]
                data = text.decode_bytes(segment.ids)
                at = data.find(opening)
                assert 0 <= at < len(text.pieces[segment.ids[0]]), "the first token holds the first byte of the call"
            if segment.is_model:
                changed += tuple(base.encode(text.decode(segment.ids), add_special_tokens=False)) != segment.ids
    assert encoded_while_reading[0] == 0
    assert changed > 500, "most of what was sampled would have come back as other ids"
    said = {text.decode(ids) for ids in reads if len(ids) > 8}
    assert not said & set(spy.encoded)
