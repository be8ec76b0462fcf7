"""Log-probabilities and entropies of chosen tokens, in chunks: no `[tokens, vocabulary]` tensor of a whole batch is
ever held, neither forward nor backward, where each chunk's logits are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentropy.algorithms.entropy import entropy_from_logits

CHUNK_ELEMENTS = 1 << 23
"""Logits a chunk: 8 million float32 are 32 MiB; a chunk's backward holds about four such tensors."""


class TokenLogprobs(NamedTuple):
    """`logprobs[M]` float32 with gradient; `entropies[M]` float32 in nats (None if not asked for)."""

    logprobs: Tensor
    entropies: Tensor | None


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    ids: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    entropy_grad: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Log-probability of each id, and entropy of the distribution it was drawn from, at the sampling temperature.

    Args:
        hidden: `[M, D]`, last hidden state at the position that predicts the token; carries gradient.
        head: maps `[m, D]` to logits `[m, V]`; whatever the model does to its logits (a soft cap, a scale, LoRA on the
            head) belongs inside. It is called again in the backward pass and must give the same result.
        ids: `[M]` int64, the tokens.
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        entropy: also compute entropies.
        entropy_grad: let gradient flow through them (an entropy bonus needs it); else they are detached.
        chunk_tokens: tokens at a time; None takes as many as CHUNK_ELEMENTS logits allow.
    """
    if chunk_tokens is None:
        with torch.no_grad():
            vocabulary = head(hidden[:1]).shape[-1] if len(hidden) else 1
        chunk_tokens = max(1, CHUNK_ELEMENTS // vocabulary)
    scale = temperature or 1.0

    def chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if scale != 1.0:
            logits = logits / scale
        logp = logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        if not entropy:
            return (logp,)
        # Detached entropy comes last and saves nothing, so the recomputation in the backward pass stops before it.
        return logp, entropy_from_logits(logits if entropy_grad else logits.detach())

    parts: list[tuple[Tensor, ...]] = []
    for states, chosen in zip(torch.split(hidden, chunk_tokens), torch.split(ids, chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, states, chosen, use_reentrant=False))
        else:
            parts.append(chunk(states, chosen))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return TokenLogprobs(columns[0], columns[1] if entropy else None)
