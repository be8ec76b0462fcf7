"""The training loop: collect a batch, learn from it, write down what happened; evaluate before and after.

Everything that a step does hangs on the run's seed and the step's place in the data, so a run that was killed and
resumed from a checkpoint equals one that was not, bit by bit on CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from agentropy.batch import Batch
from agentropy.config import RunConfig
from agentropy.evaluation.summary import evaluation_metrics
from agentropy.policies.base import SamplingParams
from agentropy.rollout.branching import rollout_for
from agentropy.rollout.loop import rollout
from agentropy.seeds import derive
from agentropy.training.checkpoint import (
    Progress,
    checkpoint_name,
    list_checkpoints,
    optimizer_state,
    save_checkpoint,
)
from agentropy.training.collect import Collected, attempts_for, collect, collected_metrics
from agentropy.training.display import Display
from agentropy.training.distributed import ALONE, Ranks
from agentropy.training.loggers import Logger
from agentropy.training.optimizer import MasterAdamW
from agentropy.training.sampler import SamplerLost
from agentropy.training.setup import Setup
from agentropy.training.sharding import Shards
from agentropy.training.update import UpdateOptions, update
from agentropy.trajectory import Trajectory, write_jsonl

STOPPING: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Signals that end a run, and what they do by default."""
ECHO_SECONDS = 3.0
"""How long after the first a second signal may be the same one: a scheduler sends it to all processes, and torchrun
passes on its own."""


class Stopped(Exception):
    """Training ended early on the user's word; everything is saved."""


@dataclass
class Trainer:
    """One run. `directory` gets `metrics.jsonl`, `trajectories/` and `checkpoints/`, from the rank that leads.

    With several ranks `shards` has the weights that are trained; `setup.model` is then only the policy's.
    """

    config: RunConfig
    setup: Setup
    directory: Path
    loggers: list[Logger]
    display: Display
    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = ALONE
    shards: Shards | None = None

    def __post_init__(self) -> None:
        shards = self.shards
        self.model = model = self.setup.model if shards is None else shards.model
        self.optimizer = MasterAdamW(
            [p for p in model.parameters() if p.requires_grad] if shards is None else shards.local,
            lr=self.setup.lr,
            betas=self.config.optim.betas,
            weight_decay=self.config.optim.weight_decay,
        )
        # With LoRA the frozen base is the reference; without, a copy is kept, and only if it is used.
        needs_copy = self.setup.method.loss.kl_coef > 0 and not self.config.lora.rank
        self.reference = None
        if needs_copy:
            self.reference = (
                copy.deepcopy(model).requires_grad_(False).eval() if shards is None else shards.keep_reference()
            )
        self._stop = asyncio.Event()
        roll = rollout_for(self.setup.method.rollout, self.config.rollout.samples)
        self._roll = self.ranks.share(self.setup.scored(roll), self._stop)
        self._work: asyncio.Task[Collected] | None = None

    @property
    def params(self) -> SamplingParams:
        r = self.config.rollout
        return SamplingParams(r.temperature, r.top_p, r.top_k, self.setup.limits.max_new_tokens)

    async def run(self) -> None:
        """Train to `config.steps`. Raises Stopped after Ctrl-C, when the last whole step has been saved."""
        with self._interruptible():
            while self.progress.step < self.config.steps:
                before = copy.copy(self.progress)
                self._work = asyncio.ensure_future(self._collect())
                try:
                    collected = await self._work
                except asyncio.CancelledError:
                    if not self._stop.is_set():
                        raise
                    self.progress = before
                    self.save()
                    raise Stopped from None
                except SamplerLost as error:
                    self.progress = before
                    raise self._saved(error) from None
                self._learn(collected, before)
                if self.config.evaluation.every and self.progress.step % self.config.evaluation.every == 0:
                    await self._validate()
                if any(self.ranks.gather(self._stop.is_set())):
                    self.save()
                    raise Stopped
                if self.progress.step % self.config.checkpoint.every == 0:
                    self.save()
        if self.progress.step % self.config.checkpoint.every:
            self.save()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C or SIGTERM ends the rollout at once but lets an update finish; a second one ends the process."""
        loop = asyncio.get_running_loop()
        first: float | None = None

        def interrupt() -> None:
            self._stop.set()
            if self._work is not None:
                self._work.cancel()

        # Not the loop's own handlers: between those and others there are moments in which a signal kills, and they do
        # nothing while the loop does not run, as during a save.
        def handle(number: int, _: Any) -> None:
            nonlocal first
            if first is None:
                first = time.monotonic()
                loop.call_soon_threadsafe(interrupt)
            elif time.monotonic() - first > ECHO_SECONDS:
                signal.signal(number, STOPPING[number])
                signal.raise_signal(number)

        with contextlib.suppress(ValueError):  # not in the main thread
            for number in STOPPING:
                signal.signal(number, handle)
        try:
            yield
        finally:
            if first is None:  # else the run is about to end, and an echo must not cut it short
                with contextlib.suppress(ValueError):
                    for number, default in STOPPING.items():
                        signal.signal(number, default)

    async def _collect(self) -> Collected:
        r = self.config.rollout
        started = time.perf_counter()
        with self.whole_model():
            async with self.setup.sampling(self.progress.step, self.display.say):
                collected = await collect(
                    self.setup.agent,
                    self.setup.method,
                    self.setup.tasks,
                    self.progress,
                    questions=r.questions,
                    samples=r.samples,
                    max_oversample=r.max_oversample,
                    params=self.params,
                    limits=self.setup.limits,
                    seed=self.config.seed,
                    roll=self._roll,
                )
        self._rollout_seconds = time.perf_counter() - started
        return collected

    def whole_model(self) -> contextlib.AbstractContextManager[Any]:
        """The model with all its weights, to sample with or to save. All ranks must enter."""
        return contextlib.nullcontext(self.model) if self.shards is None else self.shards.gathered()

    def _learn(self, collected: Collected, before: Progress) -> None:
        started = time.perf_counter()
        o = self.config.optim
        for group in self.optimizer.param_groups:
            group["lr"] = self.setup.lr * min(1.0, (before.step + 1) / max(o.warmup_steps, 1))
        metrics = collected_metrics(collected)
        batch, importance, of_sampler = self._corrected(collected)
        metrics |= update(
            self.model,
            self.optimizer,
            self.setup.method,
            batch,
            collected.shaped,
            UpdateOptions(o.minibatches, o.epochs, o.micro_batch_tokens, o.grad_clip, self.config.rollout.temperature),
            seed=derive(self.config.seed, "update", before.step),
            reference_model=self.reference,
            shards=self.shards,
            importance=importance,
        )
        metrics |= of_sampler
        update_seconds = time.perf_counter() - started
        tokens = sum(t.own_model_tokens for t in collected.sampled)
        seconds = self._rollout_seconds + update_seconds
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.seconds += seconds
        metrics |= {
            "time/rollout": self._rollout_seconds,
            "time/update": update_seconds,
            "time/step": seconds,
            "time/tokens_per_second": tokens / seconds,
            "time/total_tokens": float(self.progress.tokens),
        }
        step = self.progress.step
        self._write(f"step-{step:06d}", collected.sampled)
        self.log(metrics)
        self.display.step(step, self.config.steps, metrics)

    def _corrected(self, collected: Collected) -> tuple[Batch, Tensor | None, dict[str, float]]:
        """The batch with the trainer's log-probabilities, importance weights of its tokens, and metrics of both; as it
        is where the trainer's own model sampled it."""
        sampler = self.setup.sampler
        return (collected.batch, None, {}) if sampler is None else sampler.correct(collected)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write metrics of the current step to every logger."""
        for logger in self.loggers:
            logger.log(self.progress.step, metrics)

    def _write(self, name: str, trajectories: list[Trajectory]) -> None:
        if self.ranks.leads:
            write_jsonl(self.directory / "trajectories" / f"{name}.jsonl", trajectories)

    def save(self) -> None:
        """Write a checkpoint of the last whole step."""
        state = optimizer_state(self.optimizer) if self.shards is None else self.shards.optimizer_state(self.optimizer)
        with self.whole_model() as model:
            if self.ranks.leads:
                save_checkpoint(
                    self.directory / "checkpoints",
                    model,
                    self.setup.tokenizer,
                    state,
                    self.progress,
                    self.config.checkpoint.keep,
                )

    def _saved(self, error: SamplerLost) -> SamplerLost:
        """Save the last whole step, where there is one and one process can do it alone, and say how to go on."""
        checkpoints = list_checkpoints(self.directory / "checkpoints")
        done = bool(checkpoints) and checkpoints[-1].name == checkpoint_name(self.progress.step)
        if self.ranks.size == 1 and self.progress.step and not done:
            self.save()
        elif not checkpoints:
            return error
        return SamplerLost(f"{error}. What was learned is saved; to go on: agentropy train --resume {self.directory}")

    async def _validate(self) -> None:
        out = await self.evaluate("validation", f"validation-{self.progress.step:06d}")
        self.log({k.replace("eval/", "validation/"): v for k, v in out.items() if k.startswith("eval/")})
        self.display.say(f"validation: Avg@{out['eval/k']:.0f} {out['eval/avg']:.3f}")

    async def evaluate(self, split: Literal["validation", "test"], name: str, greedy: bool = False) -> dict[str, float]:
        """Answer the questions of a split and keep the trajectories as `trajectories/<name>.jsonl`.

        The seeds hang on the question and the sample only: before and after training face the same random numbers.
        """
        try:
            return await self._evaluate(split, name, greedy)
        except SamplerLost as error:
            raise self._saved(error) from None

    async def _evaluate(self, split: Literal["validation", "test"], name: str, greedy: bool) -> dict[str, float]:
        e = self.config.evaluation
        tasks = self.setup.tasks.split(split)[: e.questions]
        samples = 1 if greedy else e.samples
        params = SamplingParams(0.0 if greedy else e.temperature, max_new_tokens=self.setup.limits.max_new_tokens)
        attempts = attempts_for(tasks, samples, derive(self.config.seed, "evaluation"), "greedy" if greedy else "eval")
        trajectories: list[Trajectory] = []
        size = max(samples, self.config.rollout.max_slots * 4 // samples * samples) * self.ranks.size
        roll = self.ranks.share(self.setup.scored(rollout))
        with self.whole_model():
            async with self.setup.sampling(self.progress.step, self.display.say):
                for start in range(0, len(attempts), size):
                    part = attempts[start : start + size]
                    trajectories += await roll(self.setup.agent, part, params, self.setup.limits)
        self._write(name, trajectories)
        return evaluation_metrics(trajectories)


def describe(value: Any) -> str:
    """A number for a table, `-` where there is none."""
    return "-" if value is None or value != value else f"{value:.3f}"
