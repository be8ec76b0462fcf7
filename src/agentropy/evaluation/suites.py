"""What an evaluation asks: the questions of each benchmark, world or file, with their tools and prompts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.evaluation.benchmarks.load import find_benchmark, load_benchmark
from agentropy.evaluation.config import EvaluationConfig
from agentropy.rollout.parts import assemble_toolbox
from agentropy.tasks.base import Task
from agentropy.tasks.files import FileTasks, load_tasks
from agentropy.tasks.worlds import World, make_world
from agentropy.tools.base import ToolBox
from agentropy.tools.named import tool_by_name
from agentropy.tools.search import SearchIndex, search_tool

OVERLAP = frozenset({"f1", "f1_squad"})
"""Graders whose score is a share of common words, so that exact match is worth a line of its own."""


@dataclass(frozen=True)
class Suite:
    """The questions of one benchmark (or world, or file) and how they are asked.

    notes: what was left out or repaired while reading, by reason. hint: False where the protocol must not ask for a
    boxed answer. exact: give exact match beside the score. vote: a majority vote makes sense.
    """

    name: str
    title: str
    tasks: tuple[Task, ...]
    toolbox: ToolBox
    system: str | None
    notes: Mapping[str, int] = field(default_factory=dict)
    hint: bool = True
    exact: bool = False
    vote: bool = True

    @property
    def fingerprint(self) -> str:
        """Of the questions and their answers, so that a resumed evaluation asks the same."""
        digest = hashlib.sha256()
        for t in self.tasks:
            digest.update(repr((t.id, t.question, t.answers, t.grader)).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()[:16]


def make_suites(config: EvaluationConfig) -> list[Suite]:
    """The suites of a filled configuration. Raises UserError for the first question or tool that cannot be had."""
    if config.benchmarks:
        unknown = set(config.data) - {"", *config.benchmarks}
        if unknown:
            raise UserError(f"--data names {sorted(unknown)[0]!r}, which --benchmark does not")
        if "" in config.data and len(config.benchmarks) > 1:
            raise UserError("--data FILE goes with one benchmark; with several write --data BENCHMARK=FILE for each")
        return [_benchmark(config, name) for name in config.benchmarks]
    if config.data:
        raise UserError("--data goes with --benchmark")
    return [_world(config) if config.world else _file(config)]


def _benchmark(config: EvaluationConfig, name: str) -> Suite:
    benchmark, _ = find_benchmark(name)
    data = config.data.get(name, config.data.get(""))
    if config.protocol == "fence" and not benchmark.hint:
        raise UserError(
            f"protocol fence takes a block of Python for a call, but it is the answer of {name}; use hermes"
        )
    questions = load_benchmark(name, data, config.limit)
    tasks = unique(questions.tasks)
    names = list(benchmark.tools) if config.tools is None else config.tools
    parts = [_tool(config, n, tasks, data, name if config.tools is None else None) for n in names]
    return Suite(
        name=name,
        title=benchmark.title + (f" {name.partition(':')[2]}" if ":" in name else ""),
        tasks=tasks,
        toolbox=_toolbox(config, parts),
        system=benchmark.system if config.system is None else config.system,
        notes=questions.notes,
        hint=benchmark.hint,
        exact=benchmark.grader in OVERLAP,
        vote=benchmark.grader != "code",
    )


def _tool(config: EvaluationConfig, tool: str, tasks: Sequence[Task], data: str | None, default_of: str | None) -> Any:
    """A tool by its name. `search` alone takes corpus.jsonl beside the questions, else their own paragraphs."""
    timeout = config.tool_timeout or 5.0
    if tool == "search" and not (data and Path(data).with_name("corpus.jsonl").is_file()):
        paragraphs = {(p["title"], p["text"]): p for t in tasks for p in t.row.get("context", ()) if _is_paragraph(p)}
        if paragraphs:
            return search_tool(SearchIndex.from_documents(paragraphs.values()))
    try:
        return tool_by_name(tool, timeout, data or config.tasks)
    except UserError as error:
        if default_of is None:
            raise
        raise UserError(
            f"{default_of} is asked with {tool} unless told otherwise, but {error}; or use --tools none"
        ) from None


def _is_paragraph(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("text"), str) and isinstance(value.get("title"), str)


def _world(config: EvaluationConfig) -> Suite:
    world = make_world(config.world or "", **config.world_options)
    if config.split == "all":
        raise UserError("--split of a world is test or validation")
    tasks = world.tasks.split(config.split or "test")[: config.limit]
    return Suite(
        name=world.name,
        title=world.name,
        tasks=unique(tasks),
        toolbox=_toolbox(config, world_parts(config, world), world),
        system=config.system,
    )


def world_parts(config: EvaluationConfig, world: World) -> list[Any]:
    """The tools asked for; `search` is the world's own where it has one."""
    timeout = config.tool_timeout or 2.0
    own = list(world.tools(timeout))
    if config.tools is None:
        return own
    if "search" in config.tools and "search" in world.tool_names:
        return own + [tool_by_name(name, timeout) for name in config.tools if name != "search"]
    return [tool_by_name(name, timeout) for name in config.tools]


def _file(config: EvaluationConfig) -> Suite:
    source = load_tasks(config.tasks or "", seed=config.seed)
    whole = isinstance(source, FileTasks) and config.split in (None, "all")
    if whole and isinstance(source, FileTasks):
        tasks: Sequence[Task] = source.tasks
    elif config.split == "all":
        raise UserError(f"{config.tasks} never ends; --split is test or validation")
    else:
        tasks = source.split("validation" if config.split == "validation" else "test")
    if not tasks:
        raise UserError(f"{config.tasks} has no {config.split} question")
    tasks = unique(tasks[: config.limit])
    graders = {t.grader for t in tasks}
    return Suite(
        name=source.name,
        title=source.name,
        tasks=tasks,
        toolbox=_toolbox(config, [_tool(config, n, tasks, None, None) for n in config.tools or ()]),
        system=config.system,
        notes=source.notes if isinstance(source, FileTasks) else {},
        hint="code" not in graders,
        exact=bool(graders & OVERLAP),
        vote="code" not in graders,
    )


def _toolbox(config: EvaluationConfig, parts: Sequence[Any], world: World | None = None) -> ToolBox:
    return assemble_toolbox(
        parts, timeout=config.tool_timeout or 5.0, sandbox=config.sandbox, world=world, seed=config.seed
    )


def unique(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Tasks with an id each: further ones with the same id get a number."""
    seen: Counter[str] = Counter()
    out = []
    for task in tasks:
        seen[task.id] += 1
        out.append(task if seen[task.id] == 1 else dataclasses.replace(task, id=f"{task.id}#{seen[task.id]}"))
    return tuple(out)
