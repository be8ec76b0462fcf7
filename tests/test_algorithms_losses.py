"""The policy loss: golden values, gradients, packing, and what must not reach it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentropy.algorithms.losses import LossConfig, LossInputs, LossStats, kl_k3, policy_loss, token_weights
from typed import typed


def single(advantage: float, ratio: float, config: LossConfig = LossConfig()) -> tuple[float, float, dict[str, float]]:
    """Loss of one token, its gradient with respect to logp, and the metrics."""
    logp = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    one = torch.ones(1)
    inputs = LossInputs(logp, torch.tensor([-1.0]), advantage * one, one, torch.tensor([True]))
    loss, stats = policy_loss(inputs, config)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    return loss.item(), logp.grad.item(), stats.metrics()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1.0, 1.5, -1.28, 0.0),
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 5.0, 3.0, 0.0),
        (-1.0, 2.0, 2.0, 2.0),
        (-1.0, 0.5, 0.8, 0.0),
        (1.0, 1.0, -1.0, -1.0),
    ],
)
def test_clipped_surrogate(advantage: float, ratio: float, loss: float, gradient: float) -> None:
    assert single(advantage, ratio)[:2] == pytest.approx((loss, gradient), abs=1e-5)


def test_clip_fractions_name_the_side() -> None:
    def fractions(advantage: float, ratio: float) -> list[float]:
        metrics = single(advantage, ratio)[2]
        return [metrics[f"optim/clip_fraction{side}"] for side in ("", "_high", "_low", "_dual")]

    assert fractions(1.0, 1.5) == [1, 1, 0, 0]
    assert fractions(-1.0, 0.5) == [1, 0, 1, 0]
    assert fractions(-1.0, 5.0) == [0, 0, 0, 1]
    assert fractions(1.0, 0.5) == [0, 0, 0, 0]


def test_ratio_metrics_and_the_clamp() -> None:
    metrics = single(1.0, 2.0)[2]
    assert metrics["optim/ratio_mean"] == metrics["optim/ratio_max"] == pytest.approx(2.0)
    assert metrics["optim/approx_kl"] == pytest.approx(-math.log(2))
    assert metrics["optim/approx_kl_k3"] == pytest.approx(1.0 - math.log(2))
    one = torch.ones(1)
    inputs = LossInputs(torch.tensor([0.0]), torch.tensor([-500.0]), -one, one, torch.tensor([True]))
    loss, stats = policy_loss(inputs, LossConfig(dual_clip=None))
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert stats.metrics()["optim/ratio_max"] == pytest.approx(math.exp(20), rel=1e-5)


def test_options_of_the_loss_change_it() -> None:
    assert single(1.0, 1.5, LossConfig(clip_high=0.4))[0] == pytest.approx(-1.4)
    assert single(-1.0, 0.5, LossConfig(clip_low=0.1))[0] == pytest.approx(0.9)
    assert single(-1.0, 5.0, LossConfig(dual_clip=4.0))[0] == pytest.approx(4.0)
    assert single(-1.0, 5.0, LossConfig(dual_clip=None))[0] == pytest.approx(5.0, abs=1e-5)
    assert single(-1.0, 2.0, LossConfig(ratio_clamp=0.5))[0] == pytest.approx(math.exp(0.5), abs=1e-5)


def test_k3_estimate() -> None:
    checked = typed(kl_k3, "Float32 t", logp="Float32 t", ref_logp="Float32 t")
    got = checked(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.2, -0.8, -1.0]))
    assert got.tolist() == pytest.approx([0.018731, 0.021403, 0.0], abs=1e-6)


def test_penalty_and_entropy_bonus_enter_with_their_weights() -> None:
    one, mask = torch.ones(1), torch.tensor([True])
    logp = torch.tensor([-1.0], requires_grad=True)
    entropy = torch.tensor([0.7], requires_grad=True)
    inputs = LossInputs(logp, torch.tensor([-1.0]), one, one, mask, entropy, torch.tensor([-1.2]))
    loss, stats = policy_loss(inputs, LossConfig(kl_coef=0.5, entropy_coef=0.1))
    assert loss.item() == pytest.approx(-1.0 + 0.5 * 0.018731 - 0.1 * 0.7, abs=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert entropy.grad is not None
    assert entropy.grad.item() == pytest.approx(-0.1)
    metrics = stats.metrics()
    assert metrics["optim/ref_kl"] == pytest.approx(0.018731, abs=1e-5)
    assert metrics["optim/entropy"] == pytest.approx(0.7)
    bare = LossInputs(logp, torch.tensor([-1.0]), one, one, mask)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(bare, LossConfig(kl_coef=0.5))
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(bare, LossConfig(entropy_coef=0.1))


def test_weights_of_each_aggregation() -> None:
    trajectory_of = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    mask = torch.tensor([True, True, False, True, True, True, False])
    checked = typed(token_weights, "Float32 t", loss_mask="Bool t", trajectory_of="Int64 t")

    def weights(config: LossConfig) -> list[float]:
        return checked(mask, trajectory_of, 4, config).tolist()  # type: ignore[no-any-return]

    fifth, third, sixth = 1 / 5, 1 / 3, 1 / 6
    assert weights(LossConfig()) == pytest.approx([fifth, fifth, 0, fifth, fifth, fifth, 0])
    # trajectory 3 has no token to learn from, so three trajectories share the mean
    expected = [sixth, sixth, 0, sixth, sixth, third, 0]
    assert weights(LossConfig(aggregation="sequence-mean")) == pytest.approx(expected)
    constant = LossConfig(aggregation="sequence-sum-norm", norm_constant=10.0)
    assert weights(constant) == pytest.approx([0.1, 0.1, 0, 0.1, 0.1, 0.1, 0])
    nothing = torch.zeros(7, dtype=torch.bool)
    for config in (LossConfig(), LossConfig(aggregation="sequence-mean"), constant):
        assert token_weights(nothing, trajectory_of, 4, config).tolist() == [0.0] * 7


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "mean"},
        {"aggregation": "sequence-sum-norm"},
        {"aggregation": "sequence-sum-norm", "norm_constant": 0.0},
        {"clip_low": -0.1},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"kl_coef": -1.0},
        {"entropy_coef": math.nan},
        {"ratio_clamp": 0.0},
    ],
)
def test_senseless_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LossConfig(**options)  # type: ignore[arg-type]


CONFIGS = [
    LossConfig(entropy_coef=0.01),
    LossConfig(aggregation="sequence-mean", kl_coef=0.1),
    LossConfig(aggregation="sequence-sum-norm", norm_constant=7.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.aggregation)
@given(seed=st.integers(0, 10_000), parts=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_packing_into_micro_batches_does_not_change_the_gradient(config: LossConfig, seed: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    t = 40
    trajectory_of = torch.arange(t) // 5
    mask = torch.rand(t, generator=generator) < 0.6
    weights = token_weights(mask, trajectory_of, 8, config)
    theta = torch.randn(t, 3, generator=generator)
    features, old, ref = (torch.randn(t, generator=generator) for _ in range(3))
    advantages = torch.randn(t, generator=generator)

    def gradient(order: list[Tensor]) -> tuple[float, Tensor, LossStats]:
        parameter = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
        total, stats = 0.0, None
        for part in order:
            logp = (theta @ parameter + 0.1 * features)[part]
            inputs = LossInputs(
                logp, 0.1 * old[part], advantages[part], weights[part], mask[part], logp.exp(), 0.1 * ref[part]
            )
            loss, more = policy_loss(inputs, config)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            stats = more if stats is None else stats + more
        assert parameter.grad is not None
        assert stats is not None
        return total, parameter.grad, stats

    whole_loss, whole, whole_stats = gradient([torch.arange(t)])
    split_loss, split, split_stats = gradient(list(torch.randperm(t, generator=generator).chunk(parts)))
    assert split_loss == pytest.approx(whole_loss, abs=1e-5)
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-5)
    assert split_stats.metrics() == pytest.approx(whole_stats.metrics(), abs=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_at_masked_positions_cannot_reach_loss_or_gradient(poison: float) -> None:
    config = LossConfig(kl_coef=0.1, entropy_coef=0.1)
    mask = torch.tensor([True, False, True])

    def run(filler: float) -> tuple[float, list[float], dict[str, float]]:
        columns = [torch.tensor([a, filler, b]) for a, b in ((-1.0, -2.0), (-1.1, -1.9), (0.5, -0.5), (0.5, 0.5))]
        logp = columns[0].requires_grad_()
        entropy = torch.tensor([0.2, filler, 0.4], requires_grad=True)
        inputs = LossInputs(logp, columns[1], columns[2], columns[3], mask, entropy, torch.tensor([-1.0, filler, -1.0]))
        loss, stats = policy_loss(inputs, config)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        return loss.item(), logp.grad.tolist(), stats.metrics()

    assert run(poison) == run(0.0)


@pytest.mark.parametrize("n", [0, 3])
def test_no_token_to_learn_from_gives_exactly_zero(n: int) -> None:
    logp = torch.full((n,), math.nan, requires_grad=True)
    other = torch.full((n,), math.nan)
    inputs = LossInputs(logp, other, other, torch.zeros(n), torch.zeros(n, dtype=torch.bool), other, other)
    loss, stats = policy_loss(inputs, LossConfig(kl_coef=1.0, entropy_coef=1.0))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0] * n
    assert all(value == 0.0 for value in stats.metrics().values())


def test_no_gradient_flows_through_advantages_or_old_log_probabilities() -> None:
    leaves = [torch.tensor([value], requires_grad=True) for value in (-1.0, -1.2, 0.7)]
    logp, old, advantages = leaves
    inputs = LossInputs(logp, old, advantages, torch.ones(1), torch.tensor([True]))
    policy_loss(inputs, LossConfig())[0].backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert old.grad is None
    assert advantages.grad is None
