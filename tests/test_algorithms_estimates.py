"""Entropy from the likeliest outcomes and a tail: exact where nothing is missing, near it where the shape is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentropy.algorithms.entropy import entropy_from_logits, entropy_from_top_k
from agentropy.algorithms.estimates import entropy_with_tail

weights = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=40)


def top(p: torch.Tensor, k: int) -> torch.Tensor:
    return p.log().sort(descending=True).values[:k]


@given(weights, st.integers(1, 20))
def test_never_below_the_lower_bound_and_exact_where_all_is_known(values: list[float], k: int) -> None:
    p = torch.tensor(values, dtype=torch.float64) / sum(values)
    exact = entropy_from_logits(p.log()).item()
    got = entropy_with_tail(top(p, k)).item()
    assert math.isfinite(got)
    assert got >= entropy_from_top_k(top(p, k)).item() - 1e-9
    assert got <= math.log(50_000) + 1e-6
    if k >= len(values):
        assert got == pytest.approx(exact, abs=1e-9)


def test_a_power_law_and_a_plateau_are_found() -> None:
    ranks = torch.arange(1, 50_001, dtype=torch.float64)
    for exponent in (1.2, 1.5, 2.0, 3.0):
        p = ranks**-exponent
        p = p / p.sum()
        exact = entropy_from_logits(p.log()).item()
        assert entropy_with_tail(top(p, 20)).item() == pytest.approx(exact, rel=0.03)
        assert entropy_from_top_k(top(p, 20)).item() < exact
    for names in (25, 40, 300):
        p = torch.full((names,), 1 / names, dtype=torch.float64)
        assert entropy_with_tail(top(p, 20)).item() == pytest.approx(math.log(names), rel=1e-6)


def test_rows_do_not_touch_each_other_and_order_and_padding_mean_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(6, 200, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
    known = logp.sort(-1, descending=True).values[:, :20]
    known[2, 5:] = -math.inf
    whole = entropy_with_tail(known)
    assert whole.isfinite().all()
    for row in range(6):
        shuffled = known[row][torch.randperm(20, generator=generator)]
        assert entropy_with_tail(shuffled).item() == pytest.approx(whole[row].item(), abs=1e-12)
    assert entropy_with_tail(known[2, :5]).item() == pytest.approx(whole[2].item(), abs=1e-12)
    assert entropy_with_tail(torch.full((3,), -math.inf)).item() == 0.0
    assert entropy_with_tail(torch.empty(0, 20)).shape == (0,)


def test_the_mass_that_is_left_can_be_given() -> None:
    p = torch.tensor([0.5, 0.2, 0.1, 0.05])
    whole, less = entropy_with_tail(p.log()), entropy_with_tail(p.log(), rest=torch.tensor(0.05))
    assert less < whole
    assert entropy_with_tail(p.log(), rest=torch.tensor(0.0)).item() == pytest.approx(
        torch.special.entr(p.double()).sum().item(), abs=1e-6
    )
