"""The generated worlds by name: their questions, their tools, and the agent that was warm-started for them.

A world knows what stands beside it (tools, training) only when it is asked for it, so importing it costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.tasks.base import TaskSource

MAX_RESULT_CHARS = 160


@dataclass(frozen=True)
class World:
    """A generated world.

    `make_tools(seconds)` gives the parts of its toolbox, a call taking `seconds` at most. `tool_failures` is the share
    of calls that shall fail through no fault of the agent, with the words it then reads (`outage`); the agents have
    seen a few of these.
    """

    name: str
    tasks: TaskSource
    make_tools: Callable[[float], Sequence[Any]]
    tool_names: tuple[str, ...]
    protocol: str = "tags"
    tool_failures: float = 0.0
    outage: str = ""

    def tools(self, timeout: float = 2.0) -> Sequence[Any]:
        """The parts of the world's toolbox, for `make_toolbox`; `tool_failures` is the caller's to add (`faults`)."""
        return self.make_tools(timeout)

    def faults(self) -> Sequence[Any]:
        """What `with_faults` takes, empty in a world whose tools always work."""
        from agentropy.tools.faults import outage

        return (outage(self.tool_failures, self.outage),) if self.tool_failures else ()

    def warm_start(self) -> Path:
        """The folder of the warm-started agent. Made now (minutes) should the package lack it."""
        return warm_start_path(self.name)


def warm_start_path(name: str) -> Path:
    """The folder of a world's warm-started agent. Raises UserError for an unknown world."""
    from agentropy.training.warm_start import RECIPES, load_or_make

    if name not in RECIPES:
        raise UserError(_unknown(name))
    return load_or_make(RECIPES[name])


def brief(execution: Any) -> str:
    """What the small agents see of a run: what was printed, or of a failure the last line."""
    if execution.status == "ok":
        return str(execution.stdout).strip()[:MAX_RESULT_CHARS]
    if execution.status == "error" and execution.stderr.strip():
        return str(execution.stderr).rstrip().rsplit("\n", 1)[-1][:MAX_RESULT_CHARS]
    return str(execution.for_model())[:MAX_RESULT_CHARS]


def _python(timeout: float) -> Sequence[Any]:
    from agentropy.tools.python import python_tool

    return [python_tool(timeout=timeout, form=brief)]


def _arithmetic(
    seed: int = 0,
    kinds: Sequence[str] = (),
    tool_failures: float = 0.0,
    validation_size: int = 128,
    test_size: int = 256,
) -> World:
    from agentropy.tasks.arithmetic import UNAVAILABLE, arithmetic_tasks

    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    tasks = arithmetic_tasks(seed, kinds, validation_size, test_size)
    return World("arithmetic", tasks, _python, ("python",), tool_failures=tool_failures, outage=UNAVAILABLE)


def _facts(
    seed: int = 0,
    knowledge_seed: int = 0,
    people: int = 160,
    hits: int = 2,
    tool_failures: float = 0.08,
    validation_size: int = 128,
    test_size: int = 256,
) -> World:
    from agentropy.tasks.facts import UNAVAILABLE, facts_tasks, knowledge_base

    kb = knowledge_base(knowledge_seed, people)

    def tools(timeout: float) -> Sequence[Any]:
        from agentropy.tools.search import SearchIndex, search_tool

        index = SearchIndex.from_documents(kb.documents())
        return [search_tool(index, k=hits, form=lambda found: "\n".join(h.document.text for h in found))]

    tasks = facts_tasks(seed, knowledge_seed, people, validation_size, test_size)
    return World("facts", tasks, tools, ("search",), tool_failures=tool_failures, outage=UNAVAILABLE)


WORLDS: Mapping[str, Callable[..., World]] = {"arithmetic": _arithmetic, "facts": _facts}


def make_world(name: str, seed: int = 0, **settings: Any) -> World:
    """A world by name. `seed` orders its training questions; docs/worlds.md lists the settings of each.

    Raises UserError for an unknown world, an unknown setting or a value that cannot be.
    """
    if name not in WORLDS:
        raise UserError(_unknown(name))
    known = inspect.signature(WORLDS[name]).parameters
    for key in settings:
        if key not in known:
            raise UserError(f"world {name} has no setting {key!r}; it has {', '.join(known)}")
    for key, value in settings.items():
        if key == "tool_failures" and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise UserError(f"world {name}: tool_failures must lie between 0 and 1, not {value!r}")
        if key == "kinds" and not (isinstance(value, str | list | tuple) and all(isinstance(k, str) for k in value)):
            raise UserError(f"world {name}: kinds must be a list of names, not {value!r}")
        if key == "knowledge_seed" and (not isinstance(value, int) or value < 0):
            raise UserError(f"world {name}: knowledge_seed must be a whole number, not {value!r}")
        if key in ("hits", "people", "validation_size", "test_size") and (not isinstance(value, int) or value < 1):
            raise UserError(f"world {name}: {key} must be a whole number above 0, not {value!r}")
    return WORLDS[name](seed=seed, **settings)


def _unknown(name: str) -> str:
    return f"no world {name!r}; there are {', '.join(WORLDS)}"
