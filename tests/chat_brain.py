"""A model that multiplies, behind a chat API: it calls its tool, reads the result, and answers. Always the same way."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faulty_server import Refuse

REASONING = "I multiply them. "


@dataclass
class Multiplier:
    """`logprobs`: none, those of the text only (OpenAI), or those of the whole turn with its call (vLLM).

    `style`: how it calls: native, hermes, tags or fence. `thinks`: it has thoughts in a field of their own.
    `arguments`: what it writes as arguments, if not what is right.
    """

    logprobs: str = "text"
    style: str = "native"
    thinks: str = ""
    window: int = 4096
    tools_cost: int = 50
    arguments: str | None = None
    keeps_stop: bool = False
    key: str | None = None
    refused: tuple[str, ...] = ()
    usage: bool = True

    def __call__(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            raise Refuse(401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}})
        if path == "/v1/models":
            entries = [{"id": i, "owned_by": "someone", "max_model_len": self.window} for i in ("multiplier", "other")]
            return {"object": "list", "data": entries}
        if path != "/v1/chat/completions" or body is None:
            raise Refuse(404, {"detail": "Not Found"})
        if body["model"] not in ("multiplier", "other"):
            raise Refuse(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        for field in self.refused:
            if field in body:
                raise Refuse(400, {"error": {"message": f"Unsupported parameter: '{field}' is not supported."}})
        messages = body["messages"]
        prompt = sum(len(tokens(str(m.get("content")))) + 4 for m in messages)
        prompt += self.tools_cost * len(body.get("tools", []))
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        if prompt + limit > self.window:
            text = (
                f"This model's maximum context length is {self.window} tokens, your request has {prompt} input tokens"
            )
            raise Refuse(400, {"error": {"message": text, "code": 400}})
        return self._answer(body, prompt, limit)

    def _answer(self, body: dict[str, Any], prompt: int, limit: int) -> Any:
        text, call = self._says(body["messages"])
        written = ""
        if call is not None:
            written = {
                "native": '\n<tool_call>\n{"name": "multiply", "arguments": ' + call + "}\n</tool_call>",
                "hermes": '<tool_call>\n{"name": "multiply", "arguments": ' + call + "}\n</tool_call>",
                "tags": f"<multiply>{call}</multiply>",
                "fence": f"\n```python\nprint({call})\n```\nIt must be",
            }[self.style]
        pieces = tokens(text + written)
        finish = "stop"
        if self.style == "native" and call is not None:
            finish = "tool_calls"
        for stop in body.get("stop", []):
            whole = "".join(pieces)
            if stop in whole:
                end = whole.index(stop) + (len(stop) if self.keeps_stop else 0)
                pieces, finish = tokens(whole[:end]), "stop"
        if len(pieces) > limit:
            pieces, finish = pieces[:limit], "length"
        message: dict[str, Any] = {"role": "assistant", "content": "".join(pieces)}
        shown = pieces
        if finish == "tool_calls":
            function = {"name": "multiply", "arguments": call}
            message |= {"content": text or None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
            shown = tokens(text) if self.logprobs == "text" else pieces
        if self.thinks:
            message["reasoning_content"] = self.thinks
            if self.logprobs == "all":
                shown = [*tokens(self.thinks), "</think>", *shown]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        if body.get("logprobs") and self.logprobs != "none":
            heat = body["temperature"] or 1.0
            choice["logprobs"] = {"content": [_token(p, i, body["top_logprobs"], heat) for i, p in enumerate(shown)]}
        answer = {"object": "chat.completion", "choices": [choice]}
        if self.usage:
            answer["usage"] = {"prompt_tokens": prompt, "completion_tokens": len(pieces)}
        return answer

    def _says(self, messages: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
        last = messages[-1]["content"]
        question = next(re.search(r"(\d+) times (\d+)", str(m["content"])) for m in messages if m["role"] == "user")
        result = re.search(r"\d+", last) if len(messages) > 1 and messages[-2]["role"] == "assistant" else None
        if result is not None:
            return f"So it is \\boxed{{{result[0]}}}.", None
        if question is None:
            return "Hello to you.", None
        a, b = question.groups()
        if self.style == "fence":
            return REASONING, f"{a} * {b}"
        return REASONING, self.arguments if self.arguments is not None else json.dumps({"a": int(a), "b": int(b)})


def tokens(text: str) -> list[str]:
    """Words with the space before them."""
    return re.findall(r"\s*\S+|\s+$", text)


def _token(text: str, place: int, top: int, heat: float) -> dict[str, Any]:
    """A token with made-up alternatives, those of the raw logits whatever the temperature."""
    first = 0.3 + int.from_bytes(hashlib.blake2b(f"{text}{place}".encode(), digest_size=4).digest()) / 2**32 * 0.6
    chances = [first, *((1 - first) * 0.5**k for k in range(1, top))]
    listed = [{"token": text if k == 0 else f"?{k}", "logprob": math.log(p)} for k, p in enumerate(chances)]
    data = list(text.encode())
    return {"token": text, "bytes": data, "logprob": listed[0]["logprob"], "top_logprobs": listed}
