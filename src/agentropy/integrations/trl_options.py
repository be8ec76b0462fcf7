"""What TRL's configuration says, as options of a method; what it says that a method does not know is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentropy.errors import UserError
from agentropy.methods import METHODS, make_method, method_options
from agentropy.methods.base import Method

LOSS_OPTIONS = {
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "delta": "dual_clip",
    "beta": "kl_coef",
    "entropy_coef": "entropy_coef",
}
"""Fields of `GRPOConfig` with a counterpart in our loss. They count where they are set to other than TRL's default."""
AGGREGATIONS = {"dapo": "token-mean", "grpo": "sequence-mean", "dr_grpo": "sequence-sum-norm"}
"""`loss_type`, as far as it is a way to average."""
REFUSED = (
    "importance_sampling_level",
    "multi_objective_aggregation",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_transformers_continuous_batching",
)
"""Fields that ask for what our loss and loop do not do."""
SAMPLING_REFUSED = ("min_p", "repetition_penalty", "generation_kwargs", "cache_implementation")
"""Fields that only vLLM heeds here."""


def method_for(name: str, options: Mapping[str, Any], args: Any) -> Method:
    """The method, with what the `GRPOConfig` says where the options do not say otherwise.

    Raises: UserError for an unknown method or option, and for a field of the configuration that would have no effect.
    """
    changed = changed_fields(args)
    for field in (*REFUSED, *(() if args.use_vllm else SAMPLING_REFUSED)):
        if field in changed:
            raise UserError(f"GRPOConfig({field}={changed[field]!r}) has no counterpart in method {name}: leave it out")
    if not args.max_completion_length:
        raise UserError("max_completion_length bounds the tokens of a trajectory: give a number")
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise UserError(
            f"steps_per_generation={args.steps_per_generation} is no multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}: an update would mix trajectories of two policies"
        )
    known = method_options(name) if name in METHODS else {}
    found = {ours: changed[theirs] for theirs, ours in LOSS_OPTIONS.items() if theirs in changed}
    if "loss_type" in changed:
        if args.loss_type not in AGGREGATIONS:
            raise UserError(f"loss_type={args.loss_type!r} is none of {', '.join(AGGREGATIONS)}")
        found["aggregation"] = AGGREGATIONS[args.loss_type]
    if "scale_rewards" in changed:
        if args.scale_rewards != "none" or "normalize_std" not in known:
            raise UserError(f"scale_rewards={args.scale_rewards!r} cannot be had with method {name}")
        found["normalize_std"] = False
    if changed.get("mask_truncated_completions"):
        if "mask_truncated" not in known:
            raise UserError(f"mask_truncated_completions cannot be had with method {name}")
        found["mask_truncated"] = True
    # Trajectories of one update times the longest, the fixed denominator of Dr. GRPO.
    found["norm_constant"] = float(
        args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * args.world_size
        * args.max_completion_length
    )
    method = make_method(name, **(found | {k.replace("-", "_"): v for k, v in options.items()}))
    if method.loss.kl_coef != args.beta:
        raise UserError(
            f"kl_coef={method.loss.kl_coef:g}, but beta={args.beta:g}, which decides whether TRL keeps a reference "
            "model: set beta in the GRPOConfig, and leave kl_coef out"
        )
    return method


def changed_fields(args: Any) -> dict[str, Any]:
    """The fields of a configuration that differ from its class's defaults."""
    return {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(args)
        if f.default is not dataclasses.MISSING and getattr(args, f.name) != f.default
    }


def check_processes(trainer: Any, method: Method) -> None:
    """Raise UserError for ways to spread the work that the method or its sampling cannot go along with."""
    args = trainer.args
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if method.rollout is not None and rows % trainer.num_generations:
        raise UserError(
            f"method {method.name} grows a tree of {trainer.num_generations} trajectories in one process, and a "
            f"process has {rows} rows: make per_device_train_batch_size x steps_per_generation a multiple"
        )
    if trainer.use_vllm:
        if method.rollout is not None:
            raise UserError(f"method {method.name} branches by entropies, which vLLM does not give to TRL")
        together = trainer.vllm_mode == "server" and trainer.accelerator.num_processes > 1
        if together or trainer.vllm_tensor_parallel_size > 1:
            raise UserError(
                "TRL gathers the prompts of all processes in every call of this vLLM, and agent loops do not keep "
                "pace: use vllm_mode='colocate' with vllm_tensor_parallel_size=1"
            )
    elif trainer.is_fsdp_enabled or getattr(trainer.accelerator.state.deepspeed_plugin, "zero_stage", 0) == 3:
        raise UserError("the weights are sharded (FSDP, ZeRO-3), and agentropy's engine needs them whole: set use_vllm")
