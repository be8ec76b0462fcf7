"""verl's configuration, trajectories of an embedded agent, and a client for verl's agent loops without a server."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentropy.cli import main
from agentropy.evaluation.score import Scorer
from agentropy.integrations.verl.launch import Launch, overrides
from agentropy.integrations.verl.options import VerlOptions
from agentropy.policies.base import SamplingParams
from agentropy.policies.loading import load_model
from agentropy.policies.local import LocalPolicy
from agentropy.protocols import make_dialect
from agentropy.rollout.loop import Agent, Limits, rollout
from agentropy.rollout.parts import assemble_toolbox
from agentropy.tasks.worlds import World, make_world
from agentropy.training.collect import attempts_for
from agentropy.trajectory import Trajectory, write_jsonl

QUESTIONS, SAMPLES, PROMPT, RESPONSE = 4, 4, 128, 256


@functools.cache
def world(name: str) -> World:
    return make_world(name, seed=0)


def model_path(name: str = "arithmetic") -> str:
    return str(world(name).warm_start())


def write_tasks(path: Path, train: int = 40, held: int = 4) -> Path:
    """Questions of the arithmetic world, as a user would have them."""
    source = world("arithmetic").tasks
    tasks = [("train", source.train(i)) for i in range(train)]
    tasks += [("validation", t) for t in source.split("validation")[:held]]
    rows = [
        {"id": t.id, "question": t.question, "answer": list(t.answers), "grader": t.grader, "split": split}
        for split, t in tasks
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CPU = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.dtype=float32",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "trainer.device=cpu",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=2",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
)
"""What a run on a CPU needs beyond `agentropy launch verl`."""


def verl_config(folder: Path, *more: str, **options: Any) -> Any:
    """verl's whole configuration, as its own entry point would compose it."""
    from hydra import compose, initialize_config_module

    group = VerlOptions(**({"method": "tao-rl", "tools": ["python"], "protocol": "tags", "grader": "math"} | options))
    launch = Launch(model_path(), group, folder, QUESTIONS, SAMPLES, QUESTIONS, PROMPT, RESPONSE, 1, 1, 2, 1e-4)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*overrides(launch), *CPU, *more])


@functools.cache
def recorded(questions: int = QUESTIONS, samples: int = SAMPLES) -> tuple[Trajectory, ...]:
    """Trajectories that the embedded agent of the facts world samples with our own loop."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(model_path("facts"))
    policy = LocalPolicy(model, tokenizer, max_slots=questions * samples)
    tasks = [world("facts").tasks.train(i) for i in range(questions)]

    async def work() -> list[Trajectory]:
        box, scorer = assemble_toolbox(world("facts").tools(5.0), timeout=5.0), Scorer()
        agent = Agent(policy, make_dialect("tags", tokenizer, max_result_tokens=64), box, scorer)
        await box.start()
        out = await rollout(agent, attempts_for(tasks, samples, 0, "test"), SamplingParams(), Limits(5, 64, 512))
        await box.close()
        await scorer.close()
        return out

    with policy.rollout():
        return tuple(asyncio.run(work()))


def shaped_lines(trajectories: Sequence[Trajectory], method: str, folder: Path) -> list[dict[str, Any]]:
    """What `agentropy shape` says of them."""
    file, out = folder / "recorded.jsonl", folder / "shaped.jsonl"
    write_jsonl(file, trajectories)
    assert main(["shape", "--method", method, str(file), "--out", str(out)]) in (0, None)
    return [json.loads(line) for line in out.read_text().splitlines()]


class LocalClient:
    """What verl gives its agent loops, without a server: samples in the process that asks. May be sent to an actor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.server: Any = None
        self.requests: list[str] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        if self.server is None:
            from verl_on_cpu import Server

            self.server = Server(self.path)
            self.server.version = 3
        self.requests.append(request_id)
        return await self.server.generate(prompt_ids, sampling_params, request_id)
