"""`AgentropyGRPOTrainer`: our methods, tools and agent loop inside TRL's `GRPOTrainer` (docs/trl.md).

TRL keeps what its users know: data loading, models, PEFT, accelerate, the reference model, the optimiser, logging. From
us come trajectories (`trl_rollout.py`), and out of them, by `Method.shape` and `Method.compute_loss`, what is learned.
TRL's own advantages are computed and thrown away: ours start from the raw rewards.

Private parts of TRL that this file overrides: `_generate_and_score_completions`, `_calculate_rewards`,
`_prepare_inputs`, `_compute_loss`; that it calls: `_get_per_token_logps_and_entropies`. They change from one minor
version to the next, so the extra pins it.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentropy.algorithms.losses import LossInputs, LossStats
from agentropy.errors import UserError
from agentropy.evaluation.score import Scorer
from agentropy.integrations.batches import padded
from agentropy.integrations.trl_batch import Item, Made, collect, completion_logprobs, score_of
from agentropy.integrations.trl_engine import Engine
from agentropy.integrations.trl_options import check_processes, method_for
from agentropy.integrations.trl_rollout import (
    Row,
    Sampler,
    completion_of,
    messages_of,
    nobody_grades,
    question_of,
    reward_sources,
    row_id,
    surroundings,
    task_of,
)
from agentropy.integrations.trl_update import check_padding, correct_logs, rescored, update_metrics, weigh
from agentropy.methods.base import Method
from agentropy.protocols import make_dialect
from agentropy.rollout.branching import rollout_for
from agentropy.rollout.loop import rollout
from agentropy.seeds import derive
from agentropy.training.collect import Collected, collected_metrics
from agentropy.trajectory import Trajectory, write_jsonl

try:
    from accelerate.utils import gather_object
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise UserError(f"TRL is not to be had ({error}): pip install 'agentropy[trl]'") from None


class AgentropyGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """A `GRPOTrainer` that trains tool-using agents with a method of agentropy.

    Arguments up to `peft_config` are those of GRPOTrainer. Its `args.max_completion_length` bounds the tokens that are
    sampled over all turns (tools' output not counted), `args.max_tool_calling_iterations` the turns with calls (4
    unless set).

    Args:
        tools: functions with type hints and a Google-style docstring, `Tool` records, built-in tools or their names
            ("python", "search:corpus.jsonl"), or a ready tool box.
        environment_factory: TRL's, unchanged: a class, a callable, or a mapping of names to these.
        method: grpo, simpletir, tao-rl, tepo-sparse, tepo-dense, arpo or aepo. method_options: its options.
        protocol: how calls look: hermes, fence or tags. protocol_options: its options.
        system: the system turn of prompts that have none.
        grader: scores answers against the column `answer_column`: math, f1, em, choice, code. It is one more reward
            beside `reward_funcs`.
        max_oversample: questions whose group the method's filters remove are replaced by others from the training set,
            until so many times the batch's questions were sampled. 1: never.
        max_result_tokens: longer tool results are cut in the middle. tool_timeout: seconds a call may take.
        max_slots: sequences that decode at once. max_context: tokens of a trajectory (at most 4096 unless set).

    Raises: UserError for what cannot be had, before anything is trained.
    """

    reward_weights: Tensor
    environments: list[Any] | None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        *,
        environment_factory: Any = None,
        method: str = "tao-rl",
        method_options: Mapping[str, Any] | None = None,
        protocol: str = "hermes",
        protocol_options: Mapping[str, Any] | None = None,
        system: str | None = None,
        grader: str | None = None,
        answer_column: str = "answer",
        max_oversample: float = 2.0,
        max_result_tokens: int = 512,
        tool_timeout: float = 30.0,
        max_slots: int = 128,
        max_context: int | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
        self._method: Method = method_for(method, method_options or {}, args)
        if not max_oversample >= 1:
            raise UserError(f"max_oversample={max_oversample} is below 1, which replaces nothing")
        places = surroundings(tools, environment_factory, tool_timeout)
        if train_dataset is None and environment_factory is not None:
            # As in TRL: the environment's reset() asks the question.
            empty = [[{"role": "user", "content": ""}]] * (args.generation_batch_size // args.num_generations)
            train_dataset = Dataset.from_dict({"prompt": empty})
        rewards = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        sources = reward_sources(places, grader)
        if not rewards and not sources:
            raise UserError("nothing says what a trajectory earns: give reward_funcs, a grader, or get_reward()")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
            super().__init__(
                model,
                rewards or [f for _, f in sources],
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                rollout_func=self._hand_over,
            )
        for label, function in sources if rewards else []:  # weight 1, as TRL does with get_reward()
            self.reward_funcs.append(function)
            self.reward_func_names.append(label)
            self.reward_processing_classes.append(None)
            self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])
        check_processes(self, self._method)
        options = dict(protocol_options or {})
        if protocol == "hermes" and grader is None:
            options = {"answer_format": "text"} | options  # prompts as TRL renders them, answers as it takes them
        if self.chat_template_kwargs:
            options = {"template_options": self.chat_template_kwargs} | options
        options = {"max_result_tokens": max_result_tokens, "eos_token_ids": tuple(self.eos_token_ids)} | options
        dialect = make_dialect(protocol, self._tokenizer, **options)
        scorer = Scorer()
        self._sampler = Sampler(
            dialect=dialect,
            places=places,
            grade=nobody_grades if grader is None else scorer,
            grader=grader,
            answer_column=answer_column,
            system=system,
        )
        self._engine = Engine(self, self._sampler, scorer, max_slots, max_context)
        self._roll = rollout_for(self._method.rollout, self.num_generations)
        self._max_oversample = max_oversample
        self._made: Made | None = None
        self._weighed = True
        self._learned = True
        self._stats: LossStats | None = None
        self._gaps: list[Tensor] = []
        self._any_environment: Any = None
        if isinstance(self.train_dataset, Dataset):  # what no protocol can render shows here, not in a run
            if not len(self.train_dataset):
                raise UserError("the training set is empty")
            row = self.train_dataset[0]
            place = self._sampler.place_of(row)
            task = task_of(row, "", place, grader, answer_column)
            turn, _ = question_of(row["prompt"])
            dialect.prompt(task.question, place.toolbox.specs, system if turn is None else turn)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # there the weights come together in training only
            check_padding(self)
        atexit.register(self.close)

    def close(self) -> None:
        """Stop tools and graders. Done at exit too; safe to call twice."""
        atexit.unregister(self.close)
        self._engine.close()

    # -- trajectories -------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        """A generation batch: TRL's, with our trajectories in it, and our columns beside them."""
        training = self.model.training
        started = time.perf_counter()
        self._made, collected = self._collect(inputs)
        mode = "train" if training else "eval"
        for name, value in collected_metrics(collected).items():
            if value == value:
                self._metrics[mode][name].append(value)
        self._metrics[mode]["time/rollout"].append(time.perf_counter() - started)
        if training and self.args.log_completions and self.accelerator.is_main_process:
            name = f"step-{self.state.global_step:06d}.jsonl"
            folder = Path(self.args.output_dir) / "trajectories"
            folder.mkdir(parents=True, exist_ok=True)
            write_jsonl(folder / name, collected.sampled)
        texts = [self._tokenizer.decode(item.trajectory.prompt) for item in self._made.own()]
        out: dict[str, Any] = super()._generate_and_score_completions([{"prompt": text} for text in texts])
        correct_logs(self, self._made, mode)
        self._add_columns(out)
        return out

    def _collect(self, inputs: Sequence[Row]) -> tuple[Made, Collected]:
        """Sample the rows of all processes, and others for questions that the method's filters removed."""
        training = self.model.training
        samples = self.num_generations if training else self.num_generations_eval
        processes = self.accelerator.num_processes
        groups = len(inputs) * processes // samples
        data = self.train_dataset
        replaceable = training and self._method.filters and isinstance(data, Dataset)

        def replace(rounds: int, n: int) -> list[Row]:
            draw = random.Random(derive(self.args.seed, "replacements", self.state.global_step, rounds))
            return [data[draw.randrange(len(data))] for _ in range(n)]

        return collect(
            inputs,
            self._method,
            process=self.accelerator.process_index,
            processes=processes,
            samples=samples,
            budget=math.floor(groups * self._max_oversample) if replaceable else groups,
            sample=self._sample,
            gather=gather_object,
            replace=replace,
        )

    def _sample(self, rows: Sequence[Row], active: Sequence[int], rounds: int, known: Mapping[int, Item]) -> list[Item]:
        """Graded trajectories for the `active` rows of this process. All processes call this together."""
        first = self.accelerator.process_index * len(rows)
        tag = f"step-{self.state.global_step}" if self.model.training else "evaluation"
        names = []
        for i in active:
            question, place = row_id(rows[i]), first + i
            seed = derive(self.args.seed, "trl", tag, rounds, question, place)
            names.append((question, f"{question}/{tag}/{place}", seed))
        roll = self._roll if self.model.training else rollout  # evaluation's trajectories are independent
        fresh = self._engine.sample([rows[i] for i in active], names, roll)
        # Rewards and forward passes are collective: a process with fewer rows than another shows some twice.
        most = max(gather_object([len(active)]))
        shown = [*zip(active, fresh, strict=True)]
        shown += [shown[0] if shown else (0, known[first].trajectory)] * (most - len(shown))
        trajectories = [t for _, t in shown]
        if self.use_vllm or self.accelerator.mixed_precision != "no":
            trajectories = rescored(self, trajectories)
        rewards, extra = self._rewards([rows[i] for i, _ in shown], trajectories, [seed for _, _, seed in names])
        weights = self.reward_weights.tolist()
        out = []
        for k, (i, sampled) in enumerate(shown[: len(active)]):
            t = dataclasses.replace(trajectories[k], score=score_of(rewards[k], weights))
            out.append(Item(first + i, t, completion_logprobs(sampled), rewards[k], extra[k]))
        return out

    def _rewards(
        self, rows: Sequence[Row], trajectories: Sequence[Trajectory], seeds: Sequence[int]
    ) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """Every reward function's word on every trajectory (NaN where it has none), and what it logged of it."""
        completions: list[Any] = []
        for row, t in zip(rows, trajectories, strict=True):
            if isinstance(row["prompt"], str):
                completions.append(self._decode(completion_of(t)[0]))
            else:
                completions.append(messages_of(t, self._decode))
        self.environments = self._environments_of(seeds, len(rows))
        table = super()._calculate_rewards(
            [{**row, "trajectory": t} for row, t in zip(rows, trajectories, strict=True)],
            [row["prompt"] for row in rows],
            completions,
            [completion_of(t)[0] for t in trajectories],
        )
        self.environments = None
        begin = self.accelerator.process_index * len(rows)
        own: list[list[float]] = table[begin : begin + len(rows)].tolist()
        for i, t in enumerate(trajectories):
            if t.stop == "error" or any(r.status == "lost" for r in t.results):  # no fault of the policy's
                own[i] = [math.nan] * len(own[i])
        extra = [{c: v[i] for c, v in self._pending_extra_logs.items() if i < len(v)} for i in range(len(rows))]
        self._pending_extra_logs.clear()
        return own, extra

    def _environments_of(self, seeds: Sequence[int], n: int) -> list[Any] | None:
        """The environments of trajectories, for reward functions that take them; those shown twice get any."""
        opened: dict[int, Any] = {}
        for place in self._sampler.places.values():
            if place.environments is None:
                return None
            opened |= place.environments.opened
            place.environments.opened.clear()
        self._any_environment = next(iter(opened.values()), self._any_environment)
        return [opened.get(s) for s in seeds] + [self._any_environment] * (n - len(seeds))

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    # -- into TRL's batch ---------------------------------------------------------------------------------------------

    def _hand_over(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: what was sampled. TRL needs a token in each completion; one that is none is masked."""
        assert self._made is not None
        out: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for item in self._made.own():
            ids, mask = completion_of(item.trajectory)
            out["prompt_ids"].append(list(item.trajectory.prompt))
            out["completion_ids"].append(ids or [self._tokenizer.pad_token_id])
            out["env_mask"].append(mask or [0])
            out["logprobs"].append(item.logprobs or [0.0])
        return out

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """The rewards of all processes, which are known already."""
        assert self._made is not None
        for item in self._made.own():
            for column, value in item.extra.items():
                self._pending_extra_logs[column].append(value)
        return torch.tensor([item.rewards for item in self._made.items], device=self.accelerator.device)

    def _add_columns(self, out: dict[str, Any]) -> None:
        """Our per-token columns; the weights of the loss follow when the rows are in their micro-batches."""
        assert self._made is not None
        made, width = self._made, int(out["completion_ids"].shape[1])
        rows = torch.arange(made.first, made.first + made.rows)

        def column(values: Tensor) -> Tensor:
            return padded(made.batch, values, width, rows=rows, starts=made.starts).to(self.accelerator.device)

        out["advantages"] = column(made.shaped.advantages)
        out["loss_mask"] = column(made.shaped.loss_mask)
        out["old_per_token_logps"] = column(made.batch.logprobs)
        if made.shaped.marked is not None:
            out["marked"] = column(made.shaped.marked)
        out["row"] = rows.to(self.accelerator.device)
        self._weighed = False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if not self._weighed:
            assert self._made is not None
            training = self.model.training
            size = self.args.gradient_accumulation_steps if training else 1
            weigh(self.accelerator, self._method, self._made, self._buffered_inputs if training else [inputs], size)
            self._weighed = True
        return inputs

    # -- the update ---------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """As TRL's; an update without a token to learn from changes nothing (a momentum would)."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            if not self._learned and self.accelerator.scaler is None:
                self.model.zero_grad(set_to_none=True)
            self._metrics["train"]["optim/skipped_empty"].append(float(not self._learned))
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The method's loss of a micro-batch: a plain sum, since the weights hold the denominator."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logps, entropies, aux = self._get_per_token_logps_and_entropies(
            model,
            ids,
            there,
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        self._learned = bool(inputs["learned"])
        mask, config = inputs["loss_mask"], self._method.loss
        advantages = inputs["advantages"]
        if "importance_sampling_ratio" in inputs:  # vLLM's other probabilities, corrected as TRL does
            advantages = advantages * inputs["importance_sampling_ratio"]
        loss, stats = self._method.compute_loss(
            LossInputs(
                logp=logps.flatten(),
                old_logp=inputs["old_per_token_logps"].flatten(),
                advantages=advantages.flatten(),
                weights=inputs["weights"].flatten(),
                mask=mask.flatten(),
                entropy=(entropies if config.entropy_coef else entropies.detach()).flatten(),
                ref_logp=inputs["ref_per_token_logps"].flatten() if "ref_per_token_logps" in inputs else None,
                marked=inputs["marked"].flatten() if "marked" in inputs else None,
            )
        )
        if self.aux_loss_enabled:
            parts = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * aux / parts
        self._stats = stats if self._stats is None else self._stats + stats
        if self._is_first_update():
            sampler = inputs.get("sampling_per_token_logps", inputs["old_per_token_logps"])
            self._gaps.append((logps.detach() - sampler)[mask].abs())
        if self.accelerator.sync_gradients:
            logged = self._metrics["train" if self.model.training else "eval"]
            for name, value in update_metrics(self.accelerator, self._stats, self._gaps).items():
                logged[name].append(value)
            self._stats, self._gaps = None, []
        return loss

    def _is_first_update(self) -> bool:
        """True for micro-batches that see the policy which sampled them."""
        every = self.args.steps_per_generation * self.num_iterations
        return not self.model.training or self._step % every < self.args.gradient_accumulation_steps
