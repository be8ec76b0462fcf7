"""A vLLM and an SGLang server in miniature: a real tiny model behind their forms of request and answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from agentropy.policies.parts import split_model
from faulty_server import Refuse

VOCAB = 97


def ascii_tokenizer() -> Any:
    """97 tokens: the 95 printable characters of ASCII, and two that end something."""
    vocab = {("Ġ" if i == 0 else chr(32 + i)): i for i in range(95)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|begin|>")
    assert len(tokenizer) == VOCAB
    return tokenizer


@dataclass
class TinyServer:
    """`mode`: log-probabilities of the raw logits, or of the scaled ones. `window`: as vLLM's --max-model-len."""

    model: Any
    tokenizer: Any
    kind: str = "vllm"
    mode: str = "raw"
    window: int = 200
    max_logprobs: int = 97
    names_only: bool = False
    """An older vLLM: ids only as the names of the tokens."""
    deaf: bool = False
    """It does not know stop tokens."""

    def __call__(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        if path == "/v1/models":
            entry = {"id": "tiny", "owned_by": self.kind.replace(".", ""), "max_model_len": self.window}
            return {"object": "list", "data": [entry]}
        if body is None:
            raise Refuse(404, {"detail": "Not Found"})
        if (self.kind, path) == ("vllm", "/v1/completions"):
            return self._vllm(body)
        if (self.kind, path) == ("sglang", "/generate"):
            return self._sglang(body)
        raise Refuse(404, {"detail": "Not Found"})

    def _vllm(self, body: dict[str, Any]) -> Any:
        if body["model"] != "tiny":
            message = f"The model `{body['model']}` does not exist."
            raise Refuse(404, {"error": {"message": message, "type": "NotFoundError", "code": 404}})
        if body["logprobs"] > self.max_logprobs:
            raise Refuse(400, {"error": {"message": f"Requested sample logprobs of {body['logprobs']}, too many"}})
        if len(body["prompt"]) + body["max_tokens"] > self.window:
            text = f"This model's maximum context length is {self.window} tokens. However, you requested more."
            raise Refuse(400, {"error": {"message": text, "code": 400}})
        stops = (set() if self.deaf else set(body.get("stop_token_ids", [])), body.get("stop", []))
        rows, cut = self._sample(
            body["prompt"], body["max_tokens"], body["temperature"], body["seed"], stops, body["logprobs"]
        )
        ids = [i for i, _, _ in rows]
        logprobs = {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": [p for _, p, _ in rows],
            "top_logprobs": [{f"token_id:{j}": q for j, q in [*top, (i, p)]} for i, p, top in rows],
        }
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(ids, skip_special_tokens=False),
            "logprobs": logprobs,
            "finish_reason": "length" if cut else "stop",
        }
        if not self.names_only:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def _sglang(self, body: dict[str, Any]) -> Any:
        sampling = body["sampling_params"]
        stops = (set(sampling.get("stop_token_ids", [])), sampling.get("stop", []))
        rows, cut = self._sample(
            body["input_ids"], sampling["max_new_tokens"], sampling["temperature"], sampling["sampling_seed"], stops,
            body["top_logprobs_num"],
        )  # fmt: skip
        ids = [i for i, _, _ in rows]
        meta = {
            "finish_reason": {"type": "length", "length": len(ids)} if cut else {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "output_token_logprobs": [[p, i, None] for i, p, _ in rows],
            "output_top_logprobs": [[[q, j, None] for j, q in top] for _, _, top in rows],
        }
        return {"text": self.tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}

    def _sample(
        self, prompt: list[int], count: int, temperature: float, seed: int, stops: tuple[set[int], list[str]], top: int
    ) -> tuple[list[tuple[int, float, list[tuple[int, float]]]], bool]:
        """(id, log-probability, the likeliest others) of each token, and whether the limit ended it."""
        ids, out = list(prompt), []
        generator = torch.Generator().manual_seed(seed % 2**31)
        parts, cache, new = split_model(self.model), DynamicCache(), ids
        for _ in range(count):
            with torch.inference_mode():
                step = parts.decoder(input_ids=torch.tensor([new]), use_cache=True, **{parts.cache_argument: cache})
                logits = self.model.lm_head(step.last_hidden_state[0, -1]).double()
            heat = temperature or 1.0
            scaled = (logits / heat).log_softmax(-1)
            shown = scaled if self.mode == "scaled" else logits.log_softmax(-1)
            choice = scaled.argmax() if temperature == 0 else torch.multinomial(scaled.exp(), 1, generator=generator)[0]
            token = int(choice)
            likeliest = shown.topk(min(top, len(shown)))
            out.append(
                (
                    token,
                    float(shown[token]),
                    list(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)),
                )
            )
            assert not math.isnan(out[-1][1])
            ids.append(token)
            new = [token]
            text = self.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)
            if token in stops[0] or any(s in text for s in stops[1]):
                return out, False
        return out, True
