"""`LocalSandbox`: the asyncio side of the supervisor. Sends programs, awaits results, replaces a dead supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import site
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from agentropy.errors import UserError
from agentropy.sandbox.forkserver import clean_environment, command
from agentropy.sandbox.results import Capabilities, ExecutionResult, Limits
from agentropy.sandbox.session import Session
from agentropy.sandbox.wire import Frames, frame

logger = logging.getLogger(__name__)
ISOLATIONS = ("strict", "namespaces", "landlock")
MEGA = 1 << 20
LONGEST_S = 86_400.0
SYSTEM_TREES = (
    "/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
    "/usr/share/zoneinfo", "/usr/share/fonts", "/etc/fonts",
)  # fmt: skip


class SandboxBusy(RuntimeError):
    """More calls wait than `Limits.queue` allows."""


class LocalSandbox:
    """Runs untrusted Python on this machine, each program in a locked child of a warm interpreter.

    `workers` programs run at once (default: one per core); further calls wait and their clocks start when they do.
    `isolation`: "strict" needs Landlock and seccomp, or namespaces, and adds namespaces where possible; "namespaces"
    requires them; "landlock" leaves them out. Where the floor can't be had, `start` raises UserError, unless
    `allow_unsafe`.
    """

    def __init__(
        self,
        workers: int | None = None,
        preload: Sequence[str] = ("numpy", "sympy"),
        isolation: str = "strict",
        allow_unsafe: bool = False,
        limits: Limits = Limits(),
    ) -> None:
        if isolation not in ISOLATIONS:
            raise UserError(f"unknown isolation {isolation!r}; one of {', '.join(ISOLATIONS)}")
        if workers is not None and workers < 1:
            raise UserError(f"a sandbox needs at least one worker, not {workers}")
        self.workers = workers or len(os.sched_getaffinity(0))
        self.preload = tuple(preload)
        self.isolation = isolation
        self.allow_unsafe = allow_unsafe
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames, self._outbox = Frames(), bytearray()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._started: asyncio.Future[Capabilities] | None = None
        self._capabilities: Capabilities | None = None
        self._sessions: set[str] = set()
        self._deaths: list[float] = []
        self._broken = ""

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> Capabilities:
        """Start the supervisor and wait for its self-test. Raises UserError when isolation can't be had."""
        self._attach()
        if self._started is None:
            self._launch()
        assert self._started is not None
        about = await asyncio.shield(self._started)
        if about is not self._capabilities:
            self._capabilities = about
            grade = logging.WARNING if about.level == "unsafe" else logging.INFO
            logger.log(grade, "sandbox isolation: %s; not in force: %s", about.level, "; ".join(about.missing) or "-")
        return about

    async def close(self) -> None:
        """End every program and process of this sandbox and wait until they are gone."""
        process = self._process
        self._forget_supervisor("the sandbox was closed")
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, _wait, process)

    def capabilities(self) -> Capabilities:
        """What is in force; the sandbox must have been started."""
        if self._capabilities is None:
            raise UserError("the sandbox has not been started")
        return self._capabilities

    # --- calls ---

    async def execute(
        self,
        codes: Sequence[str],
        *,
        timeout: float = 5.0,
        stdin: str | None = None,
        seed: int = 0,
        echo: bool = True,
    ) -> list[ExecutionResult]:
        """Run programs, each in a process of its own that knows nothing of the others. Results in the order of `codes`.

        `timeout` in seconds of wall clock each, counted from the start of the program; `echo` shows the value of a last
        bare expression. Raises SandboxBusy when the queue is full and UserError when the sandbox can't run at all; a
        failing program is a result.
        """
        await self.start()
        calls = [self.call(code, timeout=timeout, stdin=stdin, seed=seed, echo=echo) for code in codes]
        return list(await asyncio.gather(*calls))

    @asynccontextmanager
    async def session(self, *, seed: int = 0) -> AsyncIterator[Session]:
        """An interpreter that keeps its variables from cell to cell, for the length of the `async with` block."""
        session = await self.open_session(seed=seed)
        try:
            yield session
        finally:
            await session.close()

    async def open_session(self, *, seed: int = 0) -> Session:
        """As `session`, for callers that close it themselves. The interpreter starts with the first cell."""
        await self.start()
        return Session(self, self.new_session(seed), seed)

    def new_session(self, seed: int) -> str:
        """Announce a session to the supervisor; returns its key."""
        key = f"s{next(self._numbers)}"
        self._sessions.add(key)
        self._send({"op": "open", "session": key, "seed": seed})
        return key

    def end_session(self, key: str) -> None:
        """Forget a session and end its interpreter."""
        if key in self._sessions:
            self._sessions.discard(key)
            self._send({"op": "close", "session": key})

    def has_session(self, key: str) -> bool:
        """Whether the current supervisor knows this session."""
        return key in self._sessions

    async def call(
        self,
        code: str,
        *,
        timeout: float = 5.0,
        stdin: str | None = None,
        seed: int = 0,
        echo: bool = True,
        session: str | None = None,
    ) -> ExecutionResult:
        """Run one program, or one cell of a session."""
        if not isinstance(code, str) or not isinstance(stdin, str | None):
            raise TypeError("code must be a string, stdin a string or None")
        if not 0 < timeout <= LONGEST_S:
            raise ValueError(f"timeout must be between 0 and {LONGEST_S:.0f} seconds, not {timeout}")
        self._attach()
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        message = {
            "op": "run",
            "id": number,
            "code": code,
            "stdin": stdin,
            "timeout": timeout,
            "seed": seed,
            "echo": echo,
        }
        self._send(message | {"session": session})
        try:
            answer = await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._send({"op": "cancel", "id": number})
            raise
        if answer["status"] == "busy":
            raise SandboxBusy(f"{self.limits.queue} calls are waiting already")
        unsafe = self._capabilities is not None and self._capabilities.level == "unsafe"
        return _result(answer, unsafe)

    # --- the supervisor ---

    def _launch(self) -> None:
        if self._broken:
            raise UserError(f"the sandbox keeps failing: {self._broken}")
        if sys.platform != "linux":
            raise UserError(
                f"no sandbox on {sys.platform}: run `agentropy sandbox serve` on a Linux one and use RemoteSandbox(url)"
            )
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._process = subprocess.Popen(
            command("supervisor", self._configuration(theirs.fileno()), isolated=True),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=clean_environment(),
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._started = asyncio.get_running_loop().create_future()
        self._loop = None
        self._attach()

    def _configuration(self, descriptor: int) -> dict[str, Any]:
        limits = self.limits
        return {
            "fd": descriptor,
            "workers": self.workers,
            "preload": list(self.preload),
            "isolation": self.isolation,
            "namespaces": self.isolation != "landlock",
            "unsafe": self.allow_unsafe,
            "trees": interpreter_trees(),
            "first_user": _first_user(),
            "limits": {
                "memory": limits.memory_mb * MEGA,
                "file": limits.file_mb * MEGA,
                "descriptors": limits.descriptors,
                "threads": limits.threads,
                "scratch": limits.scratch_mb * MEGA,
                "scratch_files": limits.scratch_files,
                "code": limits.code_kb << 10,
                "output": limits.output_kb << 10,
                "output_kill": limits.output_kill_mb * MEGA,
                "queue": limits.queue,
                "sessions": limits.sessions,
                "session_idle": limits.session_idle_s,
            },
        }

    def _attach(self) -> None:
        """Listen in the running event loop; a sandbox may be used from one loop after another, not from two at once."""
        loop = asyncio.get_running_loop()
        if self._socket is None or self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        if self._started is not None and self._started.done() and not self._started.cancelled():
            finished = self._started
            self._started = loop.create_future()
            if (error := finished.exception()) is not None:
                self._started.set_exception(error)
            else:
                self._started.set_result(finished.result())
        elif self._loop is not None:
            self._started = loop.create_future()
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._read)

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            return  # the supervisor has just died: the reader will say so
        self._outbox += frame(message)
        self._flush()

    def _flush(self) -> None:
        if self._socket is None or self._loop is None:
            return
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox[:MEGA])]
            self._loop.remove_writer(self._socket.fileno())
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._flush)
        except OSError:
            self._outbox.clear()  # the reader will see the end

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MEGA)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget_supervisor("the supervisor died")
            return
        for message in self._frames.feed(data):
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message.get("op")
        if kind is None:
            future = self._waiting.pop(message["id"], None)
            if future is not None and not future.done():
                future.set_result(message)
        elif kind == "ready" and self._started is not None:
            self._started.set_result(self._describe(message))
        elif kind == "failed" and self._started is not None:
            self._started.set_exception(UserError(_refusal(message)))
            self._started.exception()  # nobody may be waiting any more
        elif kind == "broken":
            self._broken = message["reason"]

    def _describe(self, message: dict[str, Any]) -> Capabilities:
        about = message["about"]
        missing = [*about["missing"], *about["leaks"]]
        missing += [f"preload of {name}: not installed" for name in self.preload if find_spec(name) is None]
        if about["no_namespaces"]:
            missing.append(f"namespaces: {about['no_namespaces']}")
        safe = about["seccomp"] and (about["landlock"] or about["namespaces"]) and not about["leaks"]
        return Capabilities(
            level="unsafe" if not safe else "namespaces" if about["namespaces"] else "strict",
            landlock_abi=about["landlock"],
            seccomp=about["seccomp"],
            namespaces=about["namespaces"],
            own_user=about["own_user"] or about["user_namespace"],
            workers=self.workers,
            preloaded=self.preload,
            proven=tuple(message["proven"]),
            missing=tuple(missing),
        )

    def _forget_supervisor(self, why: str) -> None:
        """The socket has ended: waiting calls get a `sandbox_error`, and the next call starts a new supervisor."""
        if self._socket is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
                self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        started, self._started = self._started, None
        if started is not None and not started.done() and not started.get_loop().is_closed():
            started.set_exception(UserError(f"the sandbox did not start: {why}"))
            started.exception()
        elif started is not None and started.done() and not started.cancelled() and started.exception() is not None:
            self._started = None
        if self._process is not None and self._process.poll() is None and why == "the supervisor died":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        if why == "the supervisor died":
            now = time.monotonic()
            self._deaths = [moment for moment in self._deaths if now - moment < 60.0] + [now]
            if len(self._deaths) >= 3:
                self._broken = f"the supervisor died {len(self._deaths)} times within a minute"
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_result({"status": "sandbox_error", "stderr": why, "reset": True})
        self._socket, self._loop, self._process = None, None, None
        self._sessions.clear()
        self._frames = Frames()
        self._outbox.clear()


def interpreter_trees() -> list[str]:
    """What a program must be able to read: the standard library, site-packages and the system's libraries."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    trees = [sysconfig.get_paths()[name] for name in names]
    trees += [os.path.join(prefix, folder) for prefix in (sys.prefix, sys.base_prefix) for folder in ("lib", "lib64")]
    trees += [os.path.join(path) for path in site.getsitepackages()]
    found = [path for path in dict.fromkeys([*trees, *SYSTEM_TREES]) if os.path.exists(path)]
    return list(dict.fromkeys([*found, *map(os.path.realpath, found)]))


def _first_user() -> int:
    """The first of 4,096 user ids that nobody else uses, where ids are plenty other ones for each trainer."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/uid_map") as file:
            start, _, count = map(int, file.readline().split())
        if start == 0 and count > 1 << 31:
            return 1_000_000_000 + (os.getpid() % (1 << 17)) * 4097
    return 61_000


def _refusal(message: dict[str, Any]) -> str:
    reason = message["reason"]
    if message["no_namespaces"]:
        reason += f"; namespaces: {message['no_namespaces']}"
    return (
        f"no safe sandbox on this machine: {reason}. Use a machine with Landlock or user namespaces, a remote sandbox, "
        "or accept the risk: --sandbox unsafe in training, allow_unsafe=True in Python"
    )


def _result(answer: dict[str, Any], unsafe: bool) -> ExecutionResult:
    return ExecutionResult(
        status=answer["status"],
        stdout=answer.get("stdout", ""),
        stderr=answer.get("stderr", ""),
        duration=answer.get("duration", 0.0),
        cpu_time=answer.get("cpu", 0.0),
        queue_time=answer.get("queue", 0.0),
        max_rss_mb=answer.get("rss", 0),
        exit_code=answer.get("exit"),
        truncated=answer.get("truncated", False),
        session_reset=answer.get("reset", False),
        unsafe=unsafe,
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
