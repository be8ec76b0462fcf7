"""`agentropy tasks`: look at questions, and grade every gold answer with its own grader."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("tasks", help="show or check the questions of a world, a file or a data set")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    specs = (
        "a world (also WORLD?level=hard), FILE.jsonl, FILE.parquet, BENCHMARK=FILE, hf:NAME:SPLIT or reasoning-gym:TASK"
    )
    check = actions.add_parser("check", help="grade every gold answer with its own grader and list those that fail")
    check.add_argument("specs", nargs="+", metavar="SPEC", help=specs)
    check.add_argument("--limit", type=int, default=1000, help="questions a source at most (default 1000)")
    check.add_argument("--list", type=int, default=20, help="failures to print a source (default 20)")
    check.set_defaults(run=run_check)
    show = actions.add_parser("show", help="print a few questions with their answers")
    show.add_argument("specs", nargs="+", metavar="SPEC", help=specs)
    show.add_argument("--n", type=int, default=5, help="how many (default 5)")
    show.add_argument("--seed", type=int, default=0)
    show.set_defaults(run=run_show)


def open_source(spec: str, seed: int = 0) -> Any:
    """The task source of a spec: a world's name, with settings after a question mark, BENCHMARK=FILE for a file in the
    schema of a benchmark's publisher, or any spec of `load_tasks`."""
    from agentropy.errors import UserError
    from agentropy.evaluation.benchmarks.load import load_benchmark
    from agentropy.evaluation.benchmarks.table import BENCHMARKS
    from agentropy.tasks import WORLDS, load_tasks, make_world
    from agentropy.tasks.base import Split
    from agentropy.tasks.files import FileTasks

    benchmark, equals, file = spec.partition("=")
    if equals and benchmark in BENCHMARKS:
        found = load_benchmark(benchmark, file)
        splits: list[Split] = ["test" for _ in found.tasks]
        return FileTasks(spec, found.tasks, tuple(splits), seed, found.notes)
    if equals and file and benchmark.isalnum() and not Path(spec).exists():
        raise UserError(f"no benchmark {benchmark!r}; there are {', '.join(BENCHMARKS)}")
    name, _, settings = spec.partition("?")
    if name not in WORLDS:
        return load_tasks(spec, seed=seed)
    return make_world(name, seed=seed, **_settings(settings)).tasks


def _settings(text: str) -> dict[str, Any]:
    """`level=hard&people=40` as settings of a world; values are read as YAML."""
    import yaml

    from agentropy.errors import UserError

    settings: dict[str, Any] = {}
    for pair in filter(None, text.split("&")):
        key, equals, value = pair.partition("=")
        if not key or not equals or not value or key == "seed":
            raise UserError(f"world setting {pair!r}: write KEY=VALUE, such as level=hard")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            settings[key] = value
    return settings


def all_tasks(source: Any, limit: int) -> list[Any]:
    """Every question of a file; of an endless source its test split and the start of its training stream."""
    from agentropy.tasks.files import FileTasks

    if isinstance(source, FileTasks):
        return list(source.tasks[:limit])
    tasks = list(source.split("test"))[:limit]
    return tasks + [source.train(i) for i in range(min(256, limit - len(tasks)))]


def _at_least(value: int, least: int, option: str) -> None:
    from agentropy.errors import UserError

    if value < least:
        raise UserError(f"{option} must be at least {least}, not {value}")


def run_show(args: argparse.Namespace) -> int:
    """Print questions."""
    from agentropy.tasks.files import FileTasks

    _at_least(args.n, 0, "--n")
    for spec in args.specs:
        source = open_source(spec, args.seed)
        print(f"{source.name}:" + (_notes(source) if isinstance(source, FileTasks) else ""))
        of_benchmark = isinstance(source, FileTasks) and "train" not in source.splits
        for i in range(min(args.n, len(source.tasks)) if of_benchmark else args.n):
            task = source.tasks[i] if of_benchmark else source.train(i)
            need = "" if task.need is None else f", needs {task.need} call{'s' * (task.need != 1)}"
            answers = " | ".join(task.answers) or "(tests)"
            print(f"  [{task.kind}{need}, graded by {task.grader}] {task.question}")
            if task.row.get("setup"):
                print(f"    only the tool sees: {task.row['setup']}")
            print(f"    -> {answers}")
    return 0


def _notes(source: Any) -> str:
    counts = {s: source.splits.count(s) for s in ("train", "validation", "test")}
    text = f" {len(source.tasks)} questions (" + ", ".join(f"{n} {s}" for s, n in counts.items()) + ")"
    return text + "".join(f"; {what}: {n}" for what, n in source.notes.items())


def run_check(args: argparse.Namespace) -> int:
    """Grade golds. Returns 1 if any of them fails."""
    import asyncio

    _at_least(args.limit, 1, "--limit")
    _at_least(args.list, 0, "--list")
    return asyncio.run(_check(args.specs, args.limit, args.list))


async def _check(specs: list[str], limit: int, shown: int) -> int:
    import asyncio

    from agentropy.evaluation.score import Scorer
    from agentropy.tasks.files import FileTasks

    scorer = Scorer()
    failed = False
    try:
        for spec in specs:
            source = open_source(spec)
            tasks = all_tasks(source, limit)
            golds = [(t, a) for t in tasks for a in t.answers]
            verdicts = await asyncio.gather(*(scorer.grader(t.grader).grade_answer(a, [a]) for t, a in golds))
            bad = [(t, a, v) for (t, a), v in zip(golds, verdicts, strict=True) if v.score != 1.0]
            untested = sum(not t.answers for t in tasks)
            line = f"{source.name}: {len(tasks)} questions, {len(golds)} golds, {len(bad)} fail their own grader"
            print(line + (f", {untested} with tests and no gold" if untested else ""))
            if isinstance(source, FileTasks):
                for what, n in source.notes.items():
                    print(f"  {what}: {n}")
            for task, answer, verdict in bad[:shown]:
                print(f"  {task.id} ({task.grader}): {answer!r}: {verdict.reason} {verdict.detail}".rstrip())
            if len(bad) > shown:
                print(f"  … and {len(bad) - shown} more (--list {len(bad)})")
            failed = failed or bool(bad)
    finally:
        await scorer.close()
    return 1 if failed else 0
