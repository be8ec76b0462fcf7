"""A method is a composition: rollout, filters, reward, advantage, bonus, loss. Two seams meet the engine.

`Method.shape(batch)` runs before the update, over the whole batch: which trajectories are learned from, what they
earn, the advantage of every token. `Method.compute_loss(inputs)` runs inside it, a micro-batch at a time, and sees the
current policy's log-probabilities and entropies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from agentropy.algorithms.branching import count_once
from agentropy.algorithms.entropy import EntropyChange, entropy_change
from agentropy.algorithms.filters import Population, Selection, select_found
from agentropy.algorithms.losses import LossConfig, LossInputs, LossStats, policy_loss, token_weights
from agentropy.algorithms.rewards import Rewards
from agentropy.batch import Batch
from agentropy.errors import UserError
from agentropy.methods.metrics import shape_metrics

CountShared = Literal["each", "once"]


class RolloutSpec(Protocol):
    """How trajectories of a group are sampled where it is not independently from the prompt (ARPO, AEPO)."""

    @property
    def name(self) -> str: ...


Filter = Callable[[Batch, Selection, Rewards], Selection]
"""`(batch, selection, rewards) -> a smaller selection`."""
RewardFunction = Callable[[Batch, EntropyChange], Rewards]
AdvantageFunction = Callable[[Batch, Rewards, Tensor], Tensor]
"""`(batch, rewards, members[N]) -> [T]`; `members` are the trajectories that count in group statistics."""
BonusFunction = Callable[[Batch, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(batch, advantages[T], kept[N]) -> (shaped advantages[T], bonus[T] bool, True where it applied)`."""
MarkFunction = Callable[[Batch, Tensor], Tensor]
"""`(batch, kept[N]) -> [T]` bool, True for tokens that the method's loss treats apart."""
LossFunction = Callable[[LossInputs, LossConfig], tuple[Tensor, LossStats]]


@dataclass(frozen=True)
class Shaped:
    """What a batch teaches. Tensors are on the batch's device; none carries gradient.

    advantages[T]        float32, 0 outside the model tokens of kept trajectories
    kept[N]              bool, True for trajectories that are learned from
    why                  for each trajectory None or the filter's reason (`agentropy.algorithms.filters.REASONS`)
    reward[N]            float32, the method's reward; NaN where the trajectory could not be graded
    turn_reward[U]       float32, likewise for each turn
    entropy_change[C]    float32, dH of each executed call in nats; NaN where undefined
    entropy_reducing[C]  bool, True iff dH < 0
    bonus[T]             bool, True where the entropy-guided bonus applied
    loss_mask[T]         bool, True for the model tokens of kept trajectories (with `count_shared="once"`, tokens that
                         several of them share only in the first)
    marked[T]            bool, True where the method's loss treats a token apart; None where it treats all alike
    metrics              finite numbers under the names of docs/algorithms.md
    """

    advantages: Tensor
    kept: Tensor
    why: tuple[str | None, ...]
    reward: Tensor
    turn_reward: Tensor
    entropy_change: Tensor
    entropy_reducing: Tensor
    bonus: Tensor
    loss_mask: Tensor
    metrics: dict[str, float]
    marked: Tensor | None = None

    def to(self, device: torch.device | str) -> Shaped:
        """The same on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Method:
    """One algorithm with its options. Built by the functions of `agentropy.methods`; every part can be swapped."""

    name: str
    reward: RewardFunction
    advantage: AdvantageFunction
    filters: tuple[Filter, ...] = ()
    bonus: BonusFunction | None = None
    statistics: Population = "all"
    """Who counts in group statistics: all but lost trajectories, or only those that every filter left."""
    loss: LossConfig = field(default_factory=LossConfig)
    loss_function: LossFunction = policy_loss
    mark: MarkFunction | None = None
    count_shared: CountShared = "each"
    """Tokens that several leaves of a tree share count in the loss of each of them, or once."""
    rollout: RolloutSpec | None = None
    """None: independent samples from the prompt."""
    needs_entropies: bool = False
    """True where the result depends on entropies; a batch without them is then refused."""
    accept_estimates: bool = False
    """True lets top-k estimates stand in for exact entropies where the method needs them."""
    include_call_tokens: bool = False
    """Segment entropy averages over call tokens too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the method was built with, for the run's record."""

    def shape(self, batch: Batch) -> Shaped:
        """Filters, rewards and advantages of a whole batch; all of them 0 where nothing is left.

        Raises: UserError where the method needs entropies that the batch lacks, or only has estimates of.
        """
        self._check_inputs(batch)
        with torch.no_grad():
            change = entropy_change(batch, self.include_call_tokens)
            rewards = self.reward(batch, change)
            selection = select_found(batch)
            for narrow in self.filters:
                selection = narrow(batch, selection, rewards)
            kept = selection.kept
            loss_mask = batch.is_model & kept[batch.trajectory_of]
            if self.count_shared == "once":
                loss_mask = count_once(batch, loss_mask)
            plain = self.advantage(batch, rewards, selection.population(self.statistics))
            plain = torch.where(loss_mask, plain, torch.zeros_like(plain))
            advantages, bonus = plain, torch.zeros_like(loss_mask)
            if self.bonus is not None:
                advantages, bonus = self.bonus(batch, plain, kept)
            return Shaped(
                advantages=advantages.float(),
                kept=kept,
                why=selection.why,
                reward=rewards.trajectory.float(),
                turn_reward=rewards.turn.float(),
                entropy_change=change.change.float(),
                entropy_reducing=change.reducing,
                bonus=bonus,
                loss_mask=loss_mask,
                marked=None if self.mark is None else self.mark(batch, kept),
                metrics=shape_metrics(batch, selection, rewards, change, plain, advantages, bonus),
            )

    def token_weights(self, batch: Batch, loss_mask: Tensor) -> Tensor:
        """Loss weights `[T]` of one optimiser batch; `loss_mask[T]` is True for the tokens its step learns from."""
        return token_weights(loss_mask, batch.trajectory_of, batch.n_trajectories, self.loss)

    def compute_loss(self, inputs: LossInputs) -> tuple[Tensor, LossStats]:
        """The loss of a micro-batch, a plain sum: micro-batches of one optimiser step add up to its loss."""
        return self.loss_function(inputs, self.loss)

    def _check_inputs(self, batch: Batch) -> None:
        if not self.needs_entropies:
            return
        if not batch.has_entropies:
            raise UserError(
                f"method {self.name} needs the entropy of every model token, and some trajectories have none: "
                "record 'entropies' with the ids, or choose a method or option that does without (grpo, bonus=false)"
            )
        if not batch.entropies_exact and not self.accept_estimates:
            raise UserError(
                f"method {self.name} needs exact entropies, and some are top-k estimates: "
                "record full-vocabulary entropies, or set accept_estimates=true"
            )
