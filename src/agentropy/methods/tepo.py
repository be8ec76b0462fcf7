"""TEPO (arXiv 2602.02050): reward calls that lower the entropy of the agent's reasoning, gated by the outcome."""

from __future__ import annotations

from torch import Tensor

from agentropy.algorithms import rewards as reward_functions
from agentropy.algorithms.advantages import Credit, turn_advantages
from agentropy.algorithms.entropy import EntropyChange
from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig
from agentropy.algorithms.rewards import Rewards, ZeroCall
from agentropy.batch import Batch
from agentropy.methods.base import Method
from agentropy.methods.checks import positive, require
from agentropy.methods.common import chosen, group_advantage, truncated, void_turns


def tepo_sparse(
    *,
    zero_call: ZeroCall = "f1",
    include_call_tokens: bool = False,
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
        accept_estimates: let top-k estimates stand in for exact entropies.
        normalize_std, void_filter, mask_truncated, statistics: as in GRPO and SimpleTIR.
    """

    def reward(batch: Batch, change: EntropyChange) -> Rewards:
        return reward_functions.tepo_sparse(batch, change.reducing, zero_call)

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
    include_call_tokens: bool = False,
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
        credit: "turn" gives a token its turn's advantage, "return" the sum of its own and the later turns'.
        include_call_tokens, accept_estimates: as in `tepo_sparse`.
        normalize_std, void_filter, mask_truncated, statistics: as in GRPO and SimpleTIR.
    """
    require("alpha", alpha, positive(alpha, or_zero=True), "0 or above")

    def reward(batch: Batch, change: EntropyChange) -> Rewards:
        return reward_functions.tepo_dense(batch, change.reducing, alpha)

    def advantage(batch: Batch, rewards: Rewards, members: Tensor) -> Tensor:
        return turn_advantages(batch, rewards.turn, members, credit, normalize_std)

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
