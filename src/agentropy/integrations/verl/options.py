"""The config group `agentropy` of a verl run, and what of verl's own configuration it contradicts."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.methods.base import Method
from agentropy.tools.named import tool_by_name

GROUP = "agentropy"
"""The top-level key of verl's configuration that holds our options."""
TRAINER = "agentropy"
"""What `trainer.v1.trainer_mode` is set to."""
MANAGER = "agentropy.integrations.verl.worker.AgentropyManager"
"""What `actor_rollout_ref.rollout.agent.agent_loop_manager_class` is set to."""

BUILT_IN = ("python", "search", "web-search", "mcp", "mcp-each")
"""Kinds of built-in tools that a colon may follow."""


class VerlOptions(BaseModel):
    """The options of the group `agentropy`; `+agentropy.method=tao-rl` on verl's command line sets one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, frozen=True)

    method: str
    """grpo, simpletir, tao-rl, tepo-sparse, tepo-dense, arpo or aepo."""
    method_options: dict[str, Any] = {}
    """Options of the method and of its loss (`clip_low`, `kl_coef`, ...); docs/algorithms.md lists them."""
    tools: list[str] = []
    """Built-in tools by name (python, python:stateful, search:FILE, ...; docs/tools.md), or `module:function`."""
    protocol: Literal["hermes", "fence", "tags"] = "hermes"
    """How calls look: hermes, fence or tags."""
    protocol_options: dict[str, Any] = {}
    system: str | None = None
    """System turn of prompts that have none."""
    sandbox: str = "strict"
    """strict, namespaces, unsafe, or the URL of a SandboxFusion-compatible server."""
    tool_timeout: float = Field(5.0, gt=0)
    """Seconds a tool call may take."""
    max_turns: int = Field(5, ge=1)
    """Turns of the policy a trajectory; a call in the last one is not run."""
    max_result_tokens: int = Field(512, ge=4)
    """Longer tool results are cut in the middle."""
    reward: Literal["grader", "verl"] = "grader"
    """`grader`: our graders score the answer. `verl`: verl's reward function scores the whole response."""
    grader: str | None = None
    """math, f1, em, choice or code, for rows that do not say so themselves."""
    max_oversample: float = Field(2.0, ge=1)
    """Questions that the method's filters remove are replaced, until so many times the batch's questions were drawn."""
    seed: int = Field(0, ge=0)
    """Of the tools and of branching decisions; sampling is the server's."""


def read_options(config: Mapping[str, Any]) -> VerlOptions:
    """The options out of verl's whole configuration (a plain mapping). Raises UserError for the first thing wrong."""
    group = config.get(GROUP)
    if not isinstance(group, Mapping):
        raise UserError(f"verl's configuration has no group {GROUP!r}: add '+{GROUP}.method=tao-rl'")
    for key in group:
        if key not in VerlOptions.model_fields:
            near = difflib.get_close_matches(str(key), VerlOptions.model_fields, n=1)
            raise UserError(f"unknown option {GROUP}.{key}" + (f"; did you mean {GROUP}.{near[0]}?" if near else ""))
    try:
        return VerlOptions.model_validate(dict(group))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in (GROUP, *first["loc"]))
        raise UserError(f"{where}: {first['msg']} (got {first['input']!r})") from None


def tool_of(name: str, timeout: float) -> Any:
    """A built-in tool by its name, or the function that `module:function` names. Raises UserError for what is none."""
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier() or module in BUILT_IN:
        return tool_by_name(name, timeout)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"tool {name!r}: {error} (a built-in tool, or module:function on PYTHONPATH)") from None
    if not callable(found) or isinstance(found, type):
        raise UserError(f"tool {name!r} is no function; environment classes cannot be used inside verl")
    return found


def method_arguments(options: VerlOptions, config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `make_method` for a run. The fixed denominator of `sequence-sum-norm` is the trajectories of an update
    times the longest response, unless the options say otherwise."""
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    norm = float(actor["ppo_mini_batch_size"] * rollout["n"] * rollout["response_length"])
    return {"norm_constant": norm} | {k.replace("-", "_"): v for k, v in options.method_options.items()}


def method_of(options: VerlOptions, config: Mapping[str, Any]) -> Method:
    """The method of a run."""
    return make_method(options.method, **method_arguments(options, config))


def check_config(config: Mapping[str, Any], method: Method) -> None:
    """Raise UserError for a setting of verl that contradicts the method, or that would have no effect under it."""
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    algorithm, trainer = config["algorithm"], config["trainer"]
    name = method.name

    def refuse(wrong: bool, setting: str, what: str) -> None:
        if wrong:
            raise UserError(f"{setting} with method {name}: {what}")

    refuse(
        str(algorithm["adv_estimator"]) == "gae" or bool((config.get("critic") or {}).get("enable")),
        f"algorithm.adv_estimator={algorithm['adv_estimator']}",
        "there is no critic; set algorithm.adv_estimator=grpo (the advantages come from the method)",
    )
    refuse(
        bool(algorithm.get("use_kl_in_reward")),
        "algorithm.use_kl_in_reward=true",
        "rewards are the method's own; use agentropy.method_options.kl_coef and actor_rollout_ref.actor.use_kl_loss",
    )
    correction = algorithm.get("rollout_correction") or {}
    refuse(
        bool(correction.get("bypass_mode")),
        "algorithm.rollout_correction.bypass_mode=true",
        "the old policy's entropies and log-probabilities have to be computed; set it to false",
    )
    refuse(
        bool(actor["use_kl_loss"]) != bool(method.loss.kl_coef),
        f"actor_rollout_ref.actor.use_kl_loss={bool(actor['use_kl_loss'])}",
        f"agentropy.method_options.kl_coef is {method.loss.kl_coef:g}; the first keeps the reference model, the second "
        "weighs it, so set both or neither",
    )
    refuse(
        bool(actor["entropy_coeff"]),
        f"actor_rollout_ref.actor.entropy_coeff={actor['entropy_coeff']}",
        "use agentropy.method_options.entropy_coef",
    )
    refuse(
        bool(method.loss.entropy_coef) and not actor["calculate_entropy"],
        "actor_rollout_ref.actor.calculate_entropy=false",
        "its loss has an entropy term; set it to true",
    )
    refuse(
        bool(actor["shuffle"]),
        "actor_rollout_ref.actor.shuffle=true",
        "weights of the loss are fixed over each mini-batch, so its rows must be known; set it to false",
    )
    refuse(
        str((actor.get("policy_loss") or {}).get("loss_mode", "vanilla")) != "vanilla",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={(actor.get('policy_loss') or {}).get('loss_mode')}",
        "the loss is the method's own; leave it at vanilla",
    )
    refuse(
        not rollout["calculate_log_probs"],
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "the sampler's log-probabilities are needed; set it to true",
    )
    refuse(
        not rollout["temperature"] > 0,
        f"actor_rollout_ref.rollout.temperature={rollout['temperature']}",
        "trajectories of a group would all be alike",
    )
    refuse(
        bool(((config.get("skip") or {}).get("rollout_tq") or {}).get("enable")),
        "skip.rollout_tq.enable=true",
        "questions are replaced while sampling, which a dump of rollouts cannot do",
    )
    refuse(
        bool((config.get("distillation") or {}).get("enabled")),
        "distillation.enabled=true",
        "its loss has no distillation term",
    )
    refuse(
        int(rollout["n"]) < 2,
        f"actor_rollout_ref.rollout.n={rollout['n']}",
        "a question needs several trajectories to compare; set 8 or more",
    )
    manager = (rollout.get("agent") or {}).get("agent_loop_manager_class")
    refuse(
        manager != MANAGER,
        f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={manager}",
        f"trajectories come from our agent loop; set it to {MANAGER}",
    )
    refuse(
        bool((config.get("reward") or {}).get("reward_model", {}).get("enable")),
        "reward.reward_model.enable=true",
        "a reward model has not been tried with agentropy; use agentropy.reward=verl with a reward function",
    )
    refuse(
        trainer["v1"]["trainer_mode"] != TRAINER,
        f"trainer.v1.trainer_mode={trainer['v1']['trainer_mode']}",
        f"set it to {TRAINER}",
    )
