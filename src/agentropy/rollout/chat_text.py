"""Protocols in text for servers that chat: prompts and results as messages, calls and answers read from a turn's text.

The protocols themselves are those of `protocols/`. They work on ids, so each text is given to them as its bytes, by a
tokenizer that has one token a byte and a chat template whose separators nobody can guess.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from agentropy.policies.base import Finish
from agentropy.policies.http_chat import Message
from agentropy.protocols import make_dialect
from agentropy.protocols.base import Turn
from agentropy.trajectory import ToolResult

_END = 256
"""The id that ends a turn; the ids below are the bytes."""


class TextProtocol:
    """`hermes`, `fence` or `tags` over chat messages. Results come in a user turn, whatever the protocol.

    Raises UserError for an unknown protocol or option.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._mark = f"\x1e{secrets.token_hex(8)}"
        self._dialect = make_dialect(name, byte_tokenizer(self._mark), **({"max_result_tokens": 1 << 40} | {**options}))
        self.stop = self._dialect.stop.strings
        """Stop strings to send with a request."""

    def messages(self, question: str, tools: Sequence[Mapping[str, Any]], system: str | None) -> list[Message]:
        """The conversation up to the policy's first turn. Raises UserError for a tool that the protocol cannot call."""
        return self._split(self._dialect.prompt(question, tools, system))

    def results(self, results: Sequence[ToolResult]) -> list[Message]:
        """The results of one turn as messages."""
        ids = self._dialect.results(results, _END)
        split = self._split(ids)
        return split or [{"role": "user", "content": _text(ids).strip("\n")}]

    def read(self, text: str, finish: Finish) -> Turn:
        """Read a turn; `call_start` is a place in its bytes."""
        data = text.encode("utf-8", "replace")
        turn = self._dialect.read([*data, _END] if finish == "stop" else [*data], finish)
        return Turn(min(turn.call_start, len(data)), turn.calls, turn.answer)

    def whole(self, text: str, finish: Finish, stopped_by: str | None) -> str:
        """The turn up to and with its stop string. Servers leave it out, or go on behind it where they know none.

        Where the server does not say which one it was, it is the one that makes a call or an answer of the text.
        """
        ends = [at + len(s) for s in self.stop if (at := text.find(s)) >= 0]
        if ends:
            return text[: min(ends)]
        if finish != "stop":
            return text
        if stopped_by in self.stop:
            return text + str(stopped_by)
        turn = self.read(text, finish)
        if not turn.calls and turn.answer is None:
            for stop in self.stop:
                turn = self.read(text + stop, finish)
                if turn.answer is not None or any(c.error is None for c in turn.calls):
                    return text + stop
        return text

    def _split(self, ids: Sequence[int]) -> list[Message]:
        """The messages of a rendered conversation; the opening of the policy's turn is none."""
        messages = []
        for part in _text(ids).split(self._mark)[1:]:
            role, _, content = part.partition("\x1f")
            messages.append({"role": role, "content": content})
        if messages and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()
        return messages


def _text(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < _END).decode("utf-8", "replace")


def byte_tokenizer(mark: str) -> Any:
    """A tokenizer whose ids are bytes; its template writes `mark`, the role, U+001F and the content of each message."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={c: b for b, c in enumerate(_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"{mark}end")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '" + mark + "' + m['role'] + '\x1f' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + mark + "assistant\x1f' }}{% endif %}"
    )
    return tokenizer


def _alphabet() -> list[str]:
    """The character that a byte-level vocabulary writes for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    out, spare = [], 256
    for byte in range(256):
        out.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return out
