"""Our agent loop in verl's agent-loop workers. A worker holds all trajectories of a question, so they may branch.

Private parts of verl that this file overrides: `AgentLoopWorkerTQ._run_prompt`; that it calls:
`_agent_loop_postprocess`. They change from one minor version to the next, so the extra pins it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from agentropy.evaluation.score import Scorer
from agentropy.integrations.trl_rollout import nobody_grades
from agentropy.integrations.verl.options import VerlOptions, method_of, read_options, tool_of
from agentropy.integrations.verl.policy import ServerPolicy
from agentropy.integrations.verl.rows import PREFIX, TASK, Row, row_of, task_of
from agentropy.methods.base import Method
from agentropy.policies.base import PolicyInfo, SamplingParams
from agentropy.policies.stops import StopTable
from agentropy.protocols import make_dialect
from agentropy.protocols.base import Dialect
from agentropy.rollout.branching import rollout_for
from agentropy.rollout.loop import Agent, Attempt, Limits, rollout
from agentropy.rollout.parts import assemble_toolbox
from agentropy.seeds import derive
from agentropy.tools.base import ToolBox
from agentropy.trajectory import Trajectory

logger = logging.getLogger(__name__)


class ColumnsOutput(AgentLoopOutput):  # type: ignore[misc]
    """verl's record of a trajectory with per-token columns of ours, `[response]` each, beside verl's own."""

    columns: dict[str, list[int]]

    def as_dict(self) -> dict[str, Any]:
        """verl's fields, and ours as tensors."""
        out: dict[str, Any] = super().as_dict()
        columns = out.pop("columns")
        return out | {PREFIX + name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}


@dataclass(frozen=True)
class House:
    """What all questions of a worker share."""

    options: VerlOptions
    method: Method
    dialect: Dialect
    toolbox: ToolBox
    scorer: Scorer
    stops: StopTable
    info: PolicyInfo
    stop_strings: bool
    limits: Limits
    pad: int


def make_house(config: Mapping[str, Any], tokenizer: Any, hf_config: Any, generation_config: Any) -> House:
    """The parts of a worker from verl's configuration (a plain mapping). Raises UserError for what cannot be had."""
    options = read_options(config)
    rollout_config = config["actor_rollout_ref"]["rollout"]
    longest = rollout_config["prompt_length"] + rollout_config["response_length"]
    context = min(longest, rollout_config.get("max_model_len") or longest)
    vocabulary = max(int(getattr(hf_config, "vocab_size", 0) or 0), len(tokenizer))
    eos = getattr(generation_config, "eos_token_id", None)
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    dialect_options = {"max_result_tokens": options.max_result_tokens, "eos_token_ids": tuple(eos)}
    parts = [tool_of(name, options.tool_timeout) for name in options.tools]
    return House(
        options=options,
        method=method_of(options, config),
        dialect=make_dialect(options.protocol, tokenizer, **(dialect_options | options.protocol_options)),
        toolbox=assemble_toolbox(parts, timeout=options.tool_timeout, sandbox=options.sandbox, seed=options.seed),
        scorer=Scorer(),
        stops=StopTable(tokenizer, vocabulary, torch.device("cpu")),
        info=PolicyInfo(str(config["actor_rollout_ref"]["model"]["path"]), vocabulary, context, "top-k"),
        stop_strings=rollout_config["name"] == "vllm",
        limits=Limits(options.max_turns, rollout_config["response_length"], context),
        pad=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
    )


async def sample_group(
    house: House,
    client: Any,
    row: Mapping[str, Any],
    n: int,
    params: SamplingParams,
    *,
    validate: bool,
) -> tuple[list[Trajectory], set[int]]:
    """`n` graded trajectories of one question, and the weight versions that they were sampled with.

    Validation samples independently, training as the method says (trees for ARPO and AEPO).
    """
    graded = house.options.reward == "grader"
    system, task = task_of(row, house.options.grader, graded)
    policy = ServerPolicy(client, house.stops, house.info, house.stop_strings)
    grade = house.scorer if graded else nobody_grades
    agent = Agent(policy, house.dialect, house.toolbox, grade, house.options.system if system is None else system)
    step, uid = str(row.get("global_steps", "")), str(row["uid"])
    tag = "validation" if validate else "train"
    attempts = [Attempt(task, f"{uid}/{k}", derive(house.options.seed, tag, step, task.id, k)) for k in range(n)]
    roll = rollout if validate else rollout_for(house.method.rollout, n)
    return await roll(agent, attempts, params, house.limits), policy.versions


def output_of(row: Row, graded: bool, turns: int, versions: set[int], step: int) -> ColumnsOutput:
    """A row as verl's record. verl scores it where `graded` is False; a lost trajectory has the reward 0, and is told
    apart by our columns."""
    score = row.about["score"]
    lost = row.about["lost"]
    return ColumnsOutput(
        prompt_ids=row.prompt,
        response_ids=row.response,
        response_mask=row.mask,
        response_logprobs=row.logprobs,
        reward_score=float(score or 0.0) if graded or lost else None,
        num_turns=turns,
        metrics=AgentLoopMetrics(),
        columns=row.columns,
        extra_fields={
            TASK: row.about,
            "reward_extra_info": {},
            "min_global_steps": min(versions, default=step),
            "max_global_steps": max(versions, default=step),
        },
    )


_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class AgentropyWorker(_Worker):  # type: ignore[misc]
    """verl's agent-loop worker with our agent loop; a row's `agent_name` is not looked at."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        plain: Any = OmegaConf.to_container(config, resolve=True)
        model = self.model_config
        self._house = make_house(plain, self.tokenizer, model.hf_config, getattr(model, "generation_config", None))
        self._starting: asyncio.Task[None] | None = None

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Sample all trajectories of one question into the TransferQueue, then mark it finished, or say why not."""
        uid, partition = prompt["uid"], "val" if trajectory["validate"] else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        tag = {"status": "finished"}
        try:
            await self._sample(dict(prompt), dict(sampling_params), bool(trajectory["validate"]))
        except Exception as error:
            logger.exception("question %s could not be sampled", uid)
            tag = {"status": "failure", "why": f"{type(error).__name__}: {error}"}
        await tq.async_kv_put(key=uid, partition_id=partition, tag=tag)

    async def _sample(self, row: dict[str, Any], sampling: dict[str, Any], validate: bool) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._house.toolbox.start())
        await self._starting
        config = self.config.actor_rollout_ref.rollout
        row.pop("agent_name", None)
        n = int(row.pop("__rollout_n__", config.val_kwargs.n if validate else config.n))
        greedy = not bool(row.pop("__do_sample__", True)) and not validate
        params = SamplingParams(
            temperature=0.0 if greedy else float(sampling["temperature"]),
            top_p=1.0 if greedy else float(sampling["top_p"]),
            top_k=0 if greedy else max(int(sampling["top_k"]), 0),
            max_new_tokens=self._house.limits.max_new_tokens,
        )
        made, versions = await sample_group(self._house, self.llm_client, row, n, params, validate=validate)
        graded, step = self._house.options.reward == "grader", int(row["global_steps"])
        for i, t in enumerate(made):
            turns = 1 + sum(s.kind == "result" for s in t.segments)
            record = row_of(t, self._house.info.max_context, self._house.pad)
            output = output_of(record, graded, turns, versions, step)
            await self._agent_loop_postprocess(output, validate, session_id=i, **row)


class AgentropyManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager of agent-loop workers, with ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(AgentropyWorker)
