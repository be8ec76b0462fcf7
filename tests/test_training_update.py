"""From advantages to gradients, on a tiny random model: packing changes nothing, masks hold, bad steps are survived."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from agentropy.batch import make_batch
from agentropy.config import RunConfig
from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.policies.scoring import score
from agentropy.training.trainer import Trainer
from agentropy.training.update import UpdateOptions, deal, micro_batches, update
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory

VOCABULARY = 50


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def trajectory(model: Any, question: int, sample: int, score_: float, seed: int) -> Trajectory:
    """A random trajectory whose log-probabilities are the model's own."""
    generator = torch.Generator().manual_seed(seed)

    def some(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist())

    lengths = torch.randint(1, 9, (5,), generator=generator).tolist()
    kinds = ("prompt", "reasoning", "call", "result", "reasoning")
    ids = [some(n) for n in lengths]
    with torch.no_grad():
        found = score(model, [[i for part in ids for i in part]])
    assert found.entropies is not None
    segments, at = [], 0
    for kind, part in zip(kinds, ids, strict=True):
        span = slice(at, at + len(part))
        at += len(part)
        mine = kind in ("reasoning", "call")
        segments.append(
            Segment(
                kind,  # type: ignore[arg-type]
                part,
                tuple(found.logprobs[span].tolist()) if mine else None,
                tuple(found.entropies[span].tolist()) if mine else None,
                calls=(ToolCall("python"),) if kind == "call" else (),
                results=(ToolResult("1"),) if kind == "result" else (),
            )
        )
    return Trajectory(f"q{question}", f"q{question}-{sample}", "", tuple(segments), "1", score_, "answer")


def trajectories(model: Any, questions: int = 4, samples: int = 4) -> list[Trajectory]:
    return [
        trajectory(model, q, k, float((q + k) % 3 == 0), seed=100 * q + k)
        for q in range(questions)
        for k in range(samples)
    ]


class Recorder(torch.optim.SGD):
    """Keeps the gradients of every step and leaves the weights alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append([p.grad.clone() for g in self.param_groups for p in g["params"] if p.grad is not None])


def options(**changes: Any) -> UpdateOptions:
    base = UpdateOptions(minibatches=2, epochs=1, micro_batch_tokens=10_000, grad_clip=1e9, temperature=1.0)
    return dataclasses.replace(base, **changes)


def gradients(model: Any, batch: Any, method: Any, **changes: Any) -> list[list[torch.Tensor]]:
    recorder = Recorder(model.parameters())
    update(model, recorder, method, batch, method.shape(batch), options(**changes), seed=1)
    return recorder.seen


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum-norm"])
@pytest.mark.parametrize("budget", [1, 40, 100])
def test_how_micro_batches_are_packed_does_not_change_the_gradient(model: Any, aggregation: str, budget: int) -> None:
    batch = make_batch(trajectories(model))
    method = make_method("tao-rl", aggregation=aggregation, norm_constant=64.0, execution_filter=False)
    whole = gradients(model, batch, method)
    packed = gradients(model, batch, method, micro_batch_tokens=budget)
    assert len(whole) == len(packed) == 2
    for a, b in zip(whole, packed, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)
    assert max(float(x.abs().max()) for x in whole[0]) > 1e-3


def test_packing_does_not_change_which_tokens_keep_a_clipped_gradient(model: Any) -> None:
    rows = make_batch(trajectories(model))
    batch = dataclasses.replace(rows, logprobs=rows.logprobs - 0.5)  # every ratio is 1.65
    method = make_method("aepo", tokens="high-entropy")
    whole = gradients(model, batch, method)
    for budget in (1, 40):
        packed = gradients(model, batch, method, micro_batch_tokens=budget)
        for a, b in zip(whole, packed, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)
    every = gradients(model, batch, make_method("aepo"))
    none = gradients(model, batch, make_method("aepo", clip_gradient=False))
    for other in (every, none):
        assert max(float((x - y).abs().max()) for x, y in zip(whole[0], other[0], strict=True)) > 1e-4


def test_the_first_ratio_is_one_and_the_gap_is_zero(model: Any) -> None:
    batch = make_batch(trajectories(model))
    method = make_method("grpo")
    metrics = update(
        model, Recorder(model.parameters()), method, batch, method.shape(batch), options(minibatches=1), seed=0
    )
    assert metrics["optim/sampler_gap_max"] < 1e-5
    assert metrics["optim/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["optim/updates"] == 1


def test_tokens_of_tool_results_get_no_gradient(model: Any) -> None:
    """Only the embedding of a token that is conditioned on may change; what is predicted at results may not."""
    batch = make_batch(trajectories(model))
    method = make_method("grpo")
    shaped = method.shape(batch)
    spoiled = dataclasses.replace(
        batch, logprobs=torch.where(batch.is_model, batch.logprobs, torch.full_like(batch.logprobs, float("nan")))
    )
    a = gradients(model, batch, method)
    recorder = Recorder(model.parameters())
    update(model, recorder, method, spoiled, shaped, options(), seed=1)
    for x, y in zip(a, recorder.seen, strict=True):
        for u, v in zip(x, y, strict=True):
            assert torch.equal(u, v)


def test_a_batch_without_signal_makes_no_update(model: Any) -> None:
    same = [dataclasses.replace(t, score=1.0) for t in trajectories(model)]
    batch = make_batch(same)
    for name in ("grpo", "tao-rl", "simpletir", "tepo-dense"):
        method = make_method(name)
        before = [p.clone() for p in model.parameters()]
        metrics = update(
            model, torch.optim.AdamW(model.parameters()), method, batch, method.shape(batch), options(), seed=0
        )
        if name != "tepo-dense":  # its turns still differ
            assert metrics["optim/updates"] == 0
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("coefficient", ["kl_coef", "entropy_coef"])
def test_penalties_pull_on_a_batch_without_signal(model: Any, coefficient: str) -> None:
    batch = make_batch([dataclasses.replace(t, score=1.0) for t in trajectories(model)])
    method = make_method("grpo", **{coefficient: 0.1})
    recorder = Recorder(model.parameters())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn_like(p))
    metrics = update(
        model, recorder, method, batch, method.shape(batch), options(minibatches=1), seed=0, reference_model=other
    )
    assert metrics["optim/updates"] == 1
    assert metrics["optim/grad_norm"] > 1e-4


def test_dropout_hangs_on_the_seed_of_the_step_alone(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = make_batch(trajectories(model))
    method = make_method("grpo")
    torch.manual_seed(1)
    first = gradients(model, batch, method)
    torch.manual_seed(2)
    again = gradients(model, batch, method)
    assert all(torch.equal(u, v) for x, y in zip(first, again, strict=True) for u, v in zip(x, y, strict=True))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    without = gradients(model, batch, method)
    assert not all(torch.equal(u, v) for x, y in zip(first, without, strict=True) for u, v in zip(x, y, strict=True))


def test_trajectories_without_a_token_of_the_policy_cost_nothing(model: Any) -> None:
    """The prompt alone may be longer than the model's window."""
    rows = trajectories(model)
    prompt_only = [
        Trajectory(f"q{q}", f"q{q}-x", "", (Segment("prompt", (1,) * 5000),), None, 0.0, "context_full")
        for q in range(4)
    ]
    method = make_method("grpo")
    metrics = {}
    for micro in (10_000, 1):
        batch = make_batch([*rows, *prompt_only])
        recorder = Recorder(model.parameters())
        metrics = update(model, recorder, method, batch, method.shape(batch), options(micro_batch_tokens=micro), seed=1)
        assert len(recorder.seen) == 2
    assert metrics["optim/skipped_not_finite"] == 0


def test_a_last_result_beyond_the_window_is_not_read(model: Any) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=48, n_embd=16, n_layer=1, n_head=2)
    small = GPT2LMHeadModel(config)
    rows = trajectories(small)
    too_long = Segment("result", (1,) * 48, results=(ToolResult("1" * 48),))
    call = Segment("call", (3,), (-1.0,), (1.0,), calls=(ToolCall("python"),))
    cut = [dataclasses.replace(t, segments=(*t.segments, call, too_long), stop="context_full") for t in rows]
    method = make_method("grpo")
    batch = make_batch(cut)
    assert len(gradients(small, batch, method)) == 2


def test_the_reference_is_kept_however_the_penalty_was_set(model: Any, tmp_path: Path) -> None:
    config = RunConfig(method_options={"kl_coef": 0.1})
    for method, kept in ((make_method("grpo", **config.method_options), True), (make_method("grpo"), False)):
        setup = SimpleNamespace(model=model, lr=1e-3, method=method, scored=lambda roll: roll)
        trainer = Trainer(config, setup, tmp_path, [], None)  # type: ignore[arg-type]
        assert (trainer.reference is not None) == kept


def test_nothing_at_all_is_no_update(model: Any) -> None:
    batch = make_batch([])
    for name in ("grpo", "tao-rl", "tepo-sparse"):
        method = make_method(name)
        metrics = update(model, Recorder(model.parameters()), method, batch, method.shape(batch), options(), seed=1)
        assert metrics["optim/updates"] == 0
        assert metrics["optim/skipped_empty"] >= 1


def test_a_gradient_that_is_not_finite_is_counted_and_skipped(model: Any) -> None:
    batch = make_batch(trajectories(model))
    method = make_method("grpo")
    shaped = method.shape(batch)
    broken = dataclasses.replace(shaped, advantages=torch.full_like(shaped.advantages, float("inf")))
    before = [p.clone() for p in model.parameters()]
    metrics = update(model, torch.optim.AdamW(model.parameters()), method, batch, broken, options(), seed=0)
    assert metrics["optim/skipped_not_finite"] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_groups_are_dealt_whole(model: Any) -> None:
    batch = make_batch(trajectories(model, questions=5, samples=3))
    parts = deal(batch, 2, seed=3)
    assert sorted(int(i) for p in parts for i in p) == list(range(15))
    for part in parts:
        groups = batch.group_of[part].tolist()
        assert all(groups.count(g) == 3 for g in groups)
    assert [p.tolist() for p in deal(batch, 2, seed=3)] == [p.tolist() for p in parts]


def test_micro_batches_hold_to_their_budget() -> None:
    lengths = [5, 1, 9, 3, 3, 20]
    runs = list(micro_batches(lengths, 12))
    assert sorted(i for r in runs for i in r) == list(range(6))
    for run in runs:
        assert len(run) == 1 or len(run) * max(lengths[i] for i in run) <= 12


def test_bfloat16_weights_learn_at_a_small_learning_rate_and_their_copies_are_saved(model: Any) -> None:
    from agentropy.training.optimizer import MasterAdamW

    model = model.to(torch.bfloat16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-5)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(200):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    moved = [bool((a != b).any()) for a, b in zip(start, model.parameters(), strict=True)]
    assert all(moved)
    again = MasterAdamW([torch.nn.Parameter(p.detach().clone()) for p in start], lr=1e-5)
    again.load_state_dict(optimizer.state_dict())
    again.load_masters(optimizer.masters())
    assert all(torch.equal(a, b) for a, b in zip(again.weights, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again.masters(), optimizer.masters(), strict=True))


def test_a_trajectory_without_ids_is_never_trained_on(model: Any) -> None:
    found = trajectories(model)
    nothing = [dataclasses.replace(s, ids=(0,) * len(s.ids)) for s in found[0].segments]
    batch = make_batch([dataclasses.replace(found[0], segments=tuple(nothing), ids_kind="none"), *found[1:]])
    method = make_method("grpo")
    with pytest.raises(UserError, match="without token ids"):
        update(model, Recorder(model.parameters()), method, batch, method.shape(batch), options(), seed=0)
