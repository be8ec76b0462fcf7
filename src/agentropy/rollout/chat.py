"""The agent loop over a chat API: messages instead of ids, everything else as in `rollout.loop`.

Calls come natively (`tools`, `tool_calls`, role `tool`) or in the text, by one of the protocols. A trajectory has no
ids (`ids_kind` "none"): its segments hold the texts of the tokens, with log-probabilities, alternatives and estimated
entropies where the server gave them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentropy.errors import UserError
from agentropy.policies.base import PolicyLost, SamplingParams
from agentropy.policies.http_chat import ChatCall, ChatPolicy, ChatTurn, Message
from agentropy.protocols import DIALECTS, answers
from agentropy.protocols.calls import json_arguments
from agentropy.protocols.hermes import BOXED_HINT, OPEN
from agentropy.rollout.chat_segments import (
    Split,
    place_in_text,
    place_of_call,
    prompt_segment,
    result_segment,
    turn_segments,
)
from agentropy.rollout.chat_text import TextProtocol
from agentropy.rollout.loop import Attempt, Grade, Limits, finish
from agentropy.seeds import derive
from agentropy.tools.base import ToolBox, ToolSession
from agentropy.trajectory import Segment, StopReason, ToolCall, ToolResult, Trajectory

NATIVE = "native"
_NATIVE_OPTIONS = frozenset({"answer_format", "hint"})


@dataclass(frozen=True, slots=True)
class ChatAgent:
    """Everything that turns a question into a trajectory by chatting with a server.

    policy: from `policies.http.connect(..., api="chat")`
    protocol: `native` uses the server's own tool calling; `hermes`, `fence` and `tags` write tools into the prompt and
        read calls from the text. None: native where the server shows its model the tools, else hermes.
    protocol_options: of the protocol in text (docs/protocols.md); native knows `answer_format` and `hint`, as hermes.
    max_result_chars: longer results are cut in the middle; what a token is only the server knows.
    """

    policy: ChatPolicy
    toolbox: ToolBox
    grade: Grade
    system: str | None = None
    protocol: str | None = None
    protocol_options: Mapping[str, Any] = field(default_factory=dict)
    max_result_chars: int = 2048


async def rollout_chat(
    agent: ChatAgent, attempts: Sequence[Attempt], params: SamplingParams, limits: Limits
) -> list[Trajectory]:
    """Sample all attempts at once and return their trajectories in the same order.

    Limits, statuses, scores and stop reasons are those of `rollout.loop.rollout`; tokens are counted as the server
    counts them, and its own window counts too. A turn that the server did not give after all tries ends its trajectory
    with `error` and no score, and the others go on.

    Raises UserError where the protocol cannot be had, the key is refused, or the server refuses the first request.
    """
    style = make_style(agent)
    opened = await asyncio.gather(*(agent.toolbox.open(a.task.row, a.seed) for a in attempts))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run(agent, style, attempt, session, addition, params, limits))
                for attempt, (session, addition) in zip(attempts, opened, strict=True)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await asyncio.gather(*(session.close() for session, _ in opened))
    return [task.result() for task in tasks]


async def _run(
    agent: ChatAgent,
    style: Style,
    attempt: Attempt,
    session: ToolSession,
    addition: str | None,
    params: SamplingParams,
    limits: Limits,
) -> Trajectory:
    question = attempt.task.question + (f"\n{addition}" if addition else "")
    messages = style.messages(question, agent.toolbox.specs, agent.system)
    segments = [prompt_segment(messages)]
    answer, stop = await _take_turns(agent, style, attempt, session, messages, segments, params, limits)
    return replace(await finish(agent, attempt, session, segments, answer, stop), ids_kind="none")


async def _take_turns(
    agent: ChatAgent,
    style: Style,
    attempt: Attempt,
    session: ToolSession,
    messages: list[Message],
    segments: list[Segment],
    params: SamplingParams,
    limits: Limits,
) -> tuple[str | None, StopReason]:
    """Take turns, appending to `messages` and `segments`. Returns the answer and why the trajectory ended."""
    budget = limits.max_new_tokens
    window = context = min(limits.max_context, agent.policy.info.max_context)
    for number in range(1, limits.max_turns + 1):
        room = min(params.max_new_tokens, budget, context)
        if room <= 0:
            return None, "max_tokens" if budget <= 0 else "context_full"
        turn_params = replace(params, max_new_tokens=room)
        seed = derive(attempt.seed, "turn", number)
        try:
            turn = await agent.policy.chat(messages, style.tools(agent.toolbox.specs), turn_params, seed, style.stop)
        except PolicyLost:
            return None, "error"
        if turn.finish == "context_full":
            return None, "context_full"
        read = style.read(turn)
        segments += turn_segments(turn, read.split, read.calls)
        spent = turn.completion_tokens if turn.completion_tokens is not None else len(turn.tokens or ())
        budget -= spent
        context = window - (turn.prompt_tokens or 0) - spent
        if read.answer is not None:
            return read.answer, "answer"
        if not read.calls:
            if turn.finish == "stop":
                return None, "void"
            return None, "context_full" if context <= 0 < budget else "max_tokens"
        if number == limits.max_turns:
            return None, "max_turns"
        results = await session.call(read.calls)
        shown = [replace(r, content=cut(r.content, agent.max_result_chars)) for r in results]
        messages += read.message
        messages += style.results(turn, read, shown)
        segments.append(result_segment(shown, results))
        if any(r.status == "lost" for r in results):
            return None, "error"
        for r in results:
            if r.stop:
                return r.content, "answer"
    raise AssertionError("the loop returns")


def cut(text: str, most: int) -> str:
    """The text, or its head and tail around a note that counts what was left out."""
    if len(text) <= most:
        return text
    note = f"\n[… {len(text) - most} characters left out …]\n"
    return text[: (most + 1) // 2] + note + text[len(text) - most // 2 :]


# -- how calls and answers look ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """What a turn holds. `message` is the turn as it goes into the conversation; `native`: its calls have ids."""

    split: Split
    calls: tuple[ToolCall, ...]
    answer: str | None
    message: list[Message]
    native: bool


@dataclass(frozen=True)
class Style:
    """Native calls (`text` is then hermes, for calls that the server left in the text), or a protocol in text."""

    native: bool
    text: TextProtocol
    hint: str
    answer_format: str

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of a request."""
        return () if self.native else self.text.stop

    def tools(self, specs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The tools of a request."""
        return specs if self.native else ()

    def messages(self, question: str, specs: Sequence[Mapping[str, Any]], system: str | None) -> list[Message]:
        """The conversation up to the first turn."""
        if not self.native:
            return self.text.messages(question, specs, system)
        whole = "\n\n".join(p for p in (system, self.hint) if p)
        head: list[Message] = [{"role": "system", "content": whole}] if whole else []
        return [*head, {"role": "user", "content": question}]

    def read(self, turn: ChatTurn) -> Read:
        """The calls and the answer of a turn. Never raises for what the model wrote."""
        left_over = self.native and not turn.calls and OPEN in answers.final_text(turn.content)
        if not self.native or left_over:
            return self._read_text(turn)
        if turn.calls:
            calls = tuple(json_arguments(c.name, c.arguments or "{}") for c in turn.calls)
            message = _assistant(turn) | {
                "tool_calls": [_sent_back(c, r) for c, r in zip(turn.calls, calls, strict=True)]
            }
            done = turn.finish == "stop"  # what the length limit cut is no call
            return Read(place_of_call(turn), calls if done else (), None, [message], native=True)
        answer = _answer(turn.content, self.answer_format) if turn.finish == "stop" else None
        return Read(Split(None), (), answer, [_assistant(turn)], native=True)

    def _read_text(self, turn: ChatTurn) -> Read:
        text = self.text.whole(turn.content, turn.finish, turn.stopped_by)
        read = self.text.read(text, turn.finish)
        split = place_in_text(turn, text, read.call_start)
        message = {"role": "assistant", "content": text}
        return Read(split, read.calls, read.answer, [message], native=False)

    def results(self, turn: ChatTurn, read: Read, results: Sequence[ToolResult]) -> list[Message]:
        """The messages that bring a turn's results."""
        if not read.native:
            return self.text.results(results)
        return [
            {"role": "tool", "tool_call_id": call.id, "content": result.content}
            for call, result in zip(turn.calls, results, strict=True)
        ]


def make_style(agent: ChatAgent) -> Style:
    """The protocol that an agent and its server agree on. Raises UserError where there is none."""
    server, name, options = agent.policy, agent.protocol, dict(agent.protocol_options)
    if name not in (None, NATIVE, *DIALECTS):
        raise UserError(f"protocol {name!r} is none of {NATIVE}, {', '.join(DIALECTS)}")
    tools = bool(agent.toolbox.specs)
    if name == NATIVE and tools and server.no_tools is not None:
        raise UserError(
            f"protocol native: {server.client.root} {server.no_tools}; start it with tool calling (vLLM: --enable-auto-"
            "tool-choice --tool-call-parser NAME; llama.cpp: --jinja), or use --protocol hermes"
        )
    native = name == NATIVE or (name is None and (server.no_tools is None or not tools))
    if native and (unknown := sorted(set(options) - _NATIVE_OPTIONS)):
        raise UserError(f"protocol native has no option {unknown[0]!r}; it has {', '.join(sorted(_NATIVE_OPTIONS))}")
    text = TextProtocol("hermes" if name in (None, NATIVE) else str(name), options)
    if not native:
        text.messages("", agent.toolbox.specs, agent.system)  # a tool that the protocol cannot call is said here
    answer_format = str(options.get("answer_format", "auto"))
    hint = options.get("hint")
    return Style(native, text, ("" if answer_format == "text" else BOXED_HINT) if hint is None else hint, answer_format)


def _answer(content: str, answer_format: str) -> str | None:
    """The answer of a turn without a call, as protocol hermes reads it."""
    if answer_format == "auto":
        return answers.auto(content)
    visible = answers.final_text(content)
    return answers.boxed(visible) if answer_format == "boxed" else visible or None


def _assistant(turn: ChatTurn) -> Message:
    """A turn as it goes back to the server; thoughts in the field in which they came."""
    thoughts = {turn.reasoning_field: turn.reasoning} if turn.reasoning_field else {}
    return {"role": "assistant", "content": turn.content, **thoughts}


def _sent_back(call: ChatCall, read: ToolCall) -> dict[str, Any]:
    """A call in the conversation. Servers refuse arguments that are no JSON object, so these are shown as a string."""
    arguments = call.arguments or "{}"
    if read.error is not None:
        arguments = json.dumps({"unreadable": arguments}, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
