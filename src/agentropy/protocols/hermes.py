"""JSON calls in `<tool_call>` tags inside a chat template, as Hermes and Qwen models write them.

A turn of the policy ends with the template's end-of-turn token. It holds any number of calls, which run in parallel;
their results come back in one tool turn. A turn without a call is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentropy.errors import UserError
from agentropy.policies.base import Finish, Stop
from agentropy.protocols import answers, chat
from agentropy.protocols.base import Turn
from agentropy.protocols.calls import DECODER, explain, json_call
from agentropy.protocols.text import TokenText
from agentropy.trajectory import ToolCall, ToolResult

AnswerFormat = Literal["auto", "boxed", "text"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BOXED_HINT = r"When you know the final answer, write it inside \boxed{}."


class HermesDialect:
    r"""The `hermes` protocol.

    answer_format: where a turn without a call has its answer. `boxed`: the last `\boxed{…}`, nothing else. `text`: all
    text after `</think>`. `auto`: boxed if there is one, else `<answer>…</answer>`, else the text.
    hint: a sentence that the system turn gets; None: one that asks for `\boxed{}`, unless the format is `text`.
    stop_at_call: end a turn at the first `</tool_call>`; the end-of-turn token is then put in by us.
    template_options: further variables of the chat template, such as `enable_thinking`.
    eos_token_ids: further ids that end a turn, from the model's generation_config.

    Templates that write `tools` in this form get them through `tools=`; others get a section of ours in the system turn
    and results in a user turn. Raises UserError for a tokenizer without chat template.
    """

    name = "hermes"

    def __init__(
        self,
        tokenizer: Any,
        *,
        answer_format: AnswerFormat = "auto",
        hint: str | None = None,
        max_result_tokens: int = 512,
        stop_at_call: bool = False,
        template_options: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if answer_format not in ("auto", "boxed", "text"):
            raise UserError(f"answer_format {answer_format!r} is none of auto, boxed, text")
        self.text = TokenText(tokenizer)
        if not chat.has_template(self.text):
            raise UserError("protocol hermes needs a chat template, which this tokenizer lacks; use fence or tags")
        self._answer_format = answer_format
        self._hint = ("" if answer_format == "text" else BOXED_HINT) if hint is None else hint
        self._max_result_tokens = max_result_tokens
        self._stop_at_call = stop_at_call
        self._options = dict(template_options or {})
        self.native = chat.writes_hermes_tools(self.text, self._options)
        """True where the tokenizer's own template describes the tools."""
        self._between = self._tool_turn()
        self._ends = chat.end_ids(self.text, eos_token_ids)
        closing = self.text.single(CLOSE)
        at_call = stop_at_call and closing is not None
        self.stop = Stop(
            token_ids=self._ends | ({closing} if at_call and closing is not None else set()),
            strings=(CLOSE,) if stop_at_call and closing is None else (),
        )

    def _tool_turn(self) -> chat.Between:
        if self.native:
            try:
                return chat.between(self.text, "tool", self._options)
            except UserError:
                pass  # a template with tools but without tool turns
        return chat.between(self.text, "user", self._options, ("<tool_response>\n", "\n</tool_response>"))

    def prompt(self, question: str, tools: Sequence[Mapping[str, Any]], system: str | None = None) -> list[int]:
        """Ids of the prompt: system turn with the tools, user turn, opening of the policy's turn."""
        parts = [system, self._hint]
        if tools and not self.native:
            parts.append(tool_section(tools))
        system = "\n\n".join(p for p in parts if p) or None
        return chat.prompt_ids(self.text, question, system, self._options, tools if tools and self.native else None)

    def read(self, ids: Sequence[int], finish: Finish) -> Turn:
        """Read a turn. Text after the last call is ignored; so is a call that is mentioned in a closed `<think>`.

        A call that the end-of-turn token cuts off is unreadable (the model is told); one cut by length is no call.
        """
        length = len(ids)
        while length and ids[length - 1] in self._ends:
            length -= 1
        data = self.text.decode_bytes(ids[:length])
        text = data.decode("utf-8", "replace")
        found = read_calls(text)
        if not found:
            return Turn(len(ids), answer=self._answer(text) if finish == "stop" else None)
        # Bytes that are no UTF-8 shift offsets, but not the order of the tags.
        offset = -1
        for _ in range(text.count(OPEN, 0, found[0].start) + 1):
            offset = data.find(OPEN.encode(), offset + 1)
        calls = tuple(f.call for f in found) if finish == "stop" else ()
        return Turn(self.text.token_at(ids, offset), calls)

    def _answer(self, text: str) -> str | None:
        if self._answer_format == "auto":
            return answers.auto(text)
        visible = answers.final_text(text)
        return answers.boxed(visible) if self._answer_format == "boxed" else visible or None

    def results(self, results: Sequence[ToolResult], after: int | None = None) -> list[int]:
        """Ids of the tool turn and the opening of the next turn.

        `after` is the last id that the policy sampled: where it ends no turn, the end of the turn is put in first.
        None: the turn ended, unless `stop_at_call`.
        """
        contents = [self.text.cut(r.content, self._max_result_tokens) for r in results]
        ended = not self._stop_at_call if after is None else after in self._ends
        return self._between.ids(self.text, contents, ended)


def tool_section(tools: Sequence[Mapping[str, Any]]) -> str:
    """The part of a system turn that tells a model without tool template what it may call and how."""
    lines = [
        "# Tools",
        "",
        "You may call functions to help with the question. Their signatures stand between <tools> and </tools>:",
        "<tools>",
        *(json.dumps(t, ensure_ascii=False) for t in tools),
        "</tools>",
        "",
        f"To call one, write a JSON object with its name and its arguments between {OPEN} and {CLOSE}:",
        OPEN,
        '{"name": "<function name>", "arguments": {"<argument>": "<value>"}}',
        CLOSE,
        "The output comes back between <tool_response> and </tool_response>.",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call, where its opening tag begins, and where its JSON ends (at `start` if that could not be read)."""

    call: ToolCall
    start: int
    json_end: int


def read_calls(text: str) -> list[FoundCall]:
    """The calls of a turn in order, unreadable ones with their error.

    `</tool_call>` inside a JSON string is text. Calls before the last `</think>` are thoughts, not calls.
    """
    found: list[FoundCall] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        inside = start + len(OPEN)
        call, json_end, used = _one(text[inside:])
        found.append(FoundCall(call, start, inside + json_end if json_end else start))
        at = inside + used
    thoughts = [m.start() for m in re.finditer("</think>", text)]
    thoughts = [t for t in thoughts if not any(f.start < t < f.json_end for f in found)]
    return [f for f in found if not thoughts or f.start > thoughts[-1]]


def _one(body: str) -> tuple[ToolCall, int, int]:
    """The call at the head of `body`, where its JSON ends (0: unreadable), and how many characters it takes."""
    blank = len(body) - len(body.lstrip())
    try:
        value, end = DECODER.raw_decode(body, blank)
    except (ValueError, RecursionError) as error:
        inside, used = _upto_close(body, 0)
        if inside is None:
            return ToolCall("", error=f"the call is cut off: it has no {CLOSE}"), 0, used
        return ToolCall("", error=explain(error) if inside.strip() else f"nothing stands in {OPEN}"), 0, used
    trailing, used = _upto_close(body, end)
    call = json_call(value)
    if trailing is None:
        call = ToolCall(call.tool, error=f"the call has no {CLOSE}")
    elif trailing.lstrip().startswith("{"):
        call = ToolCall(call.tool, error=f"more than one JSON object; give each call its own {OPEN}")
    elif trailing.strip():
        call = ToolCall(call.tool, error=f"text after the JSON object: {trailing.strip()[:40]!r}")
    return call, end, used


def _upto_close(body: str, start: int) -> tuple[str | None, int]:
    """What stands before the call's closing tag (None: it has none), and where the call is over."""
    close, following = body.find(CLOSE, start), body.find(OPEN, start)
    if close < 0 or 0 <= following < close:
        return None, following if following >= 0 else len(body)
    return body[start:close], close + len(CLOSE)
