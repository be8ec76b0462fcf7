"""The trainer's forward: ragged sequences, with gradients, through heads of all kinds."""

from __future__ import annotations

import random

import pytest
import torch

from agentropy.errors import UserError
from agentropy.policies import scoring
from agentropy.policies.parts import check_parts, split_model
from agentropy.policies.scoring import hidden_states, score
from engine_models import VOCAB, tiny_model

KINDS = ["qwen3", "gemma3", "gemma2", "mistral", "granite", "gpt2", "lora"]


def ragged(n: int = 7, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(n)]


def one_by_one(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by the model's own forward, a sequence at a time; 0 for first tokens."""
    logprobs, entropies = [], []
    for ids in sequences:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float() / temperature
        logp = logits.log_softmax(-1)
        zero = logits.new_zeros(1)
        logprobs += [zero, logp.gather(1, torch.tensor(ids[1:], dtype=torch.long).unsqueeze(1)).squeeze(1)]
        entropies += [zero, -(logp.exp() * logp).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_models_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SMALL_FORWARD", 40)  # so that the seven sequences take several forwards
    model, sequences = tiny_model(kind), ragged()
    expected = one_by_one(model, sequences, 0.6)
    found = score(model, sequences, temperature=0.6, entropy_grad=True, chunk_tokens=13)
    assert found.entropies is not None
    torch.testing.assert_close(found.logprobs, expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.entropies, expected[1], atol=1e-4, rtol=1e-4)
    weights = torch.randn(len(expected[0]), generator=torch.Generator().manual_seed(1))
    trained = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad((found.logprobs * weights - 0.1 * found.entropies).sum(), trained)
    theirs = torch.autograd.grad((expected[0] * weights - 0.1 * expected[1]).sum(), trained)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3 * float(b.abs().max()) + 1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_change_neither_values_nor_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SMALL_FORWARD", 40)
    model, rng = tiny_model(kind), random.Random(3)
    heads = [[rng.randrange(VOCAB) for _ in range(n)] for n in (9, 14, 5)]
    rows = [(heads[i % 3], [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]) for i in range(9)]
    sequences, prompts = [head + tail for head, tail in rows], [len(head) for head, _ in rows]
    trained = [p for p in model.parameters() if p.requires_grad]
    apart, together = score(model, sequences), score(model, sequences, prompts=prompts)
    assert apart.entropies is not None
    assert together.entropies is not None
    torch.testing.assert_close(together.logprobs, apart.logprobs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.entropies, apart.entropies, atol=1e-5, rtol=1e-4)
    weights = torch.randn(len(apart.logprobs), generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((together.logprobs * weights).sum(), trained)
    theirs = torch.autograd.grad((apart.logprobs * weights).sum(), trained)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 * float(b.abs().max()) + 1e-5, rtol=1e-3)


def test_a_shared_prompt_is_computed_once() -> None:
    model, head = tiny_model("qwen3"), list(range(20))
    parts, computed = split_model(model), 0

    def count(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        nonlocal computed
        computed += kwargs["input_ids"].numel()

    parts.decoder.register_forward_pre_hook(count, with_kwargs=True)
    score(parts, [[*head, i] for i in range(8)], prompts=[20] * 8)
    assert computed == 20 + 8
    computed = 0
    score(parts, [[i, *head] for i in range(8)], prompts=[20] * 8)  # nothing in common
    assert computed == 8 * 21


def test_only_the_tokens_asked_for_are_scored() -> None:
    model, sequences = tiny_model("qwen3"), ragged()
    everything = score(model, sequences)
    where = torch.rand(len(everything.logprobs), generator=torch.Generator().manual_seed(2)) < 0.3
    some = score(model, sequences, where=where, entropy=False)
    assert some.entropies is None
    torch.testing.assert_close(some.logprobs, everything.logprobs * where)
    nothing = score(model, sequences, where=torch.zeros_like(where))
    assert not nothing.logprobs.any()


def test_hidden_states_are_flat_and_in_order() -> None:
    model, sequences = tiny_model("llama"), ragged(5)
    hidden = hidden_states(model, sequences)
    assert hidden.shape == (sum(map(len, sequences)), 32)
    alone = [hidden_states(model, [ids]) for ids in sequences]
    torch.testing.assert_close(hidden, torch.cat(alone), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="no empty ones"):
        hidden_states(model, [[1], []])


def test_forwards_waste_little_on_padding() -> None:
    lengths = sorted(random.Random(0).choices(range(1, 1000), k=200))
    runs = scoring._forwards(lengths)
    assert [i for run in runs for i in run] == list(range(200))
    padded = sum(len(run) * lengths[run[-1]] for run in runs)
    assert padded < 1.25 * sum(lengths)
    assert len(runs) < 30


def test_models_the_engine_would_get_wrong_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.1)
    check_parts(split_model(model))  # a hook on the head is part of the head
    strange = tiny_model("llama")
    strange.register_forward_hook(lambda module, args, output: type(output)(logits=output.logits * 1.1))
    with pytest.raises(UserError, match="gives other logits"):
        check_parts(split_model(strange))
    flash = tiny_model("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="attn_implementation='sdpa'"):
        split_model(flash)
    with pytest.raises(UserError, match="no language-model head"):
        split_model(tiny_model("llama").model)
