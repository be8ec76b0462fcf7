"""Small trainers on the embedded agent of the facts world, and trajectories that it made."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from agentropy.evaluation.score import Scorer
from agentropy.integrations.trl import AgentropyGRPOTrainer
from agentropy.integrations.trl_batch import Item, completion_logprobs
from agentropy.policies.base import SamplingParams
from agentropy.policies.loading import load_model
from agentropy.policies.local import LocalPolicy
from agentropy.protocols import make_dialect
from agentropy.rollout.loop import Agent, Limits, rollout
from agentropy.rollout.parts import assemble_toolbox
from agentropy.tasks.worlds import World, make_world
from agentropy.training.collect import attempts_for
from agentropy.trajectory import Trajectory

QUESTIONS, SAMPLES, TOKENS = 4, 4, 64


@functools.cache
def world() -> World:
    return make_world("facts", seed=0)


def model_path() -> str:
    return str(world().warm_start())


def toolbox() -> Any:
    return assemble_toolbox(world().tools(2.0), timeout=2.0, world=world(), seed=0)


def dataset(n: int = 16, **columns: Any) -> Dataset:
    """Questions of the world as a TRL user would have them."""
    tasks = [world().tasks.train(i) for i in range(n)]
    rows = [
        {"prompt": [{"role": "user", "content": t.question}], "id": t.id, "answer": list(t.answers)} | columns
        for t in tasks
    ]
    return Dataset.from_list(rows)


def config(out: Any, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": QUESTIONS * SAMPLES,
        "num_generations": SAMPLES,
        "max_completion_length": TOKENS,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }
    return GRPOConfig(output_dir=str(out), **(settings | changes))


def trainer(out: Any, kind: Any = AgentropyGRPOTrainer, *, settings: Mapping[str, Any] = {}, **changes: Any) -> Any:
    """A trainer of the embedded agent with its own tools and grader, unless something else is said."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "model": model_path(),
        "args": config(out, **settings),
        "train_dataset": dataset(),
        "protocol": "tags",
        "max_result_tokens": 64,
        "max_oversample": 1.0,
    }
    if "tools" not in changes and "environment_factory" not in changes:
        options["tools"] = toolbox()
    if "reward_funcs" not in changes and "environment_factory" not in changes:
        options["grader"] = "f1"
    return kind(**(options | changes))


def logged(run: Any) -> list[dict[str, float]]:
    """What TRL's logger was given, a record an update."""
    return [h for h in run.state.log_history if "loss" in h]


@functools.cache
def recorded(questions: int = QUESTIONS, samples: int = SAMPLES) -> tuple[Trajectory, ...]:
    """Trajectories that the embedded agent samples with our own loop."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(model_path())
    policy = LocalPolicy(model, tokenizer, max_slots=questions * samples)
    tasks = [world().tasks.train(i) for i in range(questions)]

    async def work() -> list[Trajectory]:
        box, scorer = toolbox(), Scorer()
        agent = Agent(policy, make_dialect("tags", tokenizer, max_result_tokens=64), box, scorer)
        await box.start()
        params = SamplingParams(max_new_tokens=TOKENS)
        out = await rollout(agent, attempts_for(tasks, samples, 0, "test"), params, Limits(5, TOKENS, 512))
        await box.close()
        await scorer.close()
        return out

    with policy.rollout():
        return tuple(asyncio.run(work()))


class Replay(AgentropyGRPOTrainer):
    """Learns from given trajectories, `replayed`, instead of sampling."""

    replayed: Sequence[Trajectory] = ()

    def _sample(self, rows: Any, active: Any, rounds: Any, known: Any) -> list[Item]:
        first = self.accelerator.process_index * len(rows)
        mine = [(first + i, self.replayed[first + i]) for i in active]
        return [Item(p, t, completion_logprobs(t), [float("nan") if t.score is None else t.score], {}) for p, t in mine]


class Recorder(torch.optim.SGD):
    """Keeps the gradients of every update and leaves the weights alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]
        )


def record_gradients(run: Any) -> Recorder:
    """Put a Recorder in the place of the trainer's optimiser."""
    recorder = Recorder([p for p in run.model.parameters() if p.requires_grad])
    run.optimizer, run.lr_scheduler = recorder, torch.optim.lr_scheduler.ConstantLR(recorder)
    return recorder


def sampled_in_rounds(out: Any, settings: Mapping[str, Any]) -> Any:
    """A run in which the first questions get the same reward for all their trajectories, so that others follow."""

    def parity(prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
        first = [r["prompt"][0]["content"] for r in dataset(2)]
        alike = [p[0]["content"] in first for p in prompts]
        return [1.0 if a else float(sum(ids) % 2) for a, ids in zip(alike, completion_ids, strict=True)]

    options = {"execution_filter": False}
    run = trainer(out, reward_funcs=parity, settings=settings, max_oversample=4.0, method_options=options)
    run.train()
    run.close()
    return run
