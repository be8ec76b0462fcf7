"""The `python` tool: code from the policy, run in the sandbox."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from agentropy.errors import UserError
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

    @property
    def session_reset(self) -> bool: ...

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
        self._good_setups: set[str] = set()
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
        setup = row.get("setup")
        setup = "" if setup is None else setup
        if not isinstance(setup, str):
            raise UserError(f"a question's setup is Python code, a text, not {type(setup).__name__}")
        return (_Stateful(self, seed, setup, None) if self._stateful else _Stateless(self, seed, setup)), None

    async def close(self) -> None:
        if self._owned:
            await _maybe(self._sandbox, "close")

    def result(self, execution: Execution) -> ToolResult:
        """The execution as a tool result. A fault of the sandbox itself is raised as ToolLost."""
        status = STATUS[execution.status]
        if status == "lost":
            raise ToolLost(self._form(execution) or "the sandbox failed")
        return ToolResult(self._form(execution), status)

    async def execute(self, code: str, seed: int, setup: str = "") -> ToolResult:
        """A run without state, after the question's own `setup` in the same process.

        Raises ToolLost for a fault of the sandbox, UserError where it can't run at all or the setup fails by itself.
        """
        result = self.result(await self._execute(f"{setup}\n{code}" if setup else code, seed))
        if setup and result.status != "ok" and setup not in self._good_setups:
            self._check_setup(setup, await self._execute(setup, seed))
            self._good_setups.add(setup)
        return result

    async def _execute(self, code: str, seed: int) -> Execution:
        try:
            ran = await self._sandbox.execute([code], timeout=self._timeout, seed=seed, echo=self._echo)
        except (RuntimeError, OSError) as error:  # a full queue, a dead supervisor
            raise ToolLost(f"the sandbox failed: {error}") from error
        done: Execution = ran[0]
        return done

    async def run_cell(self, session: SandboxSession, code: str) -> Execution:
        """A run in a session. Raises as `execute`."""
        try:
            return await session.run(code, timeout=self._timeout, echo=self._echo)
        except (RuntimeError, OSError) as error:
            raise ToolLost(f"the sandbox failed: {error}") from error

    async def set_up(self, session: SandboxSession, setup: str) -> None:
        """Run a question's setup in its session. Raises as `execute`."""
        self._check_setup(setup, await self.run_cell(session, setup))

    def _check_setup(self, setup: str, ran: Execution) -> None:
        status = self.result(ran).status
        if status == "timeout":  # may be a busy machine's fault
            raise ToolLost("the setup of a question took too long")
        if status != "ok":
            shown = setup if len(setup) <= 80 else f"{setup[:80]}…"
            why = " ".join(ran.for_model(max_chars=400).split())
            raise UserError(f"the setup of a question fails in the python tool ({shown!r}): {why}")

    def session(self, seed: int) -> AbstractAsyncContextManager[Any]:
        """A sandbox session, not yet entered."""
        opened: AbstractAsyncContextManager[Any] = self._sandbox.session(seed=seed)
        return opened


class _Stateless:
    keeps_time = True
    repeatable = True

    def __init__(self, part: PythonPart, seed: int, setup: str) -> None:
        self._part = part
        self._seed = seed
        self._setup = setup
        self.tools: Sequence[Tool] = (Tool("python", part.description, _PARAMETERS, self._run),)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._part.execute(arguments["code"], self._seed, self._setup)

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        return self

    async def close(self) -> None:
        return None


class _Stateful:
    keeps_time = True
    repeatable = False

    def __init__(self, part: PythonPart, seed: int, setup: str, session: Any, ready: bool = False) -> None:
        self._part = part
        self._seed = seed
        self._setup = setup
        self._session = session
        self._ready = ready  # the setup has run in the present interpreter
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        if session is not None:
            self._stack.push_async_callback(session.close)
        self.tools: Sequence[Tool] = (Tool("python", part.description, _PARAMETERS, self._run),)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._lock:  # cells run in order, and one session is opened, however many calls a turn has
            if self._session is None:
                self._session = await self._stack.enter_async_context(self._part.session(self._seed))
            if self._setup and not self._ready:
                await self._part.set_up(self._session, self._setup)
                self._ready = True
            ran = await self._part.run_cell(self._session, arguments["code"])
            if ran.session_reset:
                self._ready = False
            return self._part.result(ran)

    async def reward(self) -> float | None:
        return None

    async def fork(self) -> PartSession:
        copied = None if self._session is None else await self._session.fork()
        return _Stateful(self._part, self._seed, self._setup, copied, self._ready)

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
        A question's row may have `setup`: code that runs before the agent's, in each call, or once a session.
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
