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
