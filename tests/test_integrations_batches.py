"""Padded tensors of an engine and our batch: nothing is lost on the way, whatever the trajectories look like."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.batch import PROMPT, Batch, make_batch
from agentropy.errors import UserError
from agentropy.integrations.batches import completion_starts, flat, from_columns, padded, to_columns, with_scores
from agentropy.methods import make_method
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory
from make_trajectories import drawn_batch, trajectory


def same(a: Batch, b: Batch, but: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(Batch):
        if field.name in but:
            continue
        one, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True, msg=field.name)
        else:
            assert one == other, field.name


@given(drawn_batch(), st.integers(0, 12), st.booleans())
@settings(max_examples=60)
def test_padded_and_flat_are_each_other_backwards(drawn: list[Trajectory], more: int, completions: bool) -> None:
    batch = make_batch(drawn)
    values = torch.arange(batch.n_tokens, dtype=torch.float64) + 1
    starts = completion_starts(batch) if completions else None
    longest = max((len(t.ids) for t in drawn), default=0)
    rows = padded(batch, values, longest + more, starts=starts, fill=-1)
    assert rows.shape == (len(drawn), longest + more)
    for i, t in enumerate(drawn):
        begin = len(t.prompt) if completions else 0
        at = sum(len(other.ids) for other in drawn[:i])
        own = [float(at + k + 1) for k in range(begin, len(t.ids))]
        assert rows[i].tolist() == own + [-1.0] * (longest + more - len(own))
    there = torch.ones(batch.n_tokens, dtype=torch.bool) if starts is None else batch.kind_of != PROMPT
    back = flat(batch, rows, starts=starts, fill=-2)
    assert back.tolist() == [v if ok else -2.0 for v, ok in zip(values.tolist(), there.tolist(), strict=True)]


def test_rows_may_be_any_and_what_is_beyond_the_width_is_left_out() -> None:
    batch = make_batch([trajectory([([1.0, 2.0], [], [])], name="a"), trajectory([([3.0], [], [])], name="b")])
    assert batch.tokens.tolist() == [0, 1, 10, 11, 0, 1, 10]
    out = padded(batch, batch.tokens, 2, rows=torch.tensor([1, 0, 1]), starts=completion_starts(batch), fill=-1)
    assert out.tolist() == [[10, -1], [10, 11], [10, -1]]
    assert padded(batch, batch.is_model, 1, starts=completion_starts(batch)).tolist() == [[True], [True]]
    assert padded(batch, batch.tokens, 2, rows=torch.tensor([], dtype=torch.int64)).shape == (0, 2)


def without_empty(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, segments=tuple(s for s in t.segments if s.ids or s.calls or s.results))


@given(drawn_batch())
@settings(max_examples=60)
def test_columns_carry_all_that_methods_look_at(drawn: list[Trajectory]) -> None:
    drawn = [without_empty(t) for t in drawn]
    if any(not s.ids for t in drawn for s in t.segments):
        with pytest.raises(UserError, match="without tokens"):
            to_columns(drawn)
        return
    questions, names = [t.question_id for t in drawn], [t.trajectory_id for t in drawn]
    back = from_columns(to_columns(drawn), questions, names)
    one, other = make_batch(drawn), make_batch(back)
    same(one, other, but=("tools", "call_tool"))
    for method in ("grpo", "tao-rl", "tepo-sparse", "tepo-dense", "simpletir"):
        a, b = make_method(method).shape(one), make_method(method).shape(other)
        torch.testing.assert_close(a.advantages, b.advantages, atol=0, rtol=0)
        assert a.why == b.why


def test_columns_of_parallel_calls_and_of_unknown_entropies() -> None:
    calls = tuple(ToolCall("python") for _ in range(21))
    results = tuple(ToolResult("x", s) for s in ("ok", "error", "timeout", "invalid", "lost", *["ok"] * 16))
    t = Trajectory(
        "q",
        "t",
        "",
        (
            Segment("prompt", (1,)),
            Segment("call", (2, 3), (-0.5, -0.25), calls=calls),
            Segment("result", (4, 5), results=results),
        ),
        None,
        None,
        "error",
        entropy_kind="top-k",
    )
    columns = to_columns([t])
    assert columns.kinds.tolist() == [[0, 2, 2, 3, 3]]
    assert columns.calls.tolist() == [[0, 21, 0, 0, 0]]
    (back,) = from_columns(columns, ["q"], ["t"])
    assert [r.status for r in back.results] == [r.status for r in results]
    assert back.segments[1].logprobs == (-0.5, -0.25)
    assert back.segments[1].entropies is None
    assert (back.score, back.stop, back.answer, back.entropy_kind) == (None, "error", None, "top-k")
    more = dataclasses.replace(t, segments=(*t.segments[:2], Segment("result", (4,), results=(*results, results[0]))))
    with pytest.raises(UserError, match="22 results in one turn"):
        to_columns([more])


def test_scores_are_put_where_the_policy_spoke() -> None:
    t = dataclasses.replace(trajectory([([1.0], [2.0], ["ok"]), ([3.0], [], [])], entropy_kind="top-k"))
    n = len(t.ids)
    scored = with_scores(t, [float(-i) for i in range(n)], [float(i) for i in range(n)])
    assert scored.entropy_kind == "exact"
    assert scored.ids == t.ids
    batch = make_batch([scored])
    assert batch.entropies.tolist() == [float(i) if ours else 0.0 for i, ours in enumerate(batch.is_model.tolist())]
