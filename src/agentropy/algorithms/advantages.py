"""Advantages from rewards, and the entropy-guided bonus on them. Nothing here carries gradient."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_count, segment_mean, segment_spread, segment_std, suffix_sum
from agentropy.batch import Batch

Credit = Literal["turn", "return", "mean-return"]
"""A token gets the normalised reward of its own turn, or the sum or mean of those of its own and the later turns."""
Pool = Literal["turns", "role", "outcome"]
"""What the turn rewards of a group are compared with: all its turns, those of the same role (calling, or not), or, in
two parts, the outcomes of its trajectories and, for what a call earns beyond the outcome, its other calls."""
Form = Literal["multiplicative", "additive"]

EPSILON = 1e-6


def group_normalise(
    reward: Tensor,
    group: Tensor,
    n_groups: int,
    members: Tensor,
    normalize_std: bool = True,
    epsilon: float = EPSILON,
) -> Tensor:
    """`A_i = (R_i - mean_g R) / (std_g R + epsilon)` (GRPO, arXiv 2402.03300), the sample standard deviation (n-1).

    Args:
        reward: `[N]`; may be NaN outside `members`.
        group: `[N]` int64 in 0..n_groups-1.
        members: `[N]` bool, True for what mean and std are taken over.
        normalize_std: False subtracts the mean only (Dr. GRPO, arXiv 2503.20783).
    Returns: `[N]` float64; 0 outside `members`, exactly 0 in groups of one member and where all members are equal.
    """
    mean = segment_mean(reward, group, n_groups, members)
    advantage = reward.double() - mean[group]
    if normalize_std:
        advantage = advantage / (segment_std(reward, group, n_groups, members, ddof=1)[group] + epsilon)
    signal = members & (segment_spread(reward, group, n_groups, members) > 0)[group]
    return torch.where(signal, advantage, torch.zeros_like(advantage))


def trajectory_advantages(
    batch: Batch, reward: Tensor, members: Tensor, normalize_std: bool = True, epsilon: float = EPSILON
) -> Tensor:
    """Every token of a trajectory gets its group-normalised reward `[N]`. Returns `[T]` float64."""
    advantage = group_normalise(reward, batch.group_of, batch.n_groups, members, normalize_std, epsilon)
    return advantage[batch.trajectory_of]


def turn_advantages(
    batch: Batch,
    turn_reward: Tensor,
    members: Tensor,
    credit: Credit = "turn",
    normalize_std: bool = True,
    epsilon: float = EPSILON,
    pool: Pool = "turns",
) -> Tensor:
    """Turn rewards of a group, normalised, for the tokens of each turn (TEPO-dense).

    Args:
        turn_reward: `[U]`; may be NaN for trajectories outside `members`.
        members: `[N]` bool, True for trajectories whose turns make up the pool.
        pool: "turns" (the paper) subtracts the mean over all turns of the group and divides by their deviation.
            "role" subtracts the mean over the turns that made a call, or over those that made none, and divides by the
            deviation of what is left. "outcome" adds two parts: the trajectory's normalised score, and the turn's
            reward beyond that score less its mean over the calling turns of the group.
    Returns: `[T]` float64; 0 outside model tokens.
    """
    if not batch.n_turns:
        return torch.zeros(batch.n_tokens, dtype=torch.float64, device=batch.tokens.device)
    group = batch.group_of[batch.turn_trajectory]
    there = members[batch.turn_trajectory]
    calls = segment_count(batch.call_turn, batch.n_turns) > 0
    if pool == "outcome":
        outcome = group_normalise(batch.score, batch.group_of, batch.n_groups, members, normalize_std, epsilon)
        beyond = turn_reward.double() - batch.score[batch.turn_trajectory]
        beyond = beyond - segment_mean(beyond, group, batch.n_groups, there & calls)[group]
        advantage = outcome[batch.turn_trajectory] + torch.where(there & calls, beyond, torch.zeros_like(beyond))
    else:
        if pool == "role":
            role = group * 2 + calls.long()
            turn_reward = turn_reward - segment_mean(turn_reward, role, 2 * batch.n_groups, there)[role]
        advantage = group_normalise(turn_reward, group, batch.n_groups, there, normalize_std, epsilon)
    if credit != "turn":
        total = suffix_sum(advantage, batch.turn_trajectory, batch.n_trajectories)
        left = suffix_sum(torch.ones_like(advantage), batch.turn_trajectory, batch.n_trajectories)
        advantage = total / left if credit == "mean-return" else total
    token = advantage[batch.turn_of.clamp(min=0)]
    return torch.where(batch.is_model, token, torch.zeros_like(token))


def top_share(values: Tensor, candidates: Tensor, share: float) -> Tensor:
    """The `max(1, ceil(share * n))` largest of the n candidates, ties at the threshold included.

    Args:
        values: `[T]`.
        candidates: `[T]` bool, True for entries that take part; with none nothing is selected.
        share: q_H in (0, 1].
    Returns: `[T]` bool.
    """
    pool = values[candidates]
    if not pool.numel():
        return torch.zeros_like(candidates)
    count = max(1, math.ceil(share * pool.numel() - 1e-9))  # 0.28 * 25 is 7.000000000000001
    threshold = pool.topk(min(count, pool.numel())).values[-1]
    return candidates & (values >= threshold)


def entropy_bonus(
    advantages: Tensor,
    z: Tensor,
    selected: Tensor,
    alpha: float = 0.01,
    form: Form = "multiplicative",
    kappa: float = 2.0,
) -> Tensor:
    """Shaped advantages on the selected tokens, the others unchanged (TAO-RL, arXiv 2606.03762).

    multiplicative: `A' = A * max(0, 1 + alpha * z)`, which for A < 0 raises the penalty on uncertain tokens.
    additive: `A' = A + min(alpha * max(z, 0), |A| / kappa)`, which for kappa >= 1 never flips the sign of A.

    Args:
        advantages: `[T]`; z: `[T]` standardised entropy; selected: `[T]` bool, True where the bonus applies.
    Returns: `[T]`, same dtype as `advantages`.
    """
    if form == "multiplicative":
        shaped = advantages * (1.0 + alpha * z).clamp(min=0.0)
    else:
        shaped = advantages + torch.minimum(alpha * z.clamp(min=0.0), advantages.abs() / kappa)
    return torch.where(selected, shaped.to(advantages.dtype), advantages)
