"""verl's synchronous trainer with our methods: registered as `agentropy`.

verl keeps what its users know: data loading, resource pools, engines, weight sync, checkpoints, validation, logging.
From us come trajectories (`worker.py`), which questions a step learns from (`groups.py`), the advantages
(`Method.shape`) and the loss (`Method.compute_loss`, in `loss.py`). verl's own advantage estimator is never called.

Private parts of verl that this file overrides: `_build_replay_buffer`, `_setup`, `_compute_advantage`,
`_update_actor`. They change from one minor version to the next, so the extra pins it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from agentropy.batch import Batch, make_batch
from agentropy.evaluation.summary import rollout_metrics
from agentropy.integrations.batches import completion_starts, flat, padded
from agentropy.integrations.verl.loss import MARKED, MASK, WEIGHTS, ActorLoss
from agentropy.integrations.verl.options import (
    TRAINER,
    check_config,
    method_arguments,
    method_of,
    read_options,
)
from agentropy.integrations.verl.rows import FIELDS, PREFIX, TOKEN_COLUMNS, read_trajectories, unbound
from agentropy.methods.base import Method, Shaped
from agentropy.training.update import learned_tokens
from agentropy.trajectory import Trajectory


@dataclass(frozen=True)
class Taught:
    """What a batch teaches, as columns of the response, a row each of `keys` (those that verl padded with are empty).

    `metrics` under the names of docs/metrics.md; `learns` is False where no token gives a gradient.
    """

    columns: dict[str, Tensor]
    metrics: dict[str, float]
    learns: bool
    batch: Batch
    shaped: Shaped


def optimiser_batches(rows: int, ranks: int, size: int) -> list[list[int]]:
    """The rows of each update of verl's actors, which do not shuffle: every rank gets a run of the rows and cuts it
    into mini-batches, which are one update together."""
    own, part = rows // ranks, size // ranks
    return [
        [rank * own + start + k for rank in range(ranks) for k in range(min(part, own - start))]
        for start in range(0, own, part)
    ]


def teach(
    method: Method,
    trajectories: Sequence[Trajectory],
    places: Sequence[int],
    lengths: Sequence[int],
    updates: Sequence[Sequence[int]],
    allowed: Tensor | None = None,
) -> Taught:
    """Shape a batch and lay it out in verl's columns.

    Args:
        places: the row of each trajectory.
        lengths: of the response of every row, padding rows included.
        updates: the rows of each optimiser update.
        allowed: `[rows, width]`, 0 where verl's rejection sampling bars a token.
    """
    batch = make_batch(trajectories)
    shaped = method.shape(batch)
    starts, width = completion_starts(batch), max(lengths)
    where = torch.tensor(places)

    def column(values: Tensor) -> Tensor:
        out = torch.zeros((len(lengths), width), dtype=torch.float32)
        out[where] = padded(batch, values.float(), width, starts=starts)
        return out

    mask = column(shaped.loss_mask)
    if allowed is not None:
        mask = mask * allowed
    loss_mask = shaped.loss_mask.clone()
    if allowed is not None:
        loss_mask &= flat(batch, allowed[where], starts=starts) > 0
    weights = torch.zeros((len(lengths), width))
    row_of = where[batch.trajectory_of]
    for rows in updates:
        own = loss_mask & torch.isin(row_of, torch.tensor(rows))
        weights += column(method.token_weights(batch, own))
    columns = {
        "advantages": column(shaped.advantages),
        WEIGHTS: weights,
        MASK: mask,
        "loss_mask": mask.long(),
    }
    columns["returns"] = columns["advantages"]
    if shaped.marked is not None:
        columns[MARKED] = column(shaped.marked)
    learns = bool((learned_tokens(method, shaped) & loss_mask).any())
    metrics = {k: v for k, v in (rollout_metrics(list(trajectories)) | shaped.metrics).items() if v == v}
    return Taught(columns, metrics, learns, batch, shaped)


@register_trainer(TRAINER)
class AgentropyTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer with a method of ours; its options are the config group `agentropy`.

    Raises: UserError for an option that is wrong and for a setting of verl that contradicts the method.
    """

    def __init__(self, config: Any) -> None:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self._options = read_options(plain)
        self._arguments = method_arguments(self._options, plain)
        self._method = method_of(self._options, plain)
        check_config(plain, self._method)
        with open_dict(config):  # questions are replaced one by one, so verl has to load them one by one
            config.algorithm.filter_groups.enable = True
        self._learns = True
        super().__init__(config)

    @property
    def trainer_mode(self) -> str:
        """`sync`: by the name that the trainer is registered under, verl would take it for an asynchronous one."""
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, name: str) -> None:
        assert name == TRAINER

    def _build_replay_buffer(self) -> Any:
        # This module is imported by whoever first imports verl's trainers; that may be the module of the buffer.
        from agentropy.integrations.verl.groups import GroupBuffer

        sampler = self.config.trainer.v1.sampler
        return GroupBuffer(
            method=self._method,
            rewards=self._options.reward,
            max_oversample=self._options.max_oversample,
            trainer_mode="sync",
            trainer_config=self.config.trainer.v1.get("sync", {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
        )

    def _setup(self) -> None:
        super()._setup()
        self.actor_rollout_wg.set_loss_fn(ActorLoss(self._options.method, self._arguments))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Filters, rewards, advantages from raw scores and the old policy's entropies, into the TransferQueue."""
        fields = [*FIELDS, "response_mask", "old_log_probs", "entropy", "rollout_log_probs"]
        fields += [PREFIX + name for name in TOKEN_COLUMNS]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        lengths = [len(r) for r in unbound(data["responses"])]
        scores = ("old_log_probs", "entropy")
        trajectories = read_trajectories(data, batch.keys, real, self._options.reward, scores)
        extra, allowed = self._correct(data, metrics)
        taught = teach(self._method, trajectories, real, lengths, self._updates(len(lengths)), allowed)
        self._learns = taught.learns
        metrics.update(taught.metrics)
        columns = {name: _jagged(values, lengths) for name, values in (taught.columns | extra).items()}
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(columns, batch_size=len(lengths))
        )

    def _updates(self, rows: int) -> list[list[int]]:
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        return optimiser_batches(rows, ranks, actor.ppo_mini_batch_size * n)

    def _correct(self, data: Any, metrics: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor | None]:
        """verl's rollout correction as it is configured: importance weights, tokens that are left, metrics."""
        config = self.config.algorithm.get("rollout_correction", None)
        if config is None:
            return {}, None
        plain = data.select("old_log_probs", "rollout_log_probs", "response_mask").to_padded_tensor()
        proto, found = compute_rollout_correction_and_add_to_batch(DataProto(batch=plain), config)
        metrics.update(found)
        weights = {"rollout_is_weights": proto.batch["rollout_is_weights"]} if config.get("rollout_is") else {}
        allowed = None
        if config.get("rollout_rs"):
            allowed = (proto.batch["response_mask"] > 0).float()
        return weights, allowed

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """As verl's; a step without a token to learn from changes nothing (a momentum would)."""
        metrics["optim/skipped_empty"] = float(not self._learns)
        return super()._update_actor(batch, metrics) if self._learns else batch


def _jagged(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[rows, width]` as rows of their own lengths."""
    rows = [values[i, :n] for i, n in enumerate(lengths)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
