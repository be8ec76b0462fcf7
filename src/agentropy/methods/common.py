"""Parts that several methods share."""

from __future__ import annotations

from torch import Tensor

from agentropy.algorithms import filters
from agentropy.algorithms.advantages import trajectory_advantages
from agentropy.algorithms.entropy import EntropyChange
from agentropy.algorithms.filters import Population, Selection
from agentropy.algorithms.rewards import Rewards, outcome
from agentropy.batch import Batch
from agentropy.methods.base import AdvantageFunction, Filter


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


def group_advantage(normalize_std: bool) -> AdvantageFunction:
    """GRPO: the group-normalised trajectory reward for every token."""

    def advantage(batch: Batch, rewards: Rewards, members: Tensor) -> Tensor:
        return trajectory_advantages(batch, rewards.trajectory, members, normalize_std)

    return advantage


def chosen(*parts: tuple[bool, Filter]) -> tuple[Filter, ...]:
    """The filters that are switched on, in order."""
    return tuple(part for on, part in parts if on)
