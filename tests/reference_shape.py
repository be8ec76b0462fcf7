"""The methods once more, in plain loops over trajectories: slow, without tensors, for tests to compare with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentropy.trajectory import ToolResult, Trajectory


@dataclass
class TurnView:
    reasoning: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    wrote_call: bool = False


@dataclass
class Expected:
    kept: bool
    why: str | None
    reward: float
    turn_rewards: list[float]
    change: list[float | None]
    advantages: list[float]
    bonus: list[bool]


def turns_of(t: Trajectory) -> list[TurnView]:
    turns: list[TurnView] = []
    closed = True
    for s in t.segments:
        if s.is_model:
            if closed:
                turns.append(TurnView())
                closed = False
            turns[-1].tokens += list(s.entropies or ())
            turns[-1].wrote_call |= bool(s.calls)
            if s.kind == "reasoning":
                turns[-1].reasoning += list(s.entropies or ())
        elif s.kind == "result":
            turns[-1].results += list(s.results)
            closed = True
    return turns


def is_lost(t: Trajectory) -> bool:
    return t.stop == "error" or t.score is None or any(r.status == "lost" for r in t.results)


def is_void(t: Trajectory) -> bool:
    if t.stop == "void":
        return True
    cut = t.stop in ("max_tokens", "context_full", "max_turns")
    last = [s for s in t.segments if s.kind != "prompt"][-1:]
    return cut and bool(last) and last[0].is_model and not turns_of(t)[-1].wrote_call


def changes(turns: list[TurnView], include_call: bool) -> list[float | None]:
    """dH of each turn that ends in an executed call."""
    mean = [(statistics.fmean(v) if (v := (u.tokens if include_call else u.reasoning)) else None) for u in turns]
    out: list[float | None] = []
    for k, _ in enumerate(turns):
        before = next((h for h in reversed(mean[: k + 1]) if h is not None), None)
        after = mean[k + 1] if k + 1 < len(turns) else None
        out.append(None if before is None or after is None else after - before)
    return out


def normalise(value: float, pool: list[float], normalize_std: bool) -> float:
    if len(pool) < 2 or max(pool) == min(pool):
        return 0.0
    deviation = value - statistics.fmean(pool)
    return deviation / (statistics.stdev(pool) + 1e-6) if normalize_std else deviation


def reference(name: str, trajectories: Sequence[Trajectory], o: dict[str, Any]) -> list[Expected]:
    turns = [turns_of(t) for t in trajectories]
    change = [changes(u, bool(o.get("include_call_tokens"))) for u in turns]
    score = [math.nan if t.score is None else t.score for t in trajectories]
    groups: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        groups.setdefault(t.question_id, []).append(i)

    reward, turn_reward = list(score), [[s] * len(u) for s, u in zip(score, turns, strict=True)]
    for i, u in enumerate(turns):
        reducing = [d is not None and d < 0 for d in change[i]]
        if name == "tepo-sparse":
            n = sum(len(v.results) for v in u)
            m = sum(len(v.results) for v, r in zip(u, reducing, strict=True) if r)
            reward[i] = score[i] * (m / n if n else (1.0 if o["zero_call"] == "f1" else 0.0))
            turn_reward[i] = [reward[i]] * len(u)
        t = trajectories[i]
        if o.get("reward") == "authors" and t.score is not None:
            several = len({c.tool for c in t.calls}) > 1 and t.score > 0
            reward[i] = -1.0 if t.stop != "answer" or is_void(t) else t.score + 0.1 * several
            turn_reward[i] = [reward[i]] * len(u)
        if name == "tepo-dense":
            turn_reward[i] = [
                score[i] * (1 + o["alpha"] * (r and bool(v.results))) for v, r in zip(u, reducing, strict=True)
            ]

    why: list[str | None] = ["lost" if is_lost(t) else None for t in trajectories]
    found = [w is None for w in why]

    def drop(i: int, reason: str) -> None:
        why[i] = why[i] or reason

    for i, t in enumerate(trajectories):
        if o.get("execution_filter") and t.results and all(r.status != "ok" for r in t.results):
            drop(i, "all-calls-failed")
        if o.get("void_filter") and is_void(t):
            drop(i, "void-turn")
        if o.get("mask_truncated") and t.stop in ("max_tokens", "context_full"):
            drop(i, "truncated")
    survivors_only = o["discriminability" if name == "tao-rl" else "statistics"] == "survivors"
    if o.get("discriminability_filter"):
        for members in groups.values():
            left = [i for i in members if (why[i] is None if survivors_only else found[i])]
            spread = max((reward[i] for i in left), default=0.0) - min((reward[i] for i in left), default=0.0)
            lone = sum(why[i] is None for i in members) == 1
            for i in members:
                if lone:
                    drop(i, "single-survivor")
                elif spread < 1e-3:
                    drop(i, "not-discriminative")
    kept = [w is None for w in why]
    counts = kept if survivors_only else found

    advantage: list[list[float]] = [[] for _ in trajectories]
    for members in groups.values():
        if name == "tepo-dense":
            pool = [r for i in members if counts[i] for r in turn_reward[i]]
        else:
            pool = [reward[i] for i in members if counts[i]]
        for i in members:
            if not kept[i]:
                advantage[i] = [0.0] * len(turns[i])
                continue
            own = turn_reward[i] if name == "tepo-dense" else [reward[i]] * len(turns[i])
            values = [normalise(r, pool, o["normalize_std"]) for r in own]
            if o.get("credit") == "return":
                values = [sum(values[k:]) for k in range(len(values))]
            advantage[i] = values
    token = [
        [a for a, u in zip(advantage[i], turns[i], strict=True) for _ in u.tokens] for i in range(len(trajectories))
    ]
    bonus = [[False] * len(row) for row in token]
    if name == "tao-rl" and o["bonus"]:
        _bonus(turns, kept, token, bonus, o)
    if name == "aepo" and o["entropy_advantage"]:
        everything = [h for i, u in enumerate(turns) if kept[i] for v in u for h in v.tokens]
        mean = statistics.fmean(everything) if everything else 0.0
        std = statistics.pstdev(everything) if everything else 0.0
        for i, u in enumerate(turns):
            for position, h in enumerate(h for v in u for h in v.tokens):
                token[i][position] *= 1 + o["a"] * (h - mean) / (std + 1e-8)
                bonus[i][position] = kept[i]
    return [
        Expected(
            kept[i],
            why[i],
            reward[i],
            turn_reward[i],
            [d for d, u in zip(change[i], turns[i], strict=True) for _ in u.results],
            token[i],
            bonus[i],
        )
        for i in range(len(trajectories))
    ]


def _bonus(
    turns: list[list[TurnView]], kept: list[bool], token: list[list[float]], bonus: list[list[bool]], o: dict[str, Any]
) -> None:
    candidates: list[tuple[int, int, float]] = []
    for i, u in enumerate(turns):
        position = 0
        for k, turn in enumerate(u):
            previous = u[k - 1].results if k else []
            opens = any(o["after"] == "any" or r.status == "ok" for r in previous)
            for rank, h in enumerate(turn.tokens):
                inside = o["window"] is None or rank < o["window"]
                if kept[i] and (o["bonus_on"] == "all" or (opens and inside)):
                    candidates.append((i, position, h))
                position += 1
    if not candidates:
        return
    count = max(1, math.ceil(o["q_h"] * len(candidates) - 1e-9))
    threshold = sorted((h for _, _, h in candidates), reverse=True)[count - 1]
    everything = [h for i, u in enumerate(turns) if kept[i] for v in u for h in v.tokens]
    for i, position, h in candidates:
        if h < threshold:
            continue
        pool = everything if o["over"] == "batch" else [h for v in turns[i] for h in v.tokens]
        z = (h - statistics.fmean(pool)) / (statistics.pstdev(pool) + 1e-8)
        a = token[i][position]
        bonus[i][position] = True
        if o["form"] == "multiplicative":
            token[i][position] = a * max(0.0, 1 + o["alpha"] * z)
        else:
            token[i][position] = a + min(o["alpha"] * max(z, 0.0), abs(a) / o["kappa"])
