"""The local engine beside `model.generate`, in one run on one thread: `python benchmarks/engine.py [--batch 64 128]`.

Three jobs with a model of the embedded agent's size and random weights:

* fixed: groups of 8 sequences from one prompt of 64 tokens, 48 new tokens each, no stop;
* agentic: turns that end at a stop token (about 1 token in 25, at most 96), results of 8 to 24 tokens, 1 to 3 turns a
  trajectory; against a loop that calls `generate` for all unfinished trajectories, turn after turn;
* slow tools: the same with tools that take 20 to 60 ms, which `generate` must wait for after each turn.

`generate` samples with its own sampler and gives neither log-probabilities nor entropies; the engine gives both. CPU
seconds and wall seconds are measured; jobs alternate between the two sides, and the median of the repetitions counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentropy.policies.base import SamplingParams, SequenceHandle, Stop
from agentropy.policies.local import LocalPolicy

VOCAB = 1500
STOPS = frozenset(range(10, 70))
GROUP = 8
CAP = 96


def make_model(vocab: int = VOCAB, width: int = 128, layers: int = 2) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.07,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(batch: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCAB) for _ in range(64)] for _ in range(batch // GROUP)]


def plan(batch: int, seed: int) -> list[list[list[int]]]:
    """For each trajectory the results of its calls: none, one or two."""
    rng = random.Random(seed + 1)
    return [
        [[rng.randrange(100, VOCAB) for _ in range(rng.randrange(8, 25))] for _ in range(rng.randrange(3))]
        for _ in range(batch)
    ]


def delays(batch: int, seed: int) -> list[float]:
    rng = random.Random(seed + 2)
    return [rng.uniform(0.02, 0.06) for _ in range(batch)]


# -- model.generate ---------------------------------------------------------------------------------------------------


def generate_fixed(model: Qwen3ForCausalLM, batch: int, seed: int, new: int = 48) -> int:
    torch.manual_seed(seed)
    ids = torch.tensor([p for p in prompts(batch, seed) for _ in range(GROUP)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new
    )
    return int(out.shape[1] - ids.shape[1]) * batch


def generate_agentic(model: Qwen3ForCausalLM, batch: int, seed: int, *, wait: bool = False) -> int:
    torch.manual_seed(seed)
    context = [list(p) for p in prompts(batch, seed) for _ in range(GROUP)]
    results = plan(batch, seed)
    live, turn, sampled = list(range(batch)), 0, 0
    while live:
        longest = max(len(context[i]) for i in live)
        ids = torch.tensor([[0] * (longest - len(context[i])) + context[i] for i in live])
        mask = torch.tensor([[0] * (longest - len(context[i])) + [1] * len(context[i]) for i in live])
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=CAP, eos_token_id=sorted(STOPS)
        )
        for i, row in zip(live, out[:, longest:].tolist(), strict=True):
            end = next((n for n, t in enumerate(row) if t in STOPS), len(row) - 1) + 1
            context[i] += row[:end]
            sampled += end
        live = [i for i in live if turn < len(results[i])]
        if live and wait:
            time.sleep(max(delays(batch, seed)[i] for i in live))
        for i in live:
            context[i] += results[i][turn]
        turn += 1
    return sampled


# -- the engine -------------------------------------------------------------------------------------------------------


def open_all(policy: LocalPolicy, batch: int, seed: int) -> list[SequenceHandle]:
    groups = enumerate(prompts(batch, seed))
    return [h for n, prompt in groups for h in policy.open(prompt, range(n * 100, n * 100 + GROUP))]


def engine_fixed(policy: LocalPolicy, batch: int, seed: int, new: int = 48) -> int:
    async def run() -> int:
        handles = open_all(policy, batch, seed)

        async def one(handle: SequenceHandle) -> int:
            out = await policy.generate(handle, (), SamplingParams(max_new_tokens=new), Stop())
            policy.close(handle)
            return len(out.ids)

        return sum(await asyncio.gather(*map(one, handles)))

    with policy.rollout():
        return asyncio.run(run())


def engine_agentic(policy: LocalPolicy, batch: int, seed: int, *, wait: bool = False) -> int:
    results, sleeps = plan(batch, seed), delays(batch, seed)
    params, stop = SamplingParams(max_new_tokens=CAP), Stop(token_ids=STOPS)

    async def one(index: int, handle: SequenceHandle) -> int:
        sampled, new = 0, list[int]()
        for result in [*results[index], None]:
            out = await policy.generate(handle, new, params, stop)
            sampled += len(out.ids)
            if result is not None:
                await asyncio.sleep(sleeps[index] if wait else 0)
                new = result
        policy.close(handle)
        return sampled

    async def run() -> int:
        handles = open_all(policy, batch, seed)
        return sum(await asyncio.gather(*(one(i, h) for i, h in enumerate(handles))))

    with policy.rollout():
        return asyncio.run(run())


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(job: Callable[[int], int], seed: int) -> tuple[float, float]:
    """Sampled tokens a wall second and a CPU second."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = job(seed)
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def compare(name: str, reference: Callable[[int], int], ours: Callable[[int], int], repeats: int) -> None:
    measure(reference, 0), measure(ours, 0)
    pairs = [(measure(reference, seed), measure(ours, seed)) for seed in range(1, repeats + 1)]
    medians = [statistics.median(p[side][kind] for p in pairs) for side in (0, 1) for kind in (0, 1)]
    ratios = [sorted(p[1][kind] / p[0][kind] for p in pairs) for kind in (0, 1)]
    middle = [statistics.median(r) for r in ratios]
    print(
        f"{name:22s} generate {medians[0]:7.0f} tok/s wall {medians[1]:7.0f} cpu | engine {medians[2]:7.0f} wall "
        f"{medians[3]:7.0f} cpu | ratio {middle[0]:.2f} wall ({ratios[0][0]:.2f} to {ratios[0][-1]:.2f}), "
        f"{middle[1]:.2f} cpu ({ratios[1][0]:.2f} to {ratios[1][-1]:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", default=["fixed", "agentic", "slow-tools"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = make_model()
    for batch in args.batch:
        policy = LocalPolicy(model, None, max_slots=batch, max_context=1024)
        jobs: dict[str, tuple[Callable[..., int], Callable[..., int]]] = {
            "fixed": (partial(generate_fixed, model, batch), partial(engine_fixed, policy, batch)),
            "agentic": (partial(generate_agentic, model, batch), partial(engine_agentic, policy, batch)),
            "slow-tools": (
                partial(generate_agentic, model, batch, wait=True),
                partial(engine_agentic, policy, batch, wait=True),
            ),
        }
        for name in args.jobs:
            compare(f"{name} B={batch}", *jobs[name], args.repeats)


if __name__ == "__main__":
    main()
