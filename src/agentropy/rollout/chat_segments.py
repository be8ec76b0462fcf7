"""Segments of a chat's turns: which of the tokens are reasoning and which are the call.

What TEPO measures hangs on it, so where it cannot be told which tokens wrote the call, none of the turn has an entropy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentropy.policies.http_chat import ChatToken, ChatTurn, Message
from agentropy.trajectory import Segment, ToolCall, ToolResult

_MARKERS = (
    b"<tool_call>", b"[TOOL_CALLS]", b"<|python_tag|>", b"<function=", b"<|tool_call", b"<tool_calls>",
    b"<|channel|>commentary", b"functools[",
)  # fmt: skip
"""How calls begin in the templates of common models, for servers that give their tokens but not where they begin."""


@dataclass(frozen=True, slots=True)
class Split:
    """Where the call of a turn begins in the bytes of its tokens, or of `text` where no tokens were given.

    start: None where there is no call, or where no token that was given belongs to it
    end: where what counts of the turn ends; None: it is all that was sampled
    text: what counts of the turn's text; None: all
    known: False where some of the tokens may belong to the call and nobody knows which
    """

    start: int | None
    end: int | None = None
    text: str | None = None
    known: bool = True


def place_in_text(turn: ChatTurn, text: str, start: int) -> Split:
    """As `Split`, of a call that begins at the byte `start` of `text`: the turn's content up to its stop string."""
    length = len(text.encode("utf-8", "replace"))
    call = start if start < length else None
    data = b"".join(t.data for t in turn.tokens or ())
    if not data:
        return Split(call, length, text)
    # Servers take thoughts out of the text, and white space off its ends.
    base = data.find(turn.content.encode("utf-8", "replace"), len(turn.reasoning.strip().encode("utf-8", "replace")))
    if base < 0:
        return Split(None, None, text, known=call is None)
    return Split(None if call is None else base + call, base + length, text)


def place_of_call(turn: ChatTurn) -> Split:
    """Where the server's tool calls begin among the tokens it gave: behind the thoughts and the text.

    Servers like vLLM give the tokens of calls too, OpenAI's API only those of the text.
    """
    data = b"".join(t.data for t in turn.tokens or ())
    end = 0
    for is_thought, part in ((True, turn.reasoning), (False, turn.content)):
        words = part.strip().encode("utf-8", "replace")
        found = data.find(words, end)
        if found < 0:
            starts = [at for m in _MARKERS if (at := data.find(m)) >= 0]
            return Split(min(starts)) if starts else Split(None, known=not data)
        end = found + len(words)
        behind = data[end:].lstrip()
        if is_thought and words and behind.startswith(b"</think>"):
            end = len(data) - len(behind) + len(b"</think>")
    rest = data[end:]
    # White space between the text and the call, and an end token behind the text alone, are not the call's.
    if not rest.strip() or (not any(m in rest for m in _MARKERS) and b"{" not in rest and b"(" not in rest):
        return Split(None)
    return Split(len(data) - len(rest.lstrip()))


def turn_segments(turn: ChatTurn, split: Split, calls: Sequence[ToolCall]) -> list[Segment]:
    """The reasoning and the call of one turn; as in a trajectory with ids, no reasoning segment before a bare call."""
    if turn.tokens:
        tokens = _kept(turn.tokens, split.end)
        cut = len(tokens) if split.start is None else _index(tokens, split.start)
        before, behind = _segment("reasoning", tokens[:cut], split.known), tokens[cut:]
        if calls and not behind:
            # The server did not give the tokens of its calls; it may have counted them.
            unseen = max(1, (turn.completion_tokens or 0) - len(turn.tokens))
            return [*([before] if before.ids else []), _counted("call", _written(turn), unseen, calls)]
        segments = [before] if cut or not calls else []
        return [*segments, *([_segment("call", behind, split.known, calls)] if behind else [])]
    thought = f"<think>{turn.reasoning}</think>" if turn.reasoning else ""
    text = turn.content if split.text is None else split.text
    data = text.encode("utf-8", "replace")
    start = len(data) if split.start is None else split.start
    reasoning = thought + data[:start].decode("utf-8", "replace")
    call = data[start:].decode("utf-8", "replace") or (_written(turn) if calls else "")
    total = turn.completion_tokens or sum(map(bool, (reasoning, call)))
    share = round(total * len(reasoning) / max(1, len(reasoning) + len(call)))
    share = min(max(share, bool(reasoning)), max(0, total - bool(call)))
    segments = [_counted("reasoning", reasoning, share)] if reasoning or not calls else []
    return [*segments, *([_counted("call", call, total - share, calls)] if call else [])]


def prompt_segment(messages: Sequence[Message]) -> Segment:
    """The conversation before the first turn, as one entry: its tokens are the server's affair."""
    text = "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)
    return Segment("prompt", (0,), tokens=(text,))


def result_segment(shown: Sequence[ToolResult], results: Sequence[ToolResult]) -> Segment:
    """Results as the model saw them (`shown`, cut to length), with the records of the calls."""
    return Segment("result", (0,), results=tuple(results), tokens=("\n".join(r.content for r in shown),))


def _kept(tokens: Sequence[ChatToken], end: int | None) -> Sequence[ChatToken]:
    """The tokens up to the one that completes what counts; all where that is everything."""
    if end is None:
        return tokens
    at = 0
    for i, token in enumerate(tokens):
        at += len(token.data)
        if at >= end:
            # An end token right behind the text was sampled too, and nothing stands behind it.
            return tokens if i + 2 == len(tokens) else tokens[: i + 1]
    return tokens


def _index(tokens: Sequence[ChatToken], start: int) -> int:
    """Index of the token that holds the byte at `start`."""
    at = 0
    for i, token in enumerate(tokens):
        at += len(token.data)
        if at > start:
            return i
    return len(tokens)


def _segment(kind: str, tokens: Sequence[ChatToken], known: bool, calls: Sequence[ToolCall] = ()) -> Segment:
    """A segment of tokens that the server gave."""
    logprobs = [t.logprob for t in tokens if t.logprob is not None]
    entropies = [t.entropy for t in tokens if t.entropy is not None]
    listed = all(t.alternatives for t in tokens)
    return Segment(
        kind,  # type: ignore[arg-type]
        (0,) * len(tokens),
        tuple(logprobs) if len(logprobs) == len(tokens) else None,
        tuple(entropies) if known and len(entropies) == len(tokens) else None,
        calls=tuple(calls),
        tokens=tuple(t.text for t in tokens),
        alternatives=tuple(t.alternatives for t in tokens) if listed else None,
    )


def _counted(kind: str, text: str, count: int, calls: Sequence[ToolCall] = ()) -> Segment:
    """A segment of which only the text and the number of tokens are known: the text stands at its first token."""
    tokens = (text, *("",) * (count - 1)) if count else ()
    return Segment(kind, (0,) * count, calls=tuple(calls), tokens=tokens)  # type: ignore[arg-type]


def _written(turn: ChatTurn) -> str:
    """Calls as text, for people."""
    return "\n".join(json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in turn.calls)
