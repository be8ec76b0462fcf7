"""The clipped policy loss, with weights that are fixed over the whole optimiser batch.

A loss here is `sum_t w_t * l_t`. The weights w hold the denominator of the mean and are computed once for all tokens of
an optimiser step, so the loss of a micro-batch is a plain sum and how a batch is packed cannot change the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_count

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum-norm"]


@dataclass(frozen=True)
class LossConfig:
    """Options of the policy loss; the defaults are those of DAPO and TAO-RL."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = 3.0
    """For A < 0 the loss of a token is capped at dual_clip * |A|; None for no cap."""
    ratio_clamp: float = 20.0
    """The log-ratio is clamped to +-ratio_clamp before it is exponentiated."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference); needs reference log-probabilities where it is not 0."""
    entropy_coef: float = 0.0
    """Weight of the entropy that is subtracted from the loss; needs entropies with gradient where it is not 0."""
    aggregation: Aggregation = "token-mean"
    """token-mean over all loss tokens of the optimiser batch (DAPO); sequence-mean: mean over trajectories of their
    token means (GRPO); sequence-sum-norm: sum over all tokens, divided by `norm_constant` (Dr. GRPO)."""
    norm_constant: float | None = None
    """The fixed denominator of sequence-sum-norm, such as trajectories a batch times the longest answer."""

    def __post_init__(self) -> None:
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation {self.aggregation!r} is none of {', '.join(get_args(Aggregation))}")
        if self.aggregation == "sequence-sum-norm" and not (self.norm_constant and self.norm_constant > 0):
            raise ValueError(
                "aggregation sequence-sum-norm divides by norm_constant: give a number above 0, "
                "such as trajectories a batch times the longest answer in tokens"
            )
        if not 0 <= self.clip_low <= 1 or not self.clip_high >= 0:
            raise ValueError(f"clip_low {self.clip_low} must lie in [0, 1], clip_high {self.clip_high} not below 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1, or none")
        if not self.kl_coef >= 0 or not math.isfinite(self.entropy_coef):
            raise ValueError(f"kl_coef {self.kl_coef} must not be below 0, entropy_coef {self.entropy_coef} be finite")
        if not self.ratio_clamp > 0:
            raise ValueError(f"ratio_clamp {self.ratio_clamp} must be above 0")


def token_weights(loss_mask: Tensor, trajectory_of: Tensor, n_trajectories: int, config: LossConfig) -> Tensor:
    """The weight of each token's loss, over one whole optimiser batch.

    Args:
        loss_mask: `[T]` bool, True for the tokens that this optimiser step learns from.
        trajectory_of: `[T]` int64.
    Returns: `[T]` float32; 0 outside the mask, all 0 where the mask is empty. Trajectories without a loss token count
        in no denominator.
    """
    count = segment_count(trajectory_of, n_trajectories, loss_mask)
    if config.aggregation == "token-mean":
        weight = 1.0 / count.sum().clamp(min=1).double()
        weights = weight.expand(trajectory_of.shape)
    elif config.aggregation == "sequence-mean":
        sequences = (count > 0).sum().clamp(min=1)
        weights = (1.0 / (count.clamp(min=1) * sequences).double())[trajectory_of]
    else:
        assert config.norm_constant is not None
        weights = torch.full(trajectory_of.shape, 1.0 / config.norm_constant, device=trajectory_of.device)
    return torch.where(loss_mask, weights, torch.zeros_like(weights)).float()


@dataclass(frozen=True)
class LossInputs:
    """What the loss of some tokens is made of; any subset of the tokens of an optimiser batch, in any order.

    logp        `[M]`, log-probability of the token under the current policy, with gradient
    old_logp    `[M]`, under the policy at the start of the step
    advantages  `[M]`
    weights     `[M]`, from `token_weights` over the whole optimiser batch
    mask        `[M]` bool, True for tokens that are learned from; anything may stand elsewhere, NaN included
    entropy     `[M]`, nats, of the current policy; with gradient where entropy_coef is not 0
    ref_logp    `[M]`, under the reference policy
    marked      `[M]` bool, True for tokens that a method's loss treats apart
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    ref_logp: Tensor | None = None
    marked: Tensor | None = None


@dataclass(frozen=True)
class LossStats:
    """Sums over loss tokens, added up over the micro-batches of a step; `metrics` divides at the end. Scalars `[]`."""

    tokens: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    dual_clipped: Tensor
    kl_k1: Tensor
    kl_k3: Tensor
    ref_kl: Tensor
    entropy: Tensor
    ratio: Tensor
    ratio_max: Tensor

    def __add__(self, other: LossStats) -> LossStats:
        """The sums of both, and the larger maximum."""
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        added["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return LossStats(**added)

    def metrics(self) -> dict[str, float]:
        """Means over all loss tokens, under the names of docs/algorithms.md; 0 where there are none."""
        values = {f.name: float(getattr(self, f.name)) for f in fields(self)}
        n = max(values["tokens"], 1.0)
        return {
            "optim/clip_fraction": (values["clipped_high"] + values["clipped_low"]) / n,
            "optim/clip_fraction_high": values["clipped_high"] / n,
            "optim/clip_fraction_low": values["clipped_low"] / n,
            "optim/clip_fraction_dual": values["dual_clipped"] / n,
            "optim/approx_kl": values["kl_k1"] / n,
            "optim/approx_kl_k3": values["kl_k3"] / n,
            "optim/ref_kl": values["ref_kl"] / n,
            "optim/entropy": values["entropy"] / n,
            "optim/ratio_mean": values["ratio"] / n,
            "optim/ratio_max": values["ratio_max"],
            "optim/loss_tokens": values["tokens"],
        }


def kl_k3(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0) -> Tensor:
    """k3 estimate of KL(policy || reference), `exp(d) - d - 1` with `d = ref_logp - logp`; elementwise, >= 0."""
    d = (ref_logp - logp).clamp(-clamp, clamp)
    return d.exp() - d - 1.0


def policy_loss(inputs: LossInputs, config: LossConfig, held: Tensor | None = None) -> tuple[Tensor, LossStats]:
    """Clipped surrogate (PPO) with dual clip, k3 penalty and entropy bonus.

    `L = max(-A rho, -A clip(rho))`, for A < 0 at most `dual_clip * |A|`; plus `kl_coef * k3 - entropy_coef * H`.

    Args:
        held: `[M]` bool, True for tokens that keep a bounded gradient where A > 0 and rho is clipped from above (AEPO,
            arXiv 2510.14545): the clipped term is then `(1 + clip_high) * rho / stopgrad(rho) * A`, of the same value.
    Returns: `sum_t w_t L_t` over the tokens of the mask, exactly 0 with zero gradient where there are none, and the
        sums for the metrics.
    Raises: ValueError where kl_coef or entropy_coef asks for what the inputs lack.
    """
    mask = inputs.mask

    def masked(values: Tensor) -> Tensor:
        # Selected before any arithmetic: 0 * NaN would be NaN, in the value and in the gradient.
        return torch.where(mask, values, torch.zeros_like(values))

    logp, advantages, weights = masked(inputs.logp), masked(inputs.advantages), masked(inputs.weights)
    old_logp = masked(inputs.old_logp).detach()
    advantages = advantages.detach()
    log_ratio = (logp - old_logp).clamp(-config.ratio_clamp, config.ratio_clamp)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    if held is not None:
        bounded = -advantages * (1.0 + config.clip_high) * ratio / ratio.detach()
        clipped = torch.where(held & (advantages > 0) & (ratio > 1.0 + config.clip_high), bounded, clipped)
    loss = torch.maximum(plain, clipped)
    capped = torch.zeros_like(mask)
    if config.dual_clip is not None:
        cap = -advantages * config.dual_clip
        capped = (advantages < 0) & (loss > cap)
        loss = torch.where(capped, cap, loss)
    zero = torch.zeros((), dtype=logp.dtype, device=logp.device)
    ref_kl = zero
    if inputs.ref_logp is not None:
        k3 = kl_k3(logp, masked(inputs.ref_logp).detach(), config.ratio_clamp)
        ref_kl = k3.detach().sum()
        loss = loss + config.kl_coef * k3
    elif config.kl_coef:
        raise ValueError("kl_coef needs the log-probabilities of a reference policy")
    entropy_sum = zero
    if inputs.entropy is not None:
        entropy = masked(inputs.entropy)
        entropy_sum = entropy.detach().sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy
    elif config.entropy_coef:
        raise ValueError("entropy_coef needs the entropies of the current policy, with gradient")

    with torch.no_grad():
        over = mask & (clipped > plain)
        stats = LossStats(
            tokens=mask.sum(),
            clipped_high=(over & (advantages > 0)).sum(),
            clipped_low=(over & (advantages < 0)).sum(),
            dual_clipped=(capped & mask).sum(),
            kl_k1=-log_ratio.sum(),
            kl_k3=(ratio - 1.0 - log_ratio).sum(),
            ref_kl=ref_kl,
            entropy=entropy_sum,
            ratio=masked(ratio).sum(),
            ratio_max=masked(ratio).max() if mask.numel() else zero,
        )
    return (weights * loss).sum(), stats
