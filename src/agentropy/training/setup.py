"""From a configuration to the parts of a run: model, tools, protocol, questions, method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentropy.config import RunConfig, resolved
from agentropy.errors import UserError
from agentropy.evaluation.score import Scorer
from agentropy.methods import make_method
from agentropy.methods.base import Method
from agentropy.policies.loading import load_model
from agentropy.policies.local import LocalPolicy
from agentropy.protocols import make_dialect
from agentropy.rollout.loop import Agent, Limits
from agentropy.sandbox import LocalSandbox, RemoteSandbox
from agentropy.tasks.base import TaskSource
from agentropy.tasks.worlds import World, make_world
from agentropy.tools.base import ToolBox
from agentropy.tools.faults import with_faults
from agentropy.tools.python import PythonPart, python_tool
from agentropy.tools.search import search_tool
from agentropy.tools.session import make_toolbox

SMALL_MODEL = 10_000_000
"""Below this many parameters a second thread costs more than it gives."""


@dataclass
class Setup:
    """The parts of one run."""

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

    async def close(self) -> None:
        """Stop the tools and the graders."""
        await self.agent.toolbox.close()
        await self.scorer.close()


def build(config: RunConfig) -> Setup:
    """Make everything that a run needs. Raises UserError for the first thing that cannot be had."""
    config = resolved(config)
    r, lr = config.rollout, config.optim.lr
    # For the type checker: `resolved` has filled these in.
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
    for part in parts:
        if isinstance(part, PythonPart) and config.sandbox != "strict":
            part.use(make_sandbox(config.sandbox))
    toolbox: ToolBox = make_toolbox(parts, timeout=r.tool_timeout)
    if world is not None and world.tool_failures:
        toolbox = with_faults(toolbox, world.faults(), seed=config.seed)
    device = pick_device(config.device)
    path = config.model if config.model is not None else str(world.warm_start()) if world else ""
    model, tokenizer = load_model(path, dtype=getattr(torch, config.dtype), device=device)
    embedded = config.model is None
    if config.lora.rank:
        model = add_lora(model, config)
    size = sum(p.numel() for p in model.parameters())
    torch.set_num_threads(config.threads or (1 if size < SMALL_MODEL else os.cpu_count() or 1))
    policy = LocalPolicy(
        model,
        tokenizer,
        max_slots=r.max_slots,
        max_context=min(r.max_context or 4096, 1 << 20),
        deterministic=r.deterministic,
        name=path,
    )
    dialect = make_dialect(config.protocol, tokenizer, max_result_tokens=r.max_result_tokens, **config.protocol_options)
    if config.steps:  # questions, template or tools that cannot be used show here, before a run directory is filled
        dialect.prompt(tasks.train(0).question, toolbox.specs, config.system)
    scorer = Scorer()
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
        description=f"{'the embedded agent' if embedded else path} ({size / 1e6:.2f} million parameters, {device})",
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


def tool_by_name(name: str, timeout: float, tasks: str | None = None) -> Any:
    """A built-in tool by its name: `python`, `python:stateful`, `search:CORPUS.jsonl` or `search`.

    `search` alone takes `corpus.jsonl` from the folder of the questions.
    """
    kind, _, argument = name.partition(":")
    if kind == "python" and argument in ("", "stateful"):
        return python_tool(timeout=timeout, stateful=bool(argument))
    if kind == "search":
        beside = Path((tasks or "").partition("?")[0]).with_name("corpus.jsonl") if tasks else None
        if not argument and (beside is None or not beside.is_file()):
            missing = f" (there is no {beside})" if beside else ""
            raise UserError(
                f"tool search needs a corpus: search:FILE.jsonl, one {{title, text}} object a line{missing}"
            )
        return search_tool(Path(argument) if argument else beside or Path())
    raise UserError(f"no built-in tool {name!r}; there are python, python:stateful, search and search:FILE.jsonl")


def make_sandbox(name: str) -> LocalSandbox | RemoteSandbox:
    """A sandbox from its name in the configuration: an isolation, `unsafe`, or a server's URL."""
    if name.startswith(("http://", "https://")):
        return RemoteSandbox(name)
    if name == "unsafe":
        return LocalSandbox(allow_unsafe=True)
    return LocalSandbox(isolation=name)


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU. Raises UserError for a device that is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("unknown kind")
    except RuntimeError:
        raise UserError(f"no device {name!r}; there are auto, cpu, cuda, cuda:1 and mps") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].split(". ")[0] if device.type == "cuda" else f"this torch has no {device.type}"
        raise UserError(f"device {name!r} cannot be used here: {why}") from None
    return device


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
