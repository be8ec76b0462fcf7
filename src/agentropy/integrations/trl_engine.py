"""What samples for TRL's trainer: our local engine on its model, or its vLLM, and an event loop that tools live in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentropy.evaluation.score import Scorer
from agentropy.integrations.trl_rollout import Row, Sampler
from agentropy.integrations.trl_vllm import VllmPolicy
from agentropy.policies.base import PolicyInfo, SamplingParams
from agentropy.policies.local import LocalPolicy
from agentropy.rollout.loop import Limits, RolloutFunction
from agentropy.rollout.parts import DEFAULT_CONTEXT
from agentropy.trajectory import Trajectory

T = TypeVar("T")
DEFAULT_TURNS = 5


@contextlib.contextmanager
def _plain_forward(model: Any) -> Iterator[None]:
    """Without the casts that accelerate puts around a model's forward for mixed precision: the engine runs the layers
    below it, in the precision of the weights, and compares itself with the whole."""
    wrapped, original = model.__dict__.get("forward"), model.__dict__.get("_original_forward")
    if original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


class Engine:
    """Samples trajectories with the weights that the trainer's model has at that time."""

    def __init__(self, trainer: Any, sampler: Sampler, scorer: Scorer, max_slots: int, max_context: int | None) -> None:
        self._trainer = trainer
        self._sampler = sampler
        self._scorer = scorer
        self._max_slots = max_slots
        self._max_context = max_context
        self._policy: LocalPolicy | VllmPolicy | None = None
        self._runner: asyncio.Runner | None = None

    def sample(
        self, rows: Sequence[Row], names: Sequence[tuple[str, str, int]], roll: RolloutFunction
    ) -> list[Trajectory]:
        """One trajectory for each row, in order. `names`: question id, trajectory id and seed of each."""
        if not rows:
            return []
        trainer, policy = self._trainer, self._ready()
        tokens, turns = trainer.max_completion_length, trainer.args.max_tool_calling_iterations
        limits = Limits(DEFAULT_TURNS if turns is None else turns + 1, tokens, policy.info.max_context)
        params = SamplingParams(trainer.temperature, trainer.top_p, trainer.top_k, tokens)

        def work() -> Coroutine[Any, Any, list[Trajectory]]:
            return self._sampler.sample(policy, roll, rows, names, params, limits)

        if isinstance(policy, LocalPolicy):
            with policy.rollout():
                return self._run(work)
        if trainer.state.global_step != trainer._last_loaded_step:  # TRL does so only where it generates itself
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        return self._run(work)

    def _ready(self) -> LocalPolicy | VllmPolicy:
        if self._policy is not None:
            return self._policy
        trainer = self._trainer
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer._tokenizer
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        context = min(self._max_context or DEFAULT_CONTEXT, longest)
        if trainer.use_vllm:
            context = min(trainer.args.vllm_max_model_length or context, context)
            info = PolicyInfo("vllm", len(tokenizer), context, "exact")
            self._policy = VllmPolicy(trainer.vllm_generation, tokenizer, info)
        else:
            name = str(getattr(model.config, "_name_or_path", "")) or "model"
            with _plain_forward(model):
                self._policy = LocalPolicy(model, tokenizer, max_slots=self._max_slots, max_context=context, name=name)
        return self._policy

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on our own event loop, also below a running one (a notebook's)."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._run(self._sampler.start)
        runner = self._runner
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return runner.run(work())
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: runner.run(work())).result()

    def close(self) -> None:
        """Stop tools and graders. Safe to call twice."""
        if self._runner is not None:
            self._run(self._sampler.close)
            self._run(self._scorer.close)
            self._runner.close()
            self._runner = None
