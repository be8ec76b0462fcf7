"""verl's inference servers as a `Policy`: ids in, ids out, through the client that verl gives its agent loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from agentropy.policies.base import (
    Finish,
    Generation,
    PolicyInfo,
    PolicyLost,
    SamplingParams,
    SequenceHandle,
    Stop,
)
from agentropy.policies.stops import StopTable


@dataclass(eq=False, slots=True)
class ServerSequence:
    """Everything that was fed and sampled. `request` keeps a trajectory and its branches on one server, for the
    server's prefix cache."""

    ids: list[int]
    request: str

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.ids)


class ServerPolicy:
    """Implements `policies.base.Policy` on verl's `LLMServerClient`.

    verl's servers give the log-probability of the sampled token and nothing of the other tokens. So `entropies` are
    surprisals, `-log p(token)`: their expectation is the entropy, which makes the mean over a window an unbiased
    estimate of it, good for the decisions of branching rollouts and for nothing else (`entropy_kind` is an estimate;
    advantages are made of exact entropies, which the trainer computes).

    `versions` collects the weight versions that the turns were sampled with. Sampling is seeded by the server, so the
    seeds of sequences are not used.
    """

    def __init__(self, client: Any, stops: StopTable, info: PolicyInfo, stop_strings: bool) -> None:
        """`stop_strings`: the server can look for stop strings (vLLM); elsewhere turns are cut here."""
        self.info = info
        self.versions: set[int] = set()
        self._client = client
        self._stops = stops
        self._stop_strings = stop_strings

    def open(self, prompt: Sequence[int], seeds: Sequence[int]) -> list[SequenceHandle]:
        """Start one sequence a seed."""
        return [ServerSequence(list(prompt), uuid4().hex) for _ in seeds]

    async def generate(
        self, sequence: SequenceHandle, new_ids: Sequence[int], params: SamplingParams, stop: Stop
    ) -> Generation:
        """Append `new_ids`, then sample one turn. Raises PolicyLost where the server gave the request up."""
        assert isinstance(sequence, ServerSequence)
        sequence.ids += map(int, new_ids)
        room = min(params.max_new_tokens, self.info.max_context - sequence.length)
        if room <= 0:
            return Generation((), (), (), "length" if params.max_new_tokens <= 0 else "context_full", "top-k")
        out = await self._client.generate(
            sequence.request, prompt_ids=list(sequence.ids), sampling_params=self._request(params, stop, room)
        )
        if out.stop_reason in ("abort", "aborted"):
            raise PolicyLost("the server gave the request up")
        version = out.extra_fields.get("global_steps")
        if version is not None:
            self.versions.add(int(version))
        ids, logprobs = [int(i) for i in out.token_ids], out.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            raise RuntimeError("verl's server gave no log-probability for each token that it sampled")
        count, stopped = self._stops.end(ids, stop)
        finish: Finish = "stop" if stopped or 0 < len(ids) < room else "length"
        if finish == "length" and room < params.max_new_tokens:
            finish = "context_full"
        sequence.ids += ids[:count]
        kept = tuple(float(p) for p in logprobs[:count])
        return Generation(tuple(ids[:count]), kept, tuple(-p for p in kept), finish, "top-k")

    def _request(self, params: SamplingParams, stop: Stop, room: int) -> dict[str, Any]:
        request: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "max_tokens": room,
        }
        if stop.token_ids:
            request["stop_token_ids"] = sorted(stop.token_ids)
        if stop.strings and self._stop_strings:
            request |= {"stop": list(stop.strings), "include_stop_str_in_output": True}
        return request

    def fork(self, sequence: SequenceHandle, seed: int, at: int | None = None) -> SequenceHandle:
        """A sequence that goes on from the first `at` ids (None: all)."""
        assert isinstance(sequence, ServerSequence)
        return ServerSequence(sequence.ids[:at], sequence.request)

    def close(self, sequence: SequenceHandle) -> None:
        """Nothing is held between turns."""
