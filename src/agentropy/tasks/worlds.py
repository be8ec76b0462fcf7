"""The generated worlds by name: their questions, their tools, and the agent that was warm-started for them.

A world knows what stands beside it (tools, training) only when it is asked for it, so importing it costs nothing.
"""

from __future__ import annotations

import inspect
import math
import random
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
    of calls that shall fail through no fault of the agent, with the words it then reads (`outage`); `tool_lies` the
    share that shall answer something false, made by `lie`. The agents have seen a few of these. `name` says the level
    too, unless it is the default one, and names the warm start.
    """

    name: str
    tasks: TaskSource
    make_tools: Callable[[float], Sequence[Any]]
    tool_names: tuple[str, ...]
    protocol: str = "tags"
    tool_failures: float = 0.0
    outage: str = ""
    tool_lies: float = 0.0
    lie: Callable[[str, random.Random], str] | None = None
    size: str = "default"
    """Of the agent: small, default or large. Only the default ones ship with the package."""

    def tools(self, timeout: float = 2.0) -> Sequence[Any]:
        """The parts of the world's toolbox, for `make_toolbox`; what goes wrong is the caller's to add (`faults`)."""
        return self.make_tools(timeout)

    def faults(self) -> Sequence[Any]:
        """What `with_faults` takes, empty in a world whose tools always work."""
        from agentropy.tools.faults import outage, wrong

        faults = (outage(self.tool_failures, self.outage), wrong(self.tool_lies, self.lie))
        return tuple(f for f in faults if f.probability)

    def warm_start(self) -> Path:
        """The folder of the warm-started agent. Made now (minutes) should the package lack it."""
        return warm_start_path(self.name, self.size)


def warm_start_path(name: str, size: str = "default") -> Path:
    """The folder of a world's warm-started agent. Raises UserError for an unknown world or size."""
    from agentropy.training.warm_start import load_or_make, recipe_of

    return load_or_make(recipe_of(name, size))


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


def _named(world: str, level: str) -> str:
    if level not in LEVELS:
        raise UserError(f"world {world} has no level {level!r}; it has {', '.join(LEVELS)}")
    return world if level == "default" else f"{world}-{level}"


def _arithmetic(
    seed: int = 0,
    level: str = "default",
    size: str = "default",
    kinds: Sequence[str] = (),
    tool_failures: float | None = None,
    tool_lies: float | None = None,
    validation_size: int = 128,
    test_size: int = 256,
) -> World:
    from agentropy.tasks.arithmetic import KINDS, UNAVAILABLE, WEIGHTS, arithmetic_tasks
    from agentropy.tasks.arithmetic_hard import HARD_KINDS, HARD_WEIGHTS
    from agentropy.tools.faults import shift_number

    name, hard = _named("arithmetic", level), level == "hard"
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    mix = (HARD_WEIGHTS, HARD_KINDS) if hard else (WEIGHTS, KINDS)
    return World(
        name,
        arithmetic_tasks(seed, kinds, validation_size, test_size, *mix, name),
        _python,
        ("python",),
        tool_failures=(0.2 if hard else 0.0) if tool_failures is None else tool_failures,
        outage=UNAVAILABLE,
        tool_lies=(0.05 if hard else 0.0) if tool_lies is None else tool_lies,
        lie=shift_number,
        size=size,
    )


def _facts(
    seed: int = 0,
    level: str = "default",
    size: str = "default",
    knowledge_seed: int = 0,
    people: int = 160,
    distractors: float | None = None,
    needs: Sequence[float] | None = None,
    hits: int = 2,
    tool_failures: float | None = None,
    tool_lies: float | None = None,
    validation_size: int = 128,
    test_size: int = 256,
) -> World:
    from agentropy.tasks.facts import (
        HARD_NEED_WEIGHTS,
        NEED_WEIGHTS,
        UNAVAILABLE,
        facts_tasks,
        false_fact,
        knowledge_base,
    )

    name, hard = _named("facts", level), level == "hard"
    kb = knowledge_base(knowledge_seed, people, (0.75 if hard else 0.0) if distractors is None else distractors)
    weights = HARD_NEED_WEIGHTS if hard else NEED_WEIGHTS
    if needs is not None:
        weights = dict.fromkeys(weights, 0.0) | {need: float(weight) for need, weight in enumerate(needs)}

    def tools(timeout: float) -> Sequence[Any]:
        from agentropy.tools.search import SearchIndex, search_tool

        index = SearchIndex.from_documents(kb.documents())
        return [search_tool(index, k=hits, form=lambda found: "\n".join(h.document.text for h in found))]

    return World(
        name,
        facts_tasks(kb, seed, validation_size, test_size, weights, name),
        tools,
        ("search",),
        tool_failures=(0.2 if hard else 0.08) if tool_failures is None else tool_failures,
        outage=UNAVAILABLE,
        tool_lies=(0.05 if hard else 0.0) if tool_lies is None else tool_lies,
        lie=false_fact,
        size=size,
    )


AGENT_SIZES = ("small", "default", "large")
WORLDS: Mapping[str, Callable[..., World]] = {"arithmetic": _arithmetic, "facts": _facts}
LEVELS = ("default", "hard")


def make_world(name: str, seed: int = 0, **settings: Any) -> World:
    """A world by name. `seed` orders its training questions; docs/worlds.md lists the settings of each.

    Raises UserError for an unknown world, an unknown setting or a value that cannot be.
    """
    if name not in WORLDS:
        raise UserError(_unknown(name))
    known = inspect.signature(WORLDS[name]).parameters
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"world {name} has no setting {key!r}; it has {', '.join(known)}")
        if (must := _must(key, value)) is not None:
            raise UserError(f"world {name}: {key} must {must}, not {value!r}")
    world = WORLDS[name](seed=seed, **settings)
    if world.tool_failures + world.tool_lies > 1:
        shares = f"tool_failures ({world.tool_failures:g}) and tool_lies ({world.tool_lies:g})"
        raise UserError(f"world {name}: {shares} add up to more than 1")
    return world


def _must(key: str, value: Any) -> str | None:
    """What a setting's value must be, None where it is that."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in ("tool_failures", "tool_lies", "distractors") and not (number and 0 <= value <= 1):
        return "lie between 0 and 1"
    if key == "size" and value not in AGENT_SIZES:
        return f"be one of {', '.join(AGENT_SIZES)}"
    if key == "kinds" and not (isinstance(value, str | list | tuple) and all(isinstance(k, str) for k in value)):
        return "be a list of names"
    if key == "needs" and not (
        isinstance(value, list | tuple)
        and 0 < len(value) <= 5
        and all(isinstance(w, int | float) and 0 <= w < math.inf for w in value)
        and any(value)
    ):
        return "be the shares of questions that need 0, 1, 2, 3 and 4 searches, such as [0.1, 0.2, 0.3, 0.3, 0.1]"
    if key == "knowledge_seed" and not (whole and value >= 0):
        return "be a whole number"
    if key in ("hits", "people", "validation_size", "test_size") and not (whole and value >= 1):
        return "be a whole number above 0"
    return None


def rollout_defaults(world: str, options: Mapping[str, Any]) -> Mapping[str, int]:
    """What a world's level needs of `rollout.…` where the user sets nothing: turns and tokens; empty: the usual."""
    return _ROLLOUT.get((world, str(options.get("level"))), {})


_ROLLOUT: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("arithmetic", "hard"): {"max_turns": 8, "max_new_tokens": 160},
    ("facts", "hard"): {"max_turns": 8, "max_new_tokens": 192},
}


def _unknown(name: str) -> str:
    return f"no world {name!r}; there are {', '.join(WORLDS)}"
