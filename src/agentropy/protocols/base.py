"""How prompts, calls, results and answers look in tokens.

Token in, token out: a protocol encodes the prompt once and each tool result once; it never encodes what the policy
sampled. It reads calls and answers from the decoded text of one turn of the policy, and nowhere else, so nothing that a
tool prints can end an episode or be graded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentropy.policies.base import Finish, Stop
from agentropy.trajectory import ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy as the protocol reads it.

    `call_start` is the index of the first id that belongs to the call segment (len(ids) where there is none).
    `calls` holds what was called, unreadable calls included (`ToolCall.error`); empty where the turn holds no complete
    call. `answer` is the final answer, None where there is none. Neither calls nor answer: a void turn.
    """

    call_start: int
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None


class Dialect(Protocol):
    """One protocol bound to a tokenizer. (`Protocol` is Python's word for interface, hence the name.)"""

    name: str
    stop: Stop

    def prompt(self, question: str, tools: Sequence[Mapping[str, Any]], system: str | None = None) -> list[int]:
        """Ids of the whole prompt, up to where the policy's first turn begins."""
        ...

    def read(self, ids: Sequence[int], finish: Finish) -> Turn:
        """Read one sampled turn. Never raises for what the policy wrote."""
        ...

    def results(self, results: Sequence[ToolResult], after: int | None = None) -> list[int]:
        """Ids of the results of one turn, with whatever opens the policy's next turn. Special tokens in a tool's text
        are encoded as plain text; long text is cut in the middle to the token limit, with a count of what is left out.
        `after` is the last id that the policy sampled, which decides what has to stand between.
        """
        ...
