"""ARPO (arXiv 2507.19849): half of the budget starts at the prompt, the rest branches where a result surprised."""

from __future__ import annotations

from agentropy.algorithms.branching import Branching, Decision, Estimation, Timing
from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig
from agentropy.algorithms.rewards import RewardForm
from agentropy.methods import common
from agentropy.methods.base import CountShared, Method


def arpo(
    *,
    roots: int | None = None,
    beam: int = 2,
    window: int = 20,
    base: float = 0.5,
    beta: float = 0.2,
    tau: float = 0.5,
    decision: Decision = "threshold-draw",
    timing: Timing = "after",
    estimation: Estimation = "soft",
    count_shared: CountShared = "each",
    reward: RewardForm = "outcome",
    normalize_std: bool = True,
    void_filter: bool = False,
    mask_truncated: bool = False,
    statistics: Population = "all",
    loss: LossConfig = LossConfig(clip_high=0.2),
) -> Method:
    """Branching rollouts, outcome reward, GRPO over all leaves.

    Args:
        roots: trajectories of a question that start at the prompt; None takes half of the budget, rounded up.
        beam: branches that a fork makes out of one, the trunk included.
        window: entropies are means over the first so many tokens of a turn.
        base, beta: a state is forked with probability `clip(base + beta * d, 0, 1)`, d the rise of the normalised
            entropy since the first turn.
        tau: and only where that is above tau.
        decision: "threshold" forks wherever it is above tau (paper), "draw" whatever tau is (released code).
        timing: "before" compares the turn before the result (released code).
        estimation: "hard" gives shared tokens the mean advantage of their leaves.
        count_shared: "once" counts shared tokens in the loss of one leaf only; needs estimation="hard".
        reward: "authors" is the score, -1 for a broken format, 0.1 more for several tools in a right answer.
        normalize_std, void_filter, mask_truncated, statistics: as in GRPO and SimpleTIR.
    """
    tree = Branching("arpo", roots, beam, window, base, beta, tau, decision, timing)
    common.check_branching(tree)
    common.check_shared(count_shared, estimation)
    return Method(
        name="arpo",
        rollout=tree,
        filters=common.chosen((void_filter, common.void_turns), (mask_truncated, common.truncated)),
        reward=common.reward_in(reward),
        advantage=common.tree_advantage(normalize_std, estimation),
        statistics=statistics,
        count_shared=count_shared,
        loss=loss,
    )
