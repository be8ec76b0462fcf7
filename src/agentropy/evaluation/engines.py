"""What answers the questions of an evaluation: the local engine, or a server over HTTP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from agentropy.errors import UserError
from agentropy.evaluation.config import EvaluationConfig
from agentropy.evaluation.score import Scorer
from agentropy.evaluation.suites import Suite
from agentropy.policies.base import Policy, SamplingParams
from agentropy.protocols import DIALECTS, make_dialect
from agentropy.rollout.loop import Agent, Attempt, Limits, rollout
from agentropy.tasks.worlds import make_world
from agentropy.trajectory import Trajectory

Roll = Callable[[Suite, Sequence[Attempt]], Awaitable[list[Trajectory]]]


@dataclass(frozen=True)
class Engine:
    """Answers attempts. `sampling` is entered around the work on one suite. `usage`: what a server counted so far.
    `tokenizer`: of the ids in the trajectories; None where these have none."""

    description: str
    roll: Roll
    sampling: Callable[[], AbstractContextManager[Any]]
    usage: Callable[[], dict[str, Any] | None]
    close: Callable[[], Awaitable[None]]
    tokenizer: Any = None


async def _nothing() -> None:
    return None


def unit_size(config: EvaluationConfig) -> int:
    """Attempts that are asked, and written, together.

    The local engine gets fixed batches of whole questions, so that one that was lost with its process is asked again in
    the same company, and gives the same tokens to the bit. To a server each attempt goes by itself.
    """
    size = 2 * (config.max_slots or 64)
    return 1 if config.server else max(config.samples, size // config.samples * config.samples)


def in_flight(config: EvaluationConfig) -> int:
    """Units at once."""
    return config.concurrency if config.server else 1


def check(config: EvaluationConfig) -> None:
    """Raise UserError for options of the engine that cannot be, before anything is loaded."""
    from agentropy.rollout.parts import pick_device

    known = (*DIALECTS, "native") if config.server else tuple(DIALECTS)
    if config.protocol is not None and config.protocol not in known:
        raise UserError(f"protocol {config.protocol!r} is none of {', '.join(known)}")
    if config.temperature == 0 and config.samples > 1:
        raise UserError("--temperature 0 gives the same answer every time; use --samples 1")
    if config.server is None:
        pick_device(config.device)
        for option, value in (
            ("--api", None if config.api == "auto" else config.api),
            ("--api-key-env", config.api_key_env),
            ("--tokenizer", config.tokenizer),
            ("--request-timeout", config.request_timeout),
            ("--tries", config.tries),
        ):
            if value is not None:
                raise UserError(f"{option} goes with --server")
    elif config.api_key_env is not None and not os.environ.get(config.api_key_env):
        raise UserError(f"the environment variable {config.api_key_env} (--api-key-env) is not set")


def make_engine(config: EvaluationConfig, suites: Sequence[Suite], scorer: Scorer) -> Engine:
    """The engine of a filled configuration. Raises UserError where the model or server cannot be had or used."""
    return _remote(config, suites, scorer) if config.server else _local(config, suites, scorer)


def _params(config: EvaluationConfig) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_p, config.top_k, config.max_new_tokens or 1024)


def _agents(
    config: EvaluationConfig, suites: Sequence[Suite], scorer: Scorer, policy: Policy, tokenizer: Any
) -> dict[str, Agent]:
    """An agent a suite. The first question's prompt is made here, so that a template that cannot is noticed at once."""
    agents = {}
    for suite in suites:
        options = dict(config.protocol_options)
        if not suite.hint and config.protocol == "hermes":
            options.setdefault("hint", "")
        dialect = make_dialect(
            config.protocol or "hermes", tokenizer, max_result_tokens=config.max_result_tokens, **options
        )
        dialect.prompt(suite.tasks[0].question, suite.toolbox.specs, suite.system)
        agents[suite.name] = Agent(policy, dialect, suite.toolbox, scorer, suite.system)
    return agents


def _token_roll(agents: dict[str, Agent], config: EvaluationConfig, max_context: int) -> Roll:
    params = _params(config)
    limits = Limits(config.max_turns or 5, config.max_new_tokens or 1024, max_context)

    async def roll(suite: Suite, attempts: Sequence[Attempt]) -> list[Trajectory]:
        return await rollout(agents[suite.name], attempts, params, limits)

    return roll


def _local(config: EvaluationConfig, suites: Sequence[Suite], scorer: Scorer) -> Engine:
    import torch
    from transformers.utils import logging as hf_logging

    from agentropy.policies.loading import load_model
    from agentropy.rollout.parts import local_policy, parameters, pick_device

    hf_logging.disable_progress_bar()  # one bar is enough, and it is ours
    device = pick_device(config.device)
    path = config.model if config.model is not None else _embedded(config)
    model, tokenizer = load_model(path, dtype=getattr(torch, config.dtype), device=device)
    policy = local_policy(
        model,
        tokenizer,
        name=path,
        max_slots=config.max_slots or 64,
        max_context=config.max_context,
        threads=config.threads,
    )
    agents = _agents(config, suites, scorer, policy, tokenizer)
    name = "the embedded agent" if config.embedded else path
    return Engine(
        description=f"{name} ({parameters(model) / 1e6:.2f} million parameters, {device})",
        roll=_token_roll(agents, config, policy.info.max_context),
        sampling=policy.rollout,
        usage=lambda: None,
        close=_nothing,
        tokenizer=tokenizer,
    )


def _embedded(config: EvaluationConfig) -> str:
    return str(make_world(config.world or "arithmetic", **config.world_options).warm_start())


def _remote(config: EvaluationConfig, suites: Sequence[Suite], scorer: Scorer) -> Engine:
    from agentropy.policies.http import connect
    from agentropy.policies.http_client import Patience
    from agentropy.policies.http_tokens import HttpPolicy

    patience = Patience()
    if config.request_timeout is not None:
        patience = replace(patience, timeout=config.request_timeout)
    if config.tries is not None:
        patience = replace(patience, tries=config.tries)
    key = os.environ[config.api_key_env] if config.api_key_env else None
    policy = connect(
        config.server or "",
        config.model,
        api=config.api,
        api_key=key,
        concurrency=config.concurrency,
        tokenizer=config.tokenizer,
        patience=patience,
    )
    if isinstance(policy, HttpPolicy):
        agents = _agents(config, suites, scorer, policy, policy.tokenizer)
        limit = min(config.max_context or policy.info.max_context, policy.info.max_context)
        roll, how = _token_roll(agents, config, limit), "token ids"
    else:
        roll, how = _chat_roll(config, suites, scorer, policy), "chat"
    return Engine(
        description=f"{policy.model} at {config.server} ({how})",
        roll=roll,
        sampling=contextlib.nullcontext,
        usage=lambda: policy.usage.to_json(),
        close=policy.aclose,
        tokenizer=policy.tokenizer if isinstance(policy, HttpPolicy) else None,
    )


def _chat_roll(config: EvaluationConfig, suites: Sequence[Suite], scorer: Scorer, policy: Any) -> Roll:
    from agentropy.rollout.chat import ChatAgent, make_style, rollout_chat

    params = _params(config)
    limit = min(config.max_context or policy.info.max_context, policy.info.max_context)
    limits = Limits(config.max_turns or 5, config.max_new_tokens or 1024, limit)
    agents = {}
    for suite in suites:
        options = dict(config.protocol_options)
        if not suite.hint and config.protocol in (None, "native", "hermes"):
            options.setdefault("hint", "")
        agents[suite.name] = ChatAgent(
            policy,
            suite.toolbox,
            scorer,
            suite.system,
            protocol=config.protocol,
            protocol_options=options,
            max_result_chars=4 * (config.max_result_tokens or 512),
        )
        make_style(agents[suite.name])

    async def roll(suite: Suite, attempts: Sequence[Attempt]) -> list[Trajectory]:
        return await rollout_chat(agents[suite.name], attempts, params, limits)

    return roll
