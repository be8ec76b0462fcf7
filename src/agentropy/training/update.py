"""From advantages to weights: the optimiser's part of a step.

Groups are dealt to `minibatches` optimiser updates; each update is computed in micro-batches of at most so many tokens.
The weights of the loss are fixed over the whole update, so micro-batches are plain sums and only cost memory or time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentropy.algorithms.losses import LossInputs, LossStats
from agentropy.batch import PROMPT, Batch
from agentropy.errors import UserError
from agentropy.methods.base import Method, Shaped
from agentropy.policies.scoring import count_forwards, score
from agentropy.seeds import derive
from agentropy.training.optimizer import MasterAdamW

if TYPE_CHECKING:
    from agentropy.training.distributed import Ranks
    from agentropy.training.sharding import Shards


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
    shards: Shards | None = None,
    importance: Tensor | None = None,
) -> dict[str, float]:
    """Learn from one batch. Returns metrics over all updates; `optim/grad_norm` is the mean norm before clipping.

    An update without a token to learn from is skipped, one whose gradient is not finite too; both are counted.
    `reference_model` is a frozen copy for the KL term; None takes the base below the LoRA weights.
    With `shards` every rank has the whole batch, computes its part of each update, and gets the metrics of the whole;
    `optimizer` then holds `shards.local`.
    `importance`, `[T]`, is what each token's loss counts beside its weight (`algorithms/correction.py`).
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
    if shards is not None and shards.ranks.rank:  # nor may ranks, in other rows, drop out the same ones
        torch.manual_seed(derive(seed, "dropout", shards.ranks.rank))
    for epoch in range(options.epochs):
        for rows in deal(batch, options.minibatches, derive(seed, "minibatches", epoch)):
            mask = shaped.loss_mask & torch.isin(batch.trajectory_of, rows)
            if not bool((mask & learned).any()):
                empty += 1
                continue
            weights = method.token_weights(batch, mask)
            if importance is not None:
                weights = weights * importance
            spans = _spans(batch, mask)
            loss_sum = 0.0
            optimizer.zero_grad(set_to_none=True)
            for part, idle in _micro_spans(batch, spans, options.micro_batch_tokens, shards):
                work = functools.partial(
                    _micro_step, model, method, batch, shaped, weights, mask, part, options, reference_model, idle
                )
                loss, stats, gap = work() if shards is None else shards.run(work)
                if shards is None:
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    shards.backward(loss)
                loss_sum += float(loss.detach())
                if stats is not None:
                    total = stats if total is None else total + stats
                if not norms:
                    gaps.append(gap)
            if shards is None:
                norm = float(torch.nn.utils.clip_grad_norm_(weights_of(optimizer), options.grad_clip))
            else:
                norm, loss_sum = shards.clip(options.grad_clip, loss_sum)
            if math.isfinite(norm) and math.isfinite(loss_sum):
                optimizer.step()
                norms.append(norm)
                losses.append(loss_sum)
            else:
                skipped += 1
            optimizer.zero_grad(set_to_none=True)
    if shards is not None:
        total, gaps = _of_all_ranks(shards.ranks, total, gaps)
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


def _micro_spans(
    batch: Batch, spans: Sequence[tuple[int, int]], budget: int, shards: Shards | None
) -> list[tuple[list[tuple[int, int]], int]]:
    """The spans of each micro-batch; with shards, of each of this rank's, and how many idle forwards go with it."""
    lengths = [end - start for start, end in spans]
    if shards is None:
        return [([spans[i] for i in run], 0) for run in micro_batches(lengths, budget)]

    def forwards(run: list[int]) -> int:
        return count_forwards(*_rows(batch, [spans[i] for i in run]))

    return [([spans[i] for i in run], idle) for run, idle in shards.plan(lengths, budget, forwards)]


def _rows(batch: Batch, spans: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[int]]:
    """The ids of each span, and how many of them are its prompt."""
    of_prompt = batch.kind_of == PROMPT
    sequences = [batch.tokens[start:end].tolist() for start, end in spans]
    return sequences, [int(of_prompt[start:end].sum()) for start, end in spans]


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
    idle: int,
) -> tuple[Tensor, LossStats | None, Tensor]:
    """The loss of some spans, its sums for the metrics, and how far each token's log-probability is from the sampler's.

    Runs the decoder `idle` times more than they need, on nothing.
    """
    config = method.loss
    if not spans:
        loss = _idle_forwards(model, idle)
        if config.kl_coef:
            with _reference(model, reference_model) as reference:
                _idle_forwards(reference, idle)
        return loss, None, torch.empty(0)
    index = torch.cat([torch.arange(start, end) for start, end in spans])
    sequences, prompts = _rows(batch, spans)
    keep = mask[index]
    index = index[keep]
    temperature = options.temperature
    entropy_grad = bool(config.entropy_coef)
    scores = score(model, sequences, temperature=temperature, where=keep, prompts=prompts, entropy_grad=entropy_grad)
    filler = _idle_forwards(model, idle) if idle else None
    logp = scores.logprobs[keep]
    assert scores.entropies is not None
    device = logp.device
    ref_logp = None
    if config.kl_coef:
        with _reference(model, reference_model) as reference:
            found = score(reference, sequences, temperature=temperature, where=keep, prompts=prompts, entropy=False)
            ref_logp = found.logprobs[keep]
            if idle:
                _idle_forwards(reference, idle)
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
    return loss if filler is None else loss + filler, stats, (logp.detach() - old).abs().cpu()


def _idle_forwards(model: Any, count: int) -> Tensor:
    """Run decoder and head `count` times on next to nothing: 0, with a gradient of 0 where it is enabled."""
    return 0.0 * torch.stack([score(model, [[0, 0]], entropy=False).logprobs.sum() for _ in range(count)]).sum()


@contextlib.contextmanager
def _reference(model: Any, reference_model: Any) -> Iterator[Any]:
    """The policy that the run started from, without gradient."""
    with torch.no_grad():
        if reference_model is not None:
            yield reference_model
        else:
            with model.disable_adapter():
                yield model


def _of_all_ranks(
    ranks: Ranks, total: LossStats | None, gaps: Sequence[Tensor]
) -> tuple[LossStats | None, list[Tensor]]:
    """The sums and the gaps of all ranks, on the CPU."""
    own = None if total is None else LossStats(**{f.name: getattr(total, f.name).cpu() for f in fields(total)})
    parts = ranks.gather((own, list(gaps)))
    sums = [part for part, _ in parts if part is not None]
    return functools.reduce(operator.add, sums) if sums else None, [gap for _, more in parts for gap in more]
