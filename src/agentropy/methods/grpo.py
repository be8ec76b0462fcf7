"""GRPO (arXiv 2402.03300), the base of all methods; given tools it is the "TIR" baseline."""

from __future__ import annotations

from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig
from agentropy.methods.base import Method
from agentropy.methods.common import chosen, discriminability, group_advantage, outcome_reward, truncated


def grpo(
    *,
    normalize_std: bool = True,
    mask_truncated: bool = False,
    discriminability_filter: bool = False,
    statistics: Population = "all",
    loss: LossConfig = LossConfig(),
) -> Method:
    """Outcome reward, normalised in its group, for every model token; clipped loss.

    Args:
        normalize_std: False subtracts the group mean only (Dr. GRPO).
        mask_truncated: leave trajectories that a length limit cut off out of the loss (DAPO).
        discriminability_filter: remove groups whose rewards are all alike, for dynamic sampling to replace (DAPO).
        statistics: who counts in group statistics, "all" or only what the filters left ("survivors").
    """
    return Method(
        name="grpo",
        filters=chosen((mask_truncated, truncated), (discriminability_filter, discriminability(statistics))),
        reward=outcome_reward,
        advantage=group_advantage(normalize_std),
        statistics=statistics,
        loss=loss,
    )
