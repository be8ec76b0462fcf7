"""Log-probabilities and entropies of chosen tokens, in chunks: no `[tokens, vocabulary]` tensor of a whole batch is
ever held, neither forward nor backward, where each chunk's logits are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from agentropy.algorithms.entropy import entropy_from_logits

CHUNK_ELEMENTS = 1 << 20
"""Logits a chunk: 4 MiB in float32, about what a core's cache holds."""
MIN_TOKENS = {"cpu": 128}
"""But never fewer tokens than this (1024 on an accelerator), or a large head would be read again too often."""


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
        chunk_tokens = max(MIN_TOKENS.get(hidden.device.type, 1024), CHUNK_ELEMENTS // vocabulary)

    def chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if temperature not in (0.0, 1.0):
            logits = logits / temperature
        logp, log_probabilities = _ChosenLogprob.apply(logits, chosen)  # type: ignore[no-untyped-call]
        if not entropy:
            return (logp,)
        if entropy_grad:
            return logp, entropy_from_logits(logits)
        # Detached entropy comes last and saves nothing, so the recomputation in the backward pass stops before it.
        with torch.no_grad():
            return logp, -log_probabilities.exp().mul_(log_probabilities).nansum(-1)  # 0 * -inf counts as 0

    parts: list[tuple[Tensor, ...]] = []
    for states, chosen in zip(torch.split(hidden, chunk_tokens), torch.split(ids, chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, states, chosen, use_reentrant=False))
        else:
            parts.append(chunk(states, chosen))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return TokenLogprobs(columns[0], columns[1] if entropy else None)


class _ChosenLogprob(torch.autograd.Function):
    """`log_softmax(logits)[chosen]`, whose backward makes one `[m, V]` tensor where autograd would make several.

    Also hands out the whole `log_softmax`, without gradient, for the entropy.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        log_probabilities = logits.log_softmax(-1)
        ctx.save_for_backward(log_probabilities, chosen)
        ctx.mark_non_differentiable(log_probabilities)
        ctx.set_materialize_grads(False)
        return log_probabilities.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), log_probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        log_probabilities, chosen = ctx.saved_tensors
        column = grad.unsqueeze(-1)
        d_logits = log_probabilities.exp().mul_(-column)
        return d_logits.scatter_add_(-1, chosen.unsqueeze(-1), column), None
