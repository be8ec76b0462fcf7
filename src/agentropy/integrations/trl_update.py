"""Parts of TRL's update: the old policy's numbers, the weights of the loss, and what is logged of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentropy.algorithms.losses import LossStats
from agentropy.errors import UserError
from agentropy.integrations.batches import padded, with_scores
from agentropy.integrations.trl_batch import Made
from agentropy.integrations.trl_rollout import completion_of
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


def check_padding(trainer: Any) -> None:
    """TRL pads prompts on the left and leaves positions to the model. Raises UserError for a model to which that makes
    a difference, as with learned absolute positions: its updates would not fit what was sampled."""
    model, device = trainer.model, trainer.accelerator.device
    ids = torch.arange(8, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    pads = torch.full((1, 16), trainer._tokenizer.pad_token_id, device=device)
    shifted = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], 1)
    training = model.training
    model.eval()
    with torch.no_grad():
        score = trainer._get_per_token_logps_and_entropies
        plain, _, _ = score(model, ids, torch.ones_like(ids), 7)
        padded_left, _, _ = score(model, torch.cat([pads, ids], 1), shifted, 7)
    model.train(training)
    exact = model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"
    if float((plain - padded_left).abs().max()) > (1e-3 if exact else 0.2):
        raise UserError(
            f"{type(model).__name__} gives other log-probabilities where a prompt is padded on the left, as TRL pads "
            "it (learned absolute positions?): take a model with rotary positions, or use agentropy train"
        )


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


def correct_logs(trainer: Any, made: Made, mode: str) -> None:
    """What TRL guesses from the last token (was it cut?) or from its own advantages, as it really is."""
    batch, shaped = made.batch, made.shaped
    lengths = [sum(completion_of(item.trajectory)[1]) for item in made.items]
    whole = [n for n, cut in zip(lengths, batch.truncated.tolist(), strict=True) if not cut] or [0]
    logged = trainer._metrics[mode]
    logged["completions/clipped_ratio"][-1] = float(batch.truncated.float().mean())
    logged["completions/mean_terminated_length"][-1] = sum(whole) / len(whole)
    logged["completions/min_terminated_length"][-1] = float(min(whole))
    logged["completions/max_terminated_length"][-1] = float(max(whole))
    sums = torch.zeros(batch.n_trajectories).index_add_(0, batch.trajectory_of, shaped.advantages)
    counts = torch.zeros(batch.n_trajectories).index_add_(0, batch.trajectory_of, shaped.loss_mask.float())
    column = trainer._logs["advantages"]
    for _ in range(min(len(column), len(made.items))):
        column.pop()
    column.extend((sums / counts.clamp(min=1)).tolist())
