"""Entropy of a distribution of which only the k likeliest outcomes are known, with a model of the others.

`entropy.entropy_from_top_k` makes one outcome of all others and is a lower bound, far off where much is left over. Here
the others go on falling where the known ones leave off. docs/analysis.md has the errors that were measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTCOMES = 50_000
"""How many outcomes the tail may have, where nothing else is said: the vocabularies of language models have 30,000 to
250,000, and the estimate changes by about 1 % between these."""
LEAST_KNOWN = 4
"""With fewer known outcomes there is no slope to go on with."""
BISECTIONS = 50
STEEPEST = 100.0


def entropy_with_tail(logprobs: Tensor, rest: Tensor | None = None, outcomes: int = OUTCOMES) -> Tensor:
    """Estimate from the k largest log-probabilities, with a tail for the mass that is left.

    The tail is between two models, both of which begin at the smallest known probability `p_k` and hold exactly the
    mass that is left, r. A *plateau*: outcomes of probability p_k until the mass is used up, the least entropy that the
    known values allow. A *power law*: `p_j = p_k (j / k)^-a`, with a such that the mass is r. The slope of the lower
    half of the known values, `b = log(p_{k/2} / p_k) / log 2`, weighs them, `1 - exp(-2 b)` for the power law: where
    the known values do not fall, they are equals among many.

    Args:
        logprobs: `[..., k]`, natural logarithms in any order; -inf where fewer than k are known.
        rest: `[...]`, the mass that is left, where it is not what `logprobs` lack to 1.
        outcomes: how many outcomes there are, about.
    Returns: `[...]` float64, nats. It is an estimate and no bound; whoever stores it marks it as `top-k`.
    """
    logp = logprobs.double().sort(-1, descending=True).values
    p = logp.exp()
    known = torch.special.entr(p).sum(-1)
    r = (1.0 - p.sum(-1) if rest is None else rest.double()).clamp(0.0, 1.0)
    count = torch.isfinite(logp).sum(-1)
    last = logp.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    middle = logp.gather(-1, (count // 2 - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # With nothing known, or no mass left, there is no tail; the numbers only have to be finite there.
    open_ = (r > 1e-9) & (count > 0) & torch.isfinite(last)
    last = torch.where(open_, last, torch.zeros_like(last))
    mass = torch.where(open_, r, torch.ones_like(r))
    plateau = mass * torch.maximum(-last, -mass.log())
    ranks = (count - count // 2).clamp(min=1).double() / (count // 2).clamp(min=1).double() + 1.0
    slope = torch.where(count >= LEAST_KNOWN, (middle - last) / ranks.log(), torch.zeros_like(last)).clamp(min=0.0)
    power = _power_law(last, mass, count.clamp(min=1).double(), outcomes)
    weight = 1.0 - (-2.0 * slope).exp()
    tail = (1.0 - weight) * plateau + weight * torch.maximum(power, plateau)
    found: Tensor = known + torch.where(open_, tail, torch.zeros_like(tail))
    return found


def _power_law(last: Tensor, mass: Tensor, k: Tensor, outcomes: int) -> Tensor:
    """Entropy of `p_j = p_k (j / k)^-a`, k < j <= outcomes, with the `a` at which they add up to `mass`. Sums are
    integrals over half-way ranks: in x = j / k from `low` to `high`."""
    low, high = (k + 0.5) / k, torch.maximum((outcomes + 0.5) / k, (k + 1.5) / k)
    log_low, log_high = low.log(), high.log()
    scale = last.exp() * k

    def integral(a: Tensor) -> Tensor:
        b = _away_from_zero(1.0 - a)
        found: Tensor = scale * ((b * log_high).exp() - (b * log_low).exp()) / b
        return found

    flat, steep = torch.zeros_like(mass), torch.full_like(mass, STEEPEST)
    for _ in range(BISECTIONS):
        a = (flat + steep) / 2
        too_much = integral(a) > mass
        flat, steep = torch.where(too_much, a, flat), torch.where(too_much, steep, a)
    a = (flat + steep) / 2
    b = _away_from_zero(1.0 - a)
    at_high = (b * log_high).exp() * (log_high / b - 1 / b**2)
    at_low = (b * log_low).exp() * (log_low / b - 1 / b**2)
    return mass * -last + a * scale * (at_high - at_low)


def _away_from_zero(b: Tensor) -> Tensor:
    return torch.where(b.abs() < 1e-6, torch.full_like(b, 1e-6), b)
