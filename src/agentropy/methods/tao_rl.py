"""TAO-RL (arXiv 2606.03762): learn from valid, discriminative trajectories; weigh uncertain tokens after a success."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentropy.algorithms.advantages import Form, entropy_bonus, top_share
from agentropy.algorithms.entropy import After, Over, normalised_entropy, post_tool_mask
from agentropy.algorithms.filters import Population
from agentropy.algorithms.losses import LossConfig
from agentropy.batch import Batch
from agentropy.methods import common
from agentropy.methods.base import BonusFunction, Method
from agentropy.methods.checks import positive, require, share

BonusOn = Literal["post-tool", "all"]


def tao_rl(
    *,
    alpha: float = 0.01,
    q_h: float = 0.2,
    form: Form = "multiplicative",
    kappa: float = 2.0,
    over: Over = "trajectory",
    window: int | None = None,
    after: After = "ok",
    bonus: bool = True,
    bonus_on: BonusOn = "post-tool",
    execution_filter: bool = True,
    discriminability_filter: bool = True,
    discriminability: Population = "survivors",
    void_filter: bool = False,
    mask_truncated: bool = False,
    normalize_std: bool = True,
    accept_estimates: bool = False,
    loss: LossConfig = LossConfig(),
) -> Method:
    """Stage 1 selects O_valid, stage 2 shapes the advantages of its most uncertain post-tool tokens.

    Args:
        alpha: strength of the bonus. q_h: share of the candidate tokens, the most uncertain ones, that get it.
        form: "multiplicative" scales the advantage (paper), "additive" adds at most |A| / kappa.
        over: entropies are standardised over the tokens of the trajectory (paper) or of the batch (released code).
        window: only the first so many tokens of a post-tool turn are candidates; None takes the turn.
        after: "any" takes turns after failed calls too (released code).
        bonus_on: "all" makes every model token a candidate (released code's default).
        execution_filter: criterion 1, at least one call succeeded.
        discriminability_filter: criterion 2, the group's outcomes differ.
        discriminability: "survivors" tests what criterion 1 left and takes group statistics over what is kept; "all"
            does both over the whole group (released code).
        void_filter: also apply SimpleTIR's filter. mask_truncated, normalize_std: as in GRPO.
        accept_estimates: let top-k estimates stand in for exact entropies.
    """
    require("alpha", alpha, positive(alpha, or_zero=True), "0 or above")
    require("q_h", q_h, share(q_h), "above 0 and at most 1 (to switch the bonus off: bonus=false)")
    require("kappa", kappa, kappa >= 1, "1 or above, or the bonus could flip an advantage's sign")
    require("window", window, window is None or window > 0, "1 or above, or none")
    shaping = _bonus(alpha, q_h, form, kappa, over, window, after, bonus_on)
    return Method(
        name="tao-rl",
        filters=common.chosen(
            (execution_filter, common.execution_validity),
            (void_filter, common.void_turns),
            (mask_truncated, common.truncated),
            (discriminability_filter, common.discriminability(discriminability)),
        ),
        reward=common.outcome_reward,
        advantage=common.group_advantage(normalize_std),
        statistics=discriminability,
        bonus=shaping if bonus else None,
        needs_entropies=bonus,
        accept_estimates=accept_estimates,
        loss=loss,
    )


def _bonus(
    alpha: float, q_h: float, form: Form, kappa: float, over: Over, window: int | None, after: After, on: BonusOn
) -> BonusFunction:
    def shape(batch: Batch, advantages: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        learned = batch.is_model & kept[batch.trajectory_of]
        candidates = learned if on == "all" else learned & post_tool_mask(batch, window, after)
        selected = top_share(batch.entropies, candidates, q_h)
        z = normalised_entropy(batch, kept, over)
        return entropy_bonus(advantages, z, selected, alpha, form, kappa), selected

    return shape
