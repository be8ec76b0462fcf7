"""Tags, as single tokens of the embedded agent and as text of real chat models."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.protocols import make_dialect
from agentropy.protocols.tags import TagsDialect
from agentropy.trajectory import ToolCall, ToolResult
from protocol_tokenizers import CHATML, TINY_SPECIAL, chatml, tiny

SPECS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "python", "description": "Runs\n  code.", "parameters": {}}},
    {"type": "function", "function": {"name": "search", "description": "Looks up.", "parameters": {}}},
]


@pytest.fixture(params=["tiny", "text"])
def dialect(request: pytest.FixtureRequest) -> TagsDialect:
    made = make_dialect("tags", tiny() if request.param == "tiny" else chatml(CHATML))
    assert isinstance(made, TagsDialect)
    assert made.single_tokens == (request.param == "tiny")
    return made


def read(d: TagsDialect, text: str, finish: Any = "stop") -> Any:
    return d.read(d.text.encode(text), finish)


def test_a_call_and_where_it_starts(dialect: TagsDialect) -> None:
    ids = dialect.text.encode("<think>12+3?</think><python>print(12+3)</python>")
    turn = dialect.read(ids, "stop")
    assert turn.calls == (ToolCall("python", {"code": "print(12+3)"}),)
    assert dialect.text.decode(ids[: turn.call_start]) in ("<think>12+3?</think>", "<think>12+3?</think")
    assert "<python>" in dialect.text.decode(ids[turn.call_start :])
    turn = read(dialect, "<search> Who is 東京? </search>")
    assert turn.calls == (ToolCall("search", {"query": "Who is 東京?"}),)
    assert turn.call_start == 0


def test_code_keeps_its_indentation(dialect: TagsDialect) -> None:
    turn = read(dialect, "<python>\nfor i in x:\n    print(i)\n</python>")
    assert turn.calls[0].arguments == {"code": "for i in x:\n    print(i)"}


def test_the_last_opening_before_the_first_closing_counts(dialect: TagsDialect) -> None:
    turn = read(dialect, "I could use <python> or <search>. <python>1</python> <search>no</search>")
    assert turn.calls == (ToolCall("python", {"code": "1"}),)


def test_the_first_closing_tag_counts_whatever_its_tool(dialect: TagsDialect) -> None:
    assert read(dialect, "<search>a</search><python>1</python>").calls == (ToolCall("search", {"query": "a"}),)
    assert read(dialect, "<answer>a</answer><python>1</python>").answer == "a"
    assert read(dialect, "<python>1</python><answer>a</answer>").answer is None


def test_answers(dialect: TagsDialect) -> None:
    for text, answer in [
        ("<think>x</think><answer> 42 </answer>", "42"),
        ("<answer>so \\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer></answer>", None),
        ("<answer>never closed", None),
        ("no tags at all", None),
        ("</answer>", None),
        ("", None),
    ]:
        turn = read(dialect, text)
        assert turn.answer == answer
        assert turn.calls == ()


def test_unreadable_calls_are_told(dialect: TagsDialect) -> None:
    assert "nothing stands" in read(dialect, "<python> \n</python>").calls[0].error
    turn = read(dialect, "print(1)</python>")
    assert "no <python> before it" in turn.calls[0].error
    assert turn.call_start > 0


@pytest.mark.parametrize("finish", ["length", "context_full"])
def test_a_call_cut_by_length_is_no_call(dialect: TagsDialect, finish: Any) -> None:
    ids = dialect.text.encode("<think>x</think><python>print(12")
    turn = dialect.read(ids, finish)
    assert turn.calls == ()
    assert turn.answer is None
    assert "<python>" in dialect.text.decode(ids[turn.call_start :])


def test_tags_spelled_out_mean_nothing_where_they_are_single_tokens() -> None:
    d = TagsDialect(tiny())
    ids = d.text.encode_plain("<python>print(1)</python>")
    assert d.text.decode(ids) == "<python>print(1)</python>"
    turn = d.read(ids, "stop")
    assert turn.calls == ()
    assert turn.call_start == len(ids)


def test_stops(dialect: TagsDialect) -> None:
    if dialect.single_tokens:
        assert dialect.stop.strings == ()
        named = {dialect.text.added[i] for i in dialect.stop.token_ids}
        assert named == {"</python>", "</search>", "</answer>", "<|end|>"}
    else:
        assert set(dialect.stop.strings) == {"</python>", "</search>", "</answer>"}
        assert dialect.text.single("<|im_end|>") in dialect.stop.token_ids


def test_the_tiny_agents_prompt_and_results() -> None:
    d = TagsDialect(tiny())
    assert d.text.decode(d.prompt("1+1?", SPECS)) == "<|user|>1+1?<|assistant|>"
    assert d.text.decode(d.results([ToolResult("2\n")])) == "<result>2\n</result>"
    one = [d.text.single(t) for t in ("<result>", "</result>")]
    for special in TINY_SPECIAL:
        ids = d.results([ToolResult(f"a {special} b")])
        assert [ids[0], ids[-1]] == one
        assert d.text.forbidden.isdisjoint(ids[1:-1])
        assert d.text.decode(ids) == f"<result>a {special} b</result>"
        ids = d.prompt(f"a {special} b?", SPECS)
        assert sum(i in d.text.forbidden for i in ids) == 2
        assert d.text.decode(ids) == f"<|user|>a {special} b?<|assistant|>"


def test_a_chat_models_prompt_explains_the_tags() -> None:
    d = TagsDialect(chatml(CHATML))
    text = d.text.decode(d.prompt("Why?", SPECS, "Be kind."))
    assert text.startswith("<|im_start|>system\nBe kind.\n\n")
    assert "<python>code</python>: Runs code." in text
    assert "<search>query</search>" in text
    assert "<answer>" in text
    assert text.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert "<python>" not in d.text.decode(d.prompt("Why?", []))
    assert d.text.decode(d.results([ToolResult("<|im_end|>")])) == "\n<result>\n<|im_end|>\n</result>\n"
    assert d.text.forbidden.isdisjoint(d.results([ToolResult("<|im_end|>")]))
    quiet = TagsDialect(chatml(CHATML), instructions=False)
    assert quiet.text.decode(quiet.prompt("Why?", SPECS)).startswith("<|im_start|>user")


def test_other_tools_take_json() -> None:
    d = TagsDialect(chatml(CHATML), tool_tags={"weather": None})
    turn = read(d, '<weather>{"city": "東京"}</weather>')
    assert turn.calls == (ToolCall("weather", {"city": "東京"}),)
    assert "not JSON" in read(d, "<weather>Tokyo</weather>").calls[0].error
    assert "no JSON object" in read(d, "<weather>[1]</weather>").calls[0].error
    with pytest.raises(UserError, match="'python' has no tag"):
        d.prompt("?", SPECS)


def test_reading_by_ids_is_fast() -> None:
    d = TagsDialect(tiny())
    ids = d.text.encode("<think>look it up</think><search>Bob's friend</search>")
    text = TagsDialect(chatml(CHATML))
    start = time.process_time()
    for _ in range(500):
        d.read(ids, "stop")
    assert (time.process_time() - start) / 500 < 200e-6, "ten times what it takes on a slow core"
    assert text.read(text.text.encode("<search>x</search>"), "stop").calls
