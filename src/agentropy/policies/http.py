"""Connecting to an OpenAI-compatible server: what it serves, what it can give, and the policy that uses it.

Nothing is believed that can be asked: whether ids come back, what the log-probabilities are of, which fields are taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentropy.errors import UserError
from agentropy.policies.base import PolicyInfo, SamplingParams, Stop
from agentropy.policies.http_chat import ChatFeatures, ChatPolicy, ChatTurn, Family, chat_request, read_turn
from agentropy.policies.http_client import BadAnswer, Client, Patience, Refused, Retry, judge
from agentropy.policies.http_tokens import HttpPolicy
from agentropy.policies.http_wire import WIRES, LogprobsMode, Sampled, Wire

Api = Literal["auto", "completions", "chat"]
APIS = ("auto", "completions", "chat")
UNKNOWN_CONTEXT = 1 << 20
"""Tokens, where a server does not say how long its window is: it refuses what is too long, which is understood."""
TRANSFORMERS = "transformers"
_KINDS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_PROBE_TOKENS = 16
"""Of chat: some models that think refuse a limit so low that they cannot begin."""
_PROBE_IDS = (1, 2, 3, 4)


def connect(
    url: str,
    model: str | None = None,
    api: str = "auto",
    api_key: str | None = None,
    concurrency: int = 32,
    tokenizer: Any = None,
    *,
    top_logprobs: int = 20,
    patience: Patience = Patience(),
) -> HttpPolicy | ChatPolicy:
    """Ask a server what it is and return the policy that samples from it. Blocking; call it before the event loop.

    Returns one of two:

    * `HttpPolicy` where the server samples from token ids and gives back those it sampled (vLLM, SGLang). It is a
      `policies.base.Policy`: give it to `rollout.loop.Agent` with a protocol bound to its `tokenizer`, and use
      `rollout.loop.rollout` or the branching rollouts.
    * `ChatPolicy` for everything else: give it to `rollout.chat.ChatAgent` and use `rollout.chat.rollout_chat`.

    Both have `info` (`entropy_kind` "top-k"; `notes` say which server, API and convention), `model`, `usage` (requests,
    tokens, retries by cause; `usage.to_json()`) and `aclose()`.

    Args:
        url: the server's address, with or without `/v1`.
        model: its name there; None where the server has one model only.
        api: `completions` insists on token ids, `chat` on the other; `auto` takes ids where they are given and the
            tokenizer can be had, else chat.
        api_key: sent as a bearer token.
        concurrency: requests at once.
        tokenizer: for `completions`: a folder, a hub id, `smollm2` or a loaded one. None: the one of `model`.
        top_logprobs: alternatives a token from which entropies are estimated. OpenAI's API allows 20, vLLM as many as
            it was started with (`--max-logprobs`).
        patience: time limits and retries.

    Raises:
        UserError: nothing answers there, the key is refused, there is no such model, `completions` is asked of a server
            that gives no ids, the tokenizer is not the server's, or the server refuses the first request.
    """
    if api not in APIS:
        raise UserError(f"api {api!r} is none of {', '.join(APIS)}")
    if concurrency < 1:
        raise UserError(f"concurrency is {concurrency}, must be at least 1")
    if not 1 <= top_logprobs <= 100_000:
        raise UserError(f"top_logprobs is {top_logprobs}, must be at least 1")
    root, api_key = server_root(url), _clean(api_key)
    with _Probe(root, api_key, patience) as probe:
        server = _look(probe, model)
        client = Client(root, api_key, concurrency, patience)
        why = ""
        if api != "chat":
            found = _try_completions(probe, server, client, tokenizer, top_logprobs, insist=api == "completions")
            if isinstance(found, HttpPolicy):
                return found
            why = found
        return _chat(probe, server, client, top_logprobs, why)


def _clean(key: str | None) -> str | None:
    """A key without the line break that a file or a shell left at its end."""
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable():
        raise UserError("the API key holds characters that no key has: check --api-key-env")
    return key or None


def server_root(url: str) -> str:
    """The address without `/v1` and what stands behind it. Raises UserError for what is no address."""
    if not url.startswith(("http://", "https://")) or len(url.split("://", 1)[1].strip("/")) == 0:
        raise UserError(f"a server's URL starts with http:// or https://, not {url!r}")
    root = url.rstrip("/")
    for end in ("/chat/completions", "/completions", "/models"):
        root = root.removesuffix(end)
    return root.removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class _Server:
    """What a server says of itself."""

    model: str
    models: tuple[str, ...]
    kind: str
    """`vllm`, `sglang`, `llama.cpp`, `transformers`, or whatever `owned_by` says."""
    max_context: int


class _Probe:
    """A few blocking requests before the work begins."""

    def __init__(self, root: str, key: str | None, patience: Patience) -> None:
        import httpx

        try:
            httpx.URL(root)
        except httpx.InvalidURL as error:
            raise UserError(f"{root} is no URL: {error}") from None
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        limit = httpx.Timeout(patience.timeout, connect=min(10.0, patience.timeout))
        self.root = root
        self._patience = patience
        self._http = httpx.Client(base_url=root, headers=headers, timeout=limit)

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer. Raises Refused, or UserError where there is none to be had."""
        import httpx

        why = ""
        for attempt in range(1, self._patience.tries + 1):
            try:
                response = self._http.get(path) if body is None else self._http.post(path, json=dict(body))
            except httpx.ConnectError as error:
                raise UserError(
                    f"no server at {self.root} ({error}): start it first, or check --server; docs/policies.md has "
                    "the commands"
                ) from None
            except httpx.HTTPError as error:
                failure = Retry("connection", f"{type(error).__name__}: {error}".rstrip(": "))
            else:
                if response.status_code == 200:
                    try:
                        return response.json()
                    except (ValueError, RecursionError):
                        failure = Retry("rubbish", f"an answer that is no JSON: {response.content[:60]!r}")
                else:
                    failure = judge(response, self.root)
            why = failure.message
            if attempt < self._patience.tries:
                pause = min(30.0, self._patience.pause * 2 ** (attempt - 1))
                time.sleep(max(pause, min(failure.retry_after or 0.0, 30.0)))
        raise UserError(f"{self.root}{path} gives no answer to use: {why}; tried {self._patience.tries} times")


def _look(probe: _Probe, model: str | None) -> _Server:
    """The models of a server, and of the one that is meant its window."""
    try:
        answer = probe.ask("/v1/models")
    except Refused as error:
        if error.status not in (404, 405, 501):
            raise UserError(f"{probe.root}/v1/models: {error}") from None
        if model is None:
            raise UserError(
                f"{probe.root} has no /v1/models (HTTP {error.status}): is the address right? If so, name one with "
                "--model"
            ) from None
        answer = {}
    data = answer.get("data") if isinstance(answer, Mapping) else None
    entries = [e for e in data or [] if isinstance(e, Mapping) and isinstance(e.get("id"), str)]
    models = tuple(str(e["id"]) for e in entries)
    if model is None:
        if len(models) != 1:
            raise UserError(f"{probe.root} serves {_listed(models)}: name one with --model")
        model = models[0]
    entry = next((e for e in entries if e["id"] == model), {})
    owner = str(entry.get("owned_by") or "unknown")
    kind = _KINDS.get(owner) or (TRANSFORMERS if _is_transformers(probe, entry) else owner)
    window = _window(probe, kind, entry)
    return _Server(model, models, kind, window or UNKNOWN_CONTEXT)


def _is_transformers(probe: _Probe, entry: Mapping[str, Any]) -> bool:
    """`transformers serve` does not say its name, but it lists its routes."""
    if not isinstance(entry.get("status"), Mapping):
        return False
    try:
        routes = probe.ask("/openapi.json")["paths"]
    except (Refused, UserError, KeyError, TypeError):
        return False
    return isinstance(routes, Mapping) and "/load_model" in routes


def _window(probe: _Probe, kind: str, entry: Mapping[str, Any]) -> int | None:
    found: Any = None
    if kind == "llama.cpp":
        try:
            props = probe.ask("/props")
            found = props["default_generation_settings"]["n_ctx"]
        except (Refused, UserError, KeyError, TypeError):
            pass
    for name in ("max_model_len", "context_length", "context_window", "max_context_length"):
        found = found or entry.get(name)
    return found if type(found) is int and found > 0 else None


def _listed(models: tuple[str, ...]) -> str:
    shown = ", ".join(models[:20]) + (f" and {len(models) - 20} more" if len(models) > 20 else "")
    return shown or "no model that it would name"


def _explain(error: Refused, server: _Server, probe: _Probe) -> UserError:
    """The first request was refused: because of the model's name, or of something else."""
    unknown = server.models and server.model not in server.models
    if error.status == 404 or (unknown and "model" in error.message.lower()) or "pinned" in error.message:
        return UserError(f"{probe.root} has no model {server.model!r} ({error}); it serves {_listed(server.models)}")
    return UserError(f"{probe.root} refuses the request: {error}")


# -- completions with token ids ---------------------------------------------------------------------------------------


def _try_completions(
    probe: _Probe, server: _Server, client: Client, tokenizer: Any, top: int, insist: bool
) -> HttpPolicy | str:
    """The policy, or why there is none. Raises UserError for that reason if `insist`."""
    wire = WIRES.get(server.kind, WIRES["vllm"])
    try:
        _sample(probe, wire, server.model, _PROBE_IDS, 1, 1.0, top)
    except (Refused, BadAnswer) as error:
        if isinstance(error, Refused) and error.status == 404 and "model" in error.message.lower():
            raise _explain(error, server, probe) from None
        why = f"it gives no token ids with their log-probabilities ({wire.path}: {error})"
        if insist:
            raise UserError(f"{probe.root}: {why}; use --api chat") from None
        return why
    try:
        loaded = _load(server.model if tokenizer is None else tokenizer)
    except UserError as error:
        if insist or tokenizer is not None:
            raise UserError(f"{error} (name it with --tokenizer)") from None
        return f"its tokenizer cannot be had here ({error}); --tokenizer names one"
    prompt = tuple(loaded.encode("The capital of France is", add_special_tokens=False))
    _check_tokenizer(loaded, _sample(probe, wire, server.model, prompt, 8, 0.0, top), probe.root)
    gaps = [_gap(_sample(probe, wire, server.model, prompt, 1, t, top).alternatives[0]) for t in (1.0, 0.5)]
    mode, note = _mode(*gaps)
    notes = {"server": server.kind, "url": probe.root, "api": "completions", "logprobs": note, "top_logprobs": str(top)}
    info = PolicyInfo(server.model, len(loaded), server.max_context, "top-k", notes)
    return HttpPolicy(client, wire, server.model, loaded, info, mode, top)


def _sample(
    probe: _Probe, wire: Wire, model: str, ids: tuple[int, ...], count: int, temperature: float, top: int
) -> Sampled:
    body = wire.request(model, ids, SamplingParams(temperature, max_new_tokens=count), Stop(), 0, top)
    sampled = wire.read(probe.ask(wire.path, body), ids)
    if not sampled.ids:
        raise BadAnswer("no token was sampled")
    return sampled


def _load(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str) and hasattr(tokenizer, "encode"):
        return tokenizer
    from agentropy.policies.loading import load_tokenizer

    return load_tokenizer(tokenizer)


def _check_tokenizer(tokenizer: Any, sampled: Sampled, root: str) -> None:
    """Raise UserError where a few sampled ids are not the text that the server says they are."""
    ours = "".join(tokenizer.decode(list(sampled.ids), skip_special_tokens=False).split())
    theirs = "".join(sampled.text.split())
    # A server may leave out what the tokenizer calls special, or show half a character in its own way.
    if theirs and theirs not in ours and "\ufffd" not in theirs + ours:
        raise UserError(
            f"the tokenizer is not that of the server: {root} calls the tokens {sampled.text[:40]!r}, here they are "
            f"{ours[:40]!r}; name the right one with --tokenizer"
        )


# -- log-probabilities ------------------------------------------------------------------------------------------------


def _gap(alternatives: tuple[float, ...]) -> float:
    """How far apart the likeliest and the fifth likeliest token are (or the last there is)."""
    ranked = sorted(alternatives, reverse=True)[:5]
    return ranked[0] - ranked[-1] if ranked else 0.0


def _mode(gap: float, gap_at_half: float) -> tuple[LogprobsMode, str]:
    """Whether log-probabilities at temperature 0.5 are those of the halved temperature, and a note of it."""
    if gap > 1e-3:
        if abs(gap_at_half - gap) <= 0.15 * gap:
            return "raw", "raw"
        if abs(gap_at_half - 2 * gap) <= 0.3 * gap:
            return "scaled", "scaled by the temperature"
    return "raw", "taken for raw: it could not be told"


# -- chat -------------------------------------------------------------------------------------------------------------


def _chat(probe: _Probe, server: _Server, client: Client, top: int, why: str) -> ChatPolicy:
    """Find out which fields the server takes, by asking for one token."""
    family: Family = (
        "vllm" if server.kind in _KINDS.values() else "transformers" if server.kind == TRANSFORMERS else "openai"
    )
    features = ChatFeatures(top=top, family=family)
    turn = None
    for _ in range(8):
        try:
            turn = _say(probe, server.model, features, 1.0)
            break
        except Refused as error:
            less = _without(features, error)
            if less is None:
                raise _explain(error, server, probe) from None
            features = less
        except BadAnswer as error:
            raise UserError(f"{probe.root} does not speak the chat API: {error}") from None
    if turn is None:
        raise UserError(f"{probe.root} refuses every form of a chat request")
    mode: LogprobsMode = "raw"
    note = "none: no entropies"
    if features.top and turn.tokens and turn.tokens[0].alternatives:
        gaps = [_gap(_alternatives(turn)), _gap(_alternatives(_say(probe, server.model, features, 0.5)))]
        mode, note = _mode(*gaps)
    else:
        features = replace(features, top=0)
    notes = {
        "server": server.kind,
        "url": probe.root,
        "api": "chat",
        "logprobs": note,
        "top_logprobs": str(features.top),
    }
    if why:
        notes["why_chat"] = why
    no_tools = _no_tools(probe, server.model, features, turn)
    notes["tools"] = no_tools or "native"
    # A vocabulary that nobody names: entropies are at most its logarithm, which only branching rollouts ask for.
    info = PolicyInfo(server.model, 0, server.max_context, "top-k", notes)
    return ChatPolicy(client, server.model, info, mode, features, no_tools)


def _no_tools(probe: _Probe, model: str, features: ChatFeatures, bare: ChatTurn) -> str | None:
    """Why the server's own tool calling cannot be used: it refuses tools, or its model is shown nothing of them."""
    try:
        turn = _say(probe, model, features, 1.0, (_TOOL,))
    except (Refused, BadAnswer) as error:
        return f"refuses tools ({error})"
    if turn.prompt_tokens is not None and turn.prompt_tokens == bare.prompt_tokens:
        return "does not show its model the tools"
    return None


def _say(
    probe: _Probe, model: str, features: ChatFeatures, temperature: float, tools: Sequence[Mapping[str, Any]] = ()
) -> ChatTurn:
    messages = [{"role": "user", "content": "Say a word."}]
    params = SamplingParams(temperature, max_new_tokens=_PROBE_TOKENS)
    return read_turn(probe.ask("/v1/chat/completions", chat_request(model, messages, tools, params, 0, (), features)))


def _alternatives(turn: ChatTurn) -> tuple[float, ...]:
    return tuple(p for _, p in turn.tokens[0].alternatives) if turn.tokens else ()


def _without(features: ChatFeatures, error: Refused) -> ChatFeatures | None:
    """The features without what the server complains of; None where that is none of them."""
    if error.status not in (400, 422):
        return None
    said = error.message
    if features.limit == "max_tokens" and ("max_completion_tokens" in said or "'max_tokens' is not" in said):
        return replace(features, limit="max_completion_tokens")
    if features.top and "logprobs" in said:
        return replace(features, top=next(t for t in (20, 5, 0) if t < features.top))
    if features.seed and "seed" in said:
        return replace(features, seed=False)
    if features.family == "vllm" and any(name in said for name in ("top_k", "min_p", "repetition_penalty")):
        return replace(features, family="openai")
    return None
