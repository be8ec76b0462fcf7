"""Chat logs in the shape of the OpenAI API: whole conversations, or requests with their responses.

docs/analysis.md has the keys that are read. Calls come from `tool_calls`, or from the text by the protocols' readers;
entropies from `logprobs`, estimated from `top_logprobs` unless the server gave them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentropy.analysis.imports.parts import Options, json_lines, key_of, score_in, status_of, text_segment
from agentropy.analysis.imports.text import RESULT, answer_of, find_calls
from agentropy.analysis.imports.tokens import ChatTokens, chat_tokens
from agentropy.errors import UserError
from agentropy.protocols.calls import json_call
from agentropy.protocols.hermes import read_calls
from agentropy.trajectory import STATUSES, Segment, Status, StopReason, ToolCall, ToolResult, Trajectory

SCORES = ("score", "reward", "correct")
NAMES = ("trajectory_id", "conversation_id", "session_id", "id", "custom_id")
MOST_OPEN = 10_000
"""Conversations of a log of requests that wait for their next request; beyond that the oldest is taken as it is."""

Message = dict[str, Any]


@dataclass
class _Conversation:
    messages: list[Message]
    row: Mapping[str, Any]
    name: str
    finish: str | None = None
    where: str = ""


def read_chat(path: Path, options: Options) -> Iterator[Trajectory]:
    """The trajectories of a chat log, one a question: where a user asks again, the conversation before is the prompt.

    Raises UserError that names the line and the key at fault.
    """
    for conversation in _conversations(path):
        try:
            yield from _trajectories(conversation, options)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(conversation.where) else f"{conversation.where}: {text}") from None


def _conversations(path: Path) -> Iterator[_Conversation]:
    waiting: dict[str, list[_Conversation]] = {}
    for line, row in json_lines(path):
        where = f"{path}, line {line}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: no JSON object")
        name = next((str(row[k]) for k in NAMES if row.get(k) is not None), f"{path.stem}/{line}")
        request, response = _body(row.get("request"), row), _response(row)
        messages = _messages(request.get("messages"), where)
        if response is None:
            yield _Conversation(messages, row, name, row.get("finish_reason"), where)
            continue
        choices = response.get("choices")
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{where}: the response has no 'choices'")
        for i, choice in enumerate(choices):
            message = choice.get("message") if isinstance(choice, Mapping) else None
            if not isinstance(message, Mapping):
                raise UserError(f"{where}: choice {i} has no 'message' (streamed pieces must be put together first)")
            mine = _continued(waiting, messages)
            own_name = mine.name if mine is not None else name if len(choices) == 1 else f"{name}/{i}"
            history = mine.messages + messages[len(mine.messages) :] if mine is not None else messages
            reply = {**message, "role": "assistant"}
            if choice.get("logprobs") is not None:
                reply["logprobs"] = choice["logprobs"]
            now = _Conversation([*history, reply], {**request, **row}, own_name, choice.get("finish_reason"), where)
            if _calls(reply) and now.finish != "length":
                waiting.setdefault(_fingerprint(now.messages), []).append(now)
                if len(waiting) > MOST_OPEN:
                    yield from waiting.pop(next(iter(waiting)))
            else:
                yield now
    for left in waiting.values():
        yield from left


def _body(part: Any, default: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        return default
    inner = part.get("body")
    return inner if isinstance(inner, Mapping) else part


def _response(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    part = next((row[k] for k in ("response", "completion") if isinstance(row.get(k), Mapping)), None)
    return None if part is None else _body(part, part)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        raise UserError(f"{where}: 'messages' is no list of messages")
    for m in value:
        if not isinstance(m.get("role"), str):
            raise UserError(f"{where}: a message has no 'role'")
        for part in m["content"] if isinstance(m.get("content"), list) else []:
            if isinstance(part, Mapping) and part.get("type") in ("tool_use", "tool_result"):
                raise UserError(
                    f"{where}: a message holds a part {part['type']!r}, as Anthropic's API has it; calls are read from "
                    "'tool_calls' and results from messages with the role 'tool'"
                )
    return [dict(m) for m in value]


def _continued(waiting: dict[str, list[_Conversation]], messages: Sequence[Message]) -> _Conversation | None:
    """The conversation that a request goes on with: the longest that its messages begin with."""
    for end in range(len(messages) - 1, 0, -1):
        if messages[end - 1]["role"] == "assistant" and (key := _fingerprint(messages[:end])) in waiting:
            found = waiting[key].pop(0)
            if not waiting[key]:
                del waiting[key]
            return found
    return None


def _fingerprint(messages: Sequence[Message]) -> str:
    """A key for what was said; not for how a client writes down an empty text or a call's id."""
    said = [(m["role"], text_of(m), [(c.tool, str(c.arguments)) for c in _calls(m)]) for m in messages]
    return key_of(json.dumps(said, ensure_ascii=False, default=str))


def _calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of a message's `tool_calls` (or of the older `function_call`)."""
    made = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    out = []
    for call in made if isinstance(made, list) else []:
        function = call.get("function", call) if isinstance(call, Mapping) else call
        known = (
            {k: v for k, v in function.items() if k in ("name", "arguments")}
            if isinstance(function, Mapping)
            else function
        )
        out.append(json_call(known))
    return tuple(out)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; parts that are no text (pictures) are named."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return str(content)
    parts = [p if isinstance(p, Mapping) else {"text": p} for p in content]
    return "".join(str(p["text"]) if p.get("text") is not None else f"[{p.get('type', 'part')}]" for p in parts)


def prompt_text(messages: Sequence[Message]) -> str:
    """A prompt's messages as one text: the text alone of a single user message, else with the roles."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return text_of(messages[0])
    return "\n\n".join(f"{m['role']}: {_said(m)}" for m in messages)


def _said(message: Message) -> str:
    calls = " ".join(
        f"[calls {c.tool} {json.dumps(c.arguments, ensure_ascii=False, default=str)}]" for c in _calls(message)
    )
    return " ".join(p for p in (text_of(message), calls) if p)


def _trajectories(conversation: _Conversation, options: Options) -> Iterator[Trajectory]:
    messages, row = conversation.messages, conversation.row
    starts = _questions(messages)
    last_assistant = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last_assistant < 0:
        raise UserError(f"{conversation.where}: the conversation has no message of the assistant")
    parts = [(a, b) for a, b in zip(starts, [*starts[1:], len(messages)], strict=True) if _answers(messages[a:b])]
    score = score_in(row, options, SCORES)
    for number, (start, end) in enumerate(parts):
        first = next(i for i in range(start, end) if messages[i]["role"] == "assistant")
        is_last = number == len(parts) - 1
        turns = messages[first:end]
        tokens = [chat_tokens(m.get("logprobs"), conversation.where) for m in turns]
        segments = conversation_segments(turns, tokens)
        stop, answer = _outcome(segments, conversation.finish if is_last else None)
        given = row.get("question_id")
        suffix = "" if len(parts) == 1 else f"/{number + 1}"
        asked = prompt_text(messages[:first])
        question = next((text_of(m) for m in reversed(messages[:first]) if m["role"] == "user"), asked)
        yield Trajectory(
            question_id=key_of(asked) if given is None else f"{given}{suffix}",
            trajectory_id=conversation.name + suffix,
            question=question,
            segments=(text_segment("prompt", asked), *segments),
            answer=str(row["answer"]) if is_last and row.get("answer") is not None else answer,
            score=score if is_last else None,
            stop=stop,
            entropy_kind="exact" if all(t is None or t.exact for t in tokens) else "top-k",
            extra={k: row[k] for k in ("model", "temperature", "need", "kind", "gold") if row.get(k) is not None},
            ids_kind="none",
        )


def _questions(messages: Sequence[Message]) -> list[int]:
    """Where each question's part begins: 0, and every message of the user that is no result of a call."""
    starts = [0]
    for i, m in enumerate(messages):
        if (
            m["role"] == "user"
            and any(p["role"] == "assistant" for p in messages[starts[-1] : i])
            and not _is_result(messages, i)
        ):
            starts.append(i)
    return starts


def _is_result(messages: Sequence[Message], i: int) -> bool:
    """True where a message of the user brings the results of calls that the message before wrote as text."""
    before = messages[i - 1]
    if before["role"] != "assistant" or _calls(before):
        return False
    text = text_of(messages[i])
    return RESULT.search(text) is not None or bool(read_calls(text_of(before)))


def _answers(messages: Sequence[Message]) -> bool:
    return any(m["role"] == "assistant" for m in messages)


def conversation_segments(
    messages: Sequence[Message], tokens: Sequence[ChatTokens | None] | None = None
) -> list[Segment]:
    """The segments of a conversation from its first message of the assistant on; `tokens` of each message, if known."""
    out: list[Segment] = []
    i = 0
    while i < len(messages):
        message, own = messages[i], tokens[i] if tokens is not None else None
        i += 1
        if message["role"] != "assistant":
            out.append(text_segment("result", text_of(message)))  # someone else speaks, and no call was made
            continue
        behind = i
        while behind < len(messages) and messages[behind]["role"] in ("tool", "function"):
            behind += 1
        if behind == i and i < len(messages) and _is_result(messages, i):
            behind = i + 1
        answers = messages[i:behind]
        i = behind
        calls = _calls(message)
        ordered, results = _matched(message, calls, answers)
        out += _assistant(message, own, ordered, len(results))
        if results:
            text = "\n".join(r.content for r in results)
            out.append(text_segment("result", text, results=results))
    return out


def _matched(
    message: Message, calls: tuple[ToolCall, ...], answers: Sequence[Message]
) -> tuple[tuple[ToolCall, ...], list[ToolResult]]:
    """Calls and results in the same order: calls that got no result come last."""
    results: list[tuple[Any, ToolResult]] = []
    for answer in answers:
        text = text_of(answer)
        contents = [next(g for g in m.groups() if g is not None) for m in RESULT.finditer(text)]
        for content in contents if contents and answer["role"] == "user" else [text]:
            results.append(
                (answer.get("tool_call_id"), ToolResult(content, _status(answer, content), seconds=_seconds(answer)))
            )
    made = message.get("tool_calls")
    ids = [c.get("id") if isinstance(c, Mapping) else None for c in made] if isinstance(made, list) else []
    if len(ids) == len(calls) and all(name is not None and name in ids for name, _ in results):
        place = {name: i for i, name in enumerate(ids)}
        answered = sorted(place[name] for name, _ in results)
        if len(set(answered)) == len(answered):
            results.sort(key=lambda pair: place[pair[0]])
            order = answered + [i for i in range(len(calls)) if i not in set(answered)]
            calls = tuple(calls[i] for i in order)
    if calls and len(results) > len(calls):
        calls = (*calls, *[ToolCall(str(a.get("name") or "")) for a in answers[len(calls) :]])
    return calls, [r for _, r in results]


def _status(answer: Message, content: str) -> Status:
    given = answer.get("status")
    if given in STATUSES:
        return given  # type: ignore[no-any-return]
    flag = answer.get("is_error")
    return status_of(content) if flag is None else "error" if flag else "ok"


def _seconds(answer: Message) -> float:
    value = answer.get("seconds")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _assistant(message: Message, tokens: ChatTokens | None, calls: tuple[ToolCall, ...], results: int) -> list[Segment]:
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    content = text_of(message)
    if tokens is None:
        text = f"{thoughts}\n{content}" if isinstance(thoughts, str) and thoughts else content
        start, written = (len(text), calls) if calls else find_calls(text, results > 0)
        written = (*written, *[ToolCall("")] * (results - len(written)))
        out = [text_segment("reasoning", text[:start])] if text[:start] else []
        return [*out, text_segment("call", text[start:], written)] if written else out
    start, written = _call_start(tokens, content, calls, results)
    end = len(tokens.pieces)
    out = [tokens.segment("reasoning", 0, start)] if start else []
    return [*out, tokens.segment("call", start, end, written)] if written else out


def _call_start(
    tokens: ChatTokens, content: str, calls: tuple[ToolCall, ...], results: int
) -> tuple[int, tuple[ToolCall, ...]]:
    """The first token of the call, and the calls. Where the server gave no tokens of the call, it has none."""
    data = tokens.data
    text = data.decode("utf-8", "surrogateescape")
    start, found = find_calls(text, results > 0 or bool(calls))
    if calls and not (found and found[0].tool == calls[0].tool):
        spoken = content.strip().encode("utf-8", "surrogatepass")
        at = data.rfind(spoken) if spoken else -1
        if at >= 0:
            rest = data[at + len(spoken) :].strip()
            # What is left is the call, unless it is only the end of the turn.
            offset = len(data) if len(rest) < 20 and (not rest or rest.startswith(b"<")) else at + len(spoken)
        else:
            thought = data.rfind(b"</think>")
            offset = thought + len(b"</think>") if thought >= 0 else 0
        return tokens.token_at(offset), calls
    calls = calls or found
    if results > len(calls):
        calls = (*calls, *[ToolCall("")] * (results - len(calls)))
    return tokens.token_at(len(text[:start].encode("utf-8", "surrogateescape"))), calls


def _outcome(segments: Sequence[Segment], finish: str | None) -> tuple[StopReason, str | None]:
    """Why a trajectory ended, and its answer."""
    last = segments[-1] if segments else None
    if finish == "length":
        return "max_tokens", None
    if last is None or last.kind != "reasoning":
        return "max_turns", None
    answer = answer_of("".join(last.tokens or ()).encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    return ("void", None) if answer is None else ("answer", answer)
