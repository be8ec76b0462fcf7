"""Rewards and advantages; values worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentropy.algorithms import rewards as r
from agentropy.algorithms.advantages import entropy_bonus, group_normalise, top_share
from agentropy.algorithms.entropy import entropy_change
from agentropy.batch import make_batch
from agentropy.methods import make_method
from agentropy.trajectory import Trajectory
from make_trajectories import trajectory
from typed import typed


def one_group(rewards: list[float], **options: bool) -> list[float]:
    n = len(rewards)
    checked = typed(group_normalise, "Float64 n", reward="Float32 n", group="Int64 n", n_groups=int, members="Bool n")
    everyone = torch.ones(n, dtype=torch.bool)
    return checked(torch.tensor(rewards), torch.zeros(n, dtype=torch.int64), 1, everyone, **options).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        ([1.0, 1.0, 0.0, -1.0], [0.7833, 0.7833, -0.2611, -1.3056]),
        ([0.5333333, 0.0, 0.5, 1.0], [0.0612, -1.2441, -0.0204, 1.2033]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([1.0], [0.0]),
    ],
)
def test_group_normalised_advantage(rewards: list[float], expected: list[float]) -> None:
    assert one_group(rewards) == pytest.approx(expected, abs=1e-4)


def test_dr_grpo_subtracts_the_mean_only() -> None:
    assert one_group([1.0, 0.0, 0.0, 0.0], normalize_std=False) == [0.75, -0.25, -0.25, -0.25]


@given(st.floats(0, 1, width=32), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(value: float, n: int) -> None:
    assert one_group([value] * n) == [0.0] * n
    assert one_group([value] * n, normalize_std=False) == [0.0] * n


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=8), st.floats(0.5, 4), st.floats(-2, 2))
def test_normalised_advantages_ignore_scale_and_offset(rewards: list[float], scale: float, offset: float) -> None:
    moved = one_group([scale * x + offset for x in rewards])
    assert moved == pytest.approx(one_group(rewards), abs=1e-4)


def sample(name: str, entropies: list[float], score: float, question: str = "q") -> Trajectory:
    """One reasoning token a segment, a call between each two."""
    turns = [([h], [9.0], ["ok"]) for h in entropies[:-1]] + [([entropies[-1]], [], [])]
    return trajectory(turns, score, name=name, question=question)


def test_tepo_rewards_of_three_calls() -> None:
    batch = make_batch([sample("a", [1.0, 0.6, 0.9, 0.5], 0.8)])
    change = entropy_change(batch)
    sparse = typed(r.tepo_sparse, object, batch=object, reducing="Bool c", zero_call=str)(batch, change.reducing)
    assert sparse.trajectory.tolist() == pytest.approx([0.533333], abs=1e-6)
    dense = r.tepo_dense(batch, change.reducing, alpha=0.5)
    assert dense.turn.tolist() == pytest.approx([1.2, 0.8, 1.2, 0.8])
    assert dense.trajectory.tolist() == pytest.approx([0.8])


def test_tepo_dense_normalises_all_turns_of_a_group_in_one_pool() -> None:
    a, b, c = sample("a", [1.0, 0.6, 0.9, 0.5], 0.8), sample("b", [1.0, 0.5], 0.0), sample("c", [1.0, 0.5], 0.5)
    batch = make_batch([a, b, c])
    shaped = make_method("tepo-dense").shape(batch)
    token = shaped.advantages[batch.is_model & (batch.kind_of == 1)].tolist()  # one reasoning token a turn
    expected = [1.1641, 0.3078, 1.1641, 0.3078, -1.4050, -1.4050, 0.2007, -0.3345]
    assert token == pytest.approx(expected, abs=1e-4)
    # the tokens that write call k get what its turn earned
    calls = shaped.advantages[batch.kind_of == 2].tolist()
    assert calls == pytest.approx([1.1641, 0.3078, 1.1641, -1.4050, 0.2007], abs=1e-4)
    returns = make_method("tepo-dense", credit="return").shape(batch)
    token = returns.advantages[batch.is_model & (batch.kind_of == 1)].tolist()
    assert token == pytest.approx([2.9438, 1.7797, 1.4719, 0.3078, -2.8100, -1.4050, -0.1338, -0.3345], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # scores 0.8, 0, 0.5: mean 13/30, deviation 0.40415; beyond the score calls earn 0.4, 0, 0.4, 0, 0.25: mean 0.21
        ({"pool": "outcome"}, [1.0973, 0.6973, 1.0973, 0.9073, -1.2822, -1.0722, 0.2050, 0.1650]),
        # mean of the calling turns 0.79, of the others 13/30; deviation of what is left 0.42906
        ({"pool": "role"}, [0.9556, 0.0233, 0.9556, 0.8546, -1.8412, -1.0100, -0.0932, 0.1554]),
        ({"credit": "mean-return"}, [0.7360, 0.5932, 0.7360, 0.3078, -1.4050, -1.4050, -0.0669, -0.3345]),
    ],
)
def test_tepo_dense_pools_and_credits(options: dict[str, object], expected: list[float]) -> None:
    a, b, c = sample("a", [1.0, 0.6, 0.9, 0.5], 0.8), sample("b", [1.0, 0.5], 0.0), sample("c", [1.0, 0.5], 0.5)
    batch = make_batch([a, b, c])
    shaped = make_method("tepo-dense", **options).shape(batch)
    assert shaped.advantages[batch.kind_of == 1].tolist() == pytest.approx(expected, abs=1e-4)


def test_an_outcome_pool_rewards_no_call_for_being_one() -> None:
    # all right and every call reduces the entropy: one call more earns nothing more
    batch = make_batch([sample("a", [1.0, 0.6, 0.4, 0.2], 1.0), sample("b", [1.0, 0.5], 1.0), sample("c", [1.0], 1.0)])
    assert make_method("tepo-dense", pool="outcome").shape(batch).advantages.abs().max() == 0.0
    assert make_method("tepo-dense").shape(batch).advantages.abs().max() > 0.5


def test_random_indicators_keep_their_number_and_lose_their_place() -> None:
    rng = random.Random(0)
    group = [sample(str(i), [rng.random() for _ in range(4)], 1.0, question=str(i)) for i in range(200)]
    batch = make_batch(group)
    reducing = entropy_change(batch).reducing
    method = make_method("tepo-dense", indicator="random")
    shaped = method.shape(batch)
    dealt = shaped.turn_reward[batch.call_turn] > 1.0
    assert int(dealt.sum()) == int(reducing.sum())
    assert abs(float((dealt == reducing).float().mean()) - 0.5) < 0.1
    assert torch.equal(shaped.advantages, method.shape(batch).advantages)


def test_tepo_sparse_group_with_a_trajectory_that_never_called() -> None:
    group = [
        sample("a", [1.0, 0.6, 0.9, 0.5], 0.8),
        sample("b", [1.0, 0.5], 0.0),
        sample("c", [1.0, 0.5], 0.5),
        sample("d", [1.0], 1.0),
    ]
    batch = make_batch(group)
    first = batch.token_start[:-1] + 2
    shaped = make_method("tepo-sparse").shape(batch)
    assert shaped.reward.tolist() == pytest.approx([0.533333, 0.0, 0.5, 1.0], abs=1e-6)
    assert shaped.advantages[first].tolist() == pytest.approx([0.0612, -1.2441, -0.0204, 1.2033], abs=1e-4)
    assert make_method("tepo-sparse", zero_call="zero").shape(batch).reward.tolist()[3] == 0.0


def test_parallel_calls_are_one_turn_but_each_counts_in_m_over_n() -> None:
    # the first turn makes two calls that lower the entropy, the second one call that raises it
    turns = [([1.0], [9.0], ["ok", "error"]), ([0.5], [9.0], ["ok"]), ([0.8], [], [])]
    batch = make_batch([trajectory(turns, 0.6)])
    change = entropy_change(batch)
    assert change.reducing.tolist() == [True, True, False]
    assert r.tepo_sparse(batch, change.reducing).trajectory.tolist() == pytest.approx([0.4])
    assert r.tepo_dense(batch, change.reducing, 0.5).turn.tolist() == pytest.approx([0.9, 0.6, 0.6])


def test_a_wrong_answer_earns_nothing_however_its_entropy_falls() -> None:
    batch = make_batch([sample("a", [3.0, 2.0, 1.0], 0.0)])
    reducing = entropy_change(batch).reducing
    assert reducing.all()
    assert r.tepo_sparse(batch, reducing).trajectory.tolist() == [0.0]
    assert r.tepo_dense(batch, reducing, 2.0).turn.tolist() == [0.0, 0.0, 0.0]


H = [0.1, 0.5, 2.0, 0.2, 0.8, 0.4]


def tao(score_of_first: float, **options: object) -> tuple[list[float], list[bool]]:
    """Six model tokens, the last four after a successful call, beside a trajectory without post-tool tokens."""
    turns = [(H[:2], [], ["ok"]), (H[2:], [], [])]
    first = trajectory(turns, score_of_first, name="a")
    others = [trajectory([([1.0], [], [])], 1.0 - score_of_first if i == 0 else 0.0, name=f"b{i}") for i in range(3)]
    if score_of_first:
        others = [trajectory([([1.0], [], [])], 0.0, name=f"b{i}") for i in range(3)]
    batch = make_batch([first, *others])
    shaped = make_method("tao-rl", **options).shape(batch)
    own = batch.is_model & (batch.trajectory_of == 0)
    return shaped.advantages[own].tolist(), shaped.bonus[own].tolist()


def test_bonus_goes_to_the_most_uncertain_token_after_the_success() -> None:
    advantages, bonus = tao(1.0, q_h=0.25)
    assert bonus == [False, False, True, False, False, False]
    assert advantages == pytest.approx([1.5, 1.5, 1.531405, 1.5, 1.5, 1.5], abs=1e-5)
    advantages, bonus = tao(0.0, q_h=0.25)
    assert advantages == pytest.approx([-0.5, -0.5, -0.510468, -0.5, -0.5, -0.5], abs=1e-5)
    advantages, bonus = tao(1.0, q_h=0.5)
    assert bonus == [False, False, True, False, True, False]
    assert advantages[4] == pytest.approx(1.5 * (1 + 0.01 * 0.2094), abs=1e-5)


def test_additive_bonus_by_hand() -> None:
    # z of the third token is 2.0937; of the sixth -0.4187
    advantages, bonus = tao(1.0, form="additive", alpha=0.1, q_h=1.0)
    assert bonus[2:] == [True] * 4
    assert advantages == pytest.approx([1.5, 1.5, 1.70937, 1.5, 1.52094, 1.5], abs=1e-4)
    capped, _ = tao(1.0, form="additive", alpha=10.0, q_h=0.25, kappa=2.0)
    assert capped[2] == pytest.approx(2.25, abs=1e-5)
    lifted, _ = tao(0.0, form="additive", alpha=10.0, q_h=0.25, kappa=2.0)
    assert lifted[2] == pytest.approx(-0.25, abs=1e-5)


def test_without_a_successful_call_no_token_is_touched() -> None:
    turns = [(H[:2], [], ["error"]), (H[2:], [], ["ok"])]
    group = [trajectory(turns, 1.0, name="a"), trajectory([([1.0], [], [])], 0.0, name="b")]
    shaped = make_method("tao-rl").shape(make_batch(group))
    plain = make_method("tao-rl", bonus=False).shape(make_batch(group))
    assert not shaped.bonus.any()
    assert torch.equal(shaped.advantages, plain.advantages)
    assert shaped.metrics["entropy/bonus_share"] == 0.0


def test_top_share_counts_up_and_takes_ties() -> None:
    values = torch.tensor([5.0, 1.0, 3.0, 3.0, 2.0, 9.0])
    candidates = torch.tensor([True, True, True, True, True, False])

    def chosen(share: float) -> list[int]:
        return top_share(values, candidates, share).nonzero().squeeze(-1).tolist()  # type: ignore[no-any-return]

    assert chosen(0.01) == [0]
    assert chosen(0.2) == [0]
    assert chosen(0.21) == [0, 2, 3]
    assert chosen(0.6) == [0, 2, 3]
    assert chosen(1.0) == [0, 1, 2, 3, 4]
    assert not top_share(values, torch.zeros(6, dtype=torch.bool), 0.5).any()


@pytest.mark.parametrize(("n", "share"), [(30, 0.1), (10, 0.7), (1000, 0.07), (7, 1 / 7), (25, 0.28), (5, 0.2)])
def test_top_share_counts_exactly_where_the_share_divides(n: int, share: float) -> None:
    """In binary, 0.28 of 25 is a little above 7, which must not count as 8."""
    chosen = top_share(torch.arange(n, dtype=torch.float32), torch.ones(n, dtype=torch.bool), share)
    assert int(chosen.sum()) == round(n * share)


@given(st.floats(-3, 3), st.floats(-5, 5), st.floats(0, 5), st.sampled_from(["multiplicative", "additive"]))
def test_the_bonus_never_flips_a_sign(advantage: float, z: float, alpha: float, form: str) -> None:
    a = torch.tensor([advantage], dtype=torch.float64)
    shaped = entropy_bonus(a, torch.tensor([z], dtype=torch.float64), torch.tensor([True]), alpha, form)  # type: ignore[arg-type]
    assert math.copysign(1.0, shaped.item()) == math.copysign(1.0, advantage) or shaped.item() == 0.0


def test_standardisation_over_the_batch_depends_on_the_other_trajectories() -> None:
    quiet, _ = tao(1.0, q_h=0.25, over="batch")
    assert quiet[2] != pytest.approx(1.531405, abs=1e-5)


def test_what_is_outside_the_members_neither_counts_nor_gets_an_advantage() -> None:
    reward = torch.tensor([1.0, 0.0, 0.7, math.nan])
    members = torch.tensor([True, True, False, False])
    got = group_normalise(reward, torch.zeros(4, dtype=torch.int64), 1, members)
    assert got.tolist() == pytest.approx([0.70711, -0.70711, 0.0, 0.0], abs=1e-4)
