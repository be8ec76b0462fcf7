"""An evaluation from its first line to its last: questions, model, answers, results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.evaluation import engines
from agentropy.evaluation.config import ANY_TIME, EvaluationConfig, filled, make_config, save, saved
from agentropy.evaluation.engines import Engine, in_flight, make_engine, unit_size
from agentropy.evaluation.journal import (
    Journal,
    Unit,
    check_questions,
    key_of,
    reopen,
    units_of,
    write_questions,
)
from agentropy.evaluation.progress import Progress, Tally, make_progress
from agentropy.evaluation.records import Record
from agentropy.evaluation.results import summarize
from agentropy.evaluation.score import Scorer
from agentropy.evaluation.suites import Suite, make_suites
from agentropy.evaluation.tables import print_results
from agentropy.run_directory import alone_in, environment, make_directory
from agentropy.trajectory import write_lines


def start(config: EvaluationConfig, out: str | None, page: Callable[[Path], None]) -> int:
    """Begin an evaluation. Returns the exit code: 1 where nothing could be scored. `page` gets the finished directory
    and may add to it."""
    config = filled(config)
    directory = Path(out or f"runs/eval-{_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}")
    fresh = not directory.exists()
    make_directory(directory)
    with alone_in(directory, "evaluating"):
        try:
            if any(directory.iterdir()):
                raise UserError(f"{directory} is not empty; choose another --out, or go on with --resume {directory}")
            return _run(config, directory, page, fresh=True)
        finally:
            if fresh:
                with contextlib.suppress(OSError):  # not empty: the evaluation got under way
                    directory.rmdir()


def _name(config: EvaluationConfig) -> str:
    model = re.sub(r"[^\w.-]+", "-", Path(config.model or "").name) or ("server" if config.server else "embedded")
    source = "-".join(config.benchmarks) or config.world or Path((config.tasks or "").partition("?")[0]).stem
    return re.sub(r"[^\w.-]+", "-", f"{model}-{source}")[:100]


def resume(directory: str, changes: Mapping[str, Any], page: Callable[[Path], None]) -> int:
    """Go on with an evaluation. `changes` may set what is in ANY_TIME."""
    path = Path(directory)
    config = saved(path)
    for key in changes:
        if key not in ANY_TIME:
            raise UserError(f"--{key.replace('_', '-')} cannot change in a resumed evaluation; start a new one")
    if "server" in changes and config.server is None:
        raise UserError("this evaluation began with the local engine and cannot go on with --server; start a new one")
    config = make_config(config.model_dump() | dict(changes))
    with alone_in(path, "evaluating"):
        return _run(config, path, page, fresh=False)


def _run(config: EvaluationConfig, directory: Path, page: Callable[[Path], None], *, fresh: bool) -> int:
    engines.check(config)
    suites = make_suites(config)
    size = unit_size(config)
    units = {s.name: units_of(s, config, size) for s in suites}
    if fresh:
        journal = Journal(directory)
    else:
        check_questions(directory, suites)
        journal = reopen(directory, [u for row in units.values() for u in row])
    done = {(r.benchmark, r.trajectory_id) for r in journal.records}
    todo = {name: [u for u in row if key_of(u[0]) not in done] for name, row in units.items()}
    if any(todo.values()):
        scorer = Scorer(lenient=config.lenient)
        engine = make_engine(config, suites, scorer)
        save(config, directory / "config.yaml")
        write_questions(directory, suites)
        if engine.tokenizer is not None:
            engine.tokenizer.save_pretrained(str(directory / "tokenizer"))  # for whoever reads the trajectories
        if not (directory / "environment.json").exists():
            write_lines(directory / "environment.json", [json.dumps(environment(), indent=2)])
        progress = make_progress()
        try:
            _announce(progress, config, suites, engine, journal, directory, fresh)
            asyncio.run(_ask(config, suites, todo, engine, scorer, journal, progress))
        except KeyboardInterrupt:
            progress.say(f"To go on: agentropy eval --resume {directory}")
            raise
        except UserError as error:
            raise UserError(
                f"{error}; what was finished is kept, to go on: agentropy eval --resume {directory}"
            ) from None
        finally:
            progress.close()
            journal.close()
    return _report(config, suites, journal, directory, page)


def _announce(
    progress: Progress,
    config: EvaluationConfig,
    suites: Sequence[Suite],
    engine: Engine,
    journal: Journal,
    directory: Path,
    fresh: bool,
) -> None:
    what = ", ".join(f"{len(s.tasks)} x {config.samples} of {s.title}" for s in suites)
    verb = "Evaluating" if fresh else f"Going on after {len(journal.records)} trajectories, evaluating"
    progress.say(f"{verb} {engine.description} on {what}; {directory}")
    if journal.asked_again:
        progress.say(f"{journal.asked_again} trajectories of unfinished batches, or lost ones, are asked again.")
    for suite in suites:
        for reason, count in suite.notes.items():
            progress.say(f"{suite.name}: {reason}: {count}")


async def _ask(
    config: EvaluationConfig,
    suites: Sequence[Suite],
    todo: Mapping[str, Sequence[Unit]],
    engine: Engine,
    scorer: Scorer,
    journal: Journal,
    progress: Progress,
) -> None:
    try:
        for suite in suites:
            if not todo[suite.name]:
                continue
            await suite.toolbox.start()
            try:
                with engine.sampling():
                    await _ask_suite(config, suite, todo[suite.name], engine, journal, progress)
            finally:
                await suite.toolbox.close()
    finally:
        await engine.close()
        await scorer.close()


async def _ask_suite(
    config: EvaluationConfig,
    suite: Suite,
    todo: Sequence[Unit],
    engine: Engine,
    journal: Journal,
    progress: Progress,
) -> None:
    total = len(suite.tasks) * config.samples
    begun = total - sum(map(len, todo))
    tally = Tally(suite.title, total, begun, begun, time.monotonic())
    for record in journal.records:
        if record.benchmark == suite.name:
            _count(tally, record)
    rest = iter(todo)
    last = time.perf_counter()

    async def work() -> None:
        nonlocal last
        for unit in rest:
            trajectories = await engine.roll(suite, unit)
            now = time.perf_counter()
            new = journal.append(trajectories)
            journal.note(suite.name, now - last, engine.usage())
            last = now
            for record in new:
                _count(tally, record)
                tally.tokens += record.tokens
            tally.done += len(new)
            progress.show(tally)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight(config), len(todo))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _count(tally: Tally, record: Record) -> None:
    if record.score is not None:
        tally.score += record.score
        tally.scored += 1
    tally.lost += record.lost


def _report(
    config: EvaluationConfig, suites: Sequence[Suite], journal: Journal, directory: Path, page: Callable[[Path], None]
) -> int:
    results: dict[str, Any] = {}
    for suite in suites:
        records = [r for r in journal.records if r.benchmark == suite.name]
        row = summarize(records, config.samples, exact=suite.exact, vote=suite.vote and config.samples > 1)
        seconds = journal.seconds.get(suite.name, 0.0)
        tokens = sum(r.tokens for r in records)
        row |= {
            "title": suite.title,
            "left_out": dict(suite.notes),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
        }
        results[suite.name] = row
    out: dict[str, Any] = {"model": config.model, "server": config.server, "benchmarks": results}
    if journal.usage or config.server:
        out["usage"] = _usage(directory)
    write_lines(directory / "results.json", [json.dumps(out, indent=1, ensure_ascii=False)])
    lost = sum(row["lost"] for row in results.values())
    print_results(results, title=_title(config), usage=out.get("usage"))
    print(f"Evaluation directory: {directory} (results.json, trajectories.jsonl, config.yaml, environment.json)")
    page(directory)
    if lost:
        again = f"agentropy eval --resume {directory}"
        print(f"{lost} trajectories were lost to faults of tools or server; to ask them again: {again}")
    return 0 if any(row["scores"] for row in results.values()) else 1


def _usage(directory: Path) -> Any:
    try:
        return json.loads((directory / "progress.json").read_bytes()).get("usage")
    except (OSError, ValueError):
        return None


def _title(config: EvaluationConfig) -> str:
    model = "the embedded agent" if config.embedded else config.model or config.server
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    return f"{model}, {how}, seed {config.seed}"
