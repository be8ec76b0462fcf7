"""Which tokens of a chat's turn are reasoning and which write the call, over the ways in which servers give them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from agentropy.policies.http_chat import ChatCall, ChatToken, ChatTurn, read_turn, room_left
from agentropy.policies.http_client import BadAnswer
from agentropy.rollout.chat_segments import place_in_text, place_of_call, turn_segments
from agentropy.trajectory import Segment, ToolCall

CALL = ChatCall("c", "f", '{"x": 1}')
READ = (ToolCall("f", {"x": 1}),)


def tokens(texts: Sequence[str]) -> tuple[ChatToken, ...]:
    return tuple(ChatToken(t.encode(), t, -0.1, 0.2, ((t, -0.1),)) for t in texts)


def native(texts: Sequence[str], content: str, reasoning: str = "", count: int | None = None) -> list[Segment]:
    turn = ChatTurn(content, (CALL,), "stop", reasoning, None, tokens(texts), 5, count or len(texts))
    return turn_segments(turn, place_of_call(turn), READ)


def texts_of(segments: Sequence[Segment]) -> list[tuple[str, str]]:
    return [(s.kind, "".join(s.tokens or ())) for s in segments]


def test_tokens_of_the_whole_turn() -> None:
    call = ["<tool_call>", "\n", '{"name": "f", ', '"arguments": {"x": 1}}', "</tool_call>", "<|im_end|>"]
    segments = native(["I ", "see", ".", "\n", *call], "I see.")
    assert texts_of(segments) == [("reasoning", "I see.\n"), ("call", "".join(call))]
    assert all(s.entropies is not None and s.logprobs is not None for s in segments)
    assert segments[1].calls == READ
    assert texts_of(native(call, "")) == [("call", "".join(call))]
    thought = ["<think>", "\n", "so", "\n", "</think>", "\n\n"]
    assert texts_of(native([*thought, *call], "", "so")) == [
        ("reasoning", "".join(thought)),
        ("call", "".join(call)),
    ]
    # The thought has the words of the text, and the text those of the arguments.
    both = native(["x", "</think>", "x", *call], "x", "x")
    assert texts_of(both)[0] == ("reasoning", "x</think>x")


def test_tokens_of_the_text_only() -> None:
    segments = native(["I ", "see", "."], "I see.", count=20)
    assert [(s.kind, len(s.ids)) for s in segments] == [("reasoning", 3), ("call", 17)]
    assert segments[0].entropies is not None
    assert segments[1].entropies is None
    assert json.loads((segments[1].tokens or ("",))[0])["name"] == "f"
    assert [(s.kind, len(s.ids)) for s in native(["I ", "see", ".", "<|im_end|>"], "I see.")] == [
        ("reasoning", 4),
        ("call", 1),
    ]
    assert [s.kind for s in native([], "", count=9)] == ["call"]


def test_where_nobody_knows_which_tokens_wrote_the_call_none_has_an_entropy() -> None:
    segments = native(["something ", "else ", "entirely"], "I see.")
    assert [s.entropies for s in segments] == [None, None]
    # Unless the call begins as calls do.
    segments = native(["odd ", "[TOOL_CALLS]", "[{}]"], "I see.")
    assert texts_of(segments) == [("reasoning", "odd "), ("call", "[TOOL_CALLS][{}]")]
    assert all(s.entropies is not None for s in segments)


def in_text(texts: Sequence[str], content: str, text: str, start: int, reasoning: str = "") -> list[Segment]:
    turn = ChatTurn(content, (), "stop", reasoning, None, tokens(texts))
    return turn_segments(turn, place_in_text(turn, text, start), READ)


def test_calls_in_text_begin_where_the_server_cut_the_text() -> None:
    """Servers take white space and thoughts off the text, but not off the tokens."""
    texts = ["\n", "\n", "é ", "é", "<python>", "1", "</python>", "<|im_end|>"]
    content = "é é<python>1</python>"
    start = len("é é".encode())
    expected = [("reasoning", "\n\né é"), ("call", "<python>1</python><|im_end|>")]
    assert texts_of(in_text(texts, content, content, start)) == expected
    assert texts_of(in_text(["<think>", "é é", "</think>", *texts], content, content, start, "é é")) == [
        ("reasoning", "<think>é é</think>\n\né é"),
        expected[1],
    ]
    # A stop string that the server left out of the text and of the tokens.
    short = in_text(texts[:6], content.removesuffix("</python>"), content, start)
    assert texts_of(short) == [("reasoning", "\n\né é"), ("call", "<python>1")]
    # What a server that knows no stop strings sampled behind one does not count.
    long = in_text([*texts[:7], "made ", "up"], content + "made up", content, start)
    assert texts_of(long) == [("reasoning", "\n\né é"), ("call", "<python>1</python>")]
    assert [s.entropies for s in in_text(["other"], content, content, start)] == [None, None]


def answer(message: object, logprobs: object = None) -> dict[str, object]:
    return {"choices": [{"message": message, "logprobs": logprobs, "finish_reason": "stop"}]}


def test_forms_of_answers() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_turn(answer({"content": parts})).content == "ab"
    function = {"name": "f", "arguments": {"x": 1}}
    turn = read_turn(answer({"content": None, "tool_calls": [{"function": function}]}))
    assert turn.calls == (ChatCall("call_0", "f", '{"x": 1}'),)
    assert (turn.prompt_tokens, turn.completion_tokens, turn.tokens) == (None, None, None)
    token = {"token": "\ufffd", "bytes": [0xC3], "logprob": 1e-9, "top_logprobs": None}
    [read] = read_turn(answer({"content": "é"}, {"content": [token]})).tokens or ()
    assert (read.data, read.logprob, read.alternatives) == (b"\xc3", 0.0, ())
    [read] = read_turn(answer({"content": "é"}, {"content": [token | {"logprob": None}]})).tokens or ()
    assert read.logprob is None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([], "choices is missing"),
        ({"choices": []}, "choices is missing"),
        ({"error": {"message": "upstream is busy"}}, "choices is missing .*upstream is busy"),
        ({"choices": [{"text": "x"}]}, "message is missing"),
        (answer({"content": "x", "tool_calls": {"a": 1}}), "tool_calls is no list"),
        (answer({"content": "x", "tool_calls": [{"function": {}}]}), "no function with a name"),
        (answer({"content": "x"}, {"content": [{"logprob": -1}]}), "no token"),
        (answer({"content": "x"}, {"content": [{"token": "x", "logprob": 12.5}]}), "12.5, which is no log-probability"),
        (answer({"content": "x"}, {"content": [{"token": "x", "logprob": float("nan")}]}), "no log-probability"),
        (answer({"content": "x"}, {"content": [{"token": "x", "logprob": "-1"}]}), "no log-probability"),
    ],
)
def test_answers_that_cannot_be_used(given: object, match: str) -> None:
    with pytest.raises(BadAnswer, match=match):
        read_turn(given)


@pytest.mark.parametrize(
    ("message", "room"),
    [
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 500. This model's maximum context length is 4096 "
            "tokens and your request has 4000 input tokens (500 > 4096 - 4000).",
            96,
        ),
        (
            "This model's maximum context length is 4097 tokens. However, you requested 4200 tokens (4000 in the "
            "messages, 200 in the completion). Please reduce the length of the messages or completion.",
            97,
        ),
        ("This model's maximum context length is 100 tokens. However, your messages resulted in 120 tokens.", -20),
        ("context_length_exceeded", 0),
    ],
)
def test_room_that_a_refusal_tells_of(message: str, room: int) -> None:
    assert room_left(message) == room
