"""Trajectories as the page holds them: numbers rounded to what it shows, with what a method makes of each token.

A record has short keys, since a page holds thousands of them; assets/core.js names them again. Rounding keeps every
digit that the page shows: entropies and advantages to four significant digits, log-probabilities so that both they and
the probability round to what the file's own numbers round to.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentropy.algorithms.entropy import entropy_change
from agentropy.analysis.report.tokens import TokenBytes
from agentropy.batch import Batch, make_batch
from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.methods.base import Method, Shaped
from agentropy.trajectory import STATUSES, Segment, Trajectory

LONGEST_TEXT = 2_000_000
"""Characters of one text; more are cut, and the page says so."""
ALTERNATIVES = 8
KINDS = {"prompt": 0, "reasoning": 1, "call": 2, "result": 3}


@dataclass(frozen=True)
class CallPoint:
    """One executed call for the distributions: the trajectory's outcome is None where it has no score."""

    tool: str
    status: str
    correct: bool | None
    position: int
    change: float


def shape_for_page(batch: Batch, method: Method) -> tuple[Shaped, str]:
    """What the method makes of a batch, and what could not be had, in words. Estimates of entropies are accepted: the
    page marks them. Where entropies are missing the changes are undefined, and no method is applied."""
    try:
        return dataclasses.replace(method, accept_estimates=True).shape(batch), ""
    except UserError as error:
        return make_method("grpo").shape(batch), str(error)


def call_points(batch: Batch, shaped: Shaped) -> list[CallPoint]:
    """One point a call, without those of lost trajectories."""
    lost, score = batch.lost.tolist(), batch.score.tolist()
    out = []
    position, last = 0, -1
    for trajectory, status, tool, change in zip(
        batch.call_trajectory.tolist(),
        batch.call_status.tolist(),
        batch.call_tool.tolist(),
        shaped.entropy_change.tolist(),
        strict=True,
    ):
        position, last = (position + 1 if trajectory == last else 1), trajectory
        if not lost[trajectory]:
            right = None if math.isnan(score[trajectory]) else score[trajectory] >= 0.5
            out.append(CallPoint(batch.tools[tool], STATUSES[status], right, position, change))
    return out


def records(
    trajectories: Sequence[Trajectory],
    batch: Batch,
    shaped: Shaped,
    method: Method,
    texts: TokenBytes | None,
    places: Collection[int],
    used: Sequence[bool] | None = None,
) -> list[dict[str, Any]]:
    """A record of each trajectory at `places`, in order. `batch` and `shaped` are of all of them; groups are whole.

    used: True for trajectories that went into the step's update, where the others' groups were left over; None: all.
    """
    change = entropy_change(batch, method.include_call_tokens)
    final, rows = shaped, {i: i for i in range(len(trajectories))}
    starts = batch.token_start.tolist()
    if used is not None and not all(used):  # the bonus picks the most uncertain tokens of the update's batch
        learned = [i for i, yes in enumerate(used) if yes]
        rows = {i: row for row, i in enumerate(learned)}
        if learned:
            update = make_batch([trajectories[i] for i in learned])
            final, _ = shape_for_page(update, method)
            starts = update.token_start.tolist()
    advantages, bonus = final.advantages.tolist(), final.bonus.tolist()
    before, after, changes = change.before.tolist(), change.after.tolist(), shaped.entropy_change.tolist()
    reducing, kept, reward = shaped.entropy_reducing.tolist(), shaped.kept.tolist(), shaped.reward.tolist()
    calls = batch.call_start.tolist()
    out = []
    for i in sorted(places):
        span = slice(starts[rows[i]], starts[rows[i] + 1]) if i in rows else slice(0, 0)
        about = [
            {"d": round4(changes[c]), "h0": round4(before[c]), "h1": round4(after[c]), "e": int(reducing[c])}
            for c in range(calls[i], calls[i + 1])
        ]
        record = _record(trajectories[i], texts, advantages[span], bonus[span], about)
        record["rw"] = round4(reward[i])
        if not kept[i]:
            record["w"] = shaped.why[i]
        elif i not in rows:
            record["w"] = "left-over"
        out.append(record)
    return out


def _record(
    t: Trajectory,
    texts: TokenBytes | None,
    advantages: Sequence[float],
    bonus: Sequence[bool],
    about: list[dict[str, Any]],
) -> dict[str, Any]:
    segments = []
    place = 0
    calls = iter(about)
    for s in t.segments:
        n = len(s.ids)
        if s.is_model:
            segments.append(
                _model_segment(s, t.ids_kind == "sampled", advantages[place : place + n], bonus[place : place + n])
            )
        else:
            segments.append(_other_segment(s, texts, calls))
        place += n
    record: dict[str, Any] = {"i": t.trajectory_id, "sc": t.score, "st": t.stop, "s": segments}
    if t.answer is not None:
        record["an"] = clipped(t.answer)
    if t.entropy_kind != "exact":
        record["ek"] = 1
    if t.parent_id is not None:
        record["pa"] = t.parent_id
        record["fk"] = t.fork_at
    return record


def _model_segment(s: Segment, has_ids: bool, advantages: Sequence[float], bonus: Sequence[bool]) -> dict[str, Any]:
    out: dict[str, Any] = {"k": KINDS[s.kind], "t": list(s.ids)}
    if s.tokens is not None:
        out["tx"] = list(s.tokens)
    if not has_ids:
        out["t"] = [None] * len(s.ids)
    if s.entropies is not None:
        out["h"] = [round4(v) for v in s.entropies]
        if s.entropies:
            out["m"] = round4(sum(s.entropies) / len(s.entropies))
    if s.logprobs is not None:
        out["l"] = [round_logprob(v) for v in s.logprobs]
    if advantages:
        rounded = [round4(v) for v in advantages]
        out["a"] = rounded[0] if len(set(rounded)) == 1 else rounded
    if any(bonus):
        out["b"] = [i for i, yes in enumerate(bonus) if yes]
    if s.alternatives is not None:
        out["al"] = [[[text, round_logprob(p)] for text, p in some[:ALTERNATIVES]] for some in s.alternatives]
    if s.calls:
        out["c"] = [
            {"n": c.tool, "a": [_argument(k, v) for k, v in c.arguments.items()]} | ({"er": c.error} if c.error else {})
            for c in s.calls
        ]
    return out


def _other_segment(s: Segment, texts: TokenBytes | None, calls: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"k": KINDS[s.kind]}
    seen = "".join(s.tokens) if s.tokens is not None else texts.text(s.ids) if texts is not None else ""
    if s.kind == "result":
        out["r"] = [
            {"s": r.status, "o": clipped(r.content), "ms": round4(r.seconds * 1000)}
            | ({"w": round4(r.reward)} if r.reward is not None else {})
            | ({"stop": 1} if r.stop else {})
            | next(calls)
            for r in s.results
        ]
        if seen.strip() == "\n".join(r.content for r in s.results).strip():
            seen = ""
    if seen:
        out["x"] = clipped(seen)
    return out


def _argument(name: str, value: Any) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return [str(name), clipped(text)]


def clipped(text: str) -> str:
    """The text, cut in the middle where it is longer than a page should hold."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are not in this page …\n{text[-half:]}"


def cost(t: Trajectory) -> int:
    """About how many bytes a trajectory takes in a page, compressed."""
    model = t.model_tokens
    text = sum(len(r.content) for r in t.results) + 3 * (len(t.ids) - model)
    alternatives = sum(len(a[:ALTERNATIVES]) for s in t.segments for a in s.alternatives or ())
    return 60 + 5 * model + text // 6 + 5 * alternatives


def round4(value: float | None) -> float | None:
    """To four significant digits; None for a number that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}") + 0.0


def round_logprob(value: float) -> float:
    """The shortest of the roundings from four digits on that gives the same log-probability to four digits, and the
    same probability to three, as the number itself."""
    wanted = (f"{value:.4g}", f"{100 * math.exp(value):.3g}")
    for digits in range(4, 10):
        short = float(f"{value:.{digits}g}")
        if (f"{short:.4g}", f"{100 * math.exp(short):.3g}") == wanted:
            return short + 0.0
    return value


def extra_of(t: Trajectory) -> Mapping[str, Any]:
    """What a question's table needs: accepted answers, kind and need, where the trajectory has them."""
    gold = t.extra.get("gold")
    golds = gold if isinstance(gold, list) else [] if gold is None else [gold]
    need, kind = t.extra.get("need"), t.extra.get("kind")
    return {
        "gold": [clipped(str(g)) for g in golds[:20]],
        "kind": str(kind) if kind not in (None, "") else None,
        "need": need if isinstance(need, int) and not isinstance(need, bool) else None,
    }
