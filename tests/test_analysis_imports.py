"""Imports: what each source's keys become, estimates from log-probabilities, and errors that name the place."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from agentropy.analysis.imports import detect, read, sources
from agentropy.analysis.imports.parts import status_of
from agentropy.analysis.imports.text import segments_of
from agentropy.errors import UserError
from agentropy.trajectory import Trajectory, dumps, from_json
from make_trajectories import EXAMPLE


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def entry(token: str, p: float = 0.9, **rest: Any) -> dict[str, Any]:
    """A token as an OpenAI-compatible server describes it, with two alternatives."""
    likely = [(token, p), ("x", (1 - p) * 0.9), ("y", (1 - p) * 0.1)]
    top = [{"token": t, "bytes": list(t.encode()), "logprob": math.log(q)} for t, q in likely]
    return {"token": token, "bytes": list(token.encode()), "logprob": math.log(p), "top_logprobs": top, **rest}


def logprobs(*tokens: str) -> dict[str, Any]:
    return {"content": [entry(t) for t in tokens]}


CALL = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"code": "print(6*7)"}'}}
CONVERSATION: dict[str, Any] = {
    "id": "chat-1",
    "messages": [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": "6*7?"},
        {"role": "assistant", "content": "Let me", "tool_calls": [CALL], "logprobs": logprobs("Let", " me")},
        {"role": "tool", "tool_call_id": "c1", "content": "42\n"},
        {"role": "assistant", "content": "It is \\boxed{42}", "logprobs": logprobs("It", " is ", "\\boxed{42}")},
    ],
    "score": 1,
}

SURER = {
    **CONVERSATION,
    "messages": [
        *CONVERSATION["messages"][:-1],
        {"role": "assistant", "content": "42", "logprobs": {"content": [entry("42", 0.99)]}},
    ],
}
"""The call lowers the entropy."""


def one(path: Path, **options: Any) -> Trajectory:
    (found,) = read(path, **options)
    return found


def kinds(t: Trajectory) -> list[tuple[str, str]]:
    return [(s.kind, "".join(s.tokens or ())) for s in t.segments]


def test_a_conversation_with_log_probabilities(tmp_path: Path) -> None:
    t = one(write(tmp_path / "log.jsonl", CONVERSATION))
    assert (t.trajectory_id, t.question, t.answer, t.score, t.stop) == ("chat-1", "6*7?", "42", 1.0, "answer")
    assert (t.ids_kind, t.entropy_kind, t.extra["source"]) == ("none", "top-k", "log.jsonl")
    assert [s.kind for s in t.segments] == ["prompt", "reasoning", "call", "result", "reasoning"]
    reasoning, call, result = t.segments[1:4]
    assert (reasoning.tokens, reasoning.ids) == (("Let", " me"), (0, 0))
    assert reasoning.logprobs == pytest.approx((math.log(0.9),) * 2)
    exact = -sum(p * math.log(p) for p in (0.9, 0.09, 0.01))
    assert reasoning.entropies == pytest.approx((exact,) * 2)
    assert reasoning.alternatives is not None
    assert reasoning.alternatives[0][1] == ("x", pytest.approx(math.log(0.09)))
    assert call.ids == ()  # the server gave no tokens of the call
    assert [(c.tool, dict(c.arguments)) for c in call.calls] == [("python", {"code": "print(6*7)"})]
    assert [(r.content, r.status) for r in result.results] == [("42\n", "ok")]
    assert from_json(json.loads(dumps(t))) == t


def test_a_log_of_requests_is_put_together(tmp_path: Path) -> None:
    messages = CONVERSATION["messages"]
    assert isinstance(messages, list)

    def line(upto: int, **rest: Any) -> dict[str, Any]:
        reply = {k: v for k, v in messages[upto].items() if k != "logprobs"}
        choice = {"message": reply, "logprobs": messages[upto].get("logprobs"), "finish_reason": "stop"}
        history = [{k: v for k, v in m.items() if k != "logprobs"} for m in messages[:upto]]
        return {"request": {"messages": history, "model": "m"}, "response": {"choices": [choice]}, **rest}

    other = json.loads(json.dumps(line(2)).replace("6*7", "8*9"))
    path = write(tmp_path / "log.jsonl", line(2, id="a"), other, line(4, id="b", score=1))
    first, second = read(path)
    assert (first.trajectory_id, first.score, first.answer) == ("a", 1.0, "42")
    whole = one(write(tmp_path / "whole.jsonl", CONVERSATION))
    assert first.segments == whole.segments  # the tokens of the earlier response are not lost
    assert (second.question, second.stop, len(second.results)) == ("8*9?", "max_turns", 0)


def test_each_question_of_a_conversation_is_a_trajectory(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "And 6*8?"}, {"role": "assistant", "content": "48", "logprobs": logprobs("48")}]
    row = CONVERSATION | {"messages": [*CONVERSATION["messages"], *more]}  # type: ignore[misc]
    first, second = read(write(tmp_path / "log.jsonl", row))
    assert (first.trajectory_id, first.score, second.trajectory_id, second.score) == ("chat-1/1", None, "chat-1/2", 1.0)
    assert (second.question, second.answer) == ("And 6*8?", "48")
    assert kinds(second)[1:] == [("reasoning", "48")]
    assert "It is" in kinds(second)[0][1]


def test_tokens_of_a_call_in_the_text_belong_to_the_call(tmp_path: Path) -> None:
    written = (
        "Let me",
        "\n",
        "<tool_call>",
        '{"name": "python", "arguments": {"code": "1"}}',
        "</tool_call>",
        "<|im_end|>",
    )
    for message in (
        {"role": "assistant", "content": "Let me", "tool_calls": [CALL], "logprobs": logprobs(*written)},
        {"role": "assistant", "content": "".join(written[:-1]), "logprobs": logprobs(*written)},
    ):
        row = {"messages": [CONVERSATION["messages"][1], message, {"role": "tool", "content": "1"}]}  # type: ignore[index]
        t = one(write(tmp_path / "log.jsonl", row))
        assert [(s.kind, s.tokens) for s in t.segments[1:3]] == [("reasoning", written[:2]), ("call", written[2:])]
        assert t.segments[2].calls[0].tool == "python"
        assert t.stop == "max_turns"


def test_half_characters_and_tokens_beside_the_likeliest(tmp_path: Path) -> None:
    halves = [entry("a") | {"token": "\\xc3", "bytes": [0xC3]}, entry("b") | {"token": "\\xa9", "bytes": [0xA9]}]
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "é", "logprobs": {"content": halves}},
        ]
    }
    t = one(write(tmp_path / "log.jsonl", row))
    assert t.segments[1].tokens == ("\udcc3", "\udca9")
    assert t.answer == "é"
    assert from_json(json.loads(dumps(t))) == t
    assert t.segments[1].entropies is not None
    assert all(0 < h < 3 for h in t.segments[1].entropies)


def test_exact_entropies_are_taken_where_a_server_gives_them(tmp_path: Path) -> None:
    content = [entry("a", entropy=0.25), entry("b", entropy=0.5)]
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ab", "logprobs": content}]}
    t = one(write(tmp_path / "log.jsonl", row))
    assert (t.entropy_kind, t.segments[1].entropies) == ("exact", (0.25, 0.5))


def test_without_alternatives_there_are_no_entropies(tmp_path: Path) -> None:
    content = [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "logprobs": content}]}
    assert one(write(tmp_path / "log.jsonl", row)).segments[1].entropies is None


def test_parallel_calls_and_their_results_are_matched_by_id(tmp_path: Path) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("c")]},
            {"role": "tool", "tool_call_id": "c", "content": "of c", "status": "timeout", "seconds": 2.5},
            {"role": "tool", "tool_call_id": "a", "content": "of a", "is_error": True},
            {"role": "assistant", "content": "done"},
        ]
    }
    t = one(write(tmp_path / "log.jsonl", row))
    assert [c.tool for c in t.calls] == ["a", "c", "b"]
    assert [(r.content, r.status, r.seconds) for r in t.results] == [("of a", "error", 0.0), ("of c", "timeout", 2.5)]


def test_results_in_turns_of_the_user_are_results(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": 'I try\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'},
            {"role": "user", "content": "<tool_response>\n7\n</tool_response>"},
            {"role": "assistant", "content": "7"},
        ]
    }
    t = one(write(tmp_path / "log.jsonl", row))
    assert [s.kind for s in t.segments] == ["prompt", "reasoning", "call", "result", "reasoning"]
    assert [r.content for r in t.results] == ["7"]


TRANSCRIPTS = [
    (
        'I try\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\nuser\n'
        "<tool_response>\n1\n</tool_response>\n<tool_response>\nError: no\n</tool_response>\nassistant\n"
        "It is \\boxed{1}",
        ["reasoning", "call", "result", "reasoning"],
        [("f", {"x": 1}), ("", {})],
        [("1", "ok"), ("Error: no", "error")],
    ),
    (
        "<think>a</think><search>who</search><information>Ann\nBob</information><think>b</think><answer>Ann</answer>",
        ["reasoning", "call", "result", "reasoning"],
        [("search", {"query": "who"})],
        [("Ann\nBob", "ok")],
    ),
    (
        "First\n```python\nprint(1)\n```\nCode execution result: 1\nSo \\boxed{1}",
        ["reasoning", "call", "result", "reasoning"],
        [("python", {"code": "print(1)\n"})],
        [("1", "ok")],
    ),
    (
        "```python\nprint(1/0)\n```\n```output\nTraceback (most recent call last):\nZeroDivisionError\n```\nno",
        ["call", "result", "reasoning"],
        [("python", {"code": "print(1/0)\n"})],
        [("Traceback (most recent call last):\nZeroDivisionError\n", "error")],
    ),
    ("Only text with ```python\nx\n``` in it", ["reasoning"], [], []),
]


@pytest.mark.parametrize(("text", "expected", "calls", "results"), TRANSCRIPTS)
def test_turns_calls_and_results_in_plain_text(
    text: str, expected: list[str], calls: list[Any], results: list[Any]
) -> None:
    segments = segments_of(text)
    assert [s.kind for s in segments] == expected
    assert [(c.tool, dict(c.arguments)) for s in segments for c in s.calls] == calls
    assert [(r.content, r.status) for s in segments for r in s.results] == results
    assert "assistant" not in "".join((segments[-1].tokens or ("",))[0])


def test_verl_dumps(tmp_path: Path) -> None:
    row = {
        "input": "user\n?\nassistant\n",
        "output": TRANSCRIPTS[0][0],
        "gts": "1",
        "score": 0.5,
        "step": 7,
        "acc": 1.0,
    }
    path = write(tmp_path / "7.jsonl", row, row | {"input": "other"}, row)
    first, second, third = read(path)
    assert (first.score, first.answer, first.extra["step"], first.extra["gold"]) == (0.5, "1", 7, "1")
    assert first.question_id == third.question_id != second.question_id
    assert first.trajectory_id != third.trajectory_id
    assert one(write(tmp_path / "8.jsonl", row), score="acc").score == 1.0
    with pytest.raises(UserError, match=r"7\.jsonl, line 1: there is no 'good'"):
        list(read(path, score="good"))


def test_trl_dumps(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    completion = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    other = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "sub", "arguments": {"b": 1}}}],
        },
    ]
    prompt = [{"role": "user", "content": "1+1?"}]
    table = {
        "step": [3, 3],
        "prompt": [prompt] * 2,
        "completion": [completion, other],
        "reward": [1.0, 0.0],
        "advantage": [0.7, -0.7],
    }
    (tmp_path / "completions").mkdir()
    path = tmp_path / "completions" / "completions_00003.parquet"
    pandas.DataFrame(table).to_parquet(path)
    first, second = read(tmp_path)
    assert (first.question, first.score, first.stop, first.extra["step"]) == ("1+1?", 1.0, "answer", 3)
    assert [(c.tool, dict(c.arguments)) for c in (*first.calls, *second.calls)] == [
        ("add", {"a": 1}),
        ("sub", {"b": 1}),
    ]
    assert [r.content for r in first.results] == ["2"]
    assert (second.stop, second.question_id) == ("max_turns", first.question_id)
    pandas.DataFrame(table | {"format": [1.0, 1.0]}).to_parquet(path)
    with pytest.raises(UserError, match=r"several columns could be the outcome \(reward, format\)"):
        list(read(path))
    assert [t.score for t in read(path, score="reward")] == [1.0, 0.0]
    pandas.DataFrame({"prompt": ["a"], "text": ["b"]}).to_parquet(path)
    with pytest.raises(UserError, match="no column 'completion'"):
        list(read(path))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"cannot read .*broken"):
        list(read(tmp_path / "broken.parquet"))


def test_directories_and_formats_are_found_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    for name in ("step-000010", "step-000002", "test-after", "test-before"):
        write(run / "trajectories" / f"{name}.jsonl", EXAMPLE)
    found = sources([run])
    assert [s.name for s in found] == ["run/test-before", "run/step-000002", "run/step-000010", "run/test-after"]
    assert [s.part for s in found] == ["run/test-before", "run/step", "run/step", "run/test-after"]
    chat = write(tmp_path / "a.jsonl", CONVERSATION)
    array = tmp_path / "b.json"
    array.write_text(json.dumps([CONVERSATION, CONVERSATION]))
    assert [detect(p) for p in (chat, array)] == ["chat", "chat"]
    assert len(list(read(array, chat, run))) == 7
    same = tmp_path / "other"
    same.mkdir()
    write(same / "a.jsonl", CONVERSATION)
    assert len({s.name for s in sources([chat, same / "a.jsonl"])}) == 2


BROKEN: list[tuple[str, str]] = [
    ("", "is empty"),
    ("{", "line 1: not JSON"),
    ('{"a": 1}', "no known format, its first line has the keys a; --format names it"),
    ("[1]", "no known format, its first line has no JSON object"),
    ('{"choices": []}', "a response without its request"),
    ('{"messages": []}', "line 1: 'messages' is no list of messages"),
    ('{"messages": [{"content": "x"}]}', "line 1: a message has no 'role'"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "line 1: the conversation has no message of the assistant"),
    ('{"messages": [{"role": "user"}], "response": {"id": 1}}', "line 1: the response has no 'choices'"),
    ('{"messages": [{"role": "user"}], "response": {"choices": [{"delta": {}}]}}', "line 1: choice 0 has no 'message'"),
    ('{"messages": [{"role": "assistant", "logprobs": [{"token": "a"}]}]}', "line 1: 'logprob' None of a token is no"),
    ('{"messages": [{"role": "assistant", "logprobs": [{"logprob": -1}]}]}', "line 1: a token of 'logprobs' has no"),
    ('{"messages": [{"role": "assistant", "logprobs": 5}]}', "line 1: 'logprobs' is neither a list"),
    (
        '{"messages": [{"role": "assistant", "logprobs": [{"token": "a", "logprob": 5}]}]}',
        "'logprob' 5 of a token is no",
    ),
    (
        '{"messages": [{"role": "assistant", "logprobs": [{"bytes": [999], "logprob": -1}]}]}',
        "something else than bytes",
    ),
    ('{"input": 1, "output": "x"}', "line 1: needs the texts 'input' and 'output'"),
    ('{"prompt": "x", "completion": 5}', "'completion' is neither a text nor a list of messages"),
    ('{"prompt": "x", "completion": null}', "no 'completion'"),
    ('{"question_id": "q", "segments": {}}', "line 1: key 'segments' is no list"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[m[:40] for _, m in BROKEN])
def test_what_cannot_be_read_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(str(path)) + ".*" + re.escape(message)):
        list(read(path))


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        list(read(tmp_path / "nothing.jsonl"))
    with pytest.raises(UserError, match="holds no trajectories"):
        list(read(tmp_path))
    with pytest.raises(UserError, match="--format 'csv' is none of agentropy, chat, trl, verl"):
        list(read(tmp_path, format="csv"))
    with pytest.raises(UserError, match="'messages' is no list"):
        list(read(write(tmp_path / "t.jsonl", EXAMPLE), format="chat"))
    with pytest.raises(UserError, match="--score names a key of other formats"):
        list(read(tmp_path / "t.jsonl", score="reward"))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("42", "ok"),
        ("", "ok"),
        ("No error was found", "ok"),
        ("The Errors of Babel is a book", "ok"),
        ("Error: unknown", "error"),
        ("NameError: x", "error"),
        ("before\nTraceback (most recent call last):\n  …", "error"),
        ('{"error": "bad"}', "error"),
        ('{"error": null, "x": 1}', "ok"),
        ("Timeout: no answer", "timeout"),
        ("Request timed out", "timeout"),
    ],
)
def test_how_a_call_went_is_read_from_its_result(text: str, status: str) -> None:
    assert status_of(text) == status


@pytest.mark.parametrize(("given", "score"), [("true", 1.0), ("0.5", 0.5), (False, 0.0), ("", None), (None, None)])
def test_outcomes_as_text(tmp_path: Path, given: Any, score: float | None) -> None:
    assert one(write(tmp_path / "log.jsonl", {**CONVERSATION, "score": given})).score == score


@pytest.mark.parametrize("given", ["yes", [1], {"value": 1}])
def test_an_outcome_that_is_no_number_is_not_taken_as_missing(tmp_path: Path, given: Any) -> None:
    path = write(tmp_path / "log.jsonl", CONVERSATION, {**CONVERSATION, "score": given})
    with pytest.raises(UserError, match=r"log.jsonl, line 2: the outcome 'score' is .* no number"):
        list(read(path))


def test_calls_as_another_api_writes_them_are_not_overlooked(tmp_path: Path) -> None:
    part = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [part]}]
    with pytest.raises(UserError, match="line 1: a message holds a part 'tool_use'"):
        list(read(write(tmp_path / "log.jsonl", {"messages": messages})))


def test_a_compressed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(json.dumps(CONVERSATION).encode()))
    with pytest.raises(UserError, match="is compressed; unpack it first"):
        list(read(tmp_path / "log.jsonl.gz"))
