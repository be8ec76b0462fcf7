"""What each process of tests/test_distributed.py does: `torchrun distributed_ranks.py OUT`.

Computes the same updates over all ranks and, on each rank, alone, and writes how far they are apart to OUT.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from agentropy.batch import make_batch
from agentropy.config import LoraConfig, RunConfig
from agentropy.methods import make_method
from agentropy.policies.base import SamplingParams
from agentropy.rollout.loop import Attempt, Limits
from agentropy.tasks.base import Task
from agentropy.training.checkpoint import optimizer_state
from agentropy.training.distributed import OtherRankFailed, Ranks, _first_to_fail, run_joined
from agentropy.training.optimizer import MasterAdamW
from agentropy.training.setup import add_lora
from agentropy.training.sharding import Shards, shard
from agentropy.training.update import update
from test_training_update import options, trajectories

RANKS = 2


class Recorder(MasterAdamW):
    """Keeps the gradients that it steps by, and steps."""

    seen: list[list[torch.Tensor]]

    def step(self, closure: Any = None) -> None:
        self.seen.append([w.grad.clone() for w in self.weights if w.grad is not None])
        super().step(closure)


def recorder(weights: Any) -> Recorder:
    made = Recorder(weights, lr=1e-2)
    made.seen = []
    return made


def qwen(**changes: Any) -> Any:
    """Two layers, and sizes that two ranks cannot halve."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 33, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=51,
            num_hidden_layers=2,
            head_dim=8,
            use_cache=False,
            **sizes,
            **{"tie_word_embeddings": True} | changes,
        )
    )


def gpt2() -> Any:
    torch.manual_seed(0)
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=51, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **dropout
        )
    )


def lora() -> Any:
    model = add_lora(qwen(), RunConfig(lora=LoraConfig(rank=3)))
    with torch.no_grad():  # B begins at 0, and A would get no gradient
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


# Name: model, method, its options, options of the update.
CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "grpo": (qwen, "grpo", {}, {}),
    "grpo, one row a micro-batch": (qwen, "grpo", {}, {"micro_batch_tokens": 1}),
    "grpo, mean over sequences": (qwen, "grpo", {"aggregation": "sequence-mean"}, {"micro_batch_tokens": 40}),
    "tao-rl": (qwen, "tao-rl", {"execution_filter": False}, {"micro_batch_tokens": 40}),
    "tepo-dense": (qwen, "tepo-dense", {}, {"micro_batch_tokens": 60}),
    "aepo": (qwen, "aepo", {"tokens": "high-entropy"}, {"micro_batch_tokens": 60}),
    "entropy bonus, head of its own": (
        lambda: qwen(tie_word_embeddings=False), "grpo", {"entropy_coef": 0.01}, {"micro_batch_tokens": 60},
    ),
    "KL to a copy": (qwen, "grpo", {"kl_coef": 0.1}, {"micro_batch_tokens": 60, "epochs": 2}),
    "GPT-2": (gpt2, "grpo", {}, {"micro_batch_tokens": 60}),
    "LoRA and KL": (lora, "grpo", {"kl_coef": 0.1}, {"micro_batch_tokens": 60, "epochs": 2}),
    "clipped": (qwen, "grpo", {}, {"grad_clip": 0.01}),
    "sums, importance weights, an update of one row": (
        qwen,
        "grpo",
        {"kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "sequence-sum-norm", "norm_constant": 7.0},
        {"weighted": True},
    ),
}  # fmt: skip


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm of `b`, both over all tensors."""
    flat = [torch.cat([t.double().flatten() for t in tensors]) for tensors in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def whole_gradients(shards: Shards, seen: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What each update stepped by, of all ranks put together (on rank 0)."""
    return [[shards._join(g, i) for i, g in enumerate(step)] for step in seen]


def compare(ranks: Ranks, case: tuple[Any, str, dict[str, Any], dict[str, Any]], seed_rows: Any) -> dict[str, Any]:
    """One update, or several, over all ranks and alone."""
    build, name, method_options, update_options = case
    weighted = update_options.get("weighted", False)
    alone = build()
    method = make_method(name, **method_options)
    batch = make_batch(seed_rows)
    shaped = method.shape(batch)
    importance = None
    if weighted:  # and of each question one row is learned from, so that the second update has one
        importance = 0.5 + torch.rand(batch.n_tokens, generator=torch.Generator().manual_seed(0))
        shaped = replace(shaped, loss_mask=shaped.loss_mask & (batch.trajectory_of % 3 == 1))
    needs_copy = method.loss.kl_coef > 0 and not hasattr(alone, "peft_config")
    shards = shard(copy.deepcopy(alone), ranks)
    with torch.no_grad():  # the policy has moved away from the reference
        references = (copy.deepcopy(alone), shards.keep_reference()) if needs_copy else (None, None)
    one = recorder([p for p in alone.parameters() if p.requires_grad])
    many = recorder(shards.local)
    choice = options(**{k: v for k, v in update_options.items() if k != "weighted"})
    work = functools.partial(update, method=method, batch=batch, shaped=shaped, options=choice, importance=importance)
    expected = {}
    if ranks.leads:
        expected = work(alone, one, seed=1, reference_model=references[0])
    found = work(shards.model, many, seed=1, reference_model=references[1], shards=shards)
    gradients = whole_gradients(shards, many.seen)
    state = shards.optimizer_state(many)
    with shards.gathered() as whole:
        weights = {n: p.detach().clone() for n, p in whole.named_parameters()}
    again = recorder(shards.local)
    trainable = {n: torch.zeros_like(p) + 2 for n, p in alone.named_parameters() if p.requires_grad}
    shards.load(trainable, ranks.same(state), again)
    restored = shards.optimizer_state(again)
    out: dict[str, Any] = {"updates": len(one.seen), "metrics": [expected, found]}
    out["loaded"] = float(max((p.detach() - 2).abs().max() for p in shards.local if p.numel()))
    out["freed"] = sum(p.numel() for p in shards.whole.parameters())
    out["held"] = sum(p.numel() for p in shards.local) / sum(p.numel() for p in trainable.values())
    if ranks.leads:
        out["gradients"] = [distance(a, b) for a, b in zip(gradients, one.seen, strict=True)]
        out["weights"] = max(float((p.detach() - weights[n]).abs().max()) for n, p in alone.named_parameters())
        wanted = optimizer_state(one)["optimizer"]["state"]
        keys = [(i, k) for i in wanted for k in wanted[i]]
        out["momenta"] = max(float((wanted[i][k] - state["optimizer"]["state"][i][k]).abs().max()) for i, k in keys)
        out["restored"] = all(
            torch.equal(restored["optimizer"]["state"][i][k], state["optimizer"]["state"][i][k]) for i, k in keys
        )
    return out


def compare_bfloat16(ranks: Ranks, rows: Any) -> dict[str, Any]:
    """Float32 masters stay float32, and a step too small for a bfloat16 weight is not lost."""
    model = qwen().to(torch.bfloat16)
    method, batch = make_method("grpo"), make_batch(rows)
    shards = shard(model, ranks)
    optimizer = MasterAdamW(shards.local, lr=1e-6)
    before = [m.clone() for m in optimizer.masters()]
    for k in range(2):
        update(shards.model, optimizer, method, batch, method.shape(batch), options(), seed=k, shards=shards)
    moved = [float((a - b).abs().max()) for a, b in zip(before, optimizer.masters(), strict=True) if a.numel()]
    with shards.gathered() as whole:
        dtypes = {str(p.dtype) for p in whole.parameters()}
    return {"moved": min(moved), "most": max(moved), "dtypes": sorted(dtypes)}


def skip_not_finite(ranks: Ranks, rows: Any) -> dict[str, Any]:
    """Only rank 0's row has a gradient that is not finite; nobody steps."""
    method, batch = make_method("grpo"), make_batch(rows)
    shaped = method.shape(batch)
    first = int(batch.token_start[0])
    shaped.advantages[first + 8 : first + 12] = float("inf")
    shards = shard(qwen(), ranks)
    before = [p.detach().clone() for p in shards.local]
    metrics = update(
        shards.model,
        MasterAdamW(shards.local, lr=1.0),
        method,
        batch,
        shaped,
        options(minibatches=1),
        seed=1,
        shards=shards,
    )
    same = all(torch.equal(a, b) for a, b in zip(before, shards.local, strict=True))
    return {"skipped": metrics["optim/skipped_not_finite"], "same": same}


def rollouts(ranks: Ranks) -> dict[str, Any]:
    """Who samples what, and what the others hear of a failure and of a stop."""
    tasks = [Task(f"q{i}", f"question {i}", ("1",), "math") for i in (0, 1, 2, 0, 3)]
    attempts = [Attempt(t, f"{t.id}/{i}/{k}", 0) for i, t in enumerate(tasks) for k in range(2)]

    async def roll(agent: Any, mine: Any, params: Any, limits: Any) -> Any:
        if mine[0].trajectory_id.endswith("fail") and ranks.rank == 1:
            raise RuntimeError("broken tool")
        if mine[0].trajectory_id.endswith("stop") and ranks.rank == 1:
            raise asyncio.CancelledError
        return [f"{a.trajectory_id} by {ranks.rank}" for a in mine]

    async def outcome(tag: str, stop: asyncio.Event | None) -> str:
        tagged = [Attempt(a.task, f"{a.trajectory_id}{tag}", 0) for a in attempts]
        shared = ranks.share(roll, stop)
        try:
            return str(await shared(None, tagged, SamplingParams(), Limits()))  # type: ignore[arg-type]
        except (RuntimeError, OtherRankFailed, asyncio.CancelledError) as error:
            if isinstance(error, RuntimeError):
                assert _first_to_fail(ranks)  # as `run_joined` does
            return f"{type(error).__name__} {stop is not None and stop.is_set()}"

    async def all_outcomes() -> dict[str, str]:
        stop = asyncio.Event()
        return {
            "whole": await outcome("", stop),
            "one question": str(await ranks.share(roll)(None, attempts[:1], SamplingParams(), Limits())),  # type: ignore[arg-type]
            "stop in evaluation": await outcome("stop", None),
            "stop": await outcome("stop", stop),
            "fail": await outcome("fail", None),
        }

    return asyncio.run(all_outcomes())


def main(ranks: Ranks) -> int:
    rows = trajectories(qwen(), questions=3, samples=3)  # 9 rows, 2 minibatches, 2 ranks
    found: dict[str, Any] = {name: compare(ranks, case, rows) for name, case in CASES.items()}
    found["bfloat16"] = compare_bfloat16(ranks, rows)
    found["not finite"] = skip_not_finite(ranks, rows)
    found["rollouts"] = rollouts(ranks)
    Path(sys.argv[1], f"rank{ranks.rank}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(run_joined(main))
