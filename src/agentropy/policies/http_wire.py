"""How the servers that sample from token ids are asked, and what they answer. Pure functions, no connections.

| wire | path | log-probabilities are those of |
|---|---|---|
| `vllm` | `/v1/completions` with `return_token_ids` | the raw logits, unless started with another `--logprobs-mode` |
| `sglang` | `/generate` | the logits divided by the temperature, unless told otherwise by its environment |

Which of the two a server gives is measured when it is connected (`http.connect`), not believed.

llama.cpp samples from ids too and gives ids back, but no log-probabilities of tokens inside a character of several
bytes, nor of those of a stop string; so it is used through chat.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from agentropy.algorithms.estimates import OUTCOMES, entropy_with_tail
from agentropy.policies.base import SamplingParams, Stop
from agentropy.policies.http_client import BadAnswer

LogprobsMode = Literal["raw", "scaled"]
"""`raw`: of the logits as the model gives them. `scaled`: of the logits divided by the sampling temperature."""
LOWEST = -9999.0
"""What vLLM writes for minus infinity."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A turn as a server gives it. `alternatives`: per token the likeliest log-probabilities, any number of them."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[float, ...], ...]
    cut: bool
    """True where a limit ended it, not a stop."""
    prompt_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Wire:
    """One server's form. `request(model, ids, params, stop, seed, top)` gives the body."""

    name: str
    path: str
    request: Callable[[str, Sequence[int], SamplingParams, Stop, int, int], dict[str, Any]]
    read: Callable[[Any, Sequence[int]], Sampled]


# -- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm_request(
    model: str, ids: Sequence[int], params: SamplingParams, stop: Stop, seed: int, top: int
) -> dict[str, Any]:
    # vLLM takes what is not said from the model's generation_config.json, so everything is said.
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "logprobs": top,
        "return_token_ids": True,
        # Else two tokens of the same text, such as parts of characters, would be one key of `top_logprobs`.
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "add_special_tokens": False,
        "stream": False,
    }
    body |= _stop_fields(stop)
    return body


def _stop_fields(stop: Stop) -> dict[str, Any]:
    """Where a turn ends, as both servers call it."""
    fields: dict[str, Any] = {}
    if stop.token_ids:
        fields["stop_token_ids"] = sorted(stop.token_ids)
    if stop.strings:
        fields["stop"] = list(stop.strings)
    return fields


def _vllm_read(answer: Any, prompt: Sequence[int]) -> Sampled:
    choice = first_choice(answer)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        raise BadAnswer("choices[0].logprobs is missing")
    ids = _vllm_ids(choice, logprobs)
    echoed = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
    if echoed is not None and list(echoed) != list(prompt):
        raise BadAnswer("prompt_token_ids differ from those that were sent")
    chosen = _numbers(logprobs.get("token_logprobs"), 0, "token_logprobs")
    if len(chosen) != len(ids):
        raise BadAnswer("token_logprobs has not one number for each id")
    top = logprobs.get("top_logprobs")
    if not isinstance(top, list) or len(top) != len(ids):
        raise BadAnswer("top_logprobs has not one entry for each id")
    alternatives = tuple(
        _numbers(list(entry.values()) if isinstance(entry, Mapping) else [], 1, "top_logprobs") for entry in top
    )
    return Sampled(
        ids,
        chosen,
        alternatives,
        choice.get("finish_reason") == "length",
        usage_of(answer)[0] or len(prompt),
        str(choice.get("text") or ""),
    )


def _vllm_ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> tuple[int, ...]:
    """`token_ids`, or of an older server the names of the tokens, `token_id:123`."""
    if choice.get("token_ids") is not None:
        return _ids(choice["token_ids"], "choices[0].token_ids")
    names = logprobs.get("tokens")
    if not isinstance(names, list) or not all(re.fullmatch(r"token_id:\d+", str(n)) for n in names):
        raise BadAnswer("choices[0].token_ids is missing")
    return tuple(int(n[len("token_id:") :]) for n in names)


# -- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang_request(
    model: str, ids: Sequence[int], params: SamplingParams, stop: Stop, seed: int, top: int
) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "sampling_seed": seed % 2**31,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    sampling |= _stop_fields(stop)
    return {
        "input_ids": list(ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": top,
        "logprob_start_len": -1,
        "stream": False,
    }


def _sglang_read(answer: Any, prompt: Sequence[int]) -> Sampled:
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        raise BadAnswer("meta_info is missing")
    chosen = _triples(meta.get("output_token_logprobs"), "output_token_logprobs")
    ids = _ids([t[1] for t in chosen], "output_token_logprobs")
    if "output_ids" in answer and tuple(answer["output_ids"]) != ids:
        raise BadAnswer("output_ids and output_token_logprobs differ")
    top = meta.get("output_top_logprobs")
    if not isinstance(top, list) or len(top) != len(ids):
        raise BadAnswer("output_top_logprobs has not one entry for each id")
    alternatives = tuple(
        _numbers([t[0] for t in _triples(entry or [], "output_top_logprobs")], 1, "output_top_logprobs")
        for entry in top
    )
    reason = meta.get("finish_reason")
    return Sampled(
        ids,
        _numbers([t[0] for t in chosen], 0, "output_token_logprobs"),
        alternatives,
        isinstance(reason, Mapping) and reason.get("type") == "length",
        int(meta.get("prompt_tokens") or len(prompt)),
        str(answer.get("text") or ""),
    )


def _triples(value: Any, name: str) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(v, list | tuple) and len(v) >= 2 for v in value):
        raise BadAnswer(f"{name} is no list of [log-probability, id, text]")
    return [list(v) for v in value]


WIRES = {
    "vllm": Wire("vllm", "/v1/completions", _vllm_request, _vllm_read),
    "sglang": Wire("sglang", "/generate", _sglang_request, _sglang_read),
}


# -- parts ------------------------------------------------------------------------------------------------------------


def first_choice(answer: Any) -> Mapping[str, Any]:
    """`choices[0]` of OpenAI's APIs. Raises BadAnswer."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        error = answer.get("error") if isinstance(answer, Mapping) else None
        raise BadAnswer(f"choices is missing{f' ({str(error)[:200]})' if error else ''}")
    return choices[0]


def usage_of(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Prompt and completion tokens as the server counted them; None where it did not."""
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        return None, None
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    prompt, completion = (c if isinstance(c, int) and c >= 0 else None for c in counts)
    return prompt, completion


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise BadAnswer(f"{name} is no list of token ids")
    return tuple(value)


def _numbers(value: Any, least: int, name: str) -> tuple[float, ...]:
    """At least so many log-probabilities. Minus infinity becomes `LOWEST`, rounding above zero is cut."""
    if not isinstance(value, list) or len(value) < least:
        raise BadAnswer(f"{name} has no log-probabilities")
    return tuple(log_probability(v, name) for v in value)


def log_probability(value: Any, name: str) -> float:
    """One log-probability as the server wrote it. Raises BadAnswer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > 1e-3:
        raise BadAnswer(f"{name} holds {value!r}, which is no log-probability")
    return min(0.0, max(LOWEST, float(value)))


def at_temperature(
    logprobs: Sequence[float],
    alternatives: Sequence[Sequence[float]],
    temperature: float,
    mode: LogprobsMode,
    outcomes: int = OUTCOMES,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Log-probability and estimated entropy (nats) of each token, at the sampling temperature.

    Every token must have at least one alternative. What the server lists is what is known; of the rest of the
    vocabulary, `outcomes` tokens, the entropy is estimated (`entropy_with_tail`).

    Temperature 0 has the numbers of temperature 1, as everywhere. Where the server's are raw and the temperature is
    another, `p_v^(1/T)` is normalised again over the known tokens and what is not known. No token of that is likelier
    than the last one listed, and it is counted as tokens just as likely: nearly exact below temperature 1, and above it
    the worse the more of the mass is unknown.
    """
    if not logprobs:
        return (), ()
    known = torch.full((len(logprobs), max(map(len, alternatives))), -math.inf, dtype=torch.float64)
    for row, values in zip(known, alternatives, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.float64)
    chosen = torch.tensor(logprobs, dtype=torch.float64)
    # A row can be longer by the sampled token, which is then not the next likeliest.
    k = min(map(len, alternatives))
    if mode == "raw" and temperature not in (0.0, 1.0):
        last = known.sort(-1, descending=True).values[:, k - 1]
        known, chosen = _rescaled(known, chosen, last, temperature)
    known = known.sort(-1, descending=True).values
    p = known.exp()
    beside = torch.special.entr(p[:, k:]).sum(-1)
    entropies = entropy_with_tail(known[:, :k], 1.0 - p.sum(-1), outcomes) + beside
    return tuple(chosen.clamp(max=0.0).tolist()), tuple(entropies.clamp(min=0.0).tolist())


def _rescaled(known: Tensor, chosen: Tensor, last: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    rest = (1.0 - known.exp().sum(-1)).clamp(min=torch.finfo(known.dtype).tiny).log()
    rest = rest + (1 / temperature - 1) * torch.minimum(rest, last)
    total = torch.cat([known / temperature, rest[:, None]], -1).logsumexp(-1)
    return known / temperature - total[:, None], chosen / temperature - total
