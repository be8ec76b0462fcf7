"""Trajectories for tests: written down by hand in one line, or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from agentropy.trajectory import Segment, StopReason, ToolCall, ToolResult, Trajectory

EXAMPLE: dict[str, Any] = {
    "schema": "agentropy.trajectory/1",
    "question_id": "q7",
    "trajectory_id": "q7-3",
    "question": "What is 6 * 7?",
    "segments": [
        {"kind": "prompt", "ids": [1, 5, 9]},
        {"kind": "reasoning", "ids": [4, 4], "logprobs": [-0.1, -2.0], "entropies": [0.3, 1.1]},
        {
            "kind": "call",
            "ids": [8, 6],
            "logprobs": [-0.2, -0.1],
            "entropies": [0.2, 0.1],
            "calls": [{"tool": "python", "arguments": {"code": "print(6*7)"}}],
        },
        {"kind": "result", "ids": [7], "results": [{"status": "ok", "output": "42\n", "seconds": 0.004}]},
        {"kind": "reasoning", "ids": [3, 2], "logprobs": [-0.1, -0.1], "entropies": [0.1, 0.05]},
    ],
    "answer": "42",
    "score": 1.0,
    "stop": "answer",
}
"""The example of docs/trajectory.md."""

Turn = tuple[Sequence[float], Sequence[float], Sequence[str]]
"""(entropies of the reasoning tokens, entropies of the call tokens, statuses of the call's results)."""


def trajectory(
    turns: Sequence[Turn],
    score: float | None = 1.0,
    *,
    question: str = "q",
    name: str = "t",
    stop: StopReason = "answer",
    prompt: int = 2,
    result: int = 1,
    entropy_kind: Any = "exact",
    with_entropies: bool = True,
) -> Trajectory:
    """One trajectory; a turn with statuses is followed by a result segment of `result` tokens."""

    def model(kind: Any, entropies: Sequence[float], calls: int = 0) -> Segment:
        return Segment(
            kind,
            tuple(range(10, 10 + len(entropies))),
            logprobs=tuple(-float(h) for h in entropies),
            entropies=tuple(float(h) for h in entropies) if with_entropies else None,
            calls=tuple(ToolCall("python", {"code": str(i)}) for i in range(calls)),
        )

    segments = [Segment("prompt", tuple(range(prompt)))]
    for reasoning, call, statuses in turns:
        if len(reasoning):
            segments.append(model("reasoning", reasoning))
        if len(call) or statuses:
            segments.append(model("call", call, len(statuses)))
        if statuses:
            results = tuple(ToolResult("out", status) for status in statuses)  # type: ignore[arg-type]
            segments.append(Segment("result", tuple(range(result)), results=results))
    return Trajectory(
        question_id=question,
        trajectory_id=name,
        question="?",
        segments=tuple(segments),
        answer="1" if stop == "answer" else None,
        score=score,
        stop=stop,
        entropy_kind=entropy_kind,
    )


entropies = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]), min_size=0, max_size=4)
statuses = st.lists(st.sampled_from(["ok", "ok", "error", "timeout", "invalid", "lost"]), min_size=1, max_size=2)
scores = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, 0.3, None])
stops = st.sampled_from(["answer", "answer", "answer", "max_turns", "max_tokens", "context_full", "void", "error"])


@st.composite
def drawn_trajectory(draw: st.DrawFn, question: str, name: str) -> Trajectory:
    """Any shape that the rollout can make: no turns, empty segments, parallel calls, failures, cut ends."""
    turns = draw(st.lists(st.tuples(entropies, entropies, statuses), max_size=3))
    last = draw(st.one_of(st.none(), entropies))
    if last is not None:
        turns = [*turns, (last, draw(st.one_of(st.just([]), entropies)), [])]
    return trajectory(
        turns, draw(scores), question=question, name=name, stop=draw(stops), result=draw(st.integers(0, 2))
    )


@st.composite
def drawn_batch(draw: st.DrawFn, max_groups: int = 3, max_size: int = 5) -> list[Trajectory]:
    """Trajectories of some questions, interleaved."""
    out: list[Trajectory] = []
    for q in range(draw(st.integers(0, max_groups))):
        for i in range(draw(st.integers(1, max_size))):
            out.append(draw(drawn_trajectory(f"q{q}", f"q{q}-{i}")))
    return draw(st.permutations(out))
