"""Two engines give the same token two probabilities. How far apart they are, and the weights that make up for it.

The sampler (a server with other kernels, another precision, or weights of a step before) draws from q; the trainer has
p. A mean over tokens that q drew is one over p's if each counts `p / q` times. Such weights have heavy tails, so they
are cut off at a cap (truncated importance sampling: Ionides 2008): a little bias, for a variance that is bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLAMP = 20.0
"""Log-ratios are clamped to this size before they are exponentiated."""


def importance_weights(trainer: Tensor, sampler: Tensor, mask: Tensor, cap: float) -> Tensor:
    """`min(p / q, cap)` of each token, from log-probabilities.

    Args:
        trainer: `[T]`, log p of each token, as the policy was before the update.
        sampler: `[T]`, log q, at the same temperature.
        mask: `[T]` bool, True for the tokens that the sampler drew; anything may stand elsewhere.
        cap: at least 1.
    Returns: `[T]` float32 without gradient; 1 outside the mask.
    """
    ratio = _log_ratio(trainer, sampler, mask).exp().clamp(max=cap)
    return torch.where(mask, ratio, torch.ones_like(ratio)).float()


def gap_metrics(trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the sampler's distribution is from the trainer's, over the tokens of `mask`, in nats.

    `d = log p - log q` of tokens that q drew: the mean and the largest |d|; KL(q || p) as k1, the mean of `-d`
    (unbiased, and below 0 by chance), and as k3, the mean of `e^d - d - 1` (unbiased too, never below 0); the share of
    tokens whose ratio lies outside [0.5, 2]. Empty where there are no tokens.
    """
    if not bool(mask.any()):
        return {}
    d = _log_ratio(trainer, sampler, mask)[mask]
    return {
        "sampler/gap_mean": float(d.abs().mean()),
        "sampler/gap_max": float(d.abs().max()),
        "sampler/kl_k1": float(-d.mean()),
        "sampler/kl_k3": float((d.exp() - d - 1.0).mean()),
        "sampler/ratio_outside": float((d.abs() > torch.tensor(2.0, dtype=d.dtype).log()).double().mean()),
    }


def _log_ratio(trainer: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    # Selected before any arithmetic: what stands outside the mask may be infinite.
    zero = torch.zeros_like(trainer, dtype=torch.float64)
    return (torch.where(mask, trainer.double(), zero) - torch.where(mask, sampler.double(), zero)).clamp(-CLAMP, CLAMP)
