"""What each tool call did: one row a call, from trajectories of any source.

Entropies are averaged segment by segment first, so a long trajectory costs one pass over its numbers; what dH is, and
where it is undefined, is decided by `agentropy.algorithms.entropy` as in training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentropy.analysis.used import all_words, result_used
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory

if TYPE_CHECKING:
    import pandas

    from agentropy.batch import Batch

Decode = Callable[[tuple[int, ...]], str]
"""The text of a run of token ids."""

COLUMNS: dict[str, str] = {
    "source": "text",
    "question_id": "text",
    "trajectory_id": "text",
    "question": "text",
    "call": "int",
    "calls": "int",
    "turn": "int",
    "tool": "text",
    "arguments": "text",
    "status": "text",
    "seconds": "float",
    "result": "text",
    "entropy_before": "float",
    "entropy_after": "float",
    "entropy_change": "float",
    "relative_change": "float",
    "reducing": "flag",
    "score": "float",
    "correct": "maybe",
    "need": "float",
    "kind": "text",
    "parallel": "flag",
    "repeated": "flag",
    "result_used": "maybe",
    "estimated": "flag",
    "inherited": "flag",
    "lost": "flag",
}
"""Columns of the table of calls; `maybe` is True, False or nothing. docs/analysis.md defines each."""

CHUNK = 256


def call_effects(trajectories: Iterable[Trajectory], decode: Decode | None = None) -> pandas.DataFrame:
    """One row a call: what it cost, what it returned, and what it did to the entropy of the agent's reasoning.

    Args:
        trajectories: of any source, such as `agentropy.analysis.read("runs/…")`.
        decode: gives the text of token ids, so that `result_used` can look into the reasoning of trajectories that hold
            ids alone; without it, it looks into later calls and the answer, and is missing where it finds nothing.
    Returns: the columns of `COLUMNS`; docs/analysis.md defines them. Calls that were written but never run have no row.

    Raises UserError without pandas, which the extra `analysis` brings.
    """
    from agentropy.analysis.tables import frame

    return frame(call_rows(trajectories, decode))


def call_rows(trajectories: Iterable[Trajectory], decode: Decode | None = None) -> Iterator[dict[str, Any]]:
    """The rows of `call_effects` as dicts; NaN and None where something is unknown."""
    stream = iter(trajectories)
    while part := list(islice(stream, CHUNK)):
        yield from rows_of(part, outline_batch(part), decode)


def outline(t: Trajectory) -> Trajectory:
    """The trajectory with each turn's reasoning as one token of its mean entropy, and no other tokens.

    Filters, rewards and changes of entropy are the same as those of the whole trajectory (without call tokens in the
    segment entropy); only what looks at single tokens, TAO-RL's bonus, is lost.
    """
    segments: list[Segment] = []
    total, count, known, at = 0.0, 0, True, -1

    def close() -> None:
        nonlocal total, count, known, at
        if at >= 0 and count:
            segments[at] = Segment("reasoning", (0,), None, (total / count,) if known else None)
        total, count, known, at = 0.0, 0, True, -1

    for s in t.segments:
        if s.kind == "reasoning":
            if at < 0:
                at = len(segments)
                segments.append(Segment("reasoning", ()))
            count += len(s.ids)
            if s.entropies is not None:
                total += sum(s.entropies)
            elif s.ids:
                known = False
        elif s.kind == "call":
            segments.append(Segment("call", (), calls=s.calls))
        elif s.kind == "result":
            close()
            segments.append(Segment("result", (), results=s.results))
    close()
    return Trajectory(
        t.question_id, t.trajectory_id, t.question, tuple(segments), t.answer, t.score, t.stop, t.entropy_kind
    )


def outline_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """The batch of the trajectories' outlines."""
    from agentropy.batch import make_batch

    return make_batch([outline(t) for t in trajectories])


def rows_of(trajectories: Sequence[Trajectory], batch: Batch, decode: Decode | None = None) -> Iterator[dict[str, Any]]:
    """The rows of the calls of `trajectories`, whose outlines `batch` holds."""
    from agentropy.algorithms.entropy import entropy_change

    change = entropy_change(batch)
    before, after = change.before.tolist(), change.after.tolist()
    changes, relative = change.change.tolist(), change.relative.tolist()
    turns, first_turns = batch.call_turn.tolist(), batch.turn_start.tolist()
    lost = batch.lost.tolist()
    i = 0
    for place, t in enumerate(trajectories):
        executed = list(executed_calls(t))
        inherited = sum(len(s.results) for s in t.inherited)
        used = uses(t, decode)
        in_turn: dict[int, int] = {}
        for turn in turns[i : i + len(executed)]:
            in_turn[turn] = in_turn.get(turn, 0) + 1
        seen: set[tuple[str, str]] = set()
        for k, (call, result) in enumerate(executed):
            arguments = arguments_text(call)
            key = (call.tool, arguments)
            need = t.extra.get("need")
            yield {
                "source": str(t.extra.get("source", "")),
                "question_id": t.question_id,
                "trajectory_id": t.trajectory_id,
                "question": t.question,
                "call": k + 1,
                "calls": len(executed),
                "turn": turns[i] - first_turns[place] + 1,
                "tool": call.tool,
                "arguments": arguments,
                "status": result.status,
                "seconds": result.seconds,
                "result": result.content,
                "entropy_before": before[i],
                "entropy_after": after[i],
                "entropy_change": changes[i],
                "relative_change": relative[i],
                "reducing": changes[i] < 0,
                "score": math.nan if t.score is None else t.score,
                "correct": None if t.score is None else t.score >= 0.5,
                "need": float(need) if isinstance(need, int | float) else math.nan,
                "kind": str(t.extra.get("kind") or ""),
                "parallel": in_turn[turns[i]] > 1,
                "repeated": key in seen,
                "result_used": used[k],
                "estimated": t.entropy_kind != "exact",
                "inherited": k < inherited,
                "lost": lost[place],
            }
            seen.add(key)
            i += 1


def executed_calls(t: Trajectory) -> Iterator[tuple[ToolCall, ToolResult]]:
    """The calls that were run, each with its result."""
    from agentropy.evaluation.summary import executed_calls

    return executed_calls(t)


def arguments_text(call: ToolCall) -> str:
    """The arguments as JSON with sorted keys, so that equal calls have equal texts."""
    if call.error is not None and not call.arguments:
        return ""
    return json.dumps(call.arguments, ensure_ascii=False, sort_keys=True, default=str)


def segment_text(s: Segment, decode: Decode | None) -> str | None:
    """What a segment of the policy says; None where only ids are known, and nothing to read them with."""
    if s.tokens is not None:
        return "".join(s.tokens)
    if not s.ids:
        return ""
    return None if decode is None else decode(s.ids)


def uses(t: Trajectory, decode: Decode | None) -> list[bool | None]:
    """For each executed call whether its result was used later (`used.result_used`); None for failed calls."""
    places: list[tuple[int, ToolResult]] = [(i, r) for i, s in enumerate(t.segments) for r in s.results]
    if not any(r.status == "ok" for _, r in places):
        return [None] * len(places)
    texts: list[str | None] = []
    for s in t.segments:
        text = "" if s.kind == "result" else segment_text(s, decode)
        written = " ".join(arguments_text(c) for c in s.calls)
        texts.append(written if text is None and s.kind == "call" else text if text is None else f"{text} {written}")
    known = all_words(t.question)
    out: list[bool | None] = []
    at = 0
    for place, result in places:
        while at < place:
            text = texts[at]
            known |= all_words(text) if text else set()
            for r in t.segments[at].results:
                known |= all_words(r.content)
            at += 1
        if result.status != "ok":
            out.append(None)
            continue
        later = [text for text in texts[place + 1 :] if text]
        complete = all(text is not None for text in texts[place + 1 :])
        out.append(result_used(result.content, known, [*later, t.answer or ""], complete))
    return out
