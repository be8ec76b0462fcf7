"""What makes up for a sampler that is another engine: weights, gaps, the trainer's numbers, the names of weights."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentropy.algorithms.correction import gap_metrics, importance_weights
from agentropy.batch import make_batch
from agentropy.config import load_config, parse_overrides
from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.policies.base import SamplingParams
from agentropy.policies.local import LocalPolicy
from agentropy.rollout.loop import Agent, Limits, rollout
from agentropy.tools.session import make_toolbox
from agentropy.training.rescore import TRAINER_LOGPROBS, rescore, trainer_logprobs
from agentropy.training.update import update
from agentropy.training.weight_push import Control, DiskTransport, checkpoint_weights
from branching_agents import IdDialect, attempts_of, even
from engine_models import tiny_model
from fake_vllm import ascii_tokenizer
from test_training_update import Recorder, options, trajectories


def test_weights_and_gap_of_an_example_by_hand() -> None:
    # ratios p / q: 1, 2/3, 3 (cut to 2), and a token that the sampler did not draw
    p = torch.tensor([0.5, 0.2, 0.6, 0.0]).log()
    q = torch.tensor([0.5, 0.3, 0.2, 0.7]).log()
    mask = torch.tensor([True, True, True, False])
    torch.testing.assert_close(importance_weights(p, q, mask, 2.0), torch.tensor([1.0, 2 / 3, 2.0, 1.0]))
    torch.testing.assert_close(importance_weights(p, q, mask, 5.0), torch.tensor([1.0, 2 / 3, 3.0, 1.0]))
    found = gap_metrics(p, q, mask)
    a, b = math.log(1.5), math.log(3.0)
    assert found["sampler/gap_mean"] == pytest.approx((a + b) / 3)
    assert found["sampler/gap_max"] == pytest.approx(b)
    assert found["sampler/kl_k1"] == pytest.approx((a - b) / 3)
    assert found["sampler/kl_k3"] == pytest.approx(((2 / 3 - 1 + a) + (3 - 1 - b)) / 3)
    assert found["sampler/ratio_outside"] == pytest.approx(1 / 3)
    assert gap_metrics(p, q, torch.zeros(4, dtype=torch.bool)) == {}


def test_a_mean_over_what_a_coarse_sampler_drew_becomes_the_trainers() -> None:
    """Exactly, over the whole vocabulary: sum of q (p / q) f is the sum of p f; without the weights it is not."""
    torch.manual_seed(0)
    logits = torch.randn(200, 50) * 2
    p = logits.log_softmax(-1)
    q = (logits.to(torch.bfloat16) * 1.02).float().log_softmax(-1)
    f = torch.randn(200, 50)
    truth = (p.exp() * f).sum(-1)
    everywhere = torch.ones(p.numel(), dtype=torch.bool)
    weights = importance_weights(p.flatten(), q.flatten(), everywhere, 2.0).reshape(p.shape)
    corrected = (q.exp() * weights * f).sum(-1)
    assert (corrected - truth).abs().max() < 1e-5
    assert ((q.exp() * f).sum(-1) - truth).abs().max() > 1e-2


def test_importance_scales_each_tokens_gradient() -> None:
    """Weights of 0 on a trajectory leave the gradient that a batch has in which it earns nothing."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, use_cache=False,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)
    batch = make_batch(trajectories(model))
    method = make_method("grpo")
    shaped = method.shape(batch)

    def gradients(shaped_: Any, importance: Any) -> list[torch.Tensor]:
        recorder = Recorder(model.parameters())
        update(model, recorder, method, batch, shaped_, options(minibatches=1), seed=1, importance=importance)
        return recorder.seen[0]

    factors = torch.where(batch.trajectory_of % 2 == 0, 0.5, 1.5)
    scaled = dataclasses.replace(shaped, advantages=shaped.advantages * factors)
    for a, b in zip(gradients(shaped, factors), gradients(scaled, None), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    plain = gradients(shaped, None)
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients(shaped, factors), plain, strict=True))


async def beat(turns: list[int]) -> None:
    while True:
        turns.append(1)
        await asyncio.sleep(0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scored_again_a_trajectory_has_the_local_engines_numbers(temperature: float) -> None:
    model, tokenizer = tiny_model("qwen3"), ascii_tokenizer()
    engine = LocalPolicy(model, tokenizer, max_context=200)
    agent = Agent(engine, IdDialect(), make_toolbox([]), even)
    with engine.rollout():
        params = SamplingParams(temperature, max_new_tokens=24)
        out = asyncio.run(rollout(agent, attempts_of(3, 2), params, Limits(3, 24, 200)))

    def estimated(t: Any) -> Any:
        wrong = [dataclasses.replace(s, entropies=(9.0,) * len(s.ids)) if s.is_model else s for s in t.segments]
        return dataclasses.replace(t, segments=tuple(wrong), entropy_kind="top-k")

    lost = dataclasses.replace(out[0], segments=out[0].segments[:1], stop="error", score=None, entropy_kind="top-k")
    turns: list[int] = []

    async def scored_again() -> Any:
        beating = asyncio.ensure_future(beat(turns))  # as a rank's sign of life
        rows = [*map(estimated, out), lost]
        found = await rescore(model, rows, temperature=temperature, micro_batch_tokens=100)
        beating.cancel()
        return found

    again = asyncio.run(scored_again())
    assert len(turns) > 1
    assert {t.entropy_kind for t in again} == {"exact"}
    assert again[-1].segments == lost.segments
    for mine, other in zip(out, again[:-1], strict=True):
        assert mine.ids == other.ids
        for a, b in zip(mine.segments, other.segments, strict=True):
            assert b.logprobs == a.logprobs  # those of whoever sampled
            if a.is_model:
                assert b.entropies == pytest.approx(a.entropies, abs=1e-5)
                assert b.extra[TRAINER_LOGPROBS] == pytest.approx(a.logprobs, abs=1e-5)
    flat = trainer_logprobs(again)
    batch = make_batch(again)
    assert flat.shape == batch.logprobs.shape
    assert (flat - batch.logprobs).abs().max() < 1e-5


def test_names_of_weights_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    weights = checkpoint_weights(model)
    assert weights.keys() == saved.keys() | {"lm_head.weight"}
    assert all(torch.equal(weights[k], v) for k, v in saved.items())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_are_added_to_the_weights_and_the_model_stays_as_it_is() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen3")
    names = checkpoint_weights(base).keys()
    before = {k: v.clone() for k, v in base.state_dict().items()}
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    own = {k: v.clone() for k, v in model.state_dict().items()}
    weights = checkpoint_weights(model)
    assert weights.keys() == names
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
    base.load_state_dict(weights)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        torch.testing.assert_close(base(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert any(not torch.equal(weights[k], before[k]) for k in names)


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    transport = DiskTransport(Control("http://127.0.0.1:9"), tmp_path / "file" / "weights")
    with pytest.raises(UserError, match=r"cannot write weights for the server to .*Not a directory"):
        transport.send(tiny_model("qwen3"), "agentropy-x-1")


def test_options_without_a_server_are_refused() -> None:
    for url in ("", "127.0.0.1:8000"):  # before a model is loaded, and in a study's dry run
        with pytest.raises(UserError, match=r"rollout\.server: a server's URL starts with http"):
            load_config(None, [("rollout.server", url)])
    with pytest.raises(UserError, match=r"go with 'rollout.server'"):
        load_config(None, parse_overrides(["--sampler.push", "nccl"]))
    with pytest.raises(UserError, match=r"did you mean 'rollout.server'"):
        load_config(None, parse_overrides(["--server", "http://x"]))
    with pytest.raises(UserError, match="correction_cap"):
        load_config(None, parse_overrides(["--rollout.server", "http://x", "--sampler.correction_cap", "0.5"]))
