"""Chat templates as ids: prompts, and what stands between two turns of the policy.

History is never rendered again. What follows a turn (the end of the tool's or user's turn and the opening of the next
one) is found once by rendering a dummy conversation; from then on it is appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from agentropy.errors import UserError
from agentropy.protocols.text import TokenText

Message = dict[str, str]
END_TOKENS = ("<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a turn in the common templates; a tokenizer names only one of its own as `eos_token`."""

_ASSISTANT, _FIRST, _SECOND = "qqASSISTANTqq", "qqFIRSTqq", "qqSECONDqq"


def end_ids(text: TokenText, extra: Sequence[int] = ()) -> frozenset[int]:
    """Ids that end a turn: the tokenizer's eos, the usual end-of-turn tokens it has, `extra` (generation_config)."""
    ids = {int(i) for i in extra}
    if text.tokenizer.eos_token_id is not None:
        ids.add(int(text.tokenizer.eos_token_id))
    found = [text.single(t) for t in END_TOKENS]
    return frozenset(ids | {i for i in found if i is not None})


def render(text: TokenText, messages: Sequence[Message], options: Mapping[str, Any], tools: Any = None) -> str:
    """The conversation as the tokenizer's template writes it, with the opening of the next turn.

    A template that knows no system role gets the system text at the head of the first user turn.
    """
    apply = text.tokenizer.apply_chat_template
    arguments = {"tools": tools, "tokenize": False, "add_generation_prompt": True, **options}
    try:
        return str(apply(list(messages), **arguments))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the tokenizer's chat template cannot be read: line {error.lineno}: {error.message}") from None
    except (jinja2.TemplateError, ValueError):
        if len(messages) < 2 or messages[0]["role"] != "system":
            raise
        first = {"role": messages[1]["role"], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        return str(apply([first, *messages[2:]], **arguments))


def has_template(text: TokenText) -> bool:
    """True where the tokenizer brings a chat template."""
    return bool(getattr(text.tokenizer, "chat_template", None))


def writes_hermes_tools(text: TokenText, options: Mapping[str, Any]) -> bool:
    """True where the template writes `tools` into the prompt and asks for JSON calls in `<tool_call>` tags."""
    probe = {"type": "function", "function": {"name": "qqPROBEqq", "description": "", "parameters": {}}}
    try:
        rendered = render(text, [{"role": "user", "content": "x"}], options, [probe])
    except (jinja2.TemplateError, ValueError):
        return False
    return "qqPROBEqq" in rendered and "<tool_call>" in rendered and "<function=" not in rendered


def prompt_ids(
    text: TokenText,
    question: str,
    system: str | None,
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Ids of a prompt. Control tokens that the question spells out stay plain text."""
    head: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    given = None if tools is None else [dict(t) for t in tools]
    whole = render(text, [*head, {"role": "user", "content": question}], options, given)
    if text.is_plain(question):
        return text.encode(whole)
    before, _, after = render(text, [*head, {"role": "user", "content": _FIRST}], options, given).partition(_FIRST)
    return text.encode_mixed([(before, True), (question, False), (after, True)], start=True)


@dataclass(frozen=True, slots=True)
class Between:
    """What stands around the contents that are put between two turns: before, between several, and after them.

    `end` is the end-of-turn text that the policy should have sampled before it.
    """

    end: str
    before: str
    separator: str
    after: str

    def ids(self, text: TokenText, contents: Sequence[str], ended: bool = True) -> list[int]:
        """Ids for these contents. Where the policy did not end its turn itself (`ended` False) its end comes first."""
        parts: list[tuple[str, bool]] = [((("" if ended else self.end) + self.before), True)]
        for i, content in enumerate(contents):
            parts += [(self.separator, True)] if i else []
            parts.append((content, False))
        return text.encode_mixed([*parts, (self.after, True)])


def between(text: TokenText, role: str, options: Mapping[str, Any], wrap: tuple[str, str] = ("", "")) -> Between:
    """How the template puts messages of `role` after a turn of the assistant.

    `wrap` is put around each content by us (a template that knows no tool role gets results in a user turn).
    Raises UserError where the template cannot render such a conversation.
    """
    left, right = wrap
    head: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ASSISTANT}]
    contents = [f"{left}{c}{right}" for c in (_FIRST, _SECOND)]
    if role == "tool":
        tail = [{"role": role, "content": c} for c in contents]
    else:
        tail = [{"role": role, "content": "\n".join(contents)}]
    try:
        rendered = render(text, [*head, *tail], options)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the chat template cannot put a {role} turn after a call: {error}") from None
    _, found, rest = rendered.partition(_ASSISTANT)
    before, first, rest = rest.partition(_FIRST)
    separator, second, after = rest.partition(_SECOND)
    if not (found and first and second):
        raise UserError(f"the chat template drops the text of an assistant or {role} turn")
    end = next((text.added[i] for i in sorted(end_ids(text)) if before.startswith(text.added.get(i, "\0"))), "")
    return Between(end=end, before=before[len(end) :], separator=separator, after=after)
