"""The pool over HTTP, our own client against our own server, and the client against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentropy.errors import UserError
from agentropy.sandbox import LocalSandbox, RemoteSandbox
from agentropy.sandbox.remote import with_echo
from agentropy.sandbox.server import MOST_BYTES, listen
from agentropy.tools.python import python_tool
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import ToolCall


def served(work: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with LocalSandbox(workers=2, preload=()) as sandbox:
            server = await listen(sandbox, "127.0.0.1", 0)
            async with server:
                await work(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(main())


def test_programs_come_back_as_from_a_local_sandbox() -> None:
    async def work(url: str) -> None:
        async with RemoteSandbox(url) as sandbox:
            assert sandbox.capabilities().level == "remote"
            codes = [
                "print('é')\n2 + 3",
                "1/0",
                "while True: pass",
                "import os; os.abort()",
                "while True: print('x' * 10000)",
            ]
            results = await sandbox.execute(codes, timeout=1.0)
            assert [r.status for r in results] == ["ok", "error", "timeout", "crash", "output_limit"]
            assert results[0].stdout == "é\n5\n"
            assert "ZeroDivisionError" in results[1].stderr
            assert (await sandbox.call("import sys; sys.exit(3)")).exit_code == 3
            assert (await sandbox.call("print(input())", stdin="line\n")).stdout == "line\n"
            assert (await sandbox.call("7", echo=False)).stdout == ""

    served(work)


def test_sessions_replay_and_fork() -> None:
    async def work(url: str) -> None:
        async with RemoteSandbox(url) as sandbox, sandbox.session(seed=3) as session:
            assert (await session.run("import random\nx = random.random()")).status == "ok"
            first = (await session.run("x")).stdout
            assert first == (await session.run("x")).stdout != ""
            failed = await session.run("print('a')\n1/0")
            assert (failed.status, failed.stdout) == ("error", "a\n")
            twin = await session.fork()
            await twin.run("x = 5")
            assert (await twin.run("x")).stdout == "5\n"
            assert (await session.run("x")).stdout == first
            late = await session.run("while True: pass", timeout=0.3)
            assert (late.status, late.session_reset) == ("timeout", True)

    served(work)


def test_the_stateful_python_tool_runs_on_a_server() -> None:
    async def work(url: str) -> None:
        async with RemoteSandbox(url) as sandbox:
            for echo, shown in ((True, "42"), (False, "")):
                box = make_toolbox([python_tool(sandbox, timeout=5.0, stateful=True, echo=echo)])
                session, _ = await box.open({}, 0)
                for code, expected in (("x = 6", ""), ("x * 7", shown)):
                    [result] = await session.call([ToolCall("python", {"code": code})])
                    assert (result.status, result.content.strip()) == ("ok", expected or result.content.strip())
                    assert (shown in result.content) if expected else ("42" not in result.content)
                await session.close()

    served(work)


def test_the_protocol_by_hand() -> None:
    async def work(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/v1/ping")).json() == "pong"
            body = {"code": "print(1)", "language": "python"}
            answer = (await client.post("/run_code", json=body)).json()
            assert answer["status"] == "Success"
            assert answer["run_result"]["stdout"] == "1\n"
            assert answer["run_result"]["return_code"] == 0
            late = (await client.post("/run_code", json={**body, "code": "while 1: 1", "run_timeout": 0.2})).json()
            assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
            for wrong in ({"language": "cpp"}, {"files": {"a": "eA=="}}):
                answer = (await client.post("/run_code", json={**body, **wrong})).json()
                assert answer["status"] == "SandboxError"
                assert answer["message"]
            cells = {"cells": ["a = 1", "a", "1/0", "print(a)"]}
            shown = (await client.post("/run_jupyter", json=cells)).json()
            assert shown["status"] == "Success"
            assert [cell["stdout"] for cell in shown["cells"]] == ["", "1\n", "", "1\n"]
            assert shown["cells"][2]["error"][0]["ename"] == "ZeroDivisionError"
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.get("/run_code")).status_code == 405
            assert (await client.post("/run_code", content=b"{")).status_code == 422
            assert (await client.post("/run_code", json=[1])).status_code == 422
            assert (await client.post("/run_code", json={})).status_code == 422
            assert (await client.post("/run_code", json={**body, "code": 5})).status_code == 422
            assert (await client.post("/run_code", json={**body, "run_timeout": "x"})).status_code == 422
            assert (await client.post("/run_code", content=b"x" * (MOST_BYTES + 1))).status_code == 413
            assert (await client.post("/run_code", json=body)).status_code == 200

    served(work)


def test_garbage_on_the_socket_does_no_harm() -> None:
    async def work(url: str) -> None:
        port = int(url.rsplit(":", 1)[1])
        for data in (
            b"\x00\xff\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST /run_code HTTP/1.1\r\ncontent-length: x\r\n\r\n",
            b"A" * 200_000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        async with RemoteSandbox(url) as sandbox:
            assert (await sandbox.call("1")).stdout == "1\n"

    served(work)


def test_a_port_in_use_is_said_so() -> None:
    async def work(url: str) -> None:
        async with LocalSandbox(workers=1, preload=()) as other:
            with pytest.raises(UserError, match=r"can't listen on 127\.0\.0\.1:\d+: .*in use.*--port"):
                await listen(other, "127.0.0.1", int(url.rsplit(":", 1)[1]))

    served(work)


READY = {
    "status": "Success",
    "message": "",
    "run_result": {"status": "Finished", "return_code": 0, "stdout": "ready\n"},
}


def scripted(answers: list[tuple[int, Any]], work: Callable[[RemoteSandbox], Awaitable[None]]) -> int:
    """Run `work` against a server that gives these answers after a good first one; returns the requests."""
    given = [(200, READY), *answers]
    seen = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        status, content = given[min(seen, len(given) - 1)]
        seen += 1
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server, RemoteSandbox(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tries=3) as sandbox:
            await work(sandbox)

    asyncio.run(main())
    return seen - 1


@pytest.mark.parametrize(
    ("answers", "status", "requests"),
    [
        ([(503, {}), (429, {}), (200, READY)], "ok", 3),
        ([(503, {})], "sandbox_error", 3),
        ([(500, {"detail": "bug"})], "sandbox_error", 1),
        ([(200, b"<html>")], "sandbox_error", 1),
        ([(200, [])], "sandbox_error", 1),
        ([(200, {"status": "SandboxError", "message": "no pod"})], "sandbox_error", 1),
        ([(200, {"status": "Failed", "run_result": None})], "sandbox_error", 1),
        ([(200, {"status": "Failed", "run_result": {"status": "Error", "stderr": "x"}})], "sandbox_error", 1),
        ([(200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "p"}})], "timeout", 1),
        ([(200, {"status": "Failed", "run_result": {"status": "Finished", "return_code": 1}})], "error", 1),
        ([(200, {"status": "Failed", "run_result": {"status": "Finished", "return_code": -11}})], "crash", 1),
        ([(200, {"status": "Failed", "run_result": {"status": "Finished", "return_code": 137}})], "crash", 1),
    ],
)
def test_failures_of_the_server_are_not_results_of_the_program(
    answers: list[tuple[int, Any]], status: str, requests: int
) -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        assert (await sandbox.call("print(1)", timeout=1.0)).status == status

    assert scripted(answers, work) == requests


def test_a_full_pipe_that_looks_like_a_timeout_is_warned_about() -> None:
    async def work(sandbox: RemoteSandbox) -> None:
        with pytest.warns(UserWarning, match="full pipe"):
            await sandbox.call("print('x' * 200000)")

    run = {"status": "TimeLimitExceeded", "stdout": "x" * 196_608}
    scripted([(200, {"status": "Failed", "run_result": run})], work)


def test_no_server_is_a_user_error() -> None:
    async def work() -> None:
        with pytest.raises(UserError, match=r"no sandbox at .*: sandbox_error ConnectError"):
            await RemoteSandbox("http://127.0.0.1:9", tries=2).start()

    asyncio.run(work())
    with pytest.raises(UserError, match="http://"):
        RemoteSandbox("127.0.0.1:8080")


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("x = 1; x # c", "1\n"),
        ("print('a')", "a\n"),
        ("é = 'é'; é", "'é'\n"),
        ("(1 +\n 2)", "3\n"),
        ("'''a\nb'''", "'a\\nb'\n"),
        ("x = 1", ""),
        ("def f(:", None),
    ],
)
def test_echo_added_on_our_side_equals_the_local_one(code: str, shown: str | None) -> None:
    if shown is None:
        assert with_echo(code) == code
        return

    async def work() -> list[str]:
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            far = await sandbox.call(with_echo(code), echo=False)
            return [far.stdout, (await sandbox.call(code)).stdout]

    assert asyncio.run(work()) == [shown, shown]
