"""Sampling one token a row, with its log-probability and the entropy of the whole distribution.

Random numbers come from a counter: the uniform of a token is a hash of (seed of the sequence, position of the
token), so it depends neither on the other sequences nor on the order in which things happen. The token is found by
inverting the cumulative distribution, which needs one uniform a row where the Gumbel trick needs one a vocabulary
entry.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits with full avalanche.
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniforms in [0, 1 - 2**-23] for seeds and positions that broadcast against each other.

    23 bits, so that u times any positive float32 is less than that float32 also after rounding.
    """
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64) + _GOLDEN)
        mixed = _mix(key + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((mixed >> np.uint64(41)).astype(np.float64) * 2.0**-23).astype(np.float32)


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: `[B, V]` float32; overwritten.
        uniform: `[B]` float32 in [0, 1).
        temperature: `[B]`; 0 takes the most likely token. None: 1 everywhere.
        top_k: `[B]` int64; 0 keeps all. None: 0 everywhere.
        top_p: `[B]`; 1 keeps all. The smallest set of most likely tokens whose probability reaches top_p is kept.

    Returns:
        Tokens `[B]` int64, their log-probabilities `[B]` and the entropies `[B]` (nats), both of softmax(logits /
        temperature) over the full vocabulary (temperature 0 counts as 1).
    """
    if temperature is not None:
        logits = logits.div_(torch.where(temperature > 0, temperature, 1.0).unsqueeze(1))
    # A model may rule tokens out with -inf, and 0 * -inf would make the entropy NaN.
    logits = logits.clamp_(min=-1e30)
    probs = logits.softmax(-1)
    if top_k is not None or top_p is not None:
        tokens = _restricted(probs, uniform, top_k, top_p)
    else:
        cumulative = probs.cumsum(-1)
        tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True)
        tokens = tokens.clamp_(max=logits.shape[1] - 1)
    if temperature is not None:
        tokens = torch.where((temperature > 0).unsqueeze(1), tokens, logits.argmax(-1, keepdim=True))
    # The log-sum is taken off before the sum over the vocabulary: 49,000 float32 probabilities do not quite add to 1,
    # and that error would be multiplied by the size of the logits.
    logits = logits.sub_(logits.logsumexp(-1, keepdim=True))
    logprobs = logits.gather(1, tokens).squeeze(1)
    entropies = probs.mul_(logits).sum(-1).neg_()
    return tokens.squeeze(1), logprobs, entropies.clamp_(min=0.0)


def _restricted(probs: Tensor, uniform: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    ordered, index = probs.sort(stable=True, dim=-1, descending=True)
    if top_k is not None:
        rank = torch.arange(ordered.shape[1], device=probs.device)
        ordered = torch.where((top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1)), 0.0, ordered)
    cumulative = ordered.cumsum(-1)
    if top_p is not None:
        # top_p is a share of what top_k left, as in transformers, where the cuts follow one another.
        before = (cumulative - ordered) / cumulative[:, -1:]
        limit = torch.where(top_p < 1, top_p, 2.0).unsqueeze(1)
        keep = before < limit
        keep[:, 0] = True
        cumulative = torch.where(keep, ordered, 0.0).cumsum(-1)
    chosen = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True)
    tokens: Tensor = index.gather(1, chosen.clamp_(max=probs.shape[1] - 1))
    return tokens
