"""Loading from folders, adapters and GGUF files, and what is said when there is nothing to load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from agentropy.errors import UserError
from agentropy.policies import loading
from agentropy.policies.base import SamplingParams, Stop
from agentropy.policies.loading import find_smollm2, load_model
from agentropy.policies.local import LocalPolicy
from engine_models import run_play, tiny_model, with_lora
from test_engine_equality import differences
from test_engine_stops import byte_level


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_round_trips(checkpoint: Path) -> None:
    model, tokenizer = load_model(checkpoint)
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("größer 42")) == "größer 42"
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, tiny_model("qwen3")(input_ids=ids).logits)
    assert next(load_model(checkpoint, "bfloat16")[0].parameters()).dtype == torch.bfloat16


def test_a_lora_adapter_loads_with_its_base(checkpoint: Path, tmp_path: Path) -> None:
    base, _ = load_model(checkpoint)
    adapted = with_lora(base)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(20).unsqueeze(0)
    expected = adapted(input_ids=ids).logits
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        model, _ = load_model(tmp_path / "adapter")
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert any(p.requires_grad for p in model.parameters())


def test_attention_with_capped_scores_is_not_fused(tmp_path: Path) -> None:
    tiny_model("gemma2").save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    assert model.config._attn_implementation == "eager"


def test_every_failure_is_one_line(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(source: str | Path, dtype: str = "float32") -> str:
        with pytest.raises(UserError) as caught:
            load_model(source, dtype)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no model at" in message(tmp_path / "nowhere")
    assert "no model is named" in message("")
    (tmp_path / "empty").mkdir()
    assert "holds no causal language model" in message(tmp_path / "empty")
    assert "hub cannot be reached" in message("nobody/such-a-model")
    assert "unknown dtype" in message(checkpoint, "float7")
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer that loads" in message(checkpoint)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "empty" / name).write_bytes(b"GGUF")
    assert "name the one you mean" in message(tmp_path / "empty")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "cannot read" in message(tmp_path / "empty" / "a.gguf")


def test_the_hub_is_not_asked_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not loading.hub_reachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    assert not loading.hub_reachable()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert loading.hub_reachable()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_speaks_and_the_trainer_agrees() -> None:
    """A real 135-million-parameter model: converted, sampled in turns, stopped by a string, and scored alike."""
    try:
        find_smollm2()
    except UserError as error:
        pytest.skip(str(error))
    model, tokenizer = load_model("smollm2")
    policy = LocalPolicy(model, tokenizer, max_slots=6, max_context=512)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    async def ask() -> str:
        (handle,) = policy.open(prompt, [0])
        out = await policy.generate(handle, (), SamplingParams(0.0, max_new_tokens=20), Stop(strings=("aris",)))
        policy.close(handle)
        assert out.finish == "stop"
        return str(tokenizer.decode(out.ids))

    with policy.rollout():
        assert asyncio.run(ask()).endswith("Paris")
    stop = Stop(frozenset(range(100, 4000)))
    played = run_play(policy, 1, 1, SamplingParams(), limit=800, groups=2, size=3, stop=stop)
    assert max(differences(model, played, 1.0)) < 1e-4
