"""A run from its first line to its last: directory, evaluation before, training, evaluation after, table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from agentropy.analysis.report import write_report
from agentropy.config import RunConfig, SamplerConfig, load_config, resolved, save_config
from agentropy.errors import UserError
from agentropy.run_directory import alone_in, environment, make_directory
from agentropy.terminal import duration
from agentropy.training.checkpoint import list_checkpoints, restore, save_model
from agentropy.training.display import Display, SilentDisplay, make_display
from agentropy.training.distributed import ALONE, Ranks
from agentropy.training.loggers import Logger, make_loggers
from agentropy.training.setup import Setup, build, with_server
from agentropy.training.sharding import Shards, shard
from agentropy.training.trainer import Stopped, Trainer, describe
from agentropy.trajectory import write_lines

# What may change when a run goes on; everything else would make it another run.
RESUMABLE = ("steps", "log", "evaluation.", "checkpoint.", "rollout.server", "sampler.")
# What was measured before would not compare with what is measured after; the correction is part of the method.
FIXED = ("evaluation.split", "sampler.correction", "sampler.correction_cap", "sampler.correction_above")
ROWS = (
    ("eval/avg", "{split} Avg@{k}"),
    ("eval/pass", "{split} Pass@{k}"),
    ("greedy/avg", "{split} accuracy, greedy"),
    ("train/accuracy", "train accuracy, first and last {n} steps"),
    ("tool/calls_per_question", "calls a question"),
    ("eval/calls_need_0", "calls where none is needed"),
    ("tool/effective_ratio", "effective-call ratio"),
    ("tool/valid_rate", "valid-call rate"),
    ("length/model_tokens", "model tokens a trajectory"),
    ("entropy/model", "entropy, nats a token"),
)


def start(config_file: str | None, overrides: Sequence[tuple[str, Any]], ranks: Ranks = ALONE) -> int:
    """Begin a new run. Only the rank that leads touches its directory."""
    config = resolved(load_config(config_file, overrides))
    if not ranks.leads:
        return _run(config, Path(), ranks, fresh=True)
    source = config.world or Path(config.tasks or "tasks").stem
    directory = Path(config.out or f"runs/{config.method}-{source}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    fresh = not directory.exists()
    make_directory(directory)
    with alone_in(directory, "training"):
        if any(directory.iterdir()):
            raise UserError(f"{directory} is not empty; choose another --out, or go on with --resume {directory}")
        try:
            return _run(config, directory, ranks, fresh=True)
        finally:
            if fresh:
                with contextlib.suppress(OSError):  # not empty: the run got under way
                    directory.rmdir()


def resume(directory: str, overrides: Sequence[tuple[str, Any]], ranks: Ranks = ALONE) -> int:
    """Go on with a run from its newest checkpoint, or from its start where it has none."""
    path = Path(directory)
    saved = path / "config.yaml"
    if not saved.is_file() or not saved.stat().st_size:
        raise UserError(f"{path} is no run directory (its config.yaml is {'empty' if saved.is_file() else 'missing'})")
    for key, _ in overrides:
        if not key.startswith(RESUMABLE) or key in FIXED:
            raise UserError(f"--{key} cannot change in a resumed run; start a new one")
    if dict(overrides).get("rollout.server", "") is None:  # its options go with it
        overrides = [*((f"sampler.{k}", v) for k, v in SamplerConfig().model_dump().items()), *overrides]
    config = load_config(saved, overrides)
    if not ranks.leads:
        return _run(config, path, ranks, fresh=False)
    with alone_in(path, "training"):
        return _run(config, path, ranks, fresh=False)


def _run(config: RunConfig, directory: Path, ranks: Ranks, *, fresh: bool) -> int:
    hf_logging.disable_progress_bar()  # one bar is enough, and it is ours
    directory = Path(ranks.same(str(directory)))
    setup, shards = _build(config, ranks)
    if config.rollout.server is not None:
        setup = with_server(setup, config, directory, ranks)
    if ranks.leads:
        make_directory(directory / "trajectories")
        save_config(config, directory / "config.yaml")
        if fresh:
            record = environment() | ({"processes": ranks.size} if ranks.size > 1 else {})
            write_lines(directory / "environment.json", [json.dumps(record, indent=2)])
    display: Display = make_display() if ranks.leads else SilentDisplay()
    loggers: list[Logger] = []
    try:
        trainer = Trainer(config, setup, directory, [], display, ranks=ranks, shards=shards)
        checkpoints = ranks.same(list_checkpoints(directory / "checkpoints"))
        if not fresh and checkpoints:
            trainer.progress = restore(checkpoints[-1], trainer.model, trainer.optimizer, shards)
        if ranks.leads:
            loggers = make_loggers(config.log, directory, config.model_dump(mode="json"), trainer.progress.step)
            trainer.loggers = loggers
            setup.tokenizer.save_pretrained(str(directory / "tokenizer"))  # to read trajectories before the end
        verb = "Training" if fresh else f"Resuming after step {trainer.progress.step}:"
        display.say(
            f"{verb} {setup.description} with {config.method} on {setup.source_name}, {config.steps} steps of "
            f"{config.rollout.questions} questions x {config.rollout.samples} samples; {directory}"
        )
        if shards is not None:
            display.say(f"{ranks.size} processes (FSDP2); each samples a share of the questions.")
        return asyncio.run(_train(trainer, fresh and not checkpoints))
    except KeyboardInterrupt:
        display.say(f"To go on: agentropy train --resume {directory}")
        raise
    finally:
        display.close()
        for logger in loggers:
            logger.close()


def _build(config: RunConfig, ranks: Ranks) -> tuple[Setup, Shards | None]:
    """The parts of the run; with several ranks each has its own tools and its own part of the weights."""
    here = config.model_copy(update={"device": ranks.device(config.device)})
    setup = ranks.in_turn(lambda: build(here))
    if ranks.size == 1:
        return setup, None
    if config.threads is None:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.local_size))
    return setup, shard(setup.model, ranks)


async def _train(trainer: Trainer, fresh: bool) -> int:
    directory, display = trainer.directory, trainer.display
    await trainer.setup.agent.toolbox.start()
    try:
        before = await _evaluate(trainer, "before")
        started = time.perf_counter()
        await trainer.run()
        display.say(f"Trained to step {trainer.progress.step} in {duration(time.perf_counter() - started)}.")
        _export(trainer)
        after = await _evaluate(trainer, "after")
    except Stopped:
        if trainer.ranks.leads:
            _page(trainer)
        display.say(
            f"Stopped after step {trainer.progress.step}; everything is saved. To go on:\n"
            f"  agentropy train --resume {directory}"
        )
        return 130
    finally:
        await trainer.setup.close()
    if not trainer.ranks.leads:
        return 0
    has_page = _page(trainer)
    display.close()
    _report(trainer, before, after, has_page)
    return 0


def _page(trainer: Trainer) -> bool:
    """Write report.html. A run is worth more than its picture: what goes wrong is said, and ends nothing."""
    trainer.display.say("Writing report.html")
    try:
        write_report(trainer.directory / "report.html", trainer.directory)
    except (UserError, OSError) as error:
        trainer.display.say(f"No report.html: {error}")
        return False
    return True


async def _evaluate(trainer: Trainer, name: str) -> dict[str, float]:
    """Evaluate once: a resumed run reads what it wrote."""
    path = trainer.directory / f"evaluation-{name}.json"
    stamp = trainer.progress.step if name == "after" else 0
    if (saved := trainer.ranks.same(_saved_evaluation(path, stamp))) is not None:
        return saved
    e = trainer.config.evaluation
    if not e.questions or (name == "before" and (trainer.progress.step or not e.before)):
        return {}
    questions = min(e.questions, len(trainer.setup.tasks.split(e.split)))
    trainer.display.say(f"Evaluating {name} training: {questions} {e.split} questions x {e.samples} samples")
    out = await trainer.evaluate(e.split, f"{e.split}-{name}")
    if e.greedy:
        greedy = await trainer.evaluate(e.split, f"{e.split}-{name}-greedy", greedy=True)
        out |= {"greedy/avg": greedy["eval/avg"], "greedy/calls": greedy["tool/calls_per_question"]}
    row = {"step": stamp} | {k: v if math.isfinite(v) else None for k, v in out.items()}
    if trainer.ranks.leads:
        write_lines(path, [json.dumps(row, indent=2)])
    return out


def _saved_evaluation(path: Path, stamp: int) -> dict[str, float] | None:
    """What an earlier start of the run wrote after the same number of steps, if it can be read."""
    try:
        saved = json.loads(path.read_bytes())
        if saved.pop("step") == stamp:
            return {k: math.nan if v is None else float(v) for k, v in saved.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _export(trainer: Trainer) -> None:
    """The trained model as an ordinary Hugging Face checkpoint. All ranks must call."""
    with trainer.whole_model() as model:
        if trainer.ranks.leads:
            _write_model(trainer, model)


def _write_model(trainer: Trainer, model: Any) -> None:
    partial = trainer.directory / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    final = trainer.directory / "model"
    try:
        save_model(model, trainer.setup.tokenizer, partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"cannot write the trained model to {final}: {why}") from None


def _report(trainer: Trainer, before: dict[str, float], after: dict[str, float], has_page: bool) -> None:
    directory = trainer.directory
    n = max(1, min(5, trainer.progress.step // 2))
    with (directory / "metrics.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    accuracy = [r["reward/accuracy"] for r in rows if r.get("reward/accuracy") is not None]
    compared = bool(before)
    if accuracy:
        before["train/accuracy"] = sum(accuracy[:n]) / len(accuracy[:n])
        after["train/accuracy"] = sum(accuracy[-n:]) / len(accuracy[-n:])
    k, split = int(after.get("eval/k", trainer.config.evaluation.samples)), trainer.config.evaluation.split
    table = Table(title=f"{trainer.config.method} on {trainer.setup.source_name}, seed {trainer.config.seed}")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name, label in ROWS:
        if name in before or name in after:
            table.add_row(label.format(k=k, n=n, split=split), describe(before.get(name)), describe(after.get(name)))
    if table.row_count:
        Console().print(table)
    print(f"Run directory: {directory}")
    if has_page:
        print("  report.html       curves, distributions and every token of the trajectories, for a browser")
    print("  metrics.jsonl     every number of every step (docs/metrics.md says what each means)")
    kept = f"{split}-before.jsonl against {split}-after.jsonl" if compared else f"{split}-after.jsonl"
    print(f"  trajectories/     what the agent wrote, called and answered; {kept}")
    kind = "adapter of peft" if trainer.config.lora.rank else "Hugging Face checkpoint"
    print(f"  model/            the trained agent, an ordinary {kind}")
    last = directory / "trajectories" / f"step-{trainer.progress.step:06d}.jsonl"
    if last.is_file():
        print(f"Next: what a method makes of these trajectories: agentropy shape --method tepo-dense {last}")
