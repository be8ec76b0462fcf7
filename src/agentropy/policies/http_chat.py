"""Chat completions: messages in, a turn out, with the tokens' texts and log-probabilities where the server gives them.

No ids are seen or made here. What a turn's text and calls are is the server's reading of its model; where it has none,
a protocol in text (`rollout/chat.py`) reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentropy.errors import UserError
from agentropy.policies.base import PolicyInfo, SamplingParams
from agentropy.policies.http_client import BadAnswer, Client, Refused, Usage
from agentropy.policies.http_tokens import lost_or_wrong
from agentropy.policies.http_wire import LogprobsMode, at_temperature, first_choice, log_probability, usage_of

Message = dict[str, Any]
ChatFinish = Literal["stop", "length", "context_full"]
Family = Literal["openai", "vllm", "transformers"]


@dataclass(frozen=True, slots=True)
class ChatToken:
    """One sampled token: its bytes, and the likeliest in its place as (text, log-probability).

    `logprob` and `entropy` are at the sampling temperature, None where the server did not give them.
    """

    data: bytes
    text: str
    logprob: float | None
    entropy: float | None
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call as the server read it; `arguments` is text that should be a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn of the assistant.

    `reasoning` is what the server took out of the text as thoughts, with the name of the field it came in. `tokens` is
    None where the server gave none; it may cover the whole turn or only what was not a call. `prompt_tokens` and
    `completion_tokens` are the server's counts, None where it gave none. `stopped_by` is the stop string that ended the
    turn, where the server says so.
    """

    content: str
    calls: tuple[ChatCall, ...]
    finish: ChatFinish
    reasoning: str = ""
    reasoning_field: str | None = None
    tokens: tuple[ChatToken, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class ChatFeatures:
    """What a server takes; found out by `http.connect`.

    limit: the name of the field for the most new tokens
    top: alternatives a token; 0: the server gives no log-probabilities
    seed: whether it takes a seed
    family: how it is told to sample from the whole distribution, whatever the model's generation_config.json says:
        `openai` needs no telling, `vllm` has further fields (SGLang and llama.cpp too), `transformers` one of its own
    """

    limit: str = "max_tokens"
    top: int = 20
    seed: bool = True
    family: Family = "openai"


class ChatPolicy:
    """A server that chats. Made by `http.connect`; `rollout.chat.rollout_chat` makes trajectories with it.

    `no_tools` says why its own tool calling cannot be used; None where nothing speaks against it.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        info: PolicyInfo,
        mode: LogprobsMode,
        features: ChatFeatures,
        no_tools: str | None = None,
    ) -> None:
        self.client = client
        self.model = model
        self.info = info
        self.mode = mode
        self.features = features
        self.no_tools = no_tools

    @property
    def usage(self) -> Usage:
        """Requests, tokens and retries so far."""
        return self.client.usage

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        seed: int,
        stop: Sequence[str] = (),
    ) -> ChatTurn:
        """Sample one turn. One that does not fit the server's window is empty and has finish `context_full`.

        Raises: PolicyLost where the server gave no answer after all tries, or refused this request though it served
        others; UserError where it refuses the key or every request, or cannot do what `params` say.
        """
        body = chat_request(self.model, messages, tools, params, seed, stop, self.features)
        patient = bool(self.features.top)

        def read(answer: Any) -> ChatTurn:
            nonlocal patient
            turn = read_turn(answer)
            if patient and turn.content and not turn.calls and not turn.tokens:
                patient = False  # asked for once more; an answer without log-probabilities is still an answer
                raise BadAnswer("logprobs is missing")
            return turn

        try:
            turn = await self.client.post("/v1/chat/completions", body, read)
        except Refused as error:
            if error.is_context:
                # vLLM also refuses a prompt that fits, where the prompt and the whole of the limit do not.
                room = room_left(error.message)
                if not 0 < room < params.max_new_tokens:
                    return ChatTurn("", (), "context_full")
                return await self.chat(messages, tools, replace(params, max_new_tokens=room), seed, stop)
            raise lost_or_wrong(error, self.client) from None
        self.usage.count(turn.prompt_tokens or 0, turn.completion_tokens or 0)
        return self._at_temperature(turn, params.temperature)

    def _at_temperature(self, turn: ChatTurn, temperature: float) -> ChatTurn:
        tokens = turn.tokens or ()
        known = [i for i, t in enumerate(tokens) if t.alternatives and t.logprob is not None]
        logprobs, entropies = at_temperature(
            [tokens[i].logprob or 0.0 for i in known],
            [[p for _, p in tokens[i].alternatives] for i in known],
            temperature,
            self.mode,
        )
        out = list(tokens)
        for i, logprob, entropy in zip(known, logprobs, entropies, strict=True):
            out[i] = replace(tokens[i], logprob=logprob, entropy=entropy)
        return replace(turn, tokens=None if turn.tokens is None else tuple(out))

    async def aclose(self) -> None:
        """Close the connections. Safe to call twice."""
        await self.client.close()


def chat_request(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    seed: int,
    stop: Sequence[str],
    features: ChatFeatures,
) -> dict[str, Any]:
    """The body of a request. Raises UserError for a top-k that the server has no field for."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        features.limit: params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if features.top:
        body |= {"logprobs": True, "top_logprobs": features.top}
    if features.seed:
        body["seed"] = seed % 2**31
    if tools:
        body["tools"] = [dict(t) for t in tools]
    if stop:
        body["stop"] = list(stop)
    if features.family == "vllm":
        body |= {"top_k": params.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
    elif features.family == "transformers":
        # Without it, it is greedy for most models at any temperature, and cuts at the 50 likeliest tokens.
        sampling = {"do_sample": params.temperature > 0, "top_k": params.top_k, "repetition_penalty": 1.0}
        body["generation_config"] = json.dumps(sampling)
    elif params.top_k:
        raise UserError(f"top_k={params.top_k}: this server's chat API has no top-k; use 0")
    return body


def room_left(message: str) -> int:
    """How many tokens a refusal says there would still have been room for; 0 where it does not say."""
    most = re.search(r"maximum context length (?:is|of) (\d+)|max_model_len\D{0,5}(\d+)", message)
    used = re.search(
        r"(\d+) input tokens|\((\d+) in the (?:messages|prompt)|at least (\d+) input|has (\d+) input|"
        r"(?:messages resulted in|prompt contains) (?:at least )?(\d+)",
        message,
    )
    if not most or not used:
        return 0
    return int(next(g for g in most.groups() if g)) - int(next(g for g in used.groups() if g))


def read_turn(answer: Any) -> ChatTurn:
    """A turn from the server's answer. Raises BadAnswer where it has not the form that it must have."""
    choice = first_choice(answer)
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise BadAnswer("choices[0].message is missing")
    content = message.get("content")
    if isinstance(content, list):  # parts, as some servers give them
        content = "".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
    field = next((f for f in ("reasoning_content", "reasoning") if isinstance(message.get(f), str)), None)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadAnswer("message.tool_calls is no list")
    prompt_tokens, completion_tokens = usage_of(answer)
    stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
    return ChatTurn(
        content=str(content or ""),
        calls=tuple(_call(c, i) for i, c in enumerate(calls)),
        finish="length" if choice.get("finish_reason") == "length" else "stop",
        reasoning=str(message[field]) if field else "",
        reasoning_field=field,
        tokens=_tokens(choice.get("logprobs")),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        stopped_by=stopped_by if isinstance(stopped_by, str) else None,
    )


def _call(value: Any, index: int) -> ChatCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadAnswer("a tool call has no function with a name")
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):  # the object itself, as some servers give it
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ChatCall(str(value.get("id") or f"call_{index}"), function["name"], arguments)


def _tokens(logprobs: Any) -> tuple[ChatToken, ...] | None:
    if not isinstance(logprobs, Mapping) or not isinstance(logprobs.get("content"), list):
        return None
    return tuple(_token(t) for t in logprobs["content"])


def _token(value: Any) -> ChatToken:
    if not isinstance(value, Mapping) or not isinstance(value.get("token"), str):
        raise BadAnswer("logprobs.content holds something that is no token")
    text, data = value["token"], value.get("bytes")
    good = isinstance(data, list) and all(type(b) is int and 0 <= b < 256 for b in data)
    top = value.get("top_logprobs") or []
    if not isinstance(top, list) or not all(isinstance(a, Mapping) for a in top):
        raise BadAnswer("top_logprobs is no list of tokens")
    return ChatToken(
        data=bytes(data) if good and data else text.encode("utf-8", "replace"),
        text=text,
        logprob=None if (p := value.get("logprob")) is None else log_probability(p, "logprobs.content"),
        entropy=None,
        alternatives=tuple((str(a.get("token", "")), log_probability(a.get("logprob"), "top_logprobs")) for a in top),
    )
