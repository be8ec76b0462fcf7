"""Tiny random models and a small agent loop for the tests of the local engine."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentropy.policies.base import Generation, SamplingParams, SequenceHandle, Stop
from agentropy.policies.local import LocalPolicy

VOCAB = 97
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough for distributions that are neither flat nor one-hot.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny_model(kind: str) -> Any:
    """A random model of the kind, in evaluation mode, always with the same weights."""
    torch.manual_seed(0)
    return _make(kind).eval()


def _make(kind: str) -> Any:
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=8))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZE))
    if kind == "llama-eager":
        return LlamaForCausalLM(LlamaConfig(**SIZE, attn_implementation="eager"))
    if kind == "gemma3":
        return Gemma3ForCausalLM(
            Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=7, layer_types=SLIDING, query_pre_attn_scalar=8)
        )
    if kind == "gemma2":
        # Soft caps on scores and logits; the fused attention does not know the first.
        config = Gemma2Config(
            **SIZE,
            head_dim=8,
            sliding_window=7,
            layer_types=SLIDING,
            query_pre_attn_scalar=8,
            final_logit_softcapping=5.0,
        )
        config._attn_implementation = "eager"
        return Gemma2ForCausalLM(config)
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=7))
    if kind == "granite":
        return GraniteForCausalLM(GraniteConfig(**SIZE, logits_scaling=3.0))
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    if kind == "lora":
        return with_lora(Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=8)))
    raise ValueError(kind)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        # peft reads an attribute that this version of transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


@dataclass
class Played:
    """One trajectory: all its ids, and for each turn where its sampled ids begin and what was sampled."""

    ids: list[int]
    turns: list[tuple[int, Generation]] = field(default_factory=list)


STOP = Stop(token_ids=frozenset(range(5, 11)))


async def play(
    policy: LocalPolicy,
    seed: int,
    timing: int,
    params: SamplingParams,
    *,
    groups: int = 4,
    size: int = 4,
    stop: Stop = STOP,
) -> dict[tuple[int, ...], Played]:
    """Many trajectories at once: several turns, results appended, every third forked after its first turn.

    `seed` decides what is played, `timing` how long the tools take.
    """
    rng, clock = random.Random(seed), random.Random(timing)
    played: dict[tuple[int, ...], Played] = {}
    tasks: list[asyncio.Task[None]] = []

    async def tool() -> None:
        for _ in range(clock.randrange(4)):
            await asyncio.sleep(0)
        if clock.random() < 0.3:
            await asyncio.sleep(clock.random() * 0.005)

    async def trajectory(
        handle: SequenceHandle, key: tuple[int, ...], ids: Sequence[int], plan: list[tuple[int, int]]
    ) -> None:
        own = played[key] = Played(list(ids))
        new: list[int] = []
        try:
            for turn, (result, most) in enumerate(plan):
                own.ids += new
                limit = SamplingParams(params.temperature, params.top_p, params.top_k, most)
                out = await policy.generate(handle, new, limit, stop)
                own.turns.append((len(own.ids), out))
                own.ids += out.ids
                assert handle.length == len(own.ids)
                await tool()
                if turn == 0 and len(key) == 1 and key[0] % 3 == 0:
                    child = policy.fork(handle, 1000 + key[0])
                    tasks.append(asyncio.create_task(trajectory(child, (key[0], 1), list(own.ids), [(3, 9), (2, 8)])))
                    await tool()
                new = [(key[0] * 7 + i) % VOCAB for i in range(result)]
        finally:
            policy.close(handle)

    for group in range(groups):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        for handle in policy.open(prompt, [group * 10 + i for i in range(size)]):
            plan = [(rng.randrange(30), rng.randrange(1, 25)) for _ in range(rng.randrange(1, 4))]
            tasks.append(asyncio.create_task(trajectory(handle, (len(tasks),), prompt, plan)))
    while not all(task.done() for task in tasks):
        await asyncio.gather(*tasks)
    return played


def run_play(
    policy: LocalPolicy, seed: int, timing: int, params: SamplingParams, *, limit: float = 60, **kwargs: Any
) -> Any:
    with policy.rollout():
        return asyncio.run(asyncio.wait_for(play(policy, seed, timing, params, **kwargs), limit))
