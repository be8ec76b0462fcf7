"""From a configuration to the parts of a run: model, tools, protocol, questions, method."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentropy.config import RunConfig, resolved
from agentropy.errors import UserError
from agentropy.evaluation.score import Scorer
from agentropy.methods import make_method
from agentropy.methods.base import Method
from agentropy.policies.loading import load_model
from agentropy.policies.local import LocalPolicy
from agentropy.protocols import make_dialect
from agentropy.rollout.loop import Agent, Limits, RolloutFunction
from agentropy.rollout.parts import assemble_toolbox, local_policy, parameters, pick_device
from agentropy.tasks.base import TaskSource
from agentropy.tasks.worlds import World, make_world
from agentropy.tools.named import tool_by_name

if TYPE_CHECKING:
    from agentropy.training.distributed import Ranks
    from agentropy.training.sampler import Sampler


@dataclass
class Setup:
    """The parts of one run. `policy` is the local engine; with a `sampler` a server takes its place in `agent`."""

    agent: Agent
    policy: LocalPolicy
    model: Any
    tokenizer: Any
    tasks: TaskSource
    method: Method
    limits: Limits
    lr: float
    scorer: Scorer
    source_name: str
    description: str
    sampler: Sampler | None = None

    @contextlib.asynccontextmanager
    async def sampling(self, step: int, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Around rollouts: the model in evaluation mode, and a server with the weights that it has after `step`."""
        with self.policy.rollout():
            if self.sampler is not None:
                await self.sampler.begin(self.model, step, say)
            yield

    def scored(self, roll: RolloutFunction) -> RolloutFunction:
        """A rollout whose log-probabilities and entropies are those of `model`, whatever samples."""
        return roll if self.sampler is None else self.sampler.scored(roll, self.model)

    async def close(self) -> None:
        """Stop the tools and the graders."""
        if self.sampler is not None:
            await self.sampler.close()
        await self.agent.toolbox.close()
        await self.scorer.close()


def build(config: RunConfig) -> Setup:
    """Make everything that a run needs. Raises UserError for the first thing that cannot be had."""
    config = resolved(config)
    r, lr = config.rollout, config.optim.lr
    # For the type checker: `resolved` has filled these in.
    assert r.max_turns
    assert r.max_new_tokens
    assert r.max_result_tokens
    assert r.tool_timeout
    assert config.protocol
    assert lr
    method = make_method(config.method, **(_loss_options(config) | config.method_options))
    world: World | None = None
    if config.tasks is not None:
        from agentropy.tasks.files import load_tasks

        tasks, source_name = load_tasks(config.tasks, seed=config.seed), config.tasks
    else:
        world = make_world(config.world or "arithmetic", seed=config.seed, **config.world_options)
        tasks, source_name = world.tasks, world.name
    parts = _tools(config, world, r.tool_timeout)
    toolbox = assemble_toolbox(parts, timeout=r.tool_timeout, sandbox=config.sandbox, world=world, seed=config.seed)
    device = pick_device(config.device)
    path = config.model if config.model is not None else str(world.warm_start()) if world else ""
    model, tokenizer = load_model(path, dtype=getattr(torch, config.dtype), device=device)
    embedded = config.model is None
    if config.lora.rank:
        model = add_lora(model, config)
    policy = local_policy(
        model,
        tokenizer,
        name=path,
        max_slots=r.max_slots,
        max_context=r.max_context,
        deterministic=r.deterministic,
        threads=config.threads,
    )
    dialect = make_dialect(config.protocol, tokenizer, max_result_tokens=r.max_result_tokens, **config.protocol_options)
    if config.steps:  # questions, template or tools that cannot be used show here, before a run directory is filled
        dialect.prompt(tasks.train(0).question, toolbox.specs, config.system)
    scorer = Scorer()
    size = f"{parameters(model) / 1e6:.2f} million parameters"
    return Setup(
        agent=Agent(policy, dialect, toolbox, scorer, config.system),
        policy=policy,
        model=model,
        tokenizer=tokenizer,
        tasks=tasks,
        method=method,
        limits=Limits(r.max_turns, r.max_new_tokens, policy.info.max_context),
        lr=lr,
        scorer=scorer,
        source_name=source_name,
        description=f"{'the embedded agent' if embedded else path} ({size}, {device})",
    )


def with_server(setup: Setup, config: RunConfig, directory: Path, ranks: Ranks) -> Setup:
    """The same run, sampled by the server of `rollout.server`. All ranks must call.

    Raises UserError where it cannot be used, before anything is sampled.
    """
    from agentropy.training.sampler import connect_sampler

    sampler = connect_sampler(config, setup.tokenizer, directory, setup.method.rollout is not None, ranks)
    window = min(setup.limits.max_context, sampler.policy.info.max_context)
    return replace(
        setup,
        agent=replace(setup.agent, policy=sampler.policy),
        limits=replace(setup.limits, max_context=window),
        sampler=sampler,
        description=f"{setup.description}, sampled by {sampler.policy.model} at {sampler.policy.client.root}",
    )


def _loss_options(config: RunConfig) -> dict[str, Any]:
    options = {name: value for name, value in config.loss.model_dump().items() if value is not None}
    trajectories = config.rollout.questions * config.rollout.samples / config.optim.minibatches
    options["norm_constant"] = options.get("norm_constant") or trajectories * (config.rollout.max_new_tokens or 1)
    return options


def _tools(config: RunConfig, world: World | None, timeout: float) -> Sequence[Any]:
    own = world.tools(timeout) if world else ()
    if config.tools is None:
        return own
    if world and "search" in config.tools and "search" in world.tool_names:
        return [*own, *(tool_by_name(name, timeout) for name in config.tools if name != "search")]
    return [tool_by_name(name, timeout, config.tasks) for name in config.tools]


def add_lora(model: Any, config: RunConfig) -> Any:
    """Wrap a model with LoRA adapters; only they are trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("lora.rank needs the package peft: pip install 'agentropy[lora]'") from None
    c = config.lora
    torch.manual_seed(config.seed)
    options = LoraConfig(
        r=c.rank, lora_alpha=c.alpha, lora_dropout=c.dropout, target_modules=c.targets, task_type="CAUSAL_LM"
    )
    try:
        return get_peft_model(model, options)
    except ValueError as error:
        raise UserError(f"lora.targets {c.targets!r}: {str(error).splitlines()[0]}") from None
