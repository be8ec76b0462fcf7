"""Decisions of branching rollouts by hand, and what tokens that leaves share are worth."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.algorithms.branching import (
    Branching,
    branch_probability,
    count_once,
    forks,
    penalty,
    shared_tokens,
    split_budget,
    token_origin,
    window_entropy,
)
from agentropy.algorithms.losses import LossConfig, LossInputs, policy_loss
from agentropy.batch import make_batch
from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory
from make_trajectories import trajectory

# -- decisions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "rounded", "released"), [(-2, 4, 5), (-1, 6, 7), (0, 8, 9), (1, 10, 10), (2, 12, 12)]
)
def test_budget_split(difference: float, rounded: int, released: int) -> None:
    assert split_budget(16, 1.0 + difference, 1.0) == rounded
    assert split_budget(16, 1.0 + difference, 1.0, split="released") == released
    assert abs(rounded - 16 / (1 + math.exp(-0.5 * difference))) <= 0.5


def test_budget_split_stays_in_its_bounds_and_rounds_halves_up() -> None:
    assert split_budget(16, 0.0, 1e6) == 1
    assert split_budget(16, 1e6, 0.0) == split_budget(16, 1e6, 0.0, split="released") == 16
    assert [split_budget(g, 1.0, 1.0) for g in (1, 3, 5, 7)] == [1, 2, 3, 4]
    assert split_budget(16, 1.0, math.nan) == split_budget(16, math.nan, 1.0) == 8
    assert split_budget(16, 2.0, 1.0, beta=0.0) == 8


def test_branch_probability() -> None:
    v = 151_643
    scale = math.log(v)
    assert scale == pytest.approx(11.929, abs=1e-3)
    assert branch_probability(1.0, 1.0, v) == 0.5
    assert branch_probability(1.0 + scale, 1.0, v) == pytest.approx(0.7)
    assert branch_probability(1.0, 1.0 + scale, v) == pytest.approx(0.3)
    assert branch_probability(0.0, 3 * scale, v) == 0.0
    assert branch_probability(3 * scale, 0.0, v) == 1.0
    assert branch_probability(1.0 + 0.5 * scale, 1.0, v, base=0.1, beta=0.4) == pytest.approx(0.3)
    assert branch_probability(math.nan, 1.0, v) == branch_probability(1.0, math.nan, v) == 0.0


def test_what_is_forked() -> None:
    cases = {(0.5, 0.1): (False, False, True), (0.6, 0.1): (True, True, True), (0.6, 0.7): (False, True, False)}
    for (p, draw), wanted in cases.items():
        assert tuple(forks(p, draw, 0.5, d) for d in ("threshold-draw", "threshold", "draw")) == wanted  # type: ignore[arg-type]
    assert not forks(0.0, 0.0, 0.0)
    assert forks(1.0, 1.0 - 2**-53, 0.0)


def test_penalty_of_forks_in_a_row() -> None:
    assert [penalty(n) for n in (0, 1, 2, 20, 30)] == pytest.approx([1.0, 0.95, 0.9, 0.0, 0.0])
    assert penalty(7, 0.0) == 1.0


def test_window_entropy() -> None:
    assert window_entropy([1.0, 2.0, 6.0], 2) == 1.5
    assert window_entropy([1.0, 2.0, 6.0], 20) == 3.0
    assert math.isnan(window_entropy([], 20))


def test_half_of_the_budget_by_default() -> None:
    assert [Branching().initial_roots(g) for g in (1, 7, 16)] == [1, 4, 8]
    assert Branching(roots=3).initial_roots(16) == 3


# -- shared tokens -----------------------------------------------------------------------------------------------------

TRUNK = [([1.0, 0.5], [0.3], ["ok"]), ([0.4], [0.2], ["ok"]), ([0.6, 0.1], [], [])]


def leaf(name: str, parent: str | None, at: int | None, ends: Sequence[float], score: float | None) -> Trajectory:
    """A leaf of the trunk (prompt 0:2, turn 2:5, result 5:6, turn 6:8, result 8:9) with its own last turn."""
    t = trajectory([*TRUNK[:2], (ends, [], [])] if at in (None, 9) else [TRUNK[0], (ends, [], [])], score, name=name)
    return dataclasses.replace(t, parent_id=parent, fork_at=at)


def tree() -> list[Trajectory]:
    """b left a at 9, c left b's inherited part at 6, d is a root of its own."""
    return [
        leaf("c", "b", 6, [0.7, 0.7], 1.0),
        leaf("b", "a", 9, [0.9], 0.0),
        leaf("a", None, None, [0.6, 0.1], 1.0),
        leaf("d", None, None, [0.6, 0.1], 0.0),
    ]


def test_who_shares_what() -> None:
    batch = make_batch(tree())
    assert batch.parent_of.tolist() == [1, 2, -1, -1]
    assert batch.fork_at.tolist() == [6, 9, -1, -1]
    c, b, a, _ = batch.token_start.tolist()[:4]
    origin = token_origin(batch).tolist()
    assert origin[c : c + 6] == list(range(a, a + 6))
    assert origin[c + 6 : b] == list(range(c + 6, b))
    assert origin[b : b + 9] == list(range(a, a + 9))
    assert origin[a:] == list(range(a, batch.n_tokens))
    assert int(shared_tokens(batch).sum()) == 3 + 5
    assert make_method("arpo").shape(batch).metrics["batch/shared_tokens"] == 8


def test_hard_estimation_by_hand() -> None:
    batch = make_batch(tree())
    soft = make_method("arpo").shape(batch)
    hard = make_method("arpo", estimation="hard").shape(batch)
    one = 0.5 / (statistics.stdev([1, 0, 1, 0]) + 1e-6)
    c, b, a, d = batch.token_start.tolist()[:4]
    assert soft.advantages[batch.is_model].abs().tolist() == pytest.approx([one] * int(batch.is_model.sum()))
    wanted = {c + 2: one / 3, c + 4: one / 3, c + 6: one, b + 2: one / 3, b + 6: 0.0, b + 9: -one}
    wanted |= {a + 3: one / 3, a + 6: 0.0, a + 7: 0.0, a + 9: one, d + 2: -one, d + 9: -one}
    for place, value in wanted.items():
        assert float(hard.advantages[place]) == pytest.approx(value, abs=1e-6), place
    once = make_method("arpo", estimation="hard", count_shared="once").shape(batch)
    assert int(soft.loss_mask.sum() - once.loss_mask.sum()) == 8
    assert once.loss_mask[c + 2]  # the first leaf that has it
    assert not once.loss_mask[a + 2]
    assert once.loss_mask[b + 6]
    assert torch.equal(once.advantages, torch.where(once.loss_mask, hard.advantages, 0.0))
    weights = make_method("arpo").token_weights(batch, once.loss_mask)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_a_lost_leaf_counts_in_no_mean() -> None:
    rows = [dataclasses.replace(t, score=None, stop="error") if t.trajectory_id == "b" else t for t in tree()]
    batch = make_batch(rows)
    shaped = make_method("arpo", estimation="hard").shape(batch)
    high = (1 - 2 / 3) / (statistics.stdev([1, 1, 0]) + 1e-6)
    c, b, a, _ = batch.token_start.tolist()[:4]
    assert float(shaped.advantages[c + 2]) == pytest.approx(high)
    assert float(shaped.advantages[a + 6]) == pytest.approx(high)
    assert not shaped.advantages[b:a].any()


def test_a_removed_leaf_leaves_its_tokens_to_the_others() -> None:
    rows = [dataclasses.replace(t, stop="max_tokens") if t.trajectory_id == "c" else t for t in tree()]
    batch = make_batch(rows)
    options = {"estimation": "hard", "count_shared": "once", "mask_truncated": True}
    shaped = make_method("arpo", **options).shape(batch)
    c, b, a, _ = batch.token_start.tolist()[:4]
    assert not shaped.loss_mask[c:b].any()
    assert shaped.loss_mask[b + 2]
    assert not shaped.loss_mask[a + 2]


def test_trees_that_cannot_be_are_refused() -> None:
    rows = tree()
    with pytest.raises(UserError, match="'b' names 'd' as its parent, but does not share its first 11 tokens"):
        make_batch([rows[0], dataclasses.replace(rows[1], parent_id="d", fork_at=11), *rows[2:]])
    with pytest.raises(UserError, match="does not share its first 99 tokens"):
        make_batch([*rows[:2], dataclasses.replace(rows[2], parent_id="d", fork_at=99), rows[3]])
    with pytest.raises(UserError, match="is its own ancestor"):
        make_batch([*rows[:2], dataclasses.replace(rows[2], parent_id="c", fork_at=3), rows[3]])
    alone = make_batch(rows[:2])  # the parent of b is elsewhere
    assert alone.parent_of.tolist() == [1, -1]


@st.composite
def drawn_tree(draw: st.DrawFn) -> list[Trajectory]:
    """Questions whose leaves fork from any earlier leaf after any of its results, in any order."""
    out: list[Trajectory] = []
    number = 0
    for q in range(draw(st.integers(1, 2))):
        mine: list[Trajectory] = []
        for k in range(draw(st.integers(1, 6))):
            segments: list[Segment] = [Segment("prompt", (1, 2))]
            parent, at = None, None
            choices = [(t, i) for t in mine for i, s in enumerate(t.segments) if s.kind == "result"]
            if choices and draw(st.booleans()):
                source, i = draw(st.sampled_from(choices))
                segments = list(source.segments[: i + 1])
                parent, at = source.trajectory_id, sum(len(s.ids) for s in segments)
            for _ in range(draw(st.integers(0, 2))):
                number += 3
                segments.append(Segment("reasoning", (number,), (-1.0,), (number % 7 / 5,)))
                segments.append(Segment("call", (number + 1,), (-1.0,), (number % 5 / 5,), (ToolCall("t"),)))
                segments.append(Segment("result", (number + 2,), results=(ToolResult("x"),)))
            number += 1
            segments.append(Segment("reasoning", (number,), (-1.0,), (number % 3 / 2,)))
            score = draw(st.sampled_from([0.0, 1.0, 0.5, None]))
            stop = "error" if score is None else "answer"
            mine.append(Trajectory(f"q{q}", f"q{q}/{k}", "", tuple(segments), "1", score, stop, "exact", parent, at))  # type: ignore[arg-type]
        out += mine
    return draw(st.permutations(out))


def leaves_of(rows: Sequence[Trajectory], i: int, place: int) -> list[int]:
    """Leaves that have the token at `place` of leaf i: ids of sampled tokens are all different."""
    t = rows[i]
    return [
        j for j, o in enumerate(rows) if o.question_id == t.question_id and o.ids[: place + 1] == t.ids[: place + 1]
    ]


@given(rows=drawn_tree())
@settings(max_examples=60, deadline=None)
def test_hard_is_the_mean_over_leaves_and_pulls_as_soft_does(rows: list[Trajectory]) -> None:
    batch = make_batch(rows)
    soft = make_method("arpo").shape(batch)
    hard = make_method("arpo", estimation="hard").shape(batch)
    once = make_method("arpo", estimation="hard", count_shared="once").shape(batch)
    start = batch.token_start.tolist()
    value = [
        float(soft.advantages[start[i] : start[i + 1]][batch.is_model[start[i] : start[i + 1]]][0])
        for i in range(len(rows))
    ]
    total: dict[tuple[int, ...], list[float]] = {}
    for i in range(len(rows)):
        for place in range(start[i + 1] - start[i]):
            at = start[i] + place
            if not batch.is_model[at]:
                continue
            sharers = leaves_of(rows, i, place)
            found = [j for j in sharers if not batch.lost[j]]
            wanted = statistics.fmean(value[j] for j in found) if not batch.lost[i] else 0.0
            assert float(hard.advantages[at]) == pytest.approx(wanted, abs=1e-5)
            entry = total.setdefault(rows[i].ids[: place + 1], [0.0, 0.0, 0.0])
            entry[0] += float(soft.advantages[at])
            entry[1] += float(hard.advantages[at])
            entry[2] += float(once.loss_mask[at])
    for prefix, (a, b, count) in total.items():
        assert a == pytest.approx(b, abs=1e-5), prefix
        assert count in (0.0, 1.0)
    assert torch.equal(count_once(batch, once.loss_mask), once.loss_mask)
    assert int(shared_tokens(batch).sum()) == int(batch.is_model.sum()) - len(total)


# -- AEPO --------------------------------------------------------------------------------------------------------------


def single(method: str, advantage: float, ratio: float, marked: bool = True, **options: Any) -> tuple[float, float]:
    """Loss of one token and its gradient with respect to logp."""
    logp = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    one, yes = torch.ones(1), torch.tensor([True])
    inputs = LossInputs(logp, torch.tensor([-1.0]), advantage * one, one, yes, marked=torch.tensor([marked]))
    loss, _ = make_method(method, clip_high=0.28, **options).compute_loss(inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1, 1.5, -1.28, -1.28),
        (1, 0.5, -0.5, -0.5),
        (-1, 5, 3, 0),
        (-1, 2, 2, 2),
        (-1, 0.5, 0.8, 0),
        (1, 1.1, -1.1, -1.1),
    ],
)
def test_clipped_tokens_keep_a_bounded_gradient(advantage: float, ratio: float, loss: float, gradient: float) -> None:
    assert single("aepo", advantage, ratio) == pytest.approx((loss, gradient), abs=1e-5)
    clipped = advantage == 1 and ratio == 1.5
    assert single("arpo", advantage, ratio) == pytest.approx((loss, 0.0 if clipped else gradient), abs=1e-5)
    assert single("aepo", advantage, ratio, clip_gradient=False) == single("arpo", advantage, ratio)
    assert single("aepo", advantage, ratio, tokens="high-entropy") == single("aepo", advantage, ratio)
    assert single("aepo", advantage, ratio, marked=False, tokens="high-entropy") == single("arpo", advantage, ratio)


def test_high_entropy_tokens_are_those_of_the_batch_and_must_be_given() -> None:
    rows = [trajectory([([0.1, 0.9, 0.2, 0.3], [], [])], s, name=str(s)) for s in (0.0, 1.0)]
    batch = make_batch(rows)
    shaped = make_method("aepo", tokens="high-entropy", q_h=0.25).shape(batch)
    assert shaped.marked is not None
    assert shaped.marked[batch.is_model].tolist() == [False, True, False, False] * 2
    assert make_method("aepo").shape(batch).marked is None
    nothing = LossInputs(batch.logprobs, batch.logprobs, shaped.advantages, shaped.advantages, shaped.loss_mask)
    with pytest.raises(ValueError, match="marked"):
        make_method("aepo", tokens="high-entropy").compute_loss(nothing)


def test_entropy_aware_advantage_by_hand() -> None:
    rows = [trajectory([([0.0, 1.0], [], [])], 1.0, name="a"), trajectory([([2.0, 3.0], [], [])], 0.0, name="b")]
    batch = make_batch(rows)
    shaped = make_method("aepo").shape(batch)
    std = statistics.pstdev([0, 1, 2, 3])
    base = 0.5 / (math.sqrt(0.5) + 1e-6)
    z = [(h - 1.5) / std for h in (0, 1, 2, 3)]
    wanted = [s * base * (1 + 0.2 * x) for s, x in zip((1, 1, -1, -1), z, strict=True)]
    assert shaped.advantages[batch.is_model].tolist() == pytest.approx(wanted, abs=1e-5)
    assert shaped.bonus[batch.is_model].all()
    assert shaped.metrics["entropy/bonus_share"] > 0.1  # on, and seen to be on


def test_masked_tokens_reach_no_held_gradient() -> None:
    logp = torch.tensor([0.5, math.nan], requires_grad=True)
    inputs = LossInputs(logp, torch.tensor([-1.0, math.nan]), torch.ones(2), torch.ones(2), torch.tensor([True, False]))
    loss, _ = policy_loss(inputs, LossConfig(), torch.tensor([True, True]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1.28, 0.0])


# -- the authors' reward -----------------------------------------------------------------------------------------------


def test_the_authors_reward() -> None:
    def used(name: str, *tools: str, score: float | None = 1.0, **changes: Any) -> Trajectory:
        t = trajectory([*(([1.0], [1.0], ["ok"]) for _ in tools), ([1.0], [], [])], score, name=name)
        names = iter(tools)
        segments = tuple(
            dataclasses.replace(s, calls=(ToolCall(next(names)),)) if s.kind == "call" else s for s in t.segments
        )
        return dataclasses.replace(t, segments=segments, **changes)

    rows = [
        used("one", "python", "python"),
        used("both", "python", "search", score=0.4),
        used("wrong", "python", "search", score=0.0),
        used("void", "python", score=0.0, stop="void", answer=None),
        used("cut", "python", "search", score=0.0, stop="max_tokens", answer=None),
        used("lost", "python", score=None, stop="error", answer=None),
    ]
    batch = make_batch(rows)
    assert batch.tools == ("python", "search")
    for method in ("arpo", "aepo"):
        reward = make_method(method, reward="authors").shape(batch).reward.tolist()
        assert reward[:5] == pytest.approx([1.0, 0.5, 0.0, -1.0, -1.0])
        assert math.isnan(reward[5])
