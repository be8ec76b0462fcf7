"""The trainer's side: hidden states, log-probabilities and entropies of whole sequences, with gradients.

Sequences are ragged; rows of like length are run together, padded on the right, where causal attention cannot see the
padding. What comes back is flat and has none. A prompt that several sequences begin with is run once, and their keys
and values are handed, with gradient, to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from agentropy.algorithms.logprob import TokenLogprobs, token_logprobs
from agentropy.policies.parts import ModelParts, split_model

PADDING = 0.2
"""Most padding, as a share of a forward's tokens, before rows of other lengths get a forward of their own."""
SMALL_FORWARD = 1024
"""A forward of fewer tokens than this is filled up whatever the padding: its overhead costs more."""
WORTH_SHARING = 0.9
"""Prompts are shared where that leaves at most this share of the tokens to compute."""
NOWHERE = 1 << 30


def hidden_states(
    model: nn.Module | ModelParts, sequences: Sequence[Sequence[int]], prompts: Sequence[int] | None = None
) -> Tensor:
    """Last hidden states of ragged sequences, run from position 0.

    Args:
        model: a causal LM, with or without a peft wrapper, or what `split_model` made of it (which saves a little
            time).
        sequences: token ids; none of them empty.
        prompts: how many ids at the head of each sequence are its prompt, which others may begin with too.

    Returns:
        `[T, D]`, T the total number of tokens, in the order of `sequences`; carries gradient when it is enabled.
    """
    parts = model if isinstance(model, ModelParts) else split_model(model)
    if not sequences or any(len(s) == 0 for s in sequences):
        raise ValueError("hidden_states needs at least one sequence, and no empty ones")
    if (found := _shared_prompts(sequences, prompts)) is not None:
        return _with_shared_prompts(parts, sequences, *found)
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
    pieces: list[Tensor] = [torch.empty(0)] * len(sequences)
    for rows in _forwards([len(sequences[i]) for i in order]):
        members = [order[row] for row in rows]
        ids = _padded([sequences[i] for i in members])
        hidden = parts.decoder(input_ids=ids.to(parts.device), use_cache=False).last_hidden_state
        for i, states in zip(members, hidden, strict=True):
            pieces[i] = states[: len(sequences[i])]
    return torch.cat(pieces)


def count_forwards(sequences: Sequence[Sequence[int]], prompts: Sequence[int] | None = None) -> int:
    """How often `hidden_states` runs the decoder for these sequences; 0 for none."""
    if not sequences:
        return 0
    if (found := _shared_prompts(sequences, prompts)) is None:
        return len(_forwards(sorted(map(len, sequences))))
    return 1 + len(_forwards(sorted(len(s) - len(h) for s, h in zip(sequences, found[0], strict=True))))


Prompt = tuple[int, ...]


def _shared_prompts(
    sequences: Sequence[Sequence[int]], prompts: Sequence[int] | None
) -> tuple[list[Prompt], list[Prompt]] | None:
    """The prompt of each sequence, and each prompt once; None where it does not pay to run those apart."""
    if prompts is None or not all(0 < p < len(s) for p, s in zip(prompts, sequences, strict=True)):
        return None
    heads = [tuple(s[:p]) for p, s in zip(prompts, sequences, strict=True)]
    shared = list(dict.fromkeys(heads))
    total, once = sum(map(len, sequences)), sum(map(len, shared)) - sum(prompts)
    return (heads, shared) if total + once <= WORTH_SHARING * total else None


def _padded(sequences: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    ids = torch.full((len(sequences), max(map(len, sequences))), fill)
    for line, sequence in zip(ids, sequences, strict=True):
        line[: len(sequence)] = torch.as_tensor(sequence, dtype=torch.long)
    return ids


class _Prompts(Cache):  # type: ignore[misc]
    """Keys and values of the prompts. With `rows` set, each row of a forward gets those of its own prompt in front."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers_seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.rows is None:
            self.layers_seen[layer] = keys, values
            return keys, values
        before = self.layers_seen[layer]
        return (
            torch.cat([before[0].index_select(0, self.rows), keys], -2),
            torch.cat([before[1].index_select(0, self.rows), values], -2),
        )

    def get_seq_length(self, layer: int = 0) -> int:
        return 0 if self.rows is None else int(self.layers_seen[layer][0].shape[-2])


def _with_shared_prompts(
    parts: ModelParts,
    sequences: Sequence[Sequence[int]],
    heads: Sequence[Prompt],
    shared: Sequence[Prompt],
) -> Tensor:
    """As `hidden_states`; `heads[i]` is the prompt of `sequences[i]`, `shared` has each prompt once."""
    cache, device, number = _Prompts(), parts.device, {head: n for n, head in enumerate(shared)}
    ids = _padded(shared).to(device)
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    of_prompts = parts.decode(ids, positions, parts.masks(positions, ids.shape[1], parts.dtype), cache).unbind(0)
    # Columns of a shorter prompt's padding lie beyond every query.
    columns = _padded([range(len(p)) for p in shared], NOWHERE).to(device)
    tails = [s[len(h) :] for s, h in zip(sequences, heads, strict=True)]
    order = sorted(range(len(tails)), key=lambda i: (len(tails[i]), i))
    pieces: list[Tensor] = [torch.empty(0)] * len(tails)
    for run in _forwards([len(t) for t in (tails[i] for i in order)]):
        members = [order[row] for row in run]
        ids = _padded([tails[i] for i in members]).to(device)
        cache.rows = torch.tensor([number[heads[i]] for i in members], device=device)
        begin = torch.tensor([[len(heads[i])] for i in members], device=device)
        positions = begin + torch.arange(ids.shape[1], device=device)
        mask = parts.masks(positions, torch.cat([columns[cache.rows], positions], 1), parts.dtype)
        hidden = parts.decode(ids, positions, mask, cache)
        for i, states in zip(members, hidden, strict=True):
            pieces[i] = torch.cat([of_prompts[number[heads[i]]][: len(heads[i])], states[: len(tails[i])]])
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
    prompts: Sequence[int] | None = None,
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
        prompts: as in `hidden_states`.
        entropy: also compute entropies.
        entropy_grad: let gradient flow through them.
        chunk_tokens: tokens whose logits are held at a time; None: as many as fit a fixed memory.

    Returns:
        `logprobs[T]` and `entropies[T]`, float32, aligned with the tokens end to end; 0 where nothing was scored.
    """
    parts = model if isinstance(model, ModelParts) else split_model(model)
    hidden = hidden_states(parts, sequences, prompts)
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
