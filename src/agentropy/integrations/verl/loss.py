"""The method's loss in verl's actors: what `set_loss_fn` gets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from agentropy.algorithms.losses import LossInputs, LossStats
from agentropy.integrations.verl.rows import PREFIX
from agentropy.methods import make_method
from agentropy.methods.base import Method

WEIGHTS, MASK, MARKED = PREFIX + "weights", PREFIX + "loss_mask", PREFIX + "marked"
"""Columns `[response]` that the trainer writes: weights of the loss, 1 where a token is learned from, 1 where the
method's loss treats it apart."""


@functools.lru_cache(maxsize=4)
def _method(name: str, options: tuple[tuple[str, Any], ...]) -> Method:
    return make_method(name, **dict(options))


class ActorLoss:
    """`loss(model_output, data, dp_group)` as verl's engines call it. Travels to the actors, so it holds names only.

    The sum over micro-batches, averaged over the data-parallel ranks as verl averages gradients, is the loss of the
    mini-batch: the weights hold the denominator of the whole mini-batch, and are multiplied by the ranks here.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.options = tuple(sorted(options.items()))

    def __call__(
        self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch, a scalar with gradient, and metrics that add up over micro-batches."""
        method = _method(self.name, self.options)
        logp = no_padding_2_padding(model_output["log_probs"], data)
        entropy = model_output.get("entropy")
        fields = ["old_log_probs", "advantages", WEIGHTS, MASK]
        fields += [f for f in (MARKED, "ref_log_prob", "rollout_is_weights") if f in data]
        columns = data.select(*fields).to_padded_tensor()
        mask = columns[MASK] > 0
        advantages = columns["advantages"]
        if "rollout_is_weights" in fields:  # the loss is linear in the advantage's size, so this weighs its tokens
            advantages = advantages * columns["rollout_is_weights"]
        inputs = LossInputs(
            logp=logp[mask].float(),
            old_logp=columns["old_log_probs"][mask],
            advantages=advantages[mask],
            weights=columns[WEIGHTS][mask],
            mask=torch.ones_like(logp[mask], dtype=torch.bool),
            entropy=None if entropy is None else no_padding_2_padding(entropy, data)[mask].float(),
            ref_logp=columns["ref_log_prob"][mask] if "ref_log_prob" in fields else None,
            marked=columns[MARKED][mask] > 0 if MARKED in fields else None,
        )
        loss, stats = method.compute_loss(inputs)
        ranks = int(data["dp_size"])
        loss = loss * ranks
        if not loss.requires_grad:  # no token to learn from: the engine still wants a graph, with a gradient of 0
            loss = loss + 0.0 * logp.sum()
        return loss, _metrics(loss, stats, ranks, float(data["batch_num_tokens"] or 0))


def _metrics(loss: Tensor, stats: LossStats, ranks: int, tokens: float) -> dict[str, Any]:
    """Shares of the loss tokens of the whole mini-batch, which verl adds up over micro-batches (and averages over
    ranks, hence the factor)."""

    def added(value: float) -> Any:
        return Metric(AggregationType.SUM, value * ranks / max(tokens, 1.0))

    own = stats.metrics()
    n = own["optim/loss_tokens"]
    shares = {k: added(v * n) for k, v in own.items() if k not in ("optim/ratio_max", "optim/loss_tokens")}
    return shares | {
        "optim/loss": Metric(AggregationType.SUM, float(loss.detach())),
        "optim/loss_tokens": Metric(AggregationType.SUM, n * ranks),
        "optim/ratio_max": Metric(AggregationType.MAX, own["optim/ratio_max"]),
    }
