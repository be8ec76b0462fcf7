"""What holds for every method on any batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float32, jaxtyped
from torch import Tensor

from agentropy.algorithms.losses import LossInputs
from agentropy.batch import make_batch
from agentropy.commands.shape import shaped_rows
from agentropy.methods import METHODS, Shaped, make_method
from agentropy.trajectory import Trajectory
from make_trajectories import drawn_batch, trajectory

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"normalize_std": False, "discriminability_filter": True}),
    ("simpletir", {}),
    ("tao-rl", {}),
    ("tao-rl", {"over": "batch", "form": "additive", "void_filter": True}),
    ("tepo-sparse", {}),
    ("arpo", {}),
    ("arpo", {"estimation": "hard", "count_shared": "once", "reward": "authors"}),
    ("aepo", {}),
    ("aepo", {"tokens": "high-entropy", "estimation": "hard"}),
    ("tepo-dense", {}),
    ("tepo-dense", {"credit": "return"}),
]
every_method = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: str(x))


def test_every_method_is_among_the_variants() -> None:
    assert {name for name, _ in VARIANTS} == set(METHODS)


def rows(trajectories: list[Trajectory], name: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    batch = make_batch(trajectories)
    shaped = make_method(name, **options).shape(batch)
    return {row["trajectory_id"]: row for row in shaped_rows(batch, shaped)}


def assert_same(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> None:
    assert left.keys() == right.keys()
    for key, row in left.items():
        other = right[key]
        assert (row["kept"], row["why"], row["bonus"]) == (other["kept"], other["why"], other["bonus"])
        assert row["advantages"] == pytest.approx(other["advantages"], abs=1e-5)


@every_method
@given(drawn=drawn_batch(), data=st.data())
@settings(max_examples=10, deadline=None)
def test_the_order_of_trajectories_does_not_matter(
    name: str, options: dict[str, Any], drawn: list[Trajectory], data: st.DataObject
) -> None:
    other_order = data.draw(st.permutations(drawn))
    assert_same(rows(drawn, name, options), rows(other_order, name, options))


@every_method
@given(drawn=drawn_batch())
@settings(max_examples=10, deadline=None)
def test_the_names_of_questions_do_not_matter(name: str, options: dict[str, Any], drawn: list[Trajectory]) -> None:
    renamed = [dataclasses.replace(t, question_id=f"other {t.question_id}") for t in drawn]
    assert_same(rows(drawn, name, options), rows(renamed, name, options))


@every_method
@given(drawn=drawn_batch())
@settings(max_examples=10, deadline=None)
def test_shapes_masks_and_finite_numbers(name: str, options: dict[str, Any], drawn: list[Trajectory]) -> None:
    batch = make_batch(drawn)
    shaped = make_method(name, **options).shape(batch)
    check_shapes(shaped)
    assert shaped.advantages.shape == batch.tokens.shape
    assert shaped.entropy_change.shape == (batch.n_calls,)
    assert shaped.turn_reward.shape == (batch.n_turns,)
    learned = batch.is_model & shaped.kept[batch.trajectory_of]
    assert torch.equal(shaped.loss_mask, learned)
    assert torch.isfinite(shaped.advantages).all()
    assert not shaped.advantages[~learned].any()
    assert not (shaped.bonus & ~learned).any()
    assert [w is None for w in shaped.why] == shaped.kept.tolist()
    assert not (shaped.kept & batch.lost).any()
    assert all(math.isfinite(v) for v in shaped.metrics.values()), shaped.metrics
    assert shaped.metrics["batch/empty"] == float(not learned.any())
    counted = sum(v for k, v in shaped.metrics.items() if k.startswith("filter/") and k.split("/")[1] in REASON_KEYS)
    assert counted + shaped.metrics["filter/kept"] == batch.n_trajectories


REASON_KEYS = {"lost", "all_calls_failed", "void_turn", "truncated", "single_survivor", "not_discriminative"}


def check_shapes(s: Shaped) -> None:
    with jaxtyped("context"):
        assert isinstance(s.advantages, Float32[Tensor, "T"])
        assert isinstance(s.bonus, Bool[Tensor, "T"])
        assert isinstance(s.loss_mask, Bool[Tensor, "T"])
        assert isinstance(s.kept, Bool[Tensor, "N"])
        assert isinstance(s.reward, Float32[Tensor, "N"])
        assert isinstance(s.turn_reward, Float32[Tensor, "U"])
        assert isinstance(s.entropy_change, Float32[Tensor, "C"])
        assert isinstance(s.entropy_reducing, Bool[Tensor, "C"])


@pytest.mark.parametrize("name", [n for n in METHODS if n != "tepo-dense"])
@given(score=st.sampled_from([0.0, 0.3, 1.0]), n=st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_alike_groups_teach_exactly_nothing(name: str, score: float, n: int) -> None:
    turns = [([1.0, 0.5], [0.3], ["ok"]), ([0.4], [], [])]
    shaped = make_method(name).shape(make_batch([trajectory(turns, score) for _ in range(n)]))
    assert shaped.advantages.tolist() == [0.0] * len(shaped.advantages)


@every_method
def test_a_batch_of_which_nothing_is_left_says_so(name: str, options: dict[str, Any]) -> None:
    void = [trajectory([([1.0], [1.0], ["error"]), ([1.0], [], [])], None, name=str(i)) for i in range(3)]
    for trajectories in ([], void):
        batch = make_batch(trajectories)
        method = make_method(name, **options)
        shaped = method.shape(batch)
        assert shaped.metrics["batch/empty"] == 1.0
        assert shaped.metrics["filter/kept"] == 0.0
        assert not shaped.advantages.any()
        logp = torch.zeros(batch.n_tokens, requires_grad=True)
        weights = method.token_weights(batch, shaped.loss_mask)
        inputs = LossInputs(logp, logp.detach(), shaped.advantages, weights, shaped.loss_mask, marked=shaped.marked)
        loss, stats = method.compute_loss(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == 0.0
        assert stats.metrics()["optim/loss_tokens"] == 0.0


def test_the_shape_of_other_tokens_reaches_no_model_token() -> None:
    """Changing the ids of results and prompts changes nothing that is learned."""
    group = [trajectory([([1.0, 0.2], [0.3], ["ok"]), ([0.4, 2.0], [], [])], s, name=str(s)) for s in (0.0, 1.0)]
    changed = [
        dataclasses.replace(
            t,
            segments=tuple(
                s if s.is_model else dataclasses.replace(s, ids=tuple(999 for _ in s.ids)) for s in t.segments
            ),
        )
        for t in group
    ]
    for name in METHODS:
        first, second = (make_method(name).shape(make_batch(x)) for x in (group, changed))
        assert torch.equal(first.advantages, second.advantages)
        assert not first.advantages[~make_batch(group).is_model].any()


def test_pad_and_end_tokens_are_trained_like_any_other() -> None:
    """Masks come from positions: an id may be the padding and the end token at once."""
    group = []
    for score in (0.0, 1.0):
        t = trajectory([([1.0, 0.2, 0.1], [], [])], score, name=str(score))
        segments = (t.segments[0], dataclasses.replace(t.segments[1], ids=(0, 0, 0)))
        group.append(dataclasses.replace(t, segments=segments))
    shaped = make_method("grpo").shape(make_batch(group))
    assert int(shaped.loss_mask.sum()) == 6
    assert (shaped.advantages[shaped.loss_mask] != 0).all()


def test_metrics_by_hand() -> None:
    good = trajectory([([1.0], [0.2], ["ok"]), ([0.5], [], [])], 1.0, name="a")
    bad = trajectory([([1.0], [0.2], ["ok", "timeout"]), ([1.5, 0.1], [], [])], 0.0, name="b")
    failed = trajectory([([1.0], [0.2], ["error"]), ([0.4], [], [])], 0.0, name="c")
    lost = trajectory([([1.0], [0.2], ["lost"])], 0.0, name="d")
    metrics = make_method("tao-rl", alpha=0.1, q_h=0.01).shape(make_batch([good, bad, failed, lost])).metrics
    assert metrics["reward/accuracy"] == pytest.approx(1 / 3)
    assert metrics["tool/calls_per_question"] == pytest.approx(4 / 3)
    assert metrics["tool/usage_rate"] == 1.0
    assert metrics["tool/valid_rate"] == 0.5
    assert metrics["tool/timeout_rate"] == metrics["tool/error_rate"] == 0.25
    assert metrics["tool/effective_ratio"] == 1.0
    assert metrics["tool/entropy_change"] == pytest.approx((-0.5 - 0.2 - 0.2 - 0.6) / 4)
    assert metrics["entropy/post_tool"] == pytest.approx((0.5 + 1.5 + 0.1) / 3)
    assert metrics["entropy/call"] == pytest.approx(0.2)
    assert metrics["entropy/bonus_tokens"] == 1.0
    # the token with entropy 1.5 in [1.0, 0.2, 1.5, 0.1]; advantages are +-0.7071 on 3 and 4 tokens
    z = (1.5 - 0.7) / math.sqrt(((0.3**2) + (0.5**2) + (0.8**2) + (0.6**2)) / 4)
    assert metrics["entropy/bonus_share"] == pytest.approx(0.1 * z / 7, abs=1e-5)
    assert (metrics["filter/kept"], metrics["filter/all_calls_failed"], metrics["filter/lost"]) == (2, 1, 1)
    assert metrics["filter/groups_kept"] == 1.0


def test_a_large_batch_is_shaped_in_milliseconds() -> None:
    import time

    turns = [([1.0, 0.5, 0.3, 0.2], [0.3] * 8, ["ok"]), ([0.4] * 8, [], [])]
    batch = make_batch([trajectory(turns, float(i % 3 == 0), question=str(i // 8)) for i in range(1024)])
    method = make_method("tao-rl")
    method.shape(batch)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        method.shape(batch)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1  # 4 ms on a quiet core
