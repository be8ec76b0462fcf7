"""The local pool behind SandboxFusion's HTTP protocol, for verl and others: /run_code, /run_jupyter, /v1/ping.

Covered: Python, stdin, run_timeout, cells. Not covered: other languages, files, fetch_files, per-request memory
limits (the pool's own hold). There is no authentication, hence loopback by default: whoever reaches the port can run
programs in the pool.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agentropy.errors import UserError
from agentropy.sandbox.local import LocalSandbox, SandboxBusy
from agentropy.sandbox.results import ExecutionResult

MOST_BYTES = 8 << 20
REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    503: "Service Unavailable",
}
LONGEST_S = 3600.0


class BadRequest(Exception):
    """(HTTP status, what is wrong)."""


async def listen(sandbox: LocalSandbox, host: str, port: int) -> asyncio.Server:
    """Start to serve `sandbox`; port 0 takes a free one. Raises UserError when the address can't be had."""
    await sandbox.start()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _exchange(sandbox, reader, writer):
                pass
        except (ConnectionError, ValueError, asyncio.IncompleteReadError):
            pass  # the client went away or does not speak HTTP (ValueError: a line without end)
        finally:
            writer.close()

    try:
        return await asyncio.start_server(connected, host, port, limit=1 << 16)
    except OSError as error:
        raise UserError(f"can't listen on {host}:{port}: {error.strerror or error}; choose another --port") from error


async def _exchange(sandbox: LocalSandbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request. Returns whether the connection stays open."""
    line = (await reader.readline()).decode("latin-1").split()
    if len(line) != 3:
        return False
    method, path, version = line
    headers = {}
    while text := (await reader.readline()).decode("latin-1").strip():
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    keep = headers.get("connection", "").lower() != "close" and version != "HTTP/1.0"
    try:
        length = int(headers.get("content-length", 0))
    except ValueError:
        return False
    if length > MOST_BYTES or "chunked" in headers.get("transfer-encoding", ""):
        while length > 0 and (part := await reader.read(1 << 16)):  # else the client sees a reset, not the answer
            length -= len(part)
        text = f"a body of at most {MOST_BYTES} bytes with a content-length"
        await _answer(writer, 413, {"detail": text}, keep=False)
        return False
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(length)
    try:
        status, content = 200, await _route(sandbox, method, path.partition("?")[0], body)
    except BadRequest as error:
        status, content = error.args[0], {"detail": error.args[1]}
    except SandboxBusy as error:
        status, content = 429, {"detail": str(error)}
    except UserError as error:
        status, content = 503, {"detail": str(error)}
    await _answer(writer, status, content, keep)
    return keep


async def _answer(writer: asyncio.StreamWriter, status: int, content: Any, keep: bool) -> None:
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


async def _route(sandbox: LocalSandbox, method: str, path: str, body: bytes) -> Any:
    if path == "/v1/ping":
        return "pong"
    handler = {"/run_code": _run_code, "/run_jupyter": _run_jupyter}.get(path)
    if handler is None:
        raise BadRequest(404, f"no {path}; there are /run_code, /run_jupyter and /v1/ping")
    if method != "POST":
        raise BadRequest(405, f"{path} takes POST")
    try:
        request = json.loads(body)
    except ValueError as error:
        raise BadRequest(422, f"the body is no JSON: {error}") from error
    if not isinstance(request, dict):
        raise BadRequest(422, "the body is no JSON object")
    return await handler(sandbox, request)


def _field(request: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = request.get(name, default)
    if value is None and name not in request:
        raise BadRequest(422, f"{name} is missing")
    if not isinstance(value, kind) and value is not default:
        raise BadRequest(422, f"{name} has the wrong type")
    return value


def _seconds(request: dict[str, Any], name: str, default: float) -> float:
    return min(max(float(_field(request, name, (int, float), default)), 0.01), LONGEST_S)


def _unsupported(request: dict[str, Any]) -> str:
    if request.get("files") or request.get("fetch_files"):
        return "files and fetch_files are not supported by this server"
    if request.get("language", "python") != "python":
        return f"only python runs here, not {request['language']}"
    return ""


async def _run_code(sandbox: LocalSandbox, request: dict[str, Any]) -> dict[str, Any]:
    code = _field(request, "code", str, None)
    answer: dict[str, Any] = {
        "message": "",
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
    }
    if reason := _unsupported(request):
        return answer | {"status": "SandboxError", "message": reason}
    stdin = _field(request, "stdin", (str, type(None)), "")
    result = await sandbox.call(code, timeout=_seconds(request, "run_timeout", 10.0), stdin=stdin, echo=False)
    if result.status == "sandbox_error":
        return answer | {"status": "SandboxError", "message": result.stderr or "the sandbox failed"}
    message = result.status if result.status in ("output_limit", "disk_limit") else ""
    return answer | {"status": "Success" if result.ok else "Failed", "message": message, "run_result": _command(result)}


def _command(result: ExecutionResult) -> dict[str, Any]:
    code = result.exit_code if result.exit_code is not None else None if result.status == "timeout" else -9
    return {
        "status": "TimeLimitExceeded" if result.status == "timeout" else "Finished",
        "execution_time": result.duration,
        "return_code": code,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


async def _run_jupyter(sandbox: LocalSandbox, request: dict[str, Any]) -> dict[str, Any]:
    """Cells in one fresh session. The value of a last expression is in the cell's stdout."""
    cells = _field(request, "cells", list, None)
    if not all(isinstance(cell, str) for cell in cells):
        raise BadRequest(422, "cells has the wrong type")
    answer: dict[str, Any] = {"message": "", "driver": None, "cells": [], "executor_pod_name": None, "files": {}}
    if reason := _unsupported(request):
        return answer | {"status": "SandboxError", "message": reason}
    left = _seconds(request, "total_timeout", 45.0)
    each = float(_field(request, "cell_timeout", (int, float), 0.0)) or left
    shown: list[dict[str, Any]] = []
    async with sandbox.session() as session:
        for cell in cells:
            result = await session.run(cell, timeout=max(0.01, min(each, left)))
            left -= result.duration
            if result.status == "sandbox_error":
                return answer | {"status": "SandboxError", "message": result.stderr or "the sandbox failed"}
            shown.append(_cell(result))
            if result.status not in ("ok", "error"):
                late = {
                    "status": "TimeLimitExceeded",
                    "execution_time": None,
                    "return_code": None,
                    "stdout": "",
                    "stderr": "",
                }
                return answer | {"status": "Failed", "message": result.status, "driver": late, "cells": shown}
    done = {"status": "Finished", "execution_time": None, "return_code": 0, "stdout": "", "stderr": ""}
    return answer | {"status": "Success", "driver": done, "cells": shown}


def _cell(result: ExecutionResult) -> dict[str, Any]:
    error = []
    if result.status != "ok":
        rows = result.stderr.rstrip("\n").split("\n")
        name, _, value = rows[-1].partition(": ")
        error.append({"ename": name, "evalue": value, "traceback": rows})
    return {"stdout": result.stdout, "stderr": result.stderr, "display": [], "error": error}
