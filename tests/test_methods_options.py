"""Every option of every method changes its result; what cannot be meant is refused with one clear line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from agentropy.algorithms.losses import LossConfig, LossInputs
from agentropy.batch import make_batch
from agentropy.errors import UserError
from agentropy.methods import METHODS, Method, make_method, method_options
from agentropy.trajectory import Trajectory
from make_trajectories import trajectory

CUT: Any = {"stop": "max_tokens"}


def rich_batch() -> list[Trajectory]:
    """A question with successes, failures, void and cut trajectories; one all right; one with a lone survivor."""
    ok = [([0.9, 0.1], [0.5, 1.5], ["ok"]), ([0.2, 0.6, 1.8], [0.3], ["ok"]), ([0.4, 1.1, 0.05], [], [])]
    failed = [([0.3, 1.0], [0.2], ["error"]), ([0.7, 0.8], [], [])]
    partly = [([0.3, 1.0], [0.2], ["error"]), ([1.7, 0.8], [2.0], ["ok"]), ([0.35, 0.7, 0.9], [], [])]
    rising = [([0.1, 0.2], [1.0], ["ok"]), ([0.6, 0.9], [], [])]
    call_only = [([0.5], [3.0], ["ok"]), ([0.6], [], [])]
    none = [([0.4, 0.9], [], [])]
    return [
        trajectory(ok, 1.0, question="a", name="a0"),
        trajectory(failed, 0.0, question="a", name="a1"),
        trajectory(partly, 0.25, question="a", name="a2"),
        trajectory(rising, 1.0, question="a", name="a3"),
        trajectory(none, 1.0, question="a", name="a4"),
        trajectory(call_only, 0.5, question="a", name="a5"),
        trajectory(ok, 0.0, question="a", name="a6", stop="void"),
        trajectory(ok, 0.0, question="a", name="a7", **CUT),
        trajectory(ok[:2], 0.0, question="a", name="a8", **CUT),
        trajectory(ok, 1.0, question="b", name="b0"),
        trajectory(none, 1.0, question="b", name="b1"),
        trajectory(rising, 1.0, question="c", name="c0"),
        trajectory(failed, 0.0, question="c", name="c1"),
        dataclasses.replace(trajectory(ok, 0.5, question="c", name="c2"), parent_id="c3", fork_at=7),
        trajectory(ok, 0.25, question="c", name="c3"),
    ]


def outcome(method: Method) -> tuple[Any, ...]:
    """Everything that an option of the method could change: what is learned from, how, and the loss of it."""
    batch = make_batch(rich_batch())
    shaped = method.shape(batch)
    n = batch.n_tokens
    logp = (-torch.linspace(0.2, 2.0, n)).requires_grad_()
    entropy = torch.linspace(0.1, 1.0, n)
    inputs = LossInputs(
        logp,
        logp.detach() + 0.4 * (torch.arange(n) * 7 % 11 - 5),  # ratios from e^-2 to e^2 on every trajectory
        shaped.advantages,
        method.token_weights(batch, shaped.loss_mask),
        shaped.loss_mask,
        entropy,
        -torch.linspace(0.3, 1.9, n),
        shaped.marked,
    )
    loss, _ = method.compute_loss(inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    rewards = shaped.reward.tolist(), shaped.turn_reward.tolist()
    return method.rollout, shaped.advantages.tolist(), shaped.why, *rewards, loss.item(), logp.grad.tolist()


LOSS: dict[str, dict[str, Any]] = {
    "clip_low": {"clip_low": 0.1},
    "clip_high": {"clip_high": 0.5},
    "dual_clip": {"dual_clip": None},
    "ratio_clamp": {"ratio_clamp": 0.5},
    "kl_coef": {"kl_coef": 0.1},
    "entropy_coef": {"entropy_coef": 0.1},
    "aggregation": {"aggregation": "sequence-mean"},
    "norm_constant": {"norm_constant": 50.0},
}
COMMON: dict[str, dict[str, Any]] = {
    "normalize_std": {"normalize_std": False},
    "mask_truncated": {"mask_truncated": True},
    "void_filter": {"void_filter": True},
    "accept_estimates": {"accept_estimates": True},
}
BRANCHING: dict[str, dict[str, Any]] = {
    "roots": {"roots": 3},
    "beam": {"beam": 3},
    "window": {"window": 10},
    "base": {"base": 0.4},
    "beta": {"beta": 0.5},
    "tau": {"tau": 0.3},
    "decision": {"decision": "draw"},
    "timing": {"timing": "before"},
    "estimation": {"estimation": "hard"},
    "count_shared": {"count_shared": "once"},
    "reward": {"reward": "authors"},
    "statistics": {"statistics": "survivors"},
}
CHANGED: dict[str, dict[str, dict[str, Any]]] = {
    "arpo": BRANCHING,
    "aepo": BRANCHING
    | {
        "pilot": {"pilot": False},
        "split_beta": {"split_beta": 1.0},
        "split": {"split": "released"},
        "fork_penalty": {"fork_penalty": 0.1},
        "clip_gradient": {"clip_gradient": False},
        "tokens": {"tokens": "high-entropy"},
        "q_h": {"q_h": 0.5},
        "entropy_advantage": {"entropy_advantage": False},
        "a": {"a": 0.1},
    },
    "grpo": {"discriminability_filter": {"discriminability_filter": True}, "statistics": {"statistics": "survivors"}},
    "simpletir": {
        "void_filter": {"void_filter": False},
        "discriminability_filter": {"discriminability_filter": True},
        "statistics": {"statistics": "survivors"},
    },
    "tao-rl": {
        "alpha": {"alpha": 0.5},
        "q_h": {"q_h": 0.5},
        "form": {"form": "additive"},
        "kappa": {"kappa": 4.0},
        "over": {"over": "batch"},
        "window": {"window": 1},
        "after": {"after": "any"},
        "bonus": {"bonus": False},
        "bonus_on": {"bonus_on": "all"},
        "execution_filter": {"execution_filter": False},
        "discriminability_filter": {"discriminability_filter": False},
        "discriminability": {"discriminability": "all"},
    },
    "tepo-sparse": {
        "zero_call": {"zero_call": "zero"},
        "indicator": {"indicator": "random"},
        "include_call_tokens": {"include_call_tokens": True},
        "statistics": {"statistics": "survivors"},
    },
    "tepo-dense": {
        "alpha": {"alpha": 0.1},
        "credit": {"credit": "return"},
        "pool": {"pool": "outcome"},
        "indicator": {"indicator": "random"},
        "include_call_tokens": {"include_call_tokens": True},
        "statistics": {"statistics": "survivors"},
    },
}
BASE: dict[tuple[str, str], dict[str, Any]] = {
    # what an option works on must be switched on for it to show
    ("grpo", "statistics"): {"mask_truncated": True},
    ("tepo-sparse", "statistics"): {"mask_truncated": True},
    ("tepo-dense", "statistics"): {"mask_truncated": True},
    ("arpo", "statistics"): {"mask_truncated": True},
    ("aepo", "statistics"): {"mask_truncated": True},
    ("arpo", "count_shared"): {"estimation": "hard"},
    ("aepo", "count_shared"): {"estimation": "hard"},
    ("aepo", "q_h"): {"tokens": "high-entropy"},
    ("tao-rl", "kappa"): {"form": "additive", "alpha": 5.0},
    ("tao-rl", "after"): {"q_h": 0.5},
}
CASES = [(name, option) for name in METHODS for option in method_options(name) if option != "accept_estimates"]


@pytest.mark.parametrize(("name", "option"), CASES)
def test_every_option_changes_the_result(name: str, option: str) -> None:
    changed = (LOSS | COMMON | CHANGED[name])[option]
    base = dict(BASE.get((name, option), {}))
    if option == "norm_constant":
        base |= {"aggregation": "sequence-sum-norm", "norm_constant": 10.0}
    assert outcome(make_method(name, **base)) != outcome(make_method(name, **(base | changed)))


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_recorded_and_building_is_deterministic(name: str) -> None:
    method = make_method(name)
    assert method.name == name
    assert set(method.options) == set(method_options(name))
    assert outcome(method) == outcome(make_method(name, **method.options))
    assert make_method(name, clip_high=0.5).loss == LossConfig(clip_high=0.5)
    assert method.loss.clip_high == method.options["clip_high"] == (0.2 if name in ("arpo", "aepo") else 0.28)


def test_text_from_the_command_line_is_read_by_the_options_type() -> None:
    method = make_method("tao-rl", alpha="0.5", window="3", bonus="false", form="additive", dual_clip="none")
    wanted = {"alpha": 0.5, "window": 3, "bonus": False, "form": "additive", "dual_clip": None}
    assert wanted.items() <= dict(method.options).items()
    assert make_method("tao-rl", **{"bonus-on": "all"}).options["bonus_on"] == "all"
    assert make_method("tao-rl", window="none").options["window"] is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tao_rl", {}, "unknown method 'tao_rl'; did you mean 'tao-rl'?"),
        ("ppo", {}, "unknown method 'ppo'; did you mean 'grpo'?"),
        ("xyz", {}, "unknown method 'xyz'; there are grpo, simpletir"),
        ("tao-rl", {"alhpa": 1}, "no option 'alhpa'; did you mean 'alpha'?"),
        ("grpo", {"alpha": 1}, "method grpo has no option 'alpha'"),
        ("tao-rl", {"q_h": 0.0}, "q_h=0.0 is out of range"),
        ("tao-rl", {"q_h": 1.5}, "q_h=1.5 is out of range"),
        ("tao-rl", {"alpha": -1}, "alpha=-1.0 is out of range"),
        ("tao-rl", {"alpha": float("nan")}, "alpha=nan is out of range"),
        ("tao-rl", {"kappa": 0.5}, "kappa=0.5 is out of range"),
        ("tao-rl", {"window": 0}, "window=0 is out of range"),
        ("tao-rl", {"window": 1.5}, "window=1.5 is no whole number"),
        ("tao-rl", {"alpha": "much"}, "alpha='much' is no number"),
        ("tao-rl", {"alpha": True}, "alpha=True is no number"),
        ("tao-rl", {"bonus": "maybe"}, "bonus='maybe' is neither true nor false"),
        ("tao-rl", {"form": "both"}, "form='both' is none of multiplicative, additive"),
        ("tepo-dense", {"alpha": -0.1}, "alpha=-0.1 is out of range"),
        ("arpo", {"beam": 0}, "beam=0 is out of range"),
        ("arpo", {"roots": 0}, "roots=0 is out of range"),
        ("arpo", {"tau": 1.0}, "tau=1.0 is out of range"),
        ("arpo", {"base": 1.1}, "base=1.1 is out of range"),
        ("arpo", {"window": 0}, "window=0 is out of range"),
        ("arpo", {"count_shared": "once"}, "'each' unless estimation=hard"),
        ("aepo", {"a": -0.1}, "a=-0.1 is out of range"),
        ("aepo", {"fork_penalty": -0.1}, "fork_penalty=-0.1 is out of range"),
        ("grpo", {"dual_clip": 0.5}, "dual_clip 0.5 must be above 1"),
        ("grpo", {"aggregation": "sequence-sum-norm"}, "give a number above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_method(name, **options)


@pytest.mark.parametrize("name", ["tao-rl", "tepo-sparse", "tepo-dense", "aepo"])
def test_a_method_never_runs_silently_without_the_entropies_it_needs(name: str) -> None:
    turns = [([1.0], [1.0], ["ok"]), ([0.5], [], [])]
    bare = make_batch([trajectory(turns, s, with_entropies=False) for s in (1.0, 0.0)])
    with pytest.raises(UserError, match="needs the entropy of every model token"):
        make_method(name).shape(bare)
    estimated = make_batch([trajectory(turns, s, entropy_kind="top-k") for s in (1.0, 0.0)])
    with pytest.raises(UserError, match="needs exact entropies"):
        make_method(name).shape(estimated)
    exact = make_batch([trajectory(turns, s) for s in (1.0, 0.0)])
    accepted = make_method(name, accept_estimates=True).shape(estimated)
    assert torch.equal(accepted.advantages, make_method(name).shape(exact).advantages)
    assert accepted.metrics["entropy/exact"] == 0.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("simpletir", {}),
        ("tao-rl", {"bonus": False}),
        ("arpo", {}),
        ("aepo", {"entropy_advantage": False}),
    ],
)
def test_methods_without_need_of_entropies_do_without(name: str, options: dict[str, Any]) -> None:
    turns = [([1.0], [1.0], ["ok"]), ([0.5], [], [])]
    bare = make_batch([trajectory(turns, s, with_entropies=False) for s in (1.0, 0.0)])
    shaped = make_method(name, **options).shape(bare)
    assert shaped.advantages.abs().sum() > 0
    assert shaped.entropy_change.isnan().all()
    assert not shaped.entropy_reducing.any()
    assert not any(key.startswith("entropy/") for key in shaped.metrics)
