"""The trainer's side: hidden states, log-probabilities and entropies of whole sequences, with gradients.

Sequences are ragged; rows of like length are run together, padded on the right, where causal attention cannot see the
padding. What comes back is flat and has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from agentropy.algorithms.logprob import TokenLogprobs, token_logprobs
from agentropy.policies.parts import ModelParts, split_model

PADDING = 0.2
"""Most padding, as a share of a forward's tokens, before rows of other lengths get a forward of their own."""
SMALL_FORWARD = 1024
"""A forward of fewer tokens than this is filled up whatever the padding: its overhead costs more."""


def hidden_states(model: nn.Module | ModelParts, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Last hidden states of ragged sequences, run from position 0.

    Args:
        model: a causal LM, with or without a peft wrapper, or what `split_model` made of it (which saves a little
            time).
        sequences: token ids; none of them empty.

    Returns:
        `[T, D]`, T the total number of tokens, in the order of `sequences`; carries gradient when it is enabled.
    """
    parts = model if isinstance(model, ModelParts) else split_model(model)
    if not sequences or any(len(s) == 0 for s in sequences):
        raise ValueError("hidden_states needs at least one sequence, and no empty ones")
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
    pieces: list[Tensor] = [torch.empty(0)] * len(sequences)
    for rows in _forwards([len(sequences[i]) for i in order]):
        members = [order[row] for row in rows]
        lengths = [len(sequences[i]) for i in members]
        ids = torch.zeros(len(members), max(lengths), dtype=torch.long)
        for line, i in zip(ids, members, strict=True):
            line[: len(sequences[i])] = torch.as_tensor(sequences[i], dtype=torch.long)
        hidden = parts.decoder(input_ids=ids.to(parts.device), use_cache=False).last_hidden_state
        for i, states, length in zip(members, hidden, lengths, strict=True):
            pieces[i] = states[:length]
    return torch.cat(pieces)


def _forwards(lengths: Sequence[int]) -> list[range]:
    """Cut ascending lengths into runs that waste little on padding."""
    runs, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        padded = (i + 1 - start) * length
        if i > start and padded > SMALL_FORWARD and tokens + length < (1 - PADDING) * padded:
            runs.append(range(start, i))
            start, tokens = i, 0
        tokens += length
    return [*runs, range(start, len(lengths))]


def score(
    model: nn.Module | ModelParts,
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    where: Tensor | None = None,
    entropy: bool = True,
    entropy_grad: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Log-probability and entropy (nats) of each token given those before it, at the sampling temperature.

    Args:
        model: as in `hidden_states`.
        sequences: token ids, prompt included.
        temperature: that of sampling; 0 (greedy) counts as 1.
        where: `[T]` bool, which tokens to score (the model's own, say); None: all. The first token of a sequence is
            predicted by nothing and never scored.
        entropy: also compute entropies.
        entropy_grad: let gradient flow through them.
        chunk_tokens: tokens whose logits are held at a time; None: as many as fit a fixed memory.

    Returns:
        `logprobs[T]` and `entropies[T]`, float32, aligned with the tokens end to end; 0 where nothing was scored.
    """
    parts = model if isinstance(model, ModelParts) else split_model(model)
    hidden = hidden_states(parts, sequences)
    flat = torch.as_tensor([t for s in sequences for t in s], dtype=torch.long, device=hidden.device)
    lengths = torch.tensor([len(s) for s in sequences])
    scored = torch.ones(len(flat), dtype=torch.bool)
    scored[lengths.cumsum(0) - lengths] = False
    if where is not None:
        scored &= where.cpu()
    index = scored.nonzero().flatten().to(hidden.device)
    found = token_logprobs(
        hidden[index - 1],
        parts.head,
        flat[index],
        temperature=temperature,
        entropy=entropy,
        entropy_grad=entropy_grad,
        chunk_tokens=chunk_tokens,
    )
    zeros = torch.zeros(len(flat), dtype=found.logprobs.dtype, device=hidden.device)
    entropies = None if found.entropies is None else zeros.index_copy(0, index, found.entropies)
    return TokenLogprobs(zeros.index_copy(0, index, found.logprobs), entropies)
