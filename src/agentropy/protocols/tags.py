"""XML-like tags, as in ARPO (arXiv 2507.19849) and TEPO (arXiv 2602.02050).

`<think>…</think> <python>code</python> <result>…</result> … <answer>…</answer>`. A turn ends at the closing tag of a
call or of the answer. Where the tokenizer has every tag as one token (the embedded agent) a turn is read by ids alone,
and a tag that is spelled out letter by letter means nothing. Elsewhere tags are looked for in the text, also where they
lie across tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentropy.errors import UserError
from agentropy.policies.base import Finish, Stop
from agentropy.protocols import answers, chat
from agentropy.protocols.base import Turn
from agentropy.protocols.calls import json_arguments
from agentropy.protocols.text import TokenText
from agentropy.trajectory import ToolCall, ToolResult

ANSWER = "answer"
TOOL_TAGS: Mapping[str, str | None] = {"python": "code", "search": "query"}
"""Tag (= tool name) to the one argument that its text is; None: the text is a JSON object of arguments."""


class TagsDialect:
    """The `tags` protocol. `instructions` None: a system prompt unless the tags are single tokens (a trained agent)."""

    name = "tags"

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_tags: Mapping[str, str | None] = TOOL_TAGS,
        max_result_tokens: int = 512,
        instructions: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.text = TokenText(tokenizer)
        self._tool_tags = dict(tool_tags)
        self._max_result_tokens = max_result_tokens
        self._template_options = dict(template_options or {})
        tags = [*self._tool_tags, ANSWER]
        opening = {t: self.text.single(f"<{t}>") for t in tags}
        closing = {t: self.text.single(f"</{t}>") for t in tags}
        result = (self.text.single("<result>"), self.text.single("</result>"))
        self.single_tokens = None not in (*opening.values(), *closing.values(), *result)
        """True where every tag is one token, so that only ids count."""
        self._opening = {t: i for t, i in opening.items() if i is not None}
        self._tag_of_closing = {i: t for t, i in closing.items() if i is not None}
        self._instructions = not self.single_tokens if instructions is None else instructions
        ends = chat.end_ids(self.text, eos_token_ids)
        self._ends = ends
        self.stop = Stop(
            token_ids=ends | frozenset(self._tag_of_closing),
            strings=tuple(f"</{t}>" for t, i in closing.items() if i is None),
        )
        self._result_ids = result

    def prompt(self, question: str, tools: Sequence[Mapping[str, Any]], system: str | None = None) -> list[int]:
        """Ids of the prompt. Raises UserError for a tool that has no tag."""
        names = [str(t["function"]["name"]) for t in tools]
        for name in names:
            if name not in self._tool_tags:
                raise UserError(f"tool {name!r} has no tag; name it in the option tool_tags, or use protocol hermes")
        if self._instructions:
            system = "\n\n".join(p for p in (system, self._describe(tools)) if p)
        if chat.has_template(self.text):
            return chat.prompt_ids(self.text, question, system, self._template_options)
        before = f"{system}\n\nQuestion: " if system else "Question: "
        ids = self.text.encode_mixed([(before, True), (question, False), ("\n", True)], start=True)
        return [*self.text.bos, *ids]

    def _describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        lines = [
            "Think before you act, inside <think> and </think>. You may use these tools, one call at a time:",
            *(self._describe_tool(t["function"]) for t in tools),
            "After each call its output comes back between <result> and </result>, and you go on from there.",
            "Call a tool only where it helps. When you know the answer, write it as <answer>the exact answer</answer>.",
        ]
        return "\n".join(lines if tools else [lines[0].partition(" You may")[0], lines[-1].partition(". ")[2]])

    def _describe_tool(self, function: Mapping[str, Any]) -> str:
        name = str(function["name"])
        argument = self._tool_tags[name]
        inside = "a JSON object of arguments" if argument is None else argument
        described = " ".join(str(function.get("description", "")).split())
        return f"- <{name}>{inside}</{name}>: {described}"

    def read(self, ids: Sequence[int], finish: Finish) -> Turn:
        """Read a turn. A closing tag without its opening, or with nothing inside, is an unreadable call."""
        turn = self._read_ids(ids) if self.single_tokens else self._read_text(ids)
        return turn if finish == "stop" else Turn(turn.call_start)

    def _read_ids(self, ids: Sequence[int]) -> Turn:
        closing = self._tag_of_closing
        end = next((i for i, t in enumerate(ids) if t in closing), None)
        if end is None:
            return Turn(self._open_call(ids))
        tag = closing[ids[end]]
        opening = self._opening[tag]
        start = end - 1
        while start >= 0 and ids[start] != opening:
            start -= 1
        content = None if start < 0 else self.text.decode(ids[start + 1 : end])
        return self._turn(tag, content, end if start < 0 else start, len(ids))

    def _open_call(self, ids: Sequence[int]) -> int:
        """Where a call begins that has no end."""
        starts = {i for t, i in self._opening.items() if t != ANSWER}
        return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in starts), len(ids))

    def _read_text(self, ids: Sequence[int]) -> Turn:
        data = self.text.decode_bytes(ids)
        found = find_tag(data, [*self._tool_tags, ANSWER])
        if found is None:
            starts = [data.rfind(f"<{t}>".encode()) for t in self._tool_tags]
            start = max(starts, default=-1)
            return Turn(len(ids) if start < 0 else self.text.token_at(ids, start))
        return self._turn(found.tag, found.content, self.text.token_at(ids, found.start), len(ids))

    def _turn(self, tag: str, content: str | None, start: int, length: int) -> Turn:
        if tag == ANSWER:
            stripped = (content or "").strip()
            return Turn(length, answer=answers.boxed(stripped) or stripped or None)
        return Turn(start, (tag_call(tag, content, self._tool_tags[tag]),))

    def results(self, results: Sequence[ToolResult], after: int | None = None) -> list[int]:
        """Ids of results in `<result>` tags, after which the policy goes on in the same turn."""
        contents = [self.text.cut(r.content, self._max_result_tokens) for r in results]
        if self.single_tokens:
            before, behind = self._result_ids
            assert before is not None
            assert behind is not None
            return [i for c in contents for i in (before, *self.text.encode_plain(c), behind)]
        parts = [p for c in contents for p in (("\n<result>\n", True), (c, False), ("\n</result>", True))]
        return self.text.encode_mixed([*parts, ("\n", True)])


@dataclass(frozen=True, slots=True)
class FoundTag:
    """A closing tag and what stands before it: where it begins (at the closing tag where it was never opened), and its
    content, None where it was never opened."""

    tag: str
    start: int
    content: str | None


def find_tag(data: bytes, tags: Sequence[str]) -> FoundTag | None:
    """The first of `tags` that is closed in a text, with the nearest opening before it; offsets in bytes."""
    ends = [(at, t) for t in tags if (at := data.find(f"</{t}>".encode())) >= 0]
    if not ends:
        return None
    end, tag = min(ends)
    opening = f"<{tag}>".encode()
    start = data.rfind(opening, 0, end)
    content = None if start < 0 else data[start + len(opening) : end].decode("utf-8", "replace")
    return FoundTag(tag, end if start < 0 else start, content)


def tag_call(tag: str, content: str | None, argument: str | None) -> ToolCall:
    """The call that a tag and its content stand for; `argument` as in `TOOL_TAGS`."""
    if content is None:
        return ToolCall(tag, error=f"</{tag}> has no <{tag}> before it")
    if not content.strip():
        return ToolCall(tag, error=f"nothing stands between <{tag}> and </{tag}>")
    if argument is None:
        return json_arguments(tag, content)
    return ToolCall(tag, {argument: content.strip("\r\n") if argument == "code" else content.strip()})
