"""TEPO (arXiv 2602.02050): reward calls that lower the entropy of the agent's reasoning, gated by the outcome."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentropy.algorithms import rewards as reward_functions
from agentropy.algorithms.advantages import Credit, Pool, turn_advantages
from agentropy.algorithms.entropy import EntropyChange
from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig
from agentropy.algorithms.rewards import Rewards, ZeroCall
from agentropy.batch import Batch
from agentropy.methods.base import Method
from agentropy.methods.checks import positive, require
from agentropy.methods.common import chosen, group_advantage, truncated, void_turns

Indicator = Literal["entropy", "random"]
"""What decides I_k: the change of entropy, or, as a control, the same flags dealt out at random."""


def tepo_sparse(
    *,
    zero_call: ZeroCall = "f1",
    include_call_tokens: bool = False,
    indicator: Indicator = "entropy",
    normalize_std: bool = True,
    void_filter: bool = False,
    mask_truncated: bool = False,
    statistics: Population = "all",
    accept_estimates: bool = False,
    loss: LossConfig = LossConfig(),
) -> Method:
    """Efficiency: one reward a trajectory, `F1 * m / n`, m of its n calls being entropy-reducing; GRPO's advantage.

    Args:
        zero_call: what a trajectory without calls earns, its F1 ("f1") or nothing ("zero").
        include_call_tokens: segment entropy averages over the tokens that write the call, too.
        indicator: "random" deals the flags I_k of the batch out to its calls at random: the control that shows whether
            it is the entropy that has the effect.
        accept_estimates: let top-k estimates stand in for exact entropies.
        normalize_std, void_filter, mask_truncated, statistics: as in GRPO and SimpleTIR.
    """

    def reward(batch: Batch, change: EntropyChange) -> Rewards:
        return reward_functions.tepo_sparse(batch, _indicators(batch, change, indicator), zero_call)

    return Method(
        name="tepo-sparse",
        filters=chosen((void_filter, void_turns), (mask_truncated, truncated)),
        reward=reward,
        advantage=group_advantage(normalize_std),
        statistics=statistics,
        needs_entropies=True,
        accept_estimates=accept_estimates,
        include_call_tokens=include_call_tokens,
        loss=loss,
    )


def tepo_dense(
    *,
    alpha: float = 0.5,
    credit: Credit = "turn",
    pool: Pool = "turns",
    include_call_tokens: bool = False,
    indicator: Indicator = "entropy",
    normalize_std: bool = True,
    void_filter: bool = False,
    mask_truncated: bool = False,
    statistics: Population = "all",
    accept_estimates: bool = False,
    loss: LossConfig = LossConfig(),
) -> Method:
    """Performance: the turn of call k earns `F1 * (1 + alpha * I_k)`, the last turn F1; normalised in one pool a group.

    Args:
        alpha: what an entropy-reducing call earns on top, as a share of F1.
        credit: "turn" gives a token its turn's advantage, "return" the sum of its own and the later turns',
            "mean-return" their mean.
        pool: what a turn's reward is compared with: "turns" of the group (paper), those of the same "role", or the
            "outcome" of its trajectories and, for what it earns beyond that, other calls.
        include_call_tokens, indicator, accept_estimates: as in `tepo_sparse`.
        normalize_std, void_filter, mask_truncated, statistics: as in GRPO and SimpleTIR.
    """
    require("alpha", alpha, positive(alpha, or_zero=True), "0 or above")

    def reward(batch: Batch, change: EntropyChange) -> Rewards:
        return reward_functions.tepo_dense(batch, _indicators(batch, change, indicator), alpha)

    def advantage(batch: Batch, rewards: Rewards, members: Tensor) -> Tensor:
        return turn_advantages(batch, rewards.turn, members, credit, normalize_std, pool=pool)

    return Method(
        name="tepo-dense",
        filters=chosen((void_filter, void_turns), (mask_truncated, truncated)),
        reward=reward,
        advantage=advantage,
        statistics=statistics,
        needs_entropies=True,
        accept_estimates=accept_estimates,
        include_call_tokens=include_call_tokens,
        loss=loss,
    )


def _indicators(batch: Batch, change: EntropyChange, indicator: Indicator) -> Tensor:
    """I_k `[C]`. The random order hangs on the batch's tokens alone, so the same batch gives the same rewards."""
    if indicator == "entropy":
        return change.reducing
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()) % 2**62)
    order = torch.randperm(change.reducing.numel(), generator=generator)
    return change.reducing[order.to(change.reducing.device)]
