"""What a shaped batch says of itself; docs/algorithms.md defines each name."""

from __future__ import annotations

from torch import Tensor

from agentropy.algorithms.branching import shared_tokens
from agentropy.algorithms.entropy import EntropyChange, post_tool_mask
from agentropy.algorithms.filters import REASONS, Selection
from agentropy.algorithms.rewards import Rewards
from agentropy.algorithms.segments import segment_any, segment_count
from agentropy.batch import CALL, REASONING, Batch
from agentropy.trajectory import STATUSES


def shape_metrics(
    batch: Batch,
    selection: Selection,
    rewards: Rewards,
    change: EntropyChange,
    plain: Tensor,
    advantages: Tensor,
    bonus: Tensor,
) -> dict[str, float]:
    """Metrics of one batch. A mean over nothing (no calls, no tokens) has no entry, so every value is finite.

    Args:
        plain: `[T]`, advantages before the bonus; advantages: `[T]`, after it; bonus: `[T]` bool.
    """
    found = selection.population("all")
    kept = selection.kept
    call_found = found[batch.call_trajectory]
    calls = segment_count(batch.call_trajectory, batch.n_trajectories)
    out: dict[str, float] = {}

    def put(name: str, values: Tensor, where: Tensor | None = None) -> None:
        values = values if where is None else values[where]
        if values.numel():
            out[name] = float(values.double().mean())

    put("reward/accuracy", batch.score, found)
    put("reward/mean", rewards.trajectory, found)
    put("reward/kept_accuracy", batch.score, kept)
    put("tool/calls_per_question", calls, found)
    put("tool/usage_rate", calls > 0, found)
    for code, status in enumerate(STATUSES[:-1]):
        put("tool/valid_rate" if status == "ok" else f"tool/{status}_rate", batch.call_status == code, call_found)

    if batch.has_entropies:
        token_found = batch.is_model & found[batch.trajectory_of]
        put("entropy/model", batch.entropies, token_found)
        put("entropy/reasoning", batch.entropies, token_found & (batch.kind_of == REASONING))
        put("entropy/call", batch.entropies, token_found & (batch.kind_of == CALL))
        after_success = post_tool_mask(batch)
        put("entropy/post_tool", batch.entropies, token_found & after_success)
        put("entropy/other", batch.entropies, token_found & ~after_success)
        put("tool/entropy_change", change.change, call_found & ~change.change.isnan())
        put("tool/effective_ratio", change.reducing, call_found)
        out["entropy/exact"] = float(batch.entropies_exact)
        out["entropy/bonus_tokens"] = float(bonus.sum())
        mass = float(plain.abs().sum())
        out["entropy/bonus_share"] = float((advantages - plain).abs().sum()) / mass if mass > 0 else 0.0

    out["filter/kept"] = float(kept.sum())
    put("filter/kept_share", kept)
    for code, reason in enumerate(REASONS):
        out[f"filter/{reason.replace('-', '_')}"] = float((selection.reason == code).sum())
    groups_kept = segment_any(kept, batch.group_of, batch.n_groups)
    out["filter/groups_kept"] = float(groups_kept.sum())
    out["filter/groups_removed"] = float(batch.n_groups) - out["filter/groups_kept"]
    signal = segment_any(plain != 0, batch.trajectory_of, batch.n_trajectories)
    put("filter/no_signal_share", ~signal, kept)
    learned = batch.is_model & kept[batch.trajectory_of]
    put("reward/advantage_mean", advantages, learned)
    put("reward/advantage_abs", advantages.abs(), learned)
    out["batch/shared_tokens"] = float((shared_tokens(batch) & learned).sum())
    out["batch/empty"] = float(not bool(learned.any()))
    return out
