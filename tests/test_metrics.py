"""Avg@K, Pass@k, majority vote, code lines, bootstrap intervals and gradient fluctuation."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.evaluation.metrics import (
    avg_at_k,
    bootstrap_questions,
    bootstrap_seeds,
    code_lines,
    effective_ratio,
    gradient_fluctuation,
    majority,
    majority_at_k,
    mean_pass_at_k,
    paired_bootstrap,
    pass_at_k,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(16, 4, 8, 0.961538), (16, 1, 16, 1.0), (16, 0, 4, 0.0), (5, 2, 1, 0.4), (5, 2, 2, 0.7)],
)
def test_pass_at_k_worked_examples(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_the_binomial_quotient(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=0.0)


@pytest.mark.parametrize(("c", "k"), [(1, 1), (1, 9_999), (5, 5_000), (5_000, 2), (9_000, 900), (3, 10_000)])
def test_pass_at_k_is_stable_for_ten_thousand_samples(c: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(10_000 - c, k), math.comb(10_000, k))
    assert pass_at_k(10_000, c, k) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k"):
        pass_at_k(n, c, k)


def test_averages_over_questions_not_samples() -> None:
    assert avg_at_k([[1, 0, 0, 0], [1, 1]]) == pytest.approx((0.25 + 1) / 2)
    assert math.isnan(avg_at_k([]))
    with pytest.raises(ValueError, match="no samples"):
        avg_at_k([[1.0], []])
    assert mean_pass_at_k([[True, False], [False, False]], 1) == pytest.approx(0.25)
    assert mean_pass_at_k([[True, False], [False, False]], 2) == pytest.approx(0.5)


def test_majority_vote() -> None:
    assert majority(["3", "4", " 4", None]) == 1
    assert majority(["4", "3", "3", "4"]) == 0  # a tie goes to the answer given first
    assert majority([None, " "]) is None
    assert majority(["1/2", "7", "0.5"], key=lambda s: float(Fraction(s))) == 0
    assert majority_at_k([["3", "4", "4"], [None, None, None]], [[1, 0, 0], [0, 0, 0]]) == 0.0
    assert majority_at_k([["3", "4", "4"]], [[0, 1, 1]]) == 1.0


def test_code_lines() -> None:
    lines = code_lines("x=1\n\n# c\nprint(x)  # y")
    assert (lines.total, lines.stripped) == (4, 2)
    assert code_lines("").total == 0
    assert code_lines("    # indented comment\n\t\n  y").stripped == 1


def test_effective_ratio_micro_and_macro() -> None:
    micro, macro = effective_ratio([[True, False, False], [True], []])
    assert micro == pytest.approx(0.5)
    assert macro == pytest.approx((1 / 3 + 1) / 2)
    assert all(math.isnan(x) for x in effective_ratio([[], []]))


def test_the_interval_has_the_width_of_the_normal_theory() -> None:
    values = np.random.default_rng(3).normal(size=400)
    found = bootstrap_questions(values, resamples=4000)
    assert found.mean == pytest.approx(values.mean())
    expected = 2 * 1.96 * values.std() / math.sqrt(400)
    assert found.high - found.low == pytest.approx(expected, rel=0.08)
    assert bootstrap_questions(values, resamples=500) == bootstrap_questions(values, resamples=500)
    assert bootstrap_questions([0.5] * 7, resamples=100).low == 0.5


def test_seeds_widen_the_interval_when_they_differ() -> None:
    questions = np.random.default_rng(4).random(50)
    same = bootstrap_seeds(np.stack([questions] * 4), resamples=2000)
    apart = bootstrap_seeds(np.stack([questions + shift for shift in (-0.4, -0.1, 0.1, 0.4)]), resamples=2000)
    assert apart.mean == pytest.approx(same.mean)
    assert apart.high - apart.low > 2 * (same.high - same.low)


def test_the_paired_difference_uses_the_pairs() -> None:
    rng = np.random.default_rng(5)
    a = rng.random(200)
    b = a + 0.02 + 0.01 * rng.standard_normal(200)
    found = paired_bootstrap(a, b, resamples=2000)
    assert found.mean == pytest.approx(0.02, abs=0.003)
    assert found.low > 0
    assert found.p_value < 0.01
    shuffled = paired_bootstrap(a, rng.permutation(b), resamples=2000)
    assert shuffled.high - shuffled.low > 5 * (found.high - found.low)
    assert paired_bootstrap(a, a, resamples=200).p_value == 1.0
    with pytest.raises(ValueError, match="same questions"):
        paired_bootstrap([1.0], [1.0, 2.0])


def test_the_p_value_is_uniform_without_a_difference() -> None:
    rng = np.random.default_rng(6)
    rejected = sum(
        paired_bootstrap(rng.random(60), rng.random(60), resamples=300, seed=i).p_value < 0.1 for i in range(200)
    )
    assert 8 <= rejected <= 36


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=60), st.floats(0.1, 10))
def test_fluctuation_ignores_the_scale(norms: list[float], scale: float) -> None:
    plain, scaled = gradient_fluctuation(norms), gradient_fluctuation([n * scale for n in norms])
    assert scaled.cv == pytest.approx(plain.cv, rel=1e-6, abs=1e-9)
    assert scaled.window_cv == pytest.approx(plain.window_cv, rel=1e-6, abs=1e-9)
    assert scaled.mean_change == pytest.approx(plain.mean_change * scale, rel=1e-6, abs=1e-9)


def test_fluctuation_by_hand() -> None:
    found = gradient_fluctuation([1.0, 3.0, 1.0, 3.0], window=2)
    assert found.cv == pytest.approx(0.5)
    assert found.window_cv == pytest.approx(0.5)
    assert found.mean_change == pytest.approx(2.0)
    assert found.spike_rate == 0.0
    spiky = gradient_fluctuation([1.0, 1.0, math.nan, 10.0, math.inf, 1.0], window=3)
    assert spiky.non_finite == 2
    assert spiky.spike_rate == pytest.approx(1 / 3)
    assert math.isnan(gradient_fluctuation([1.0]).cv)
    with pytest.raises(ValueError, match="window"):
        gradient_fluctuation([1.0, 2.0], window=1)
