"""The `python` tool: code from the policy, run in the sandbox."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from agentropy.tools.base import Tool
from agentropy.tools.parts import PartSession, ToolLost
from agentropy.trajectory import Status, ToolResult

STATUS: Mapping[str, Status] = {
    "ok": "ok",
    "error": "error",
    "timeout": "timeout",
    "crash": "error",
    "output_limit": "error",
    "disk_limit": "error",
    "sandbox_error": "lost",
}
"""What a sandbox's status means for a trajectory."""

MAX_CHARS = 8000
"""A first bound on the text, so that no megabyte is tokenized; the limit that counts is the protocol's, in tokens."""

_DESCRIPTION = {
    False: "Run a Python program in a fresh interpreter and return what it prints.",
    True: "Run a cell of Python and return what it prints. Variables and imports are kept from earlier calls.",
}
_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "code": {
            "type": "string",
            "description": "Python code. Print what you want to see; the value of a last bare expression is shown too.",
        }
    },
    "required": ["code"],
}


class Execution(Protocol):
    """What a sandbox says of one run."""

    @property
    def status(self) -> str: ...

    def for_model(self, max_chars: int = 2000) -> str: ...


class SandboxSession(Protocol):
    """A Python process that keeps its state between runs."""

    async def run(self, code: str, *, timeout: float = 5.0, echo: bool = True) -> Execution: ...

    async def fork(self) -> Any: ...

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """What the tool needs of `agentropy.sandbox.LocalSandbox` or `RemoteSandbox`."""

    async def execute(
        self, codes: Sequence[str], *, timeout: float = 5.0, stdin: str | None = None, seed: int = 0, echo: bool = True
    ) -> Sequence[Execution]: ...

    def session(self, *, seed: int = 0) -> AbstractAsyncContextManager[Any]: ...


Format = Callable[[Any], str]
"""Makes the text for the model from an execution result."""


def show(execution: Execution) -> str:
    """The sandbox's own view: output, then the useful last lines of a traceback; a timeout or crash in words."""
    return execution.for_model(max_chars=MAX_CHARS)


class PythonPart:
    """The `python` tool. Made by `python_tool`."""

    def __init__(self, sandbox: Any, timeout: float, stateful: bool, echo: bool, form: Format, owned: bool) -> None:
        self._sandbox = sandbox
        self._timeout = timeout
        self._stateful = stateful
        self._echo = echo
        self._form = form
        self._owned = owned
        self.description = _DESCRIPTION[stateful]

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [Tool("python", self.description, _PARAMETERS, _no_run).spec()]

    def use(self, sandbox: Any) -> None:
        """Run on another sandbox from here on, which is closed with the toolbox. To be called before `start`."""
        self._sandbox, self._owned = sandbox, True

    async def start(self) -> None:
        await _maybe(self._sandbox, "start")

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[PartSession, str | None]:
        return (_Stateful(self, seed, None) if self._stateful else _Stateless(self, seed)), None

    async def close(self) -> None:
        if self._owned:
            await _maybe(self._sandbox, "close")

    def result(self, execution: Execution) -> ToolResult:
        """The execution as a tool result. A fault of the sandbox itself is raised as ToolLost."""
        status = STATUS[execution.status]
        if status == "lost":
            raise ToolLost(self._form(execution) or "the sandbox failed")
        return ToolResult(self._form(execution), status)

    async def execute(self, code: str, seed: int) -> ToolResult:
        """A run without state. Raises ToolLost for a fault of the sandbox, UserError where it can't run at all."""
        try:
            ran = await self._sandbox.execute([code], timeout=self._timeout, seed=seed, echo=self._echo)
        except (RuntimeError, OSError) as error:  # a full queue, a dead supervisor
            raise ToolLost(f"the sandbox failed: {error}") from error
        return self.result(ran[0])

    async def run_cell(self, session: SandboxSession, code: str) -> ToolResult:
        """A run in a session. Raises as `execute`."""
        try:
            ran = await session.run(code, timeout=self._timeout, echo=self._echo)
        except (RuntimeError, OSError) as error:
            raise ToolLost(f"the sandbox failed: {error}") from error
        return self.result(ran)

    def session(self, seed: int) -> AbstractAsyncContextManager[Any]:
        """A sandbox session, not yet entered."""
        opened: AbstractAsyncContextManager[Any] = self._sandbox.session(seed=seed)
        return opened


class _Stateless:
    keeps_time = True
    repeatable = True

    def __init__(self, part: PythonPart, seed: int) -> None:
        self._part = part
        self._seed = seed
        self.tools: Sequence[Tool] = (Tool("python", part.description, _PARAMETERS, self._run),)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._part.execute(arguments["code"], self._seed)

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        return self

    async def close(self) -> None:
        return None


class _Stateful:
    keeps_time = True
    repeatable = False

    def __init__(self, part: PythonPart, seed: int, session: Any) -> None:
        self._part = part
        self._seed = seed
        self._session = session
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        if session is not None:
            self._stack.push_async_callback(session.close)
        self.tools: Sequence[Tool] = (Tool("python", part.description, _PARAMETERS, self._run),)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._lock:  # cells run in order, and one session is opened, however many calls a turn has
            if self._session is None:
                self._session = await self._stack.enter_async_context(self._part.session(self._seed))
            return await self._part.run_cell(self._session, arguments["code"])

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        copied = None if self._session is None else await self._session.fork()
        return _Stateful(self._part, self._seed, copied)

    async def close(self) -> None:
        await self._stack.aclose()


def python_tool(
    sandbox: Any = None,
    *,
    timeout: float = 5.0,
    stateful: bool = False,
    echo: bool = True,
    form: Format = show,
) -> PythonPart:
    """The built-in tool `python(code)`.

    sandbox: a `Sandbox`; None: a LocalSandbox that is closed with the toolbox. One that is given stays open.
    timeout: seconds of wall time a run; the toolbox's own limit does not apply.
    stateful: one interpreter a trajectory, opened at its first call and forked for branches.
    echo: show the value of a last bare expression.
    form: makes the text for the model.
    """
    owned = sandbox is None
    if sandbox is None:
        from agentropy.sandbox import LocalSandbox

        sandbox = LocalSandbox()
    return PythonPart(sandbox, timeout, stateful, echo, form, owned)


async def _no_run(arguments: Mapping[str, Any]) -> ToolResult:
    raise ToolLost("this record only describes the tool")


async def _maybe(thing: Any, method: str) -> None:
    function = getattr(thing, method, None)
    if function is not None:
        done = function()
        if inspect.isawaitable(done):
            await done
