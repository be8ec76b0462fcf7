"""Parts that several methods share."""

from __future__ import annotations

import math

from torch import Tensor

from agentropy.algorithms import filters
from agentropy.algorithms.advantages import trajectory_advantages
from agentropy.algorithms.branching import Branching, Estimation, hard_advantages
from agentropy.algorithms.entropy import EntropyChange
from agentropy.algorithms.filters import Population, Selection
from agentropy.algorithms.rewards import RewardForm, Rewards, outcome, with_format
from agentropy.batch import Batch
from agentropy.methods.base import AdvantageFunction, CountShared, Filter, RewardFunction
from agentropy.methods.checks import positive, require


def outcome_reward(batch: Batch, change: EntropyChange) -> Rewards:
    """The trajectory's score, whatever its entropies."""
    return outcome(batch)


def execution_validity(batch: Batch, selection: Selection, rewards: Rewards) -> Selection:
    """TAO-RL, criterion 1."""
    return filters.execution_validity(batch, selection)


def void_turns(batch: Batch, selection: Selection, rewards: Rewards) -> Selection:
    """SimpleTIR's filter."""
    return filters.void_turns(batch, selection)


def truncated(batch: Batch, selection: Selection, rewards: Rewards) -> Selection:
    """DAPO's overlong filter."""
    return filters.truncated(batch, selection)


def discriminability(population: Population) -> Filter:
    """TAO-RL, criterion 2, on the method's trajectory rewards; also DAPO's dynamic-sampling test."""

    def narrow(batch: Batch, selection: Selection, rewards: Rewards) -> Selection:
        return filters.discriminability(batch, selection, rewards.trajectory, population)

    return narrow


def reward_in(form: RewardForm) -> RewardFunction:
    """The score, or the rule of ARPO's and AEPO's authors."""
    if form == "outcome":
        return outcome_reward
    return lambda batch, change: with_format(batch)


def tree_advantage(normalize_std: bool, estimation: Estimation) -> AdvantageFunction:
    """GRPO over the leaves of a tree; `hard` gives shared tokens the mean advantage of their leaves (ARPO)."""
    soft = group_advantage(normalize_std)

    def hard(batch: Batch, rewards: Rewards, members: Tensor) -> Tensor:
        return hard_advantages(batch, soft(batch, rewards, members), members)

    return hard if estimation == "hard" else soft


def check_branching(b: Branching) -> None:
    """Raise UserError for an option of a branching rollout that is out of range."""
    require("roots", b.roots, b.roots is None or b.roots >= 1, "1 or above, or none")
    require("beam", b.beam, b.beam >= 1, "1 (no branches) or above")
    require("window", b.window, b.window >= 1, "1 or above")
    require("base", b.base, 0 <= b.base <= 1, "between 0 and 1")
    require("beta", b.beta, math.isfinite(b.beta), "a finite number")
    require("tau", b.tau, 0 <= b.tau < 1, "0 or above, and below 1")
    require("fork_penalty", b.fork_penalty, positive(b.fork_penalty, or_zero=True), "0 or above")
    require("split_beta", b.split_beta, b.split_beta is None or math.isfinite(b.split_beta), "a finite number")


def check_shared(count_shared: CountShared, estimation: Estimation) -> None:
    """Raise UserError where shared tokens would count once, but with the advantage of one leaf only."""
    holds = count_shared == "each" or estimation == "hard"
    require("count_shared", count_shared, holds, "'each' unless estimation=hard: one leaf's advantage is not the mean")


def group_advantage(normalize_std: bool) -> AdvantageFunction:
    """GRPO: the group-normalised trajectory reward for every token."""

    def advantage(batch: Batch, rewards: Rewards, members: Tensor) -> Tensor:
        return trajectory_advantages(batch, rewards.trajectory, members, normalize_std)

    return advantage


def chosen(*parts: tuple[bool, Filter]) -> tuple[Filter, ...]:
    """The filters that are switched on, in order."""
    return tuple(part for on, part in parts if on)
