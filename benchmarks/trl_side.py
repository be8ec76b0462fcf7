"""TRL's half of `benchmarks/trl.py`, run by the Python of TRL's own environment; also what both halves share.

    .venv-trl/bin/python -P benchmarks/trl_side.py '{"model": DIR, "fixed": true, …}'

`-P` matters: without it this folder's `trl.py` would hide the library. The last line of output is JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

CALLS = [0]
"""How often `add` ran in this process."""


def add(a: int, b: int):  # without a type of the result, which TRL would tell the model and we would not
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    CALLS[0] += 1
    return int(a) + int(b)


def question(index: int) -> tuple[str, str]:
    """The question at a place of the stream, and its answer. The same for both sides."""
    rng = random.Random(f"benchmark/{index}")
    a, b = rng.randrange(10, 500), rng.randrange(10, 500)
    return f"What is {a} plus {b}? Use the tool.", str(a + b)


def reward(text: str, gold: str | None) -> float:
    """Mostly whether the answer is right; a tenth hangs on the text alone, so that hardly any group is all alike."""
    parity = sum(map(ord, text)) % 2
    return float(parity) if gold is None else 0.9 * (gold in text) + 0.1 * parity


def summary(steps: list[dict[str, float]], warm_up: int) -> dict[str, float]:
    """Medians over the steps after the warm-up."""
    kept = steps[warm_up:]
    return {key: statistics.median(s[key] for s in kept) for key in kept[0]} | {"steps": float(len(kept))}


def run(job: dict[str, Any]) -> dict[str, float]:
    """Train with `GRPOTrainer` and return medians a step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    fixed, limit, batch = job["fixed"], job["max_new_tokens"], job["questions"] * job["samples"]
    total = job["warm_up"] + job["steps"]
    items = [question(i) for i in range(total * job["questions"])]
    rows = [{"prompt": [{"role": "user", "content": q}], "gold": g} for q, g in items]
    sampled: list[dict[str, float]] = []
    done: list[dict[str, float]] = []

    def score(completions: list[list[dict[str, Any]]], gold: list[str], **_: Any) -> list[float]:
        texts = [str(c[-1].get("content") or "") for c in completions]
        return [reward(t, None if fixed else g) for t, g in zip(texts, gold, strict=True)]

    class Counting(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            CALLS[0] = 0
            out = super()._generate_and_score_completions(inputs)
            mask = out["completion_mask"] * out.get("tool_mask", 1)
            sampled.append(
                {
                    "tokens": float(mask.sum()),
                    "all_tokens": float(out["completion_mask"].sum() + out["prompt_mask"].sum()),
                    "calls": float(CALLS[0]),
                    "prompt": float(out["prompt_mask"].sum(1).max()),
                    "spread": float(out["advantages"].abs().gt(0).float().mean()),
                }
            )
            return out

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, cpu = time.perf_counter(), time.process_time()
            done.append({"wall": wall - self.wall, "cpu": cpu - self.cpu, **sampled[-1]})
            self.wall, self.cpu = wall, cpu

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=batch // job["accumulate"],
            gradient_accumulation_steps=job["accumulate"],
            num_generations=job["samples"],
            # TRL counts the result's tokens too; the models stop long before either limit.
            max_completion_length=limit if fixed else limit + 32,
            max_tool_calling_iterations=1,
            generation_kwargs={"min_new_tokens": limit} if fixed else None,
            temperature=1.0,
            beta=0.0,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_steps=total,
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=job["checkpointing"],
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
        )
        trainer = Counting(
            model=job["model"],
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list(rows),
            tools=[add],
            callbacks=[Clock()],
        )
        trainer.train()
    return summary(done, job["warm_up"])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(json.dumps(run(json.loads(sys.argv[1]))))
