"""From advantages to weights: the optimiser's part of a step.

Groups are dealt to `minibatches` optimiser updates; each update is computed in micro-batches of at most so many tokens.
The weights of the loss are fixed over the whole update, so micro-batches are plain sums and only cost memory or time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentropy.algorithms.losses import LossInputs, LossStats
from agentropy.batch import PROMPT, Batch
from agentropy.errors import UserError
from agentropy.methods.base import Method, Shaped
from agentropy.policies.scoring import score
from agentropy.seeds import derive
from agentropy.training.optimizer import MasterAdamW


@dataclass(frozen=True)
class UpdateOptions:
    """How a batch becomes optimiser updates. `temperature` is the sampler's: ratios start at 1 only if both agree."""

    minibatches: int
    epochs: int
    micro_batch_tokens: int
    grad_clip: float
    temperature: float


def deal(batch: Batch, parts: int, seed: int) -> list[Tensor]:
    """Deal the groups of a batch, shuffled by `seed`, to at most `parts` sets of trajectories of nearly equal size."""
    groups = torch.randperm(batch.n_groups, generator=torch.Generator().manual_seed(seed))
    return [torch.isin(batch.group_of, chunk).nonzero().squeeze(-1) for chunk in groups.chunk(parts)]


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices by length, in runs whose rows times longest row stay within `budget` tokens (always at least one)."""
    run: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if run and (len(run) + 1) * lengths[i] > budget:
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights that carry the gradients (an optimiser with master copies steps over those)."""
    if isinstance(optimizer, MasterAdamW):
        return list(optimizer.weights)
    return [p for group in optimizer.param_groups for p in group["params"]]


def learned_tokens(method: Method, shaped: Shaped) -> Tensor:
    """`[T]` bool, True for tokens that give a gradient. An update that has none is to be left out: an optimiser with
    momentum would step all the same."""
    # The KL penalty and the entropy bonus pull on every token of the loss, whatever its advantage.
    regularised = bool(method.loss.kl_coef or method.loss.entropy_coef)
    return shaped.loss_mask if regularised else shaped.loss_mask & (shaped.advantages != 0)


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    method: Method,
    batch: Batch,
    shaped: Shaped,
    options: UpdateOptions,
    *,
    seed: int,
    reference_model: Any = None,
) -> dict[str, float]:
    """Learn from one batch. Returns metrics over all updates; `optim/grad_norm` is the mean norm before clipping.

    An update without a token to learn from is skipped, one whose gradient is not finite too; both are counted.
    `reference_model` is a frozen copy for the KL term; None takes the base below the LoRA weights.
    """
    if not batch.has_ids:
        raise UserError("trajectories without token ids (ids_kind 'none') cannot be trained on: record the sampled ids")
    learned = learned_tokens(method, shaped)
    total: LossStats | None = None
    norms: list[float] = []
    losses: list[float] = []
    skipped = empty = 0
    gaps: list[Tensor] = []
    model.train()
    torch.manual_seed(derive(seed, "dropout"))  # else a resumed run would drop out other units
    for epoch in range(options.epochs):
        for rows in deal(batch, options.minibatches, derive(seed, "minibatches", epoch)):
            mask = shaped.loss_mask & torch.isin(batch.trajectory_of, rows)
            if not bool((mask & learned).any()):
                empty += 1
                continue
            weights = method.token_weights(batch, mask)
            spans = _spans(batch, mask)
            loss_sum = 0.0
            optimizer.zero_grad(set_to_none=True)
            for run in micro_batches([end - start for start, end in spans], options.micro_batch_tokens):
                part = [spans[i] for i in run]
                loss, stats, gap = _micro_step(
                    model, method, batch, shaped, weights, mask, part, options, reference_model
                )
                loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
                total = stats if total is None else total + stats
                if not norms:
                    gaps.append(gap)
            norm = float(torch.nn.utils.clip_grad_norm_(weights_of(optimizer), options.grad_clip))
            if math.isfinite(norm) and math.isfinite(loss_sum):
                optimizer.step()
                norms.append(norm)
                losses.append(loss_sum)
            else:
                skipped += 1
            optimizer.zero_grad(set_to_none=True)
    out = total.metrics() if total is not None else {}
    out |= {
        "optim/updates": float(len(norms)),
        "optim/skipped_not_finite": float(skipped),
        "optim/skipped_empty": float(empty),
        "optim/lr": float(optimizer.param_groups[0]["lr"]),
    }
    if norms:
        out["optim/grad_norm"] = sum(norms) / len(norms)
        out["optim/grad_norm_max"] = max(norms)
        out["optim/loss"] = sum(losses) / len(losses)
    if gaps:
        gap = torch.cat(gaps)
        out["optim/sampler_gap_mean"] = float(gap.mean())
        out["optim/sampler_gap_max"] = float(gap.max())
    return out


def _spans(batch: Batch, mask: Tensor) -> list[tuple[int, int]]:
    """First and last token (exclusive) of each trajectory with a token in `mask[T]`, up to its last such token: a
    result that ended the trajectory may reach beyond what the model can read."""
    places = mask.nonzero().squeeze(-1)
    owners, counts = torch.unique_consecutive(batch.trajectory_of[places], return_counts=True)
    ends = places[counts.cumsum(0) - 1] + 1
    return list(zip(batch.token_start[owners].tolist(), ends.tolist(), strict=True))


def _micro_step(
    model: Any,
    method: Method,
    batch: Batch,
    shaped: Shaped,
    weights: Tensor,
    mask: Tensor,
    spans: Sequence[tuple[int, int]],
    options: UpdateOptions,
    reference_model: Any,
) -> tuple[Tensor, LossStats, Tensor]:
    index = torch.cat([torch.arange(start, end) for start, end in spans])
    sequences = [batch.tokens[start:end].tolist() for start, end in spans]
    of_prompt = batch.kind_of == PROMPT
    prompts = [int(of_prompt[start:end].sum()) for start, end in spans]
    keep = mask[index]
    index = index[keep]
    config = method.loss
    temperature = options.temperature
    entropy_grad = bool(config.entropy_coef)
    scores = score(model, sequences, temperature=temperature, where=keep, prompts=prompts, entropy_grad=entropy_grad)
    logp = scores.logprobs[keep]
    assert scores.entropies is not None
    device = logp.device
    ref_logp = None
    if config.kl_coef:
        with torch.no_grad():
            ref_logp = _reference_logprobs(model, reference_model, sequences, keep, prompts, temperature)[keep]
    old = batch.logprobs[index].to(device)
    inputs = LossInputs(
        logp=logp,
        old_logp=old,
        advantages=shaped.advantages[index].to(device),
        weights=weights[index].to(device),
        mask=torch.ones_like(old, dtype=torch.bool),
        entropy=scores.entropies[keep],
        ref_logp=ref_logp,
        marked=None if shaped.marked is None else shaped.marked[index].to(device),
    )
    loss, stats = method.compute_loss(inputs)
    return loss, stats, (logp.detach() - old).abs().cpu()


def _reference_logprobs(
    model: Any,
    reference_model: Any,
    sequences: Sequence[Sequence[int]],
    where: Tensor,
    prompts: Sequence[int],
    temperature: float,
) -> Tensor:
    """Log-probabilities under the policy that the run started from."""
    options: dict[str, Any] = {"temperature": temperature, "where": where, "prompts": prompts, "entropy": False}
    if reference_model is not None:
        return score(reference_model, sequences, **options).logprobs
    with model.disable_adapter():
        return score(model, sequences, **options).logprobs
