"""Every method with every option, against a second implementation in plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.batch import make_batch
from agentropy.commands.shape import shaped_rows
from agentropy.methods import METHODS, make_method, method_options
from agentropy.trajectory import Trajectory
from make_trajectories import drawn_batch
from reference_shape import reference

flag = st.booleans()
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "alpha": st.sampled_from([0.0, 0.01, 0.5, 2.0]),
    "q_h": st.sampled_from([0.1, 0.2, 0.5, 1.0]),
    "form": st.sampled_from(["multiplicative", "additive"]),
    "kappa": st.sampled_from([1.0, 2.0]),
    "over": st.sampled_from(["trajectory", "batch"]),
    "window": st.sampled_from([None, 1, 2]),
    "after": st.sampled_from(["ok", "any"]),
    "bonus": flag,
    "bonus_on": st.sampled_from(["post-tool", "all"]),
    "execution_filter": flag,
    "discriminability_filter": flag,
    "discriminability": st.sampled_from(["survivors", "all"]),
    "statistics": st.sampled_from(["survivors", "all"]),
    "void_filter": flag,
    "mask_truncated": flag,
    "normalize_std": flag,
    "zero_call": st.sampled_from(["f1", "zero"]),
    "credit": st.sampled_from(["turn", "return"]),
    "include_call_tokens": flag,
    "reward": st.sampled_from(["outcome", "authors"]),
    "estimation": st.sampled_from(["soft", "hard"]),
    "entropy_advantage": flag,
    "a": st.sampled_from([0.0, 0.2, 3.0]),
}
ROLLOUT_ONLY = {"arpo": {"window"}, "aepo": {"window"}}


@pytest.mark.parametrize("name", METHODS)
@given(data=st.data(), trajectories=drawn_batch())
@settings(max_examples=25, deadline=None)
def test_every_option_equals_the_reference(name: str, data: st.DataObject, trajectories: list[Trajectory]) -> None:
    names = [o for o in method_options(name) if o in CHOICES.keys() - ROLLOUT_ONLY.get(name, set())]
    options = {o: data.draw(CHOICES[o], label=o) for o in names}
    method = make_method(name, **options)
    batch = make_batch(trajectories)
    rows = list(shaped_rows(batch, method.shape(batch)))
    expected = reference(name, trajectories, dict(method.options))
    assert len(rows) == len(expected) == len(trajectories)
    for row, want in zip(rows, expected, strict=True):
        assert (row["kept"], row["why"]) == (want.kept, want.why)
        if not math.isnan(want.reward):
            assert row["reward"] == pytest.approx(want.reward, abs=1e-6)
            assert row["turn_rewards"] == pytest.approx(want.turn_rewards, abs=1e-6)
        else:
            assert row["reward"] is None
            assert row["turn_rewards"] == [None] * len(want.turn_rewards)
        assert [d is None for d in row["entropy_change"]] == [d is None for d in want.change]
        for got, d in zip(row["entropy_change"], want.change, strict=True):
            assert got == pytest.approx(d, abs=1e-6)
        assert row["advantages"] == pytest.approx(want.advantages, abs=2e-4)
        assert row["bonus"] == want.bonus
