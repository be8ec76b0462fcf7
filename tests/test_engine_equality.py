"""What the engine says of its tokens is what the trainer finds, and the same whatever the tools' timing."""

from __future__ import annotations

import pytest
import torch

from agentropy.policies.base import SamplingParams
from agentropy.policies.local import LocalPolicy
from agentropy.policies.scoring import score
from engine_models import Played, play, run_play, tiny_model

KINDS = ["qwen3", "llama", "llama-eager", "gemma3", "gemma2", "mistral", "granite", "gpt2", "lora"]


def differences(
    model: torch.nn.Module, played: dict[tuple[int, ...], Played], temperature: float
) -> tuple[float, float]:
    """Largest differences of log-probability and entropy between the engine's turns and the trainer's forward."""
    with torch.no_grad():
        found = score(model, [p.ids for p in played.values()], temperature=temperature)
    assert found.entropies is not None
    start, logprob, entropy = 0, 0.0, 0.0
    for own in played.values():
        for at, turn in own.turns:
            where = slice(start + at, start + at + len(turn.ids))
            logprob = max(logprob, float((found.logprobs[where] - torch.tensor(turn.logprobs)).abs().max()))
            entropy = max(entropy, float((found.entropies[where] - torch.tensor(turn.entropies)).abs().max()))
        start += len(own.ids)
    return logprob, entropy


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_trainer_finds_the_engines_numbers(kind: str, temperature: float) -> None:
    """Over turns, results, forks and refilled slots (5 slots for 16 sequences); some end by a stop, some by length."""
    model = tiny_model(kind)
    policy = LocalPolicy(model, max_slots=5)
    played = run_play(policy, 1, 1, SamplingParams(temperature), groups=3)
    assert len(played) == 16
    finishes = {turn.finish for p in played.values() for _, turn in p.turns}
    assert finishes == {"stop", "length"}
    logprob, entropy = differences(model, played, temperature)
    assert logprob < 1e-4
    assert entropy < 1e-4


@pytest.mark.parametrize("slots", [3, 32])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_same_bits_whatever_the_timing(kind: str, slots: int) -> None:
    policy = LocalPolicy(tiny_model(kind), max_slots=slots)
    runs = [run_play(policy, 2, timing, SamplingParams(), groups=3) for timing in range(2)]
    assert all(run == runs[0] for run in runs)
    other = run_play(policy, 3, 0, SamplingParams(), groups=3)
    assert other != runs[0]


def test_admitting_at_once_gives_the_same_tokens() -> None:
    """Without the clock the steps are composed differently, but a sequence's random numbers are its own."""
    model = tiny_model("qwen3")
    clocked = run_play(LocalPolicy(model), 4, 1, SamplingParams())
    free = run_play(LocalPolicy(model, deterministic=False, max_slots=4), 4, 2, SamplingParams())
    assert {k: p.ids for k, p in free.items()} == {k: p.ids for k, p in clocked.items()}
    assert max(differences(model, free, 1.0)) < 1e-4


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    policy = LocalPolicy(tiny_model("llama"))
    many = run_play(policy, 5, 1, SamplingParams(), groups=3)
    few = run_play(policy, 5, 1, SamplingParams(), groups=1)
    assert {k: many[k].ids for k in few} == {k: p.ids for k, p in few.items()}


@pytest.mark.parametrize(
    "params", [SamplingParams(0.0), SamplingParams(0.7, top_p=0.8), SamplingParams(1.3, top_k=5, top_p=0.9)], ids=str
)
def test_numbers_are_those_of_the_whole_distribution(params: SamplingParams) -> None:
    model = tiny_model("qwen3")
    played = run_play(LocalPolicy(model), 6, 1, params)
    assert max(differences(model, played, params.temperature)) < 1e-4
    most_likely = all_most_likely(model, played)
    assert most_likely == (params.temperature == 0)


def all_most_likely(model: torch.nn.Module, played: dict[tuple[int, ...], Played]) -> bool:
    for own in played.values():
        with torch.no_grad():
            best = model(input_ids=torch.tensor([own.ids])).logits[0].argmax(-1)
        for at, turn in own.turns:
            if best[at - 1 : at - 1 + len(turn.ids)].tolist() != list(turn.ids):
                return False
    return True


def test_bfloat16_model_runs() -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    played = run_play(LocalPolicy(model), 7, 1, SamplingParams())
    logprob, entropy = differences(model, played, 1.0)
    assert logprob < 0.5
    assert entropy < 0.5


def test_weights_may_change_between_rollouts() -> None:
    model = tiny_model("qwen3").train()
    policy = LocalPolicy(model)
    before = run_play(policy, 8, 1, SamplingParams())
    assert model.training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = run_play(policy, 8, 1, SamplingParams())
    assert after != before
    model.eval()
    assert max(differences(model, after, 1.0)) < 1e-4


def test_long_steps_move_to_a_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3")
    inline = run_play(LocalPolicy(model, max_slots=6), 9, 1, SamplingParams(), groups=2)
    monkeypatch.setattr("agentropy.policies.local.INLINE_SECONDS", 0.0)
    policy = LocalPolicy(model, max_slots=6)
    threaded = run_play(policy, 9, 2, SamplingParams(), groups=2)
    assert threaded == inline
    assert policy._pool is None


def test_play_uses_every_kind_of_turn() -> None:
    """The tests above mean little if the play has no forks, no results and no second turns."""
    import asyncio

    policy = LocalPolicy(tiny_model("llama"))
    with policy.rollout():
        played = asyncio.run(play(policy, 1, 1, SamplingParams()))
    assert any(len(key) == 2 for key in played)
    assert any(len(p.turns) == 3 for p in played.values())
