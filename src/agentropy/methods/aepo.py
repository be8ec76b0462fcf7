"""AEPO (arXiv 2510.14545): ARPO with a budget split by a pilot, a penalty on forks in a row, and gradients that the
clip bounds instead of removing."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentropy.algorithms.advantages import top_share
from agentropy.algorithms.branching import Branching, Decision, Estimation, Split, Timing
from agentropy.algorithms.entropy import normalised_entropy
from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig, LossInputs, LossStats, policy_loss
from agentropy.algorithms.rewards import RewardForm
from agentropy.batch import Batch
from agentropy.methods import common
from agentropy.methods.base import BonusFunction, CountShared, LossFunction, MarkFunction, Method
from agentropy.methods.checks import positive, require, share

Tokens = Literal["all", "high-entropy"]
"""Which tokens keep a gradient where the clip would take it: all (released code), or the uncertain ones (paper)."""


def aepo(
    *,
    pilot: bool = True,
    split_beta: float = 0.5,
    split: Split = "round",
    roots: int | None = None,
    beam: int = 2,
    window: int = 20,
    base: float = 0.5,
    beta: float = 0.2,
    tau: float = 0.5,
    decision: Decision = "threshold-draw",
    timing: Timing = "after",
    fork_penalty: float = 0.05,
    clip_gradient: bool = True,
    tokens: Tokens = "all",
    q_h: float = 0.2,
    entropy_advantage: bool = True,
    a: float = 0.2,
    estimation: Estimation = "soft",
    count_shared: CountShared = "each",
    reward: RewardForm = "outcome",
    normalize_std: bool = True,
    void_filter: bool = False,
    mask_truncated: bool = False,
    statistics: Population = "all",
    accept_estimates: bool = False,
    loss: LossConfig = LossConfig(clip_high=0.2),
) -> Method:
    """Branching rollouts with entropy pre-monitoring; entropy-aware advantage; clipped gradients kept.

    Args:
        pilot: a first trajectory decides how much of the budget starts at the prompt,
            `round(G * sigmoid(split_beta * (H_root - H_tool)))`; False takes `roots`, as the released scripts do.
        split: "released" is the authors' floor + 1.
        fork_penalty: the probability of a fork is multiplied by `max(0, 1 - fork_penalty * l)`, l the forks in a row on
            the path; 0 switches it off.
        clip_gradient: tokens with A > 0 that are clipped from above keep a bounded gradient.
        tokens: all of them, or the share `q_h` of the batch's tokens with the highest entropy when they were sampled.
        entropy_advantage: `A' = A * (1 + a * z)`, z the entropy standardised over the batch's tokens.
        roots, beam, window, base, beta, tau, decision, timing, estimation, count_shared, reward: as in ARPO.
        normalize_std, void_filter, mask_truncated, statistics: as in GRPO and SimpleTIR.
        accept_estimates: let top-k estimates stand in for exact entropies.
    """
    tree = Branching(
        "aepo",
        roots,
        beam,
        window,
        base,
        beta,
        tau,
        decision,
        timing,
        fork_penalty,
        split_beta if pilot else None,
        split,
    )
    common.check_branching(tree)
    common.check_shared(count_shared, estimation)
    require("a", a, positive(a, or_zero=True), "0 or above")
    require("q_h", q_h, share(q_h), "above 0 and at most 1")
    marks = clip_gradient and tokens == "high-entropy"
    return Method(
        name="aepo",
        rollout=tree,
        filters=common.chosen((void_filter, common.void_turns), (mask_truncated, common.truncated)),
        reward=common.reward_in(reward),
        advantage=common.tree_advantage(normalize_std, estimation),
        statistics=statistics,
        bonus=_entropy_advantage(a) if entropy_advantage else None,
        mark=_high_entropy(q_h) if marks else None,
        loss_function=_loss(tokens) if clip_gradient else policy_loss,
        needs_entropies=entropy_advantage or marks,
        accept_estimates=accept_estimates,
        count_shared=count_shared,
        loss=loss,
    )


def _entropy_advantage(a: float) -> BonusFunction:
    def shape(batch: Batch, advantages: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        z = normalised_entropy(batch, kept, "batch")
        return advantages * (1.0 + a * z), batch.is_model & kept[batch.trajectory_of]

    return shape


def _high_entropy(q_h: float) -> MarkFunction:
    def mark(batch: Batch, kept: Tensor) -> Tensor:
        return top_share(batch.entropies, batch.is_model & kept[batch.trajectory_of], q_h)

    return mark


def _loss(tokens: Tokens) -> LossFunction:
    def loss(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, LossStats]:
        held = inputs.mask if tokens == "all" else inputs.marked
        if held is None:
            raise ValueError("tokens='high-entropy' needs `marked`, which Method.shape gives")
        return policy_loss(inputs, config, held)

    return loss
