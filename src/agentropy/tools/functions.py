"""Plain Python functions and environment classes as tools.

The schema comes from type hints and a Google-style docstring by `transformers.utils.get_json_schema`, as users of TRL
write them. Synchronous functions run in threads, so that a slow one holds nothing else back.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentropy.errors import UserError
from agentropy.tools.base import Tool
from agentropy.tools.parts import PartSession
from agentropy.trajectory import ToolResult

_NO_TOOLS = frozenset({"reset", "get_reward", "close", "fork"})
"""Public methods of an environment that are not for the model."""


def to_result(value: Any) -> ToolResult:
    """What a function returned, as a result: text as it is, None as nothing, other values as JSON where possible."""
    if isinstance(value, ToolResult):
        return value
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    try:
        return ToolResult(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return ToolResult(str(value))


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run a blocking function in a daemon thread of its own. A cancelled wait leaves the thread to end by itself.

    `asyncio.to_thread` would do, but its pool is small, and a function that never returns would keep the interpreter
    from exiting.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(function)
        except BaseException as caught:
            # A StopIteration cannot go through a future, and a SystemExit must not end the run.
            fits = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            error = caught if fits else RuntimeError(repr(caught))
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=work, daemon=True, name="agentropy-tool").start()
    return await future


async def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult:
    if inspect.iscoroutinefunction(function):
        return to_result(await function(**arguments))
    value = await in_thread(lambda: function(**arguments))
    return to_result(await value if inspect.isawaitable(value) else value)


def from_function(function: Callable[..., Any], *, name: str | None = None) -> Tool:
    """A tool from a function with type hints and a Google-style docstring (summary, `Args:`).

    Sync or async. It may return text, anything that is JSON, or a `ToolResult` (with its own status, reward, stop).
    Raises UserError where hints or descriptions are missing.
    """
    from transformers.utils import get_json_schema

    known = getattr(function, "__name__", type(function).__name__)
    try:
        spec = get_json_schema(function)["function"]
    except Exception as error:
        message = " ".join(str(error).split())
        raise UserError(f"no tool schema can be made of {known!r}: {message}") from None
    parameters = {k: v for k, v in spec["parameters"].items() if k != "return"}

    async def run(arguments: Mapping[str, Any]) -> ToolResult:
        return await _call(function, arguments)

    return Tool(name or str(spec["name"]), str(spec["description"]), parameters, run)


def from_environment(factory: Callable[[], Any]) -> EnvironmentPart:
    """Environments in the form of TRL: `factory()` makes one object a trajectory.

    `reset(**row) -> str | None` is called with the question's row (a string is added to the question); every other
    public method is a tool; `get_reward() -> float`, if it is there, is what the trajectory earned. `close()` and
    `fork()` are used if they are there.
    """
    return EnvironmentPart(factory)


class EnvironmentPart:
    """One environment object a trajectory."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._spare: Any = factory()
        if not callable(getattr(self._spare, "reset", None)):
            raise UserError(f"{type(self._spare).__name__} is no environment: it has no method reset(**row)")
        self._tools = _tools(self._spare)
        if not self._tools:
            raise UserError(f"environment {type(self._spare).__name__} has no public method that could be a tool")

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [t.spec() for t in self._tools]

    async def start(self) -> None:
        return None

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[EnvironmentSession, str | None]:
        environment, self._spare = self._spare, None
        if environment is None:
            environment = self._factory()
        text = environment.reset(**row)
        if inspect.isawaitable(text):
            text = await text
        return EnvironmentSession(environment, self._tools), None if text is None else str(text)

    async def close(self) -> None:
        self._spare = None


class EnvironmentSession:
    """Calls of one turn reach the object one after the other and in order: it need not be safe for threads."""

    keeps_time = False
    repeatable = False

    def __init__(self, environment: Any, described: Sequence[Tool]) -> None:
        self.environment = environment
        self._described = described
        self._lock = asyncio.Lock()
        self.tools: Sequence[Tool] = [replace(t, run=self._serial(getattr(environment, t.name))) for t in described]

    def _serial(self, method: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Awaitable[ToolResult]]:
        async def run(arguments: Mapping[str, Any]) -> ToolResult:
            async with self._lock:
                return await _call(method, arguments)

        return run

    async def reward(self) -> float | None:
        get = getattr(self.environment, "get_reward", None)
        if get is None:
            return None
        value = get()
        value = await value if inspect.isawaitable(value) else value
        return None if value is None else float(value)

    async def fork(self) -> PartSession:
        name = type(self.environment).__name__
        try:
            own = getattr(self.environment, "fork", None)
            copied = copy.deepcopy(self.environment) if own is None else own()
            return EnvironmentSession(await copied if inspect.isawaitable(copied) else copied, self._described)
        except Exception as error:
            advice = "give it a method fork()"
            raise UserError(f"environment {name} cannot be copied for a branch ({error}); {advice}") from None

    async def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            done = close()
            if inspect.isawaitable(done):
                await done


def _tools(environment: Any) -> list[Tool]:
    # Looked for on the class: `getmembers` of the object would run its properties, which may not be ready yet.
    names = [n for n, _ in inspect.getmembers(type(environment), callable) if not n.startswith("_")]
    methods = [m for n in names if n not in _NO_TOOLS and inspect.ismethod(m := getattr(environment, n))]
    return [from_function(m) for m in methods]
