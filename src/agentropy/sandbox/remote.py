"""`RemoteSandbox`: the same interface over a server that speaks SandboxFusion's protocol, ours say.

A failure of the server or the network is a `sandbox_error`, never a result of the program. Only what cannot have run
the program is tried again: connection errors and the answers 429, 502, 503, 504.
"""

from __future__ import annotations

import ast
import asyncio
import random
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentropy.errors import UserError
from agentropy.sandbox.results import Capabilities, ExecutionResult

if TYPE_CHECKING:
    import httpx

TRY_AGAIN = (429, 502, 503, 504)
PIPE_BUG_BYTES = 196_608  # servers of 2026 that don't drain a full pipe report this much output as a timeout


class RemoteSandbox:
    """Runs programs on a server. Use as `LocalSandbox`; `execute` can't fix a seed there, sessions seed `random`.

    `queue_allowance_s` is added to each program's time limit for the wait in the server's queue; `tries` counts
    connections.
    """

    def __init__(
        self,
        url: str,
        max_concurrency: int = 32,
        queue_allowance_s: float = 60.0,
        tries: int = 5,
        memory_mb: int = 1024,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"a sandbox URL starts with http:// or https://, not {url!r}")
        self.url = url.rstrip("/")
        self.max_concurrency = max_concurrency
        self.queue_allowance_s = queue_allowance_s
        self.tries = tries
        self.memory_mb = memory_mb
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> Capabilities:
        """Run one trivial program. Raises UserError when the server does not answer as it should."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            return self.capabilities()
        import httpx

        self._client = httpx.AsyncClient(base_url=self.url, limits=httpx.Limits(max_connections=self.max_concurrency))
        self._slots, self._loop = asyncio.Semaphore(self.max_concurrency), asyncio.get_running_loop()
        result = await self.call("print('ready')")
        if result.stdout.strip() != "ready":
            await self.close()
            raise UserError(f"no sandbox at {self.url}: {result.status} {result.stderr.strip()[:300]}")
        return self.capabilities()

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def capabilities(self) -> Capabilities:
        """All that can be said of a remote sandbox: that it is one. What isolates it is the server's affair."""
        return Capabilities("remote", workers=self.max_concurrency, details={"url": self.url})

    async def execute(
        self, codes: Sequence[str], *, timeout: float = 5.0, stdin: str | None = None, seed: int = 0, echo: bool = True
    ) -> list[ExecutionResult]:
        """Run programs, results in order. As `LocalSandbox.execute`."""
        await self.start()
        calls = [self.call(code, timeout=timeout, stdin=stdin, seed=seed, echo=echo) for code in codes]
        return list(await asyncio.gather(*calls))

    @asynccontextmanager
    async def session(self, *, seed: int = 0) -> AsyncIterator[RemoteSession]:
        """A session that sends all its earlier cells with each new one: the cost grows with their square."""
        await self.start()
        yield RemoteSession(self, seed)

    async def call(
        self, code: str, *, timeout: float = 5.0, stdin: str | None = None, seed: int = 0, echo: bool = True
    ) -> ExecutionResult:
        """Run one program."""
        request = {
            "code": with_echo(code) if echo else code,
            "language": "python",
            "run_timeout": timeout,
            "compile_timeout": timeout,
            "memory_limit_MB": self.memory_mb,
            "stdin": stdin or "",
            "files": {},
            "fetch_files": [],
        }
        answer, queued = await self.post("/run_code", request, timeout)
        return answer if isinstance(answer, ExecutionResult) else _result(answer, queued)

    async def post(
        self, path: str, request: dict[str, Any], timeout: float
    ) -> tuple[dict[str, Any] | ExecutionResult, float]:
        """(the answer or a `sandbox_error`, seconds waited for one of our slots)."""
        import httpx

        assert self._client is not None
        assert self._slots is not None
        began = time.monotonic()
        why = ""
        async with self._slots:
            queued = time.monotonic() - began
            for attempt in range(self.tries):
                if attempt:
                    await asyncio.sleep(min(10.0, 0.1 * 2**attempt) * (0.5 + random.random()))
                try:
                    limit = httpx.Timeout(timeout + self.queue_allowance_s, connect=10.0)
                    response = await self._client.post(path, json=request, timeout=limit)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    why = f"{type(error).__name__}: {error}"
                    continue
                except httpx.HTTPError as error:
                    return _failed(f"{type(error).__name__}: {error}"), queued
                if response.status_code in TRY_AGAIN:
                    why = f"HTTP {response.status_code}"
                    continue
                try:
                    answer = response.json() if response.status_code == 200 else None
                except ValueError:
                    answer = None
                if not isinstance(answer, dict):
                    return _failed(f"HTTP {response.status_code}: {response.text[:300]}"), queued
                return answer, queued
        return _failed(f"{why}, {self.tries} times"), queued


class RemoteSession:
    """Cells on a server without state of its own for us: every call runs all of them again and shows the last."""

    def __init__(self, sandbox: RemoteSandbox, seed: int, cells: Sequence[str] = ()) -> None:
        self._sandbox = sandbox
        self._seed = seed
        self._cells = list(cells)

    async def run(self, code: str, *, timeout: float = 5.0, echo: bool = True) -> ExecutionResult:
        """Run one cell after all the earlier ones. `echo` shows the value of a last bare expression."""
        # A kernel shows the last value itself, unless it is None.
        cells = [*self._cells, code if echo else f"{code}\nNone"]
        request = {
            "cells": [f"import random\nrandom.seed({self._seed})", *cells],
            "cell_timeout": timeout,
            "total_timeout": timeout * len(cells),
            "kernel": "python3",
            "files": {},
            "fetch_files": [],
        }
        answer, queued = await self._sandbox.post("/run_jupyter", request, timeout * len(cells))
        if isinstance(answer, ExecutionResult):
            return answer
        result = _last_cell(answer, len(cells) + 1, queued)
        if result.status in ("ok", "error"):
            self._cells = cells
        return result

    async def fork(self) -> RemoteSession:
        """A second session with the same cells behind it."""
        return RemoteSession(self._sandbox, self._seed, self._cells)

    async def close(self) -> None:
        """Nothing is held on the server."""


def with_echo(code: str) -> str:
    """The program with its last bare expression shown as in a REPL; unchanged where there is none."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return code
    source = ast.get_source_segment(code, last.value, padded=False)
    rows = code.encode().splitlines(keepends=True)
    before = b"".join(rows[: last.lineno - 1]) + rows[last.lineno - 1][: last.col_offset]
    return f"{before.decode()}__import__('sys').displayhook((\n{source}\n))\n"


def _failed(why: str) -> ExecutionResult:
    return ExecutionResult("sandbox_error", stderr=why)


def _result(answer: dict[str, Any], queued: float) -> ExecutionResult:
    run = answer.get("run_result")
    if answer.get("status") not in ("Success", "Failed") or not isinstance(run, dict):
        return _failed(str(answer.get("message") or "the server reports a failure of its own")[:1000])
    out, err = run.get("stdout") or "", run.get("stderr") or ""
    code = run.get("return_code")
    late = run.get("status") == "TimeLimitExceeded"
    if late and len(out.encode()) == PIPE_BUG_BYTES:
        warnings.warn("a timeout with a full pipe of output: this server does not drain pipes, update it", stacklevel=2)
    if run.get("status") == "Error":
        return _failed(err[:1000])
    status = "timeout" if late else "ok" if answer["status"] == "Success" else "error"
    if answer.get("message") in ("output_limit", "disk_limit"):  # our own server says so
        status = answer["message"]
    elif status == "error" and isinstance(code, int) and (code < 0 or code > 128):
        status = "crash"
    return ExecutionResult(
        status=status,  # type: ignore[arg-type]
        stdout=out,
        stderr=err,
        duration=float(run.get("execution_time") or 0.0),
        queue_time=queued,
        exit_code=code if isinstance(code, int) and code >= 0 else None,
    )


def _last_cell(answer: dict[str, Any], count: int, queued: float) -> ExecutionResult:
    cells = answer.get("cells") or []
    if answer.get("status") == "Failed":
        cell = cells[-1] if cells else {}
        return ExecutionResult(
            "timeout", stdout=cell.get("stdout", ""), stderr=cell.get("stderr", ""), session_reset=True
        )
    if answer.get("status") != "Success" or len(cells) != count:
        return _failed(str(answer.get("message") or "the server reports a failure of its own")[:1000])
    cell = cells[-1]
    shown = "".join(f"{item['text/plain']}\n" for item in cell.get("display", []) if "text/plain" in item)
    failed = bool(cell.get("error"))
    err = cell.get("stderr", "")
    if failed and not err:
        err = "\n".join(str(row) for item in cell["error"] for row in item.get("traceback", [])) + "\n"
    return ExecutionResult(
        "error" if failed else "ok", stdout=cell.get("stdout", "") + shown, stderr=err, queue_time=queued
    )
