"""What a trajectory and its turns earn. Scores are outcomes in [0, 1]: a verifier's 1 or 0, or token F1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_any, segment_count
from agentropy.batch import Batch

ZeroCall = Literal["f1", "zero"]
"""What a trajectory without calls earns under TEPO-sparse: its score, or nothing."""


RewardForm = Literal["outcome", "authors"]
"""What ARPO and AEPO reward: the score, or their authors' rule (`with_format`)."""
BROKEN, SEVERAL_TOOLS = -1.0, 0.1


@dataclass(frozen=True)
class Rewards:
    """`trajectory[N]` and `turn[U]`, float64; NaN where the trajectory could not be graded."""

    trajectory: Tensor
    turn: Tensor


def outcome(batch: Batch) -> Rewards:
    """The score, for the trajectory and for each of its turns (GRPO and all methods with an outcome reward)."""
    return Rewards(batch.score, batch.score[batch.turn_trajectory])


def tepo_sparse(batch: Batch, reducing: Tensor, zero_call: ZeroCall = "f1") -> Rewards:
    """TEPO-sparse: `R = F1 * m / n`, m of the n executed calls being entropy-reducing.

    Args:
        reducing: `[C]` bool, I_k.
        zero_call: the reward of a trajectory without calls.
    """
    n = segment_count(batch.call_trajectory, batch.n_trajectories)
    m = segment_count(batch.call_trajectory, batch.n_trajectories, reducing)
    no_call = torch.full_like(batch.score, 1.0 if zero_call == "f1" else 0.0)
    reward = torch.where(n > 0, batch.score * m / n.clamp(min=1), batch.score * no_call)
    return Rewards(reward, reward[batch.turn_trajectory])


def tepo_dense(batch: Batch, reducing: Tensor, alpha: float = 0.5) -> Rewards:
    """TEPO-dense: the turn of call k earns `F1 * (1 + alpha * I_k)`, a turn without an executed call earns F1.

    The gate is multiplicative: a score of 0 earns nothing anywhere. A turn with parallel calls is one turn with their
    common I_k. The trajectory's own reward stays the score.
    """
    turn_reducing = segment_any(reducing, batch.call_turn, batch.n_turns)
    turn = batch.score[batch.turn_trajectory] * (1.0 + alpha * turn_reducing)
    return Rewards(batch.score, turn)


def with_format(batch: Batch) -> Rewards:
    """The rule of ARPO's and AEPO's authors: the score, -1 for a broken format, 0.1 more for several tools.

    The format is broken where the trajectory did not end with an answer or has a void turn. Several tools means that at
    least two different ones were called on the way to a score above 0.
    """
    n, tools = batch.n_trajectories, max(len(batch.tools), 1)
    pair = batch.call_trajectory * tools + batch.call_tool
    used = segment_any(torch.ones_like(pair, dtype=torch.bool), pair, n * tools)
    several = used.view(n, tools).sum(1) >= 2
    reward = batch.score + SEVERAL_TOOLS * (several & (batch.score > 0))
    broken = (~batch.answered | batch.void) & ~batch.score.isnan()
    reward = torch.where(broken, BROKEN, reward)
    return Rewards(reward, reward[batch.turn_trajectory])
