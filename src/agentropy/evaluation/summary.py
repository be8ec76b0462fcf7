"""Numbers that describe a set of trajectories: for every training step, for evaluation, for tables. docs/metrics.md
defines each name, its population and its unit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch

from agentropy.algorithms.entropy import entropy_change, post_tool_mask
from agentropy.batch import Batch, make_batch
from agentropy.evaluation.metrics import code_lines, pass_at_k
from agentropy.trajectory import STOPS, ToolCall, ToolResult, Trajectory


def mean(values: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def rollout_metrics(trajectories: Sequence[Trajectory], batch: Batch | None = None) -> dict[str, float]:
    """Metrics over all given trajectories, before any filter. `lost` ones are counted and left out of the rest."""
    batch = make_batch(trajectories) if batch is None else batch
    good = [t for t, lost in zip(trajectories, batch.lost.tolist(), strict=True) if not lost]
    scores = [t.score for t in good if t.score is not None]
    results = [r for t in good for r in t.results]
    status = Counter(r.status for r in results)
    stops: Counter[str] = Counter(t.stop for t in trajectories)
    changes = entropy_change(batch)
    counted = ~batch.lost[batch.call_trajectory]
    defined = counted & ~torch.isnan(changes.change)
    entropy = batch.entropies
    model = batch.is_model & ~batch.lost[batch.trajectory_of]
    post = model & post_tool_mask(batch)
    other = model & ~post

    def over(mask: torch.Tensor) -> float:
        return float(entropy[mask].mean()) if bool(mask.any()) else math.nan

    programs = [(c, r) for t in good for c, r in executed_calls(t) if "code" in c.arguments]
    lines = [(float(code_lines(str(c.arguments["code"])).stripped), r.status == "ok") for c, r in programs]
    out = {
        "reward/accuracy": mean(scores),
        "reward/solved": mean([float(s >= 0.5) for s in scores]),
        "tool/calls_per_question": mean([float(len(t.results)) for t in good]),
        "tool/valid_rate": status["ok"] / len(results) if results else math.nan,
        "tool/timeout_rate": status["timeout"] / len(results) if results else math.nan,
        "tool/usage_rate": mean([float(bool(t.results)) for t in good]),
        "tool/all_failed_rate": mean(
            [float(bool(t.results) and all(r.status != "ok" for r in t.results)) for t in good]
        ),
        "tool/effective_ratio": float(changes.reducing[counted].float().mean()) if bool(counted.any()) else math.nan,
        "tool/entropy_change": float(changes.change[defined].mean()) if bool(defined.any()) else math.nan,
        "tool/code_lines": mean([n for n, _ in lines]),
        "tool/code_lines_ok": mean([n for n, ok in lines if ok]),
        "tool/lost_trajectories": float(len(trajectories) - len(good)),
        "rollout/roots": float(sum(not t.inherited for t in good)),
        "rollout/forks": float(sum(bool(t.inherited) for t in good)),
        "rollout/executed_calls": float(sum(len(t.results) - sum(len(s.results) for s in t.inherited) for t in good)),
        "entropy/model": over(model),
        "entropy/post_tool": over(post),
        "entropy/other": over(other),
        "length/model_tokens": mean([float(t.model_tokens) for t in good]),
        "length/all_tokens": mean([float(len(t.ids)) for t in good]),
        "length/turns": mean((batch.turn_start.diff()[~batch.lost]).tolist()),
    }
    for reason in STOPS:
        out[f"stop/{reason}"] = stops[reason] / len(trajectories) if trajectories else math.nan
    return out


def executed_calls(t: Trajectory) -> Iterator[tuple[ToolCall, ToolResult]]:
    """The calls that were run, those that a result follows, each with its result; a call that was not recorded is
    one to a tool without a name."""
    waiting: list[ToolCall] = []
    after_result = True
    for s in t.segments:
        if s.is_model and after_result:
            waiting, after_result = [], False  # a call of an earlier turn that never ran gets no later result
        waiting += s.calls
        for r in s.results:
            yield (waiting.pop(0) if waiting else ToolCall("")), r
        after_result = after_result or s.kind == "result"


def question_scores(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Scores by question, in order; trajectories without a score are left out."""
    by_question: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.score is not None:
            by_question[t.question_id].append(t.score)
    return dict(by_question)


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`rollout_metrics` plus Avg@K, Pass@K and calls by need.

    K is the number of samples a question; one of which some have no score counts with those it has.
    """
    by_question = question_scores(trajectories)
    k = max((len(v) for v in by_question.values()), default=0)
    out = rollout_metrics(trajectories)
    out["eval/k"] = float(k)
    out["eval/questions"] = float(len(by_question))
    out["eval/avg"] = mean([mean(v) for v in by_question.values()])
    if k:
        out["eval/pass"] = mean(
            [pass_at_k(len(v), sum(s >= 0.5 for s in v), min(k, len(v))) for v in by_question.values()]
        )
    for label, least, most in (("0", 0, 0), ("1", 1, 1), ("2+", 2, 99)):
        some = [t for t in trajectories if t.extra.get("need") is not None and least <= t.extra["need"] <= most]
        if some:
            out[f"eval/calls_need_{label}"] = mean([float(len(t.results)) for t in some])
            out[f"eval/accuracy_need_{label}"] = mean([t.score for t in some if t.score is not None])
    return out
