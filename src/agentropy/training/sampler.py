"""A vLLM server as the sampler of a training run.

Before anything is sampled the server gets the trainer's weights, unless it has them. What it samples is scored again
by the trainer's own model (`training/rescore.py`), so methods see the numbers of the local engine; how far
the two engines are apart is measured, and made up for in the loss (`algorithms/correction.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentropy.algorithms.correction import gap_metrics, importance_weights
from agentropy.batch import Batch, make_batch
from agentropy.config import RunConfig, SamplerConfig
from agentropy.errors import UserError
from agentropy.policies.base import PolicyLost, SamplingParams, Stop
from agentropy.policies.http import connect
from agentropy.policies.http_client import Patience
from agentropy.policies.http_tokens import HttpPolicy
from agentropy.policies.scoring import score
from agentropy.rollout.loop import Agent, Attempt, Limits, RolloutFunction
from agentropy.training.collect import Collected
from agentropy.training.distributed import ALONE, Ranks
from agentropy.training.rescore import rescore, trainer_logprobs
from agentropy.training.weight_push import (
    DEV_MODE,
    LOAD_SECONDS,
    Control,
    DiskTransport,
    NcclTransport,
    ServerGone,
    Transport,
    push_weights,
    served_version,
)
from agentropy.trajectory import Trajectory

PROBE = "Question: what is 17 times 23?"
PROBE_TOKENS = 16
WRONG_MODEL = 0.5
"""Nats. Mean gap of a probe right after the first push above which the server cannot have these weights: two random
tokens of the same model are rarely as close, and bfloat16 against float32 makes a hundredth of it."""
SUSPICIOUS = 0.1
"""Nats. Mean gap of a step above which it is said that the server may not have loaded the weights."""
OPTIONS = {
    "name one with --model": "name one with --sampler.model",
    "name the right one with --tokenizer": "it must serve the model that is trained (--model)",
    "; use --api chat": "; it must sample from ids, as vLLM does",
    "--server": "--rollout.server",
    "--api-key-env": "--sampler.api_key_env",
    "docs/policies.md has the commands": "docs/sampler.md has the command",
}
"""What messages of `connect`, which speak of the options of `agentropy eval`, say here."""
PREFIX = "agentropy-"
"""Of the versions of all runs' weights."""
POLL_SECONDS = 2.0
PATIENCE = Patience(tries=5, pause=0.5)
"""Of each request: a server that is gone is waited for by `Sampler.begin`, once for all of them."""


class SamplerLost(UserError):
    """The server is gone, or cannot be given the weights."""


@dataclass
class Sampler:
    """Implements the trainer's side of `rollout.server`. Made by `connect_sampler`."""

    policy: HttpPolicy
    control: Control
    transport: Transport
    options: SamplerConfig
    micro_batch_tokens: int
    run: str
    """Begins the names of this run's weights; the same on all ranks."""
    leads: bool = True
    """Whether this rank pushes; the others wait until the server has the weights."""
    pushed: str | None = None
    """The version of the weights that the server was given last."""
    notes: dict[str, float] = field(default_factory=dict)
    """Metrics since the last step."""
    _current: tuple[Any, int, Callable[[str], None]] | None = None

    # -- before sampling ----------------------------------------------------------------------------------------------

    async def begin(self, model: Any, step: int, say: Callable[[str], None]) -> None:
        """Give the server the weights of `step`, unless it has them; wait for one that does not answer.

        Raises: SamplerLost where it stays away, refuses the weights, or serves another model.
        """
        self._current = model, step, say
        version, since, told = f"{self.run}-{step}", time.monotonic(), False
        # The rank that leads may wait as long itself, and then the server loads.
        patience = self.options.wait + (0.0 if self.leads else LOAD_SECONDS)
        while True:
            try:
                if await asyncio.to_thread(self._has, version):
                    return
                if self.leads:
                    await asyncio.to_thread(self._push, version)
                    await self._probe()
                    return
                raise ServerGone(f"{self.control.root} has not been given the weights of step {step} yet")
            except (ServerGone, PolicyLost) as error:
                self._forget()
                if time.monotonic() - since >= patience:
                    why = f"the server does not answer ({error})" if self.leads else str(error)
                    raise SamplerLost(f"{why}; waited {patience:g} s (sampler.wait)") from None
                if not told and self.leads:
                    say(f"The server does not answer ({error}); waiting for it up to {self.options.wait:g} s")
                    told = True
                await asyncio.sleep(min(POLL_SECONDS, max(self.options.wait, 0.01)))
            except SamplerLost:
                raise
            except UserError as error:
                self._forget()
                raise SamplerLost(str(error)) from None

    def _has(self, version: str) -> bool:
        """Whether the server was given this version and still has it."""
        if not self.leads:
            self.pushed = version
            return served_version(self.control) == version
        if self.pushed != version:
            return False
        served = served_version(self.control)
        if served in (None, version):
            return True
        self._restarted(served, "before a rollout")
        return False

    def _restarted(self, served: str | None, when: str) -> None:
        assert self._current is not None
        if served is not None and served.startswith(PREFIX) and not served.startswith(f"{self.run}-"):
            raise SamplerLost(
                f"another run pushes its weights to {self.control.root} too ({served}): give each run its own server"
            )
        self._current[2](f"The server lost its weights {when} (was it restarted?); they are pushed again")
        self._add("sampler/restarts", 1.0)
        self._forget()

    def _forget(self) -> None:
        self.pushed = None
        self.transport.reset()

    def _push(self, version: str) -> None:
        assert self._current is not None
        started = time.perf_counter()
        push_weights(self.control, self.transport, self._current[0], version)
        self.pushed = version
        self._add("sampler/push_seconds", time.perf_counter() - started)
        self._add("sampler/pushes", 1.0)

    def _add(self, name: str, value: float) -> None:
        self.notes[name] = self.notes.get(name, 0.0) + value

    async def _probe(self) -> None:
        """Sample a few tokens with the new weights and compare: a server that took them for nothing shows here."""
        assert self._current is not None
        model, _, _ = self._current
        prompt = self.policy.tokenizer.encode(PROBE, add_special_tokens=False)
        [handle] = self.policy.open(prompt, [0])
        params = SamplingParams(max_new_tokens=PROBE_TOKENS)
        out = await self.policy.generate(handle, [], params, Stop())
        self.policy.close(handle)
        if not out.ids:
            return
        was_training = model.training
        model.eval()
        with torch.no_grad():
            found = score(model, [[*prompt, *out.ids]], entropy=False).logprobs[-len(out.ids) :].cpu()
        model.train(was_training)
        gap = float((found - torch.tensor(out.logprobs)).abs().mean())
        if gap > WRONG_MODEL and "sampler/probe_gap" not in self.notes:
            raise SamplerLost(
                f"{self.control.root} was given the weights, and its log-probabilities are {gap:.2f} nats from the "
                "trainer's: does it serve the same model (--model), and can it load new weights (docs/sampler.md)?"
            )
        self.notes["sampler/probe_gap"] = gap

    # -- sampling -----------------------------------------------------------------------------------------------------

    def scored(self, roll: RolloutFunction, model: Any) -> RolloutFunction:
        """The rollout, with the trainer's numbers in what it returns.

        Where the server was gone, questions that lost a trajectory are asked again, all of them, when it is back: those
        that were done before are the short ones, and a batch of them would be another sample.
        """

        async def rolled(
            agent: Agent, attempts: Sequence[Attempt], params: SamplingParams, limits: Limits
        ) -> list[Trajectory]:
            out = await roll(agent, attempts, params, limits)
            if not await self._still() or all(map(_lost, out)):
                assert self._current is not None
                await self.begin(*self._current)
                spoiled = {a.task.id for a, t in zip(attempts, out, strict=True) if _lost(t)}
                places = [i for i, a in enumerate(attempts) if a.task.id in spoiled]
                again = await roll(agent, [attempts[i] for i in places], params, limits) if places else []
                if again and all(map(_lost, again)):
                    raise SamplerLost(
                        f"{self.control.root} answers, but sampled not one of {len(again)} trajectories; its own log "
                        "says why"
                    )
                for i, t in zip(places, again, strict=True):
                    out[i] = t
            started = time.perf_counter()
            out = await rescore(model, out, temperature=params.temperature, micro_batch_tokens=self.micro_batch_tokens)
            self._add("sampler/score_seconds", time.perf_counter() - started)
            return out

        return rolled

    async def _still(self) -> bool:
        """Whether the server has the weights that it was given; False too where it does not answer."""
        try:
            served = await asyncio.to_thread(served_version, self.control)
        except ServerGone:
            self._forget()
            return False
        except UserError as error:
            raise SamplerLost(str(error)) from None
        if served not in (None, self.pushed):
            self._restarted(served, "during a rollout")
            return False
        return True

    # -- learning -----------------------------------------------------------------------------------------------------

    def correct(self, collected: Collected) -> tuple[Batch, Tensor, dict[str, float]]:
        """The batch with the trainer's log-probabilities in place of the server's, the weight of each of its tokens
        (`[T]`), and metrics.

        The gap is measured over everything that was sampled, as no filter has touched it.
        """
        o, batch = self.options, collected.batch
        sampled = make_batch(collected.sampled)
        metrics = gap_metrics(trainer_logprobs(collected.sampled), sampled.logprobs, sampled.is_model)
        gap = metrics.get("sampler/gap_mean", 0.0)
        trainer = trainer_logprobs(collected.trajectories)
        weights = torch.ones_like(trainer)
        corrects = o.correction == "always" or (o.correction == "auto" and gap > o.correction_above)
        if corrects:
            weights = importance_weights(trainer, batch.logprobs, batch.is_model, o.correction_cap)
        mask = collected.shaped.loss_mask
        if bool(mask.any()):
            learned = (trainer - batch.logprobs)[mask].abs()
            metrics |= {
                "sampler/weight_mean": float(weights[mask].mean()),
                "sampler/truncated": float((weights[mask] >= o.correction_cap).double().mean()) if corrects else 0.0,
                "optim/sampler_gap_mean": float(learned.mean()),
                "optim/sampler_gap_max": float(learned.max()),
            }
        metrics |= {"sampler/corrected": float(corrects)} | self.notes
        self.notes = {k: v for k, v in self.notes.items() if k == "sampler/probe_gap"}
        if self._current is not None and gap > SUSPICIOUS:
            self._current[2](
                f"The server's log-probabilities are {gap:.3f} nats from the trainer's (sampler/gap_mean): did it load "
                "the weights, and with which precision? (docs/sampler.md)"
            )
        return replace(batch, logprobs=trainer), weights, metrics

    async def close(self) -> None:
        """Close the connections, and remove what was only for the server."""
        await self.policy.aclose()
        self.transport.close()
        self.control.close()


def _lost(t: Trajectory) -> bool:
    """Whether the server lost it, not a tool."""
    return t.stop == "error" and all(r.status != "lost" for r in t.results)


def connect_sampler(
    config: RunConfig, tokenizer: Any, directory: Path | None, branches: bool, ranks: Ranks = ALONE
) -> Sampler:
    """Connect to `rollout.server` and check that it can be used, before anything is trained.

    Args:
        tokenizer: of the model that is trained; the server's must be the same.
        directory: the run directory; where weights go if `sampler.directory` does not say.
        branches: whether the method's rollout looks at entropies; else fewer alternatives are asked for.
        ranks: the processes of the run; all must call.

    Raises: UserError for what is no vLLM server, has no endpoints for weights, has another tokenizer, or cannot say the
        log-probabilities of this temperature.
    """
    r, o = config.rollout, config.sampler
    assert r.server is not None
    key = _key(o.api_key_env)
    try:
        policy = connect(r.server, o.model, "completions", key, o.concurrency, tokenizer, patience=PATIENCE)
    except UserError as error:
        message = str(error)
        for option, ours in OPTIONS.items():
            message = message.replace(option, ours)
        raise UserError(f"rollout.server: {message}") from None
    assert isinstance(policy, HttpPolicy)
    root = policy.client.root
    if policy.info.notes["server"] != "vllm":
        raise UserError(f"{root} is {policy.info.notes['server']}: weights can be pushed to vLLM only (rollout.server)")
    exact = policy.mode == "scaled" or r.temperature == 1.0
    if not exact and o.correction != "never":
        raise UserError(
            f"{root} reports log-probabilities of the raw logits, which rollout.temperature {r.temperature:g} does not "
            "have: start it with --logprobs-mode processed_logprobs, sample at temperature 1, or set "
            "sampler.correction never"
        )
    if r.max_context is not None and r.max_context > policy.info.max_context:
        raise UserError(
            f"rollout.max_context is {r.max_context}, and {root} takes {policy.info.max_context} tokens: start it with "
            f"--max-model-len {r.max_context}, or lower rollout.max_context"
        )
    if exact and not branches:
        policy.top = 1
    control = Control(root, key)
    try:
        _check_control(control, ranks)
    except BaseException:
        control.close()
        raise
    transport: Transport
    if o.push == "nccl":
        transport = NcclTransport(control, o.address)
    else:
        own = (directory or Path()) / "weights"
        if ranks.leads:
            shutil.rmtree(own, ignore_errors=True)  # what a killed run left
        transport = DiskTransport(control, Path(o.directory).expanduser() if o.directory else own)
    run = ranks.same(f"{PREFIX}{uuid.uuid4().hex[:8]}")
    return Sampler(policy, control, transport, o, config.optim.micro_batch_tokens, run, ranks.leads)


def _check_control(control: Control, ranks: Ranks) -> None:
    try:
        if control.get("/is_paused") is None:
            raise UserError(f"{control.root} has no endpoints for new weights: {DEV_MODE}")
        if ranks.size > 1 and served_version(control) is None:
            raise UserError(
                f"{control.root} keeps no version of its weights, by which several processes know that it has them: "
                "use vLLM 0.32 or newer, or one process"
            )
    except ServerGone as error:
        raise UserError(f"{control.root} stopped answering: {error}") from None


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise UserError(f"the environment variable {name} (sampler.api_key_env) is not set")
    return os.environ[name].strip()
