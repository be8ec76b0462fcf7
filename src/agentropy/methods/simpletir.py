"""SimpleTIR (arXiv 2509.02479): GRPO without trajectories that hold a void turn."""

from __future__ import annotations

from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig
from agentropy.methods.base import Method
from agentropy.methods.common import chosen, discriminability, group_advantage, outcome_reward, truncated, void_turns


def simpletir(
    *,
    void_filter: bool = True,
    statistics: Population = "all",
    normalize_std: bool = True,
    mask_truncated: bool = False,
    discriminability_filter: bool = False,
    loss: LossConfig = LossConfig(),
) -> Method:
    """Trajectories with a turn that holds neither a complete call nor an answer are left out of the loss.

    Args:
        void_filter: False is plain GRPO.
        statistics: "all" lets removed trajectories count in the group's mean and deviation, as the released code does;
            "survivors" leaves them out of those too.
        normalize_std, mask_truncated, discriminability_filter: as in GRPO.
    """
    return Method(
        name="simpletir",
        filters=chosen(
            (void_filter, void_turns),
            (mask_truncated, truncated),
            (discriminability_filter, discriminability(statistics)),
        ),
        reward=outcome_reward,
        advantage=group_advantage(normalize_std),
        statistics=statistics,
        loss=loss,
    )
