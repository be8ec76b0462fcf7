"""Entropy of token distributions, of reasoning segments, and its change over tool calls.

All entropies are in nats, of the distribution at the sampling temperature, and none carries gradient unless it says so.
Letters: T tokens, N trajectories, U turns, C executed calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_any, segment_count, segment_mean, segment_std
from agentropy.batch import OK, REASONING, Batch

After = Literal["ok", "any"]
"""Which calls open a post-tool turn: the successful ones (the paper), or any (the released TAO-RL code)."""
Over = Literal["trajectory", "batch"]
"""Which model tokens the entropy is standardised over: those of its trajectory, or of all kept trajectories."""


ROUNDING = 1e-12
"""Nats; means of equal entropies in another order or number differ by less than this."""


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """`H = logsumexp(z) - sum_v p_v z_v` of `z = logits / temperature`.

    Args:
        logits: `[..., V]`; a token with logit -inf has probability 0 and adds nothing.
        temperature: the sampling temperature, > 0.
    Returns: `[...]`, nats, at least float32; carries gradient where `logits` do.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = z / temperature if temperature != 1.0 else z
    log_p: Tensor = z.log_softmax(-1).clamp(min=torch.finfo(z.dtype).min)  # 0 * -inf would be NaN
    return -(log_p.exp() * log_p).sum(-1)


def entropy_from_top_k(logprobs: Tensor) -> Tensor:
    """Estimate from the k largest log-probabilities, with the remaining mass as one lumped outcome: a lower bound.

    Args:
        logprobs: `[..., k]`, natural logarithms; -inf where fewer than k are known.
    Returns: `[...]`, nats. Whoever stores it marks it as `top-k`: it is fine for branching, far off for rewards.
    """
    p = logprobs.double().exp()
    rest = (1.0 - p.sum(-1)).clamp(min=0.0)
    estimate: Tensor = torch.special.entr(p).sum(-1) + torch.special.entr(rest)
    return estimate.to(logprobs.dtype)


def turn_entropy(batch: Batch, include_call_tokens: bool = False) -> Tensor:
    """Segment entropy `H(r_k)`: mean entropy of the reasoning tokens of each turn (TEPO).

    Args:
        include_call_tokens: also average over the tokens that write the call.
    Returns: `[U]` float64, nats; NaN for a turn without such a token, or with one whose entropy is not known.
    """
    counted = _counted(batch, include_call_tokens)
    return segment_mean(batch.entropies, batch.turn_of, batch.n_turns, counted)


def _counted(batch: Batch, include_call_tokens: bool) -> Tensor:
    return batch.is_model if include_call_tokens else batch.kind_of == REASONING


@dataclass(frozen=True)
class EntropyChange:
    """Change of segment entropy over each executed call (TEPO).

    change[C]    float64, `dH_k = H(r_k) - H(r_{k-1})`, nats; NaN where undefined, 0 where it is mere rounding
    relative[C]  float64, `dH_k / (H(r_{k-1}) + 1e-8)`; NaN where undefined
    reducing[C]  bool, `I_k`: True iff dH_k < 0; False where undefined
    before[C]    float64, `H(r_{k-1})`, or what stands in for it; NaN where there is none
    after[C]     float64, `H(r_k)`; NaN where there is none
    """

    change: Tensor
    relative: Tensor
    reducing: Tensor
    before: Tensor
    after: Tensor


def entropy_change(batch: Batch, include_call_tokens: bool = False) -> EntropyChange:
    """How each call changed the entropy of the agent's reasoning; parallel calls of a turn share one change.

    Where r_{k-1} has no token the nearest earlier non-empty segment of the trajectory stands in for it. With none, or
    with r_k empty or missing, the change is undefined; so it is where an entropy of either was not recorded.
    """
    entropy = turn_entropy(batch, include_call_tokens)
    nan = entropy.new_full((1,), float("nan"))
    turns = torch.arange(batch.n_turns, device=entropy.device)
    size = segment_count(batch.turn_of, batch.n_turns, _counted(batch, include_call_tokens))
    filled = torch.where(size == 0, -1, turns)
    latest = filled.cummax(0).values if batch.n_turns else filled  # the nearest non-empty turn up to this one
    first = batch.turn_start[:-1][batch.turn_trajectory]
    before = torch.where(latest >= first, entropy[latest.clamp(min=0)], nan)
    follows = batch.turn_trajectory[1:] == batch.turn_trajectory[:-1]
    after = torch.cat([torch.where(follows, entropy[1:], nan), nan])[: batch.n_turns]
    change = (after - before)[batch.call_turn]
    change = torch.where(change.abs() <= ROUNDING, torch.zeros_like(change), change)  # NaN stays NaN
    return EntropyChange(
        change=change,
        relative=change / (before[batch.call_turn] + 1e-8),
        reducing=change < 0,  # NaN < 0 is False
        before=before[batch.call_turn],
        after=after[batch.call_turn],
    )


def follows_call(batch: Batch, after: After = "ok") -> Tensor:
    """`[U]` bool: True for turns that directly follow a turn with a successful call (`after="any"`: with any call).

    Of parallel calls one success is enough.
    """
    counts = batch.call_status == OK if after == "ok" else torch.ones_like(batch.call_status, dtype=torch.bool)
    opens = segment_any(counts, batch.call_turn, batch.n_turns)
    out = torch.zeros_like(opens)
    out[1:] = opens[:-1] & (batch.turn_trajectory[1:] == batch.turn_trajectory[:-1])
    return out


def post_tool_mask(batch: Batch, window: int | None = None, after: After = "ok") -> Tensor:
    """`M_post` of TAO-RL: `[T]` bool, True for model tokens of the turn that directly follows a successful call.

    Args:
        window: only the first so many model tokens of the turn; None takes the whole turn.
        after: "any" also marks turns after failed calls, as the released code does.
    """
    if not batch.n_turns:
        return torch.zeros_like(batch.is_model)
    turn = batch.turn_of.clamp(min=0)
    mask = batch.is_model & follows_call(batch, after)[turn]
    if window is not None:
        size = segment_count(batch.turn_of, batch.n_turns, batch.is_model)
        starts = size.cumsum(0) - size  # turns come in order, so a token's rank in its turn is a difference of counts
        rank = batch.is_model.cumsum(0) - 1 - starts[turn]
        mask = mask & (rank < window)
    return mask


def normalised_entropy(batch: Batch, kept: Tensor, over: Over = "trajectory") -> Tensor:
    """`z_t = (H_t - mean) / (std + 1e-8)` with population statistics over model tokens, call tokens included.

    Args:
        kept: `[N]` bool, True for trajectories that are learned from.
        over: the set that mean and std are taken over.
    Returns: `[T]` float64; 0 outside the model tokens of kept trajectories.
    """
    mask = batch.is_model & kept[batch.trajectory_of]
    if over == "trajectory":
        index, n = batch.trajectory_of, batch.n_trajectories
    else:
        index, n = torch.zeros_like(batch.trajectory_of), 1
    mean = segment_mean(batch.entropies, index, n, mask)
    std = segment_std(batch.entropies, index, n, mask, ddof=0)
    z = (batch.entropies.double() - mean[index]) / (std[index] + 1e-8)
    return torch.where(mask, z, torch.zeros((), dtype=z.dtype, device=z.device))
