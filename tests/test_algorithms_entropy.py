"""Entropies, their change over calls, and the tokens after a call; values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentropy.algorithms.entropy import (
    entropy_change,
    entropy_from_logits,
    entropy_from_top_k,
    normalised_entropy,
    post_tool_mask,
    turn_entropy,
)
from agentropy.batch import make_batch
from make_trajectories import trajectory
from typed import typed

nan = math.nan


def test_entropy_of_known_distributions() -> None:
    checked = typed(entropy_from_logits, "Float32 t", logits="Float32 t v")
    one_hot = [0.0, -math.inf, -math.inf, -math.inf]
    got = checked(torch.tensor([[1.0, 1.0, 1.0, 1.0], one_hot, [2.0, 0.0, -math.inf, -math.inf]]))
    assert got.tolist() == pytest.approx([math.log(4), 0.0, 0.365334], abs=1e-6)
    assert entropy_from_logits(torch.tensor([2.0, 0.0]), temperature=2.0).item() == pytest.approx(0.582203, abs=1e-6)


def test_entropy_does_not_change_with_a_shift_of_the_logits() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(entropy_from_logits(logits + 300.0), entropy_from_logits(logits), atol=1e-4, rtol=0)


def test_gradient_of_entropy_is_finite_where_a_token_is_impossible() -> None:
    logits = torch.tensor([1.0, 2.0, -math.inf], requires_grad=True)
    entropy_from_logits(logits).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8), st.integers(1, 8))
def test_top_k_lumps_the_rest_and_never_exceeds_the_entropy(weights: list[float], k: int) -> None:
    p = sorted((w / sum(weights) for w in weights), reverse=True)
    exact = -sum(x * math.log(x) for x in p)
    known = p[: min(k, len(p))]
    rest = max(0.0, 1 - sum(known))
    by_hand = -sum(x * math.log(x) for x in known) - (rest * math.log(rest) if rest > 0 else 0.0)
    got = entropy_from_top_k(torch.tensor(known, dtype=torch.float64).log()).item()
    assert got == pytest.approx(by_hand, abs=1e-9)
    assert got <= exact + 1e-9
    if k >= len(p):
        assert got == pytest.approx(exact, abs=1e-9)


def test_top_k_ignores_missing_candidates() -> None:
    half = math.log(0.5)
    assert entropy_from_top_k(torch.tensor([half, half, -math.inf])).item() == pytest.approx(math.log(2))


def test_change_over_three_calls() -> None:
    batch = make_batch(
        [trajectory([([1.0], [9], ["ok"]), ([0.6], [9], ["error"]), ([0.9], [9], ["ok"]), ([0.5], [], [])])]
    )
    change = entropy_change(batch)
    assert change.change.tolist() == pytest.approx([-0.4, 0.3, -0.4], abs=1e-6)
    assert change.relative.tolist() == pytest.approx([-0.4, 0.5, -0.4 / 0.9], abs=1e-6)
    assert change.reducing.tolist() == [True, False, True]


@pytest.mark.parametrize(("before", "after"), [([0.1, 0.3], [0.2]), ([0.1, 0.2, 0.3], [0.2]), ([0.2], [0.1, 0.2, 0.3])])
def test_rounding_is_no_reduction(before: list[float], after: list[float]) -> None:
    change = entropy_change(make_batch([trajectory([(before, [9], ["ok"]), (after, [], [])])]))
    assert change.change.tolist() == [0.0]
    assert change.reducing.tolist() == [False]


def test_segment_entropy_is_a_mean_over_reasoning_tokens_and_can_take_in_the_call() -> None:
    batch = make_batch([trajectory([([0.3, 1.1], [0.2, 0.1], ["ok"]), ([0.1, 0.05], [], [])])])
    checked = typed(turn_entropy, "Float64 u", batch=object, include_call_tokens=bool)
    assert checked(batch).tolist() == pytest.approx([0.7, 0.075])
    assert checked(batch, include_call_tokens=True).tolist() == pytest.approx([0.425, 0.075])
    assert entropy_change(batch).change.tolist() == pytest.approx([-0.625])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        # no reasoning before the second call: the first segment stands in for it
        ([([1.0], [5], ["ok"]), ([], [5], ["ok"]), ([0.4], [], [])], [nan, -0.6]),
        # nothing before the first call
        ([([], [5], ["ok"]), ([0.4], [5], ["ok"]), ([0.5], [], [])], [nan, 0.1]),
        # the trajectory ends after a result
        ([([1.0], [5], ["ok"])], [nan]),
        # the last segment is empty but for a call that never ran
        ([([1.0], [5], ["ok"]), ([], [5], [])], [nan]),
        # parallel calls share one change, and both count
        ([([1.0], [5], ["ok", "error"]), ([0.4], [], [])], [-0.6, -0.6]),
        # no change is no reduction
        ([([0.1, 0.3], [5], ["ok"]), ([0.3, 0.1], [], [])], [0.0]),
        # no call, no row
        ([([1.0], [], [])], []),
    ],
)
def test_change_where_segments_are_missing(turns: list, expected: list[float]) -> None:  # type: ignore[type-arg]
    change = entropy_change(make_batch([trajectory(turns)]))
    assert change.change.tolist() == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert change.reducing.tolist() == [d < 0 for d in expected]


def test_a_neighbour_never_stands_in_for_an_empty_segment() -> None:
    full = trajectory([([1.0], [5], ["ok"]), ([0.2], [], [])], name="a")
    empty = trajectory([([], [5], ["ok"]), ([0.4], [], [])], name="b")
    assert math.isnan(entropy_change(make_batch([full, empty])).change[1].item())


def marked(*turns: list, window: int | None = None, after: str = "ok") -> list[int]:  # type: ignore[type-arg]
    batch = make_batch([trajectory(turns, prompt=0, result=2)])
    return post_tool_mask(batch, window, after).nonzero().squeeze(-1).tolist()  # type: ignore[arg-type]


def test_post_tool_mask_lies_on_the_turn_after_the_result() -> None:
    first = trajectory([([1, 1], [1], ["ok"]), ([1, 1, 1, 1], [], [])], prompt=0, result=2, name="a")
    second = trajectory([([1] * 5, [1], ["ok"]), ([1, 1, 1, 1], [], [])], prompt=0, result=2, name="b")
    batch = make_batch([first, second])
    mask = typed(post_tool_mask, "Bool t", batch=object)(batch)
    own = [mask[batch.trajectory_of == i].nonzero().squeeze(-1).tolist() for i in (0, 1)]
    assert own == [[5, 6, 7, 8], [8, 9, 10, 11]]


def test_post_tool_mask_needs_a_success_unless_told_otherwise() -> None:
    # tokens: 0 r, 1 c, 2-3 result, 4 r, 5 c, 6-7 result, 8-9 r
    turns = [([1], [1], ["error"]), ([1], [1], ["ok"]), ([1, 1], [], [])]
    assert marked(*turns) == [8, 9]
    assert marked(*turns, after="any") == [4, 5, 8, 9]
    assert marked(*turns, window=1) == [8]
    assert marked(*turns, window=1, after="any") == [4, 8]
    assert marked(*turns, window=99, after="any") == [4, 5, 8, 9]


def test_one_success_among_parallel_calls_is_enough() -> None:
    assert marked(([1], [1], ["error", "ok"]), ([1], [], [])) == [4]
    assert marked(([1], [1], ["error", "timeout"]), ([1], [], [])) == []


def test_a_call_ends_its_own_trajectory_only() -> None:
    ends = trajectory([([1], [1], ["ok"])], name="a")
    starts = trajectory([([1, 1], [], [])], name="b")
    assert not post_tool_mask(make_batch([ends, starts]), after="any").any()


def test_standardised_entropy_over_a_trajectory_or_the_batch() -> None:
    a = trajectory([([0.1, 0.5], [], ["ok"]), ([2.0, 0.2, 0.8, 0.4], [], [])], name="a")
    b = trajectory([([5.0, 7.0], [], [])], name="b")
    batch = make_batch([a, b])
    both = torch.tensor([True, True])
    z = normalised_entropy(batch, both)[batch.is_model]
    assert z[:6].tolist() == pytest.approx([-0.8898, -0.2617, 2.0937, -0.7328, 0.2094, -0.4187], abs=1e-4)
    assert z[6:].tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)
    only = normalised_entropy(batch, torch.tensor([True, False]), over="batch")
    torch.testing.assert_close(only, torch.where(batch.trajectory_of == 0, normalised_entropy(batch, both), 0.0))
    across = normalised_entropy(batch, both, over="batch")[batch.is_model]
    assert across.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert across.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)


def test_equal_entropies_are_all_zero() -> None:
    batch = make_batch([trajectory([([0.7, 0.7, 0.7], [], [])])])
    assert normalised_entropy(batch, torch.tensor([True])).tolist() == pytest.approx([0.0] * batch.n_tokens, abs=1e-7)
