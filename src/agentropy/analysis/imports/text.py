"""Turns, calls and results inside one plain text, as trainers dump it.

Calls are read by the protocols' own readers: JSON in `<tool_call>`, tags, and Python fences. Results are what stands in
`<tool_response>`, `<result>` or `<information>`, in a fence named `output`, or behind `Code execution result:` in its
line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentropy.analysis.imports.parts import status_of, text_segment
from agentropy.protocols import answers
from agentropy.protocols.fence import MARKER, TOOL, fenced_blocks
from agentropy.protocols.hermes import read_calls
from agentropy.protocols.tags import TOOL_TAGS, find_tag, tag_call
from agentropy.trajectory import Segment, ToolCall, ToolResult

# What a chat template puts around a result, with and without its special tokens.
_BEFORE = r"(?:<\|im_end\|>|<\|eot_id\|>)?\s*(?:<\|im_start\|>)?\s*(?:^(?:user|tool)[ ]*\n)?\s*"
_BEHIND = r"\s*(?:<\|im_end\|>)?\s*(?:<\|im_start\|>)?(?:^assistant[ ]*(?:\n|$))?"
RESULT = re.compile(
    r"<tool_response>\n?(?P<response>.*?)\n?</tool_response>"
    r"|<result>\n?(?P<result>.*?)\n?</result>"
    r"|<information>\n?(?P<information>.*?)\n?</information>"
    r"|^```output[ \t]*\n(?P<output>.*?)^```[ \t]*$\n?"
    rf"|^{re.escape(MARKER.strip())} ?(?P<marker>[^\n]*)\n?",
    re.DOTALL | re.MULTILINE,
)
_HEADER = re.compile(_BEFORE + r"\Z", re.MULTILINE)
_FOOTER = re.compile(_BEHIND, re.MULTILINE)


@dataclass(frozen=True)
class _Span:
    """Results that come back together, and where they begin and end in the text, with a chat template's headers."""

    start: int
    end: int
    contents: tuple[str, ...]


def segments_of(text: str) -> list[Segment]:
    """The segments of what follows the prompt: the policy's turns and the results between them."""
    out: list[Segment] = []
    at = 0
    for span in _results(text):
        out += turn_segments(text[at : span.start], answered=True, calls_of=len(span.contents))
        out.append(result_segment(span.contents))
        at = span.end
    rest = text[at:]
    if rest.strip():
        out += turn_segments(rest, answered=False)
    return out


def _results(text: str) -> Iterator[_Span]:
    waiting: _Span | None = None
    for match in RESULT.finditer(text):
        content = next(group for group in match.groups() if group is not None)
        if waiting is not None and not text[waiting.end : match.start()].strip():
            waiting = _Span(waiting.start, match.end(), (*waiting.contents, content))
            continue
        if waiting is not None:
            yield _with_footer(waiting, text)
        low = max(match.start() - 100, 0 if waiting is None else waiting.end)
        header = _HEADER.search(text[low : match.start()])
        start = low + header.start() if header is not None else match.start()
        waiting = _Span(start, match.end(), (content,))
    if waiting is not None:
        yield _with_footer(waiting, text)


def _with_footer(span: _Span, text: str) -> _Span:
    footer = _FOOTER.match(text[span.end : span.end + 200])
    return _Span(span.start, span.end + (footer.end() if footer else 0), span.contents)


def result_segment(contents: Sequence[str]) -> Segment:
    """A result segment of texts; how the calls went is read from what they say."""
    results = [ToolResult(content, status_of(content)) for content in contents]
    return text_segment("result", "\n".join(contents), results=results)


def turn_segments(text: str, answered: bool, calls_of: int = 0) -> list[Segment]:
    """A turn of the policy: its reasoning, and the call that ends it.

    answered: results follow, so that a tag or a fence at the end is a call and no mere text. `calls_of` results follow.
    """
    start, calls = find_calls(text, answered)
    if answered and len(calls) < calls_of:  # not written as any protocol has it; what it was is not known
        calls = (*calls, *[ToolCall("")] * (calls_of - len(calls)))
    out = [text_segment("reasoning", text[:start])] if text[:start] else []
    return [*out, text_segment("call", text[start:], calls)] if calls else out


def find_calls(text: str, answered: bool) -> tuple[int, tuple[ToolCall, ...]]:
    """Where the call of a turn begins (the end of the text where there is none), and the calls that it makes."""
    if found := read_calls(text):
        return found[0].start, tuple(f.call for f in found)
    if not answered:
        return len(text), ()
    data = text.encode("utf-8", "surrogatepass")
    tag = find_tag(data, list(TOOL_TAGS))
    if tag is not None:
        return _characters(data, tag.start), (tag_call(tag.tag, tag.content, TOOL_TAGS[tag.tag]),)
    block = next((b for b in reversed(fenced_blocks(data)) if b.is_python and b.end is not None), None)
    if block is not None:
        return _characters(data, block.start), (ToolCall(TOOL, {"code": block.code.decode("utf-8", "replace")}),)
    return len(text), ()


def _characters(data: bytes, offset: int) -> int:
    return len(data[:offset].decode("utf-8", "surrogatepass"))


def answer_of(text: str) -> str | None:
    r"""The final answer of a last turn: `\boxed{}`, `<answer>`, else its text after the thinking."""
    return answers.auto(text)
