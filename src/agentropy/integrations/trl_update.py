"""Parts of TRL's update: the old policy's numbers, the weights of the loss, and what is logged of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentropy.algorithms.losses import LossStats
from agentropy.integrations.batches import padded, with_scores
from agentropy.integrations.trl_batch import Made
from agentropy.methods.base import Method
from agentropy.training.update import learned_tokens
from agentropy.trajectory import Trajectory


def rescored(trainer: Any, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with log-probabilities and exact entropies from a forward pass as the update will do it: where
    the sampler gives no entropies (vLLM), or computes in another precision."""
    longest = max(len(t.ids) for t in trajectories)
    ids = torch.full((len(trajectories), longest), trainer._tokenizer.pad_token_id)
    there = torch.zeros_like(ids)
    for i, t in enumerate(trajectories):
        ids[i, : len(t.ids)] = torch.tensor(t.ids)
        there[i, : len(t.ids)] = 1
    device = trainer.accelerator.device
    with torch.no_grad():
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            ids.to(device),
            there.to(device),
            longest - 1,
            batch_size=trainer.args.per_device_train_batch_size,
            compute_entropy=True,
        )
    return [
        with_scores(t, [0.0, *p[: len(t.ids) - 1]], [0.0, *h[: len(t.ids) - 1]])
        for t, p, h in zip(trajectories, logps.float().tolist(), entropies.float().tolist(), strict=True)
    ]


def weigh(accelerator: Any, method: Method, made: Made, parts: Sequence[dict[str, Any]], size: int) -> None:
    """Add to micro-batches the weight of every token's loss, over the whole update that it belongs to, in all
    processes, and whether that update has anything to learn from.

    Args:
        parts: the micro-batches of this process in order, with the indices of their trajectories as `row`.
        size: micro-batches of an update.
    """
    learned = learned_tokens(method, made.shaped)
    for start in range(0, len(parts), size):
        window = parts[start : start + size]
        rows = accelerator.gather(torch.cat([part["row"] for part in window])).cpu()
        mask = made.shaped.loss_mask & torch.isin(made.batch.trajectory_of, rows)
        # Gradients are averaged over processes, where the loss is a sum.
        weights = method.token_weights(made.batch, mask) * accelerator.num_processes
        for part in window:
            width = int(part["completion_ids"].shape[1])
            own = padded(made.batch, weights, width, rows=part["row"].cpu(), starts=made.starts)
            part["weights"] = own.to(accelerator.device)
            part["learned"] = (mask & learned).any()


def update_metrics(accelerator: Any, stats: LossStats, gaps: Sequence[Tensor]) -> dict[str, float]:
    """What the loss says of an update, over all processes.

    Args:
        stats: sums over the micro-batches of this process.
        gaps: how far the first update's log-probabilities are from the sampler's; NaN where it gave none.
    """
    fields = [f.name for f in dataclasses.fields(LossStats)]
    own = torch.stack([getattr(stats, f).float() for f in fields])
    sums = dict(zip(fields, accelerator.reduce(own, reduction="sum"), strict=True))
    highest = accelerator.gather(stats.ratio_max.float().reshape(1)).max()
    metrics = LossStats(**sums | {"ratio_max": highest}).metrics()
    gap = torch.cat([*gaps, own.new_zeros(0)])
    gap = gap[~gap.isnan()]
    total, n = accelerator.reduce(torch.stack([gap.sum(), own.new_tensor(gap.numel())]), reduction="sum").tolist()
    largest = accelerator.gather(gap.max().reshape(1) if gap.numel() else own.new_zeros(1)).max()
    if n:
        metrics |= {"optim/sampler_gap_mean": total / n, "optim/sampler_gap_max": float(largest)}
    return metrics
