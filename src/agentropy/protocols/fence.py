r"""Python in Markdown fences, the answer in `\boxed{}`: SimpleTIR (arXiv 2509.02479), TAO-RL (arXiv 2606.03762).

Unlike their released code, which lets the model write on, cuts the text and tokenizes it again, a turn ends at the
closing fence, and the sampled ids stay as they are. An answer is read from the policy's own text outside code, never
from what a program prints. Where a turn has both, what comes first in the text counts: a boxed answer ends the
trajectory and no later code of that turn runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentropy.errors import UserError
from agentropy.policies.base import Finish, Stop
from agentropy.protocols import answers, chat
from agentropy.protocols.base import Turn
from agentropy.protocols.text import TokenText
from agentropy.trajectory import ToolCall, ToolResult

TOOL = "python"
MARKER = "Code execution result: "
INSTRUCTION = (
    "Solve the problem step by step. Where computing helps, write a complete Python program between a line ```python "
    "and a line ```; its imports and what it needs of earlier programs must be in it, and it must print what you want "
    f'to see. Its output comes back after "{MARKER.strip()}" and you go on from there. When you know the answer, write '
    "it as \\boxed{answer} outside code."
)

_OPENING = re.compile(rb" {0,3}(`{3,})[ \t]*([^`\s]*)[^`]*")
_CLOSING = re.compile(rb" {0,3}`{3,}")
_PYTHON = re.compile(r"(py|python)[\d.]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: byte offsets of its opening fence and of the end of its closing one (None: not closed)."""

    start: int
    end: int | None
    language: str
    code: bytes

    @property
    def is_python(self) -> bool:
        return not self.language or _PYTHON.fullmatch(self.language) is not None


class FenceDialect:
    """The `fence` protocol.

    instruction: what stands before the question in the user turn. Without a chat template the prompt is plain text.
    A block opened by a fence without language counts as Python where it is complete. A block that is not closed is no
    call (a void turn); one in another language is an unreadable call, so that the model is told.
    """

    name = "fence"

    def __init__(
        self,
        tokenizer: Any,
        *,
        instruction: str = INSTRUCTION,
        max_result_tokens: int = 512,
        template_options: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.text = TokenText(tokenizer)
        self._instruction = instruction
        self._max_result_tokens = max_result_tokens
        self._options = dict(template_options or {})
        self._ends = chat.end_ids(self.text, eos_token_ids)
        self.stop = Stop(token_ids=self._ends, strings=("\n```\n", "\n```\r\n", "\n``` \n"))

    def prompt(self, question: str, tools: Sequence[Mapping[str, Any]], system: str | None = None) -> list[int]:
        """Ids of the prompt. Raises UserError for any tool but `python`: a fence can call nothing else."""
        for name in (str(t["function"]["name"]) for t in tools):
            if name != TOOL:
                raise UserError(f"protocol fence can call only {TOOL!r}, not {name!r}; use hermes or tags")
        before = f"{self._instruction}\n\nUser Question: " if self._instruction and tools else ""
        if chat.has_template(self.text):
            return chat.prompt_ids(self.text, before + question, system, self._options)
        head = f"{system}\n\n{before}" if system else before
        ids = self.text.encode_mixed([(head, True), (question, False), ("\n", True)], start=True)
        return [*self.text.bos, *ids]

    def read(self, ids: Sequence[int], finish: Finish) -> Turn:
        """Read a turn that ended at a closing fence, at an end token, or by length (then it holds nothing)."""
        length = len(ids)
        while length and ids[length - 1] in self._ends:
            length -= 1
        data = self.text.decode_bytes(ids[:length])
        blocks = fenced_blocks(data)
        block = next((b for b in blocks if b.is_python), blocks[-1] if blocks else None)
        outside = _outside(data, blocks, block.start if block and block.end is not None else len(data))
        if finish == "stop" and (answer := answers.boxed(outside)) is not None:
            return Turn(len(ids), answer=answer)
        if block is None:
            return Turn(len(ids))
        start = self.text.token_at(ids, block.start)
        call = self._call(block, data, length < len(ids)) if finish == "stop" else None
        return Turn(start, () if call is None else (call,))

    def _call(self, block: Block, data: bytes, ended: bool) -> ToolCall | None:
        code = block.code.decode("utf-8", "replace").replace("\r\n", "\n")
        if block.end is None:
            # A bare fence looks like a closing one, so generation stopped right behind it.
            bare = not block.language and not code and not ended
            return ToolCall(TOOL, error="open a block of code with a line ```python") if bare else None
        if not block.is_python:
            return ToolCall(TOOL, error=f"only ```python blocks are run, not {block.language[:20]!r}")
        if not code.strip():
            return ToolCall(TOOL, error="the block holds no code")
        return ToolCall(TOOL, {"code": code})

    @cached_property
    def _user_turn(self) -> chat.Between | None:
        return chat.between(self.text, "user", self._options) if chat.has_template(self.text) else None

    def results(self, results: Sequence[ToolResult], after: int | None = None) -> list[int]:
        """Ids of `Code execution result: …` on a line of its own, after which the policy goes on.

        `after` is the last id that the policy sampled: no empty line is put after its line break, and where it ended
        its turn after the fence, the result comes in a user turn.
        """
        contents = [self.text.cut(r.content, self._max_result_tokens) for r in results]
        if after in self._ends and self._user_turn is not None:
            return self._user_turn.ids(self.text, ["\n".join(MARKER + c for c in contents)])
        first = "" if after is not None and self.text.pieces[after].endswith(b"\n") else "\n"
        parts = [p for c in contents for p in ((MARKER, True), (c, False), ("\n", True))]
        return self.text.encode_mixed([(first, True), *parts])


def fenced_blocks(data: bytes) -> list[Block]:
    """The fenced blocks of a text in order, the last one perhaps not closed.

    A closing fence is a line of nothing but at least as many backticks as the opening one; backticks elsewhere in a
    line are text, so a fence inside a one-line string literal closes nothing.
    """
    blocks: list[Block] = []
    at, start, inside, ticks, language = 0, 0, 0, b"", ""
    for line in data.splitlines(keepends=True):
        bare = line.rstrip(b" \t\r\n")
        if not ticks:
            if opening := _OPENING.fullmatch(line.rstrip(b"\r\n")):
                ticks, language = opening[1], opening[2].decode("utf-8", "replace")
                start, inside = at, at + len(line)
        elif _CLOSING.fullmatch(bare) and bare.count(b"`") >= len(ticks):
            blocks.append(Block(start, at + len(line), language, data[inside:at]))
            ticks = b""
        at += len(line)
    if ticks:
        blocks.append(Block(start, None, language, data[inside:]))
    return blocks


def _outside(data: bytes, blocks: Sequence[Block], end: int) -> str:
    """The text before `end` that is in no block."""
    parts, at = [], 0
    for block in blocks:
        parts.append(data[at : min(block.start, end)])
        at = len(data) if block.end is None else block.end
        if at >= end:
            break
    else:
        parts.append(data[at:end])
    return b"\n".join(parts).decode("utf-8", "replace")
