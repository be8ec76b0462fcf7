"""MCP servers, real ones, over stdio and HTTP: results, time limits, deaths, floods, and no process left behind."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from agentropy.errors import UserError
from agentropy.tools import make_toolbox, mcp_tools
from agentropy.tools.mcp import McpPart, _offer, _plain
from agentropy.tools.mcp_link import Server
from agentropy.tools.session import Session
from agentropy.trajectory import ToolCall, ToolResult

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = f"{sys.executable} {SERVER}"

Work = Callable[[Session], Awaitable[Any]]


def with_box(parts: list[Any], work: Work) -> Any:
    async def main() -> Any:
        box = make_toolbox(parts)
        await box.start()
        session, _ = await box.open({}, 0)
        try:
            return await work(session)
        finally:
            await session.close()
            await box.close()

    return asyncio.run(main())


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool, arguments)


def alive(pid: int) -> bool:
    """Whether a process runs, a short while being granted to it to go."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (ProcessLookupError, FileNotFoundError):
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def part() -> McpPart:
    """One probe of the server for all tests: a part can be started again."""
    return mcp_tools(COMMAND, timeout=30.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def check_results(results: list[ToolResult]) -> None:
    assert [r.status for r in results] == ["ok"] * 6 + ["error"] * 2 + ["invalid"] * 4
    assert results[0].content == "3"
    assert results[1].content == "größe 東京 🙂\n"
    assert results[2].content == (
        "one\n[image, image/png]\n[resource https://example.org/a]\n[resource file:///data.bin]\ntwo"
    )
    assert results[3].content == '{"größe": [1, 2]}'
    assert len(results[4].content) < 9000
    assert "characters left out]" in results[4].content
    assert results[4].content.endswith("xend")
    assert results[5].content == "odd"
    assert results[6].content == "no such point"
    assert "fail" in results[7].content
    assert 'argument "b" is missing' in results[8].content
    assert 'argument "a" must be of type integer' in results[9].content
    assert "the tools are: add, search" in results[10].content
    assert "Unicode" in results[11].content


CALLS = [
    call("add", a=1, b="2"),
    call("echo", text="größe 東京 🙂\n"),
    call("mixed"),
    call("structured"),
    call("flood", size=1_000_000),
    call("odd_name", text="odd"),
    call("refuse", point={}),
    call("fail", why="ä"),
    call("add", a=1),
    call("add", a="x", b=2),
    call("nothing"),
    call("echo", text="\ud800"),
]


def test_results_over_stdio_and_no_process_is_left(part: McpPart) -> None:
    pids = []

    async def work(session: Session) -> list[ToolResult]:
        pids.append(int((await session.call([call("pid")]))[0].content))
        # Nobody may have to read what the server writes to its stderr.
        loud = await session.call([call("chatter", size=1_000_000) for _ in range(2)])
        assert [r.content for r in loud] == ["done", "done"]
        return await session.call(CALLS)

    assert part.specs[0]["function"]["description"] == "Adds two numbers."
    assert part.specs[0]["function"]["parameters"]["required"] == ["a", "b"]
    check_results(with_box([part], work))
    assert not alive(pids[0])


def test_results_over_http_with_many_calls_at_once(url: str) -> None:
    async def work(session: Session) -> list[ToolResult]:
        many = await session.call([call("echo", text=str(i)) for i in range(40)])
        assert [r.content for r in many] == [str(i) for i in range(40)]
        return await session.call(CALLS)

    check_results(with_box([mcp_tools(url)], work))


@pytest.mark.slow
def test_a_blocked_server_is_started_again(part: McpPart) -> None:
    hasty = copy.copy(part)
    hasty._timeout = 4.0

    async def work(session: Session) -> list[ToolResult]:
        (before,) = await session.call([call("pid")])
        (blocked,) = await session.call([call("block")])
        (after,) = await session.call([call("pid")])
        return [before, blocked, after]

    before, blocked, after = with_box([hasty], work)
    assert [before.status, blocked.status, after.status] == ["ok", "timeout", "ok"]
    assert before.content != after.content
    assert not alive(int(before.content))


def test_a_death_in_a_call_is_repeated_and_a_hang_is_a_timeout(part: McpPart, tmp_path: Path) -> None:
    marker = str(tmp_path / "died")
    hasty = copy.copy(part)
    hasty._timeout = 4.0

    async def work(session: Session) -> list[ToolResult]:
        results = await session.call([call("die_once", marker=marker), call("add", a=1, b=1)])
        results += await session.call([call("hang"), call("pid")])
        return results + await session.call([call("pid")])

    died, added, hung, pid, after = with_box([hasty], work)
    assert (died.status, died.content) == ("ok", "alive")
    assert (added.status, added.content) == ("ok", "2")
    assert (hung.status, hung.content) == ("timeout", "Timeout: no answer within 4 s")
    assert after.content == pid.content, "a server that still answers goes on"


@pytest.mark.slow
def test_a_call_that_always_kills_is_lost_and_costs_nobody_else(part: McpPart) -> None:
    async def work(session: Session) -> list[ToolResult]:
        return [*await session.call([call("die")]), *await session.call([call("add", a=2, b=2)])]

    dead, again = with_box([part], work)
    assert dead.status == "lost"
    assert "broke off" in dead.content
    assert again.content == "4"


def test_a_connection_for_each_trajectory(part: McpPart) -> None:
    each = copy.copy(part)
    each._each = True

    async def main() -> None:
        box = make_toolbox([each])
        await box.start()
        one, two = [(await box.open({}, i))[0] for i in range(2)]
        await (await one.fork()).close()
        (first, second, third), (other, pid) = await asyncio.gather(
            one.call([call("counter") for _ in range(3)]), two.call([call("counter"), call("pid")])
        )
        assert [first.content, second.content, third.content, other.content] == ["1", "2", "3", "1"]
        with pytest.raises(UserError, match="cannot be copied for a branch"):
            await one.fork()
        (dead,) = await one.call([call("die")])
        (after,) = await one.call([call("counter")])
        assert (dead.status, after.status) == ("lost", "lost"), "going on without the state would be wrong"
        for session in (one, two, two):
            await session.close()
        assert not alive(int(pid.content))
        await box.close()

    asyncio.run(main())


def test_names_that_are_taken_get_the_server_s_name(part: McpPart) -> None:
    def search(query: str) -> str:
        """Searches.

        Args:
            query: Words.
        """
        return f"ours {query}"

    box = make_toolbox([copy.copy(part), search, copy.copy(part)])
    names = [s["function"]["name"] for s in box.specs]
    assert [n for n in names if n.endswith("search")] == ["Demo_server_search", "search", "Demo_server_2_search"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/no/such/command", "there is no such command"),
        ("/etc/passwd", "cannot be started: Permission denied"),
        ("cat", "ended or does not speak MCP"),
        ("sleep 1000", "does not answer as an MCP server within 2 s"),
        ("yes", "does not answer as an MCP server within 2 s"),
        (f"{COMMAND} crash", r"cannot open the database: größe 東京"),
        (f"{COMMAND} empty", "has no tools"),
        ("http://127.0.0.1:9/mcp", "cannot be reached"),
        ("", "an MCP server is a command or a URL"),
        ("A=1", "an MCP server is a command or a URL"),
        ("sh -c 'x", "no closing quotation"),
        ("https://example.org/ more", "nothing may follow the URL"),
        ("A=$NO_SUCH_VARIABLE_HERE true", "no variable NO_SUCH_VARIABLE_HERE"),
    ],
)
def test_what_is_no_server_is_told_in_one_line(command: str, message: str) -> None:
    limit = 2.0 if command in ("sleep 1000", "yes") else 30.0
    with pytest.raises(UserError, match=message) as error:
        mcp_tools(command, start_limit=limit)
    assert "\n" not in str(error.value)


def test_a_page_that_is_no_server(url: str) -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        mcp_tools(url.replace("/mcp", "/nothing"), start_limit=10)


def test_only_named_variables_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("OTHER", "other")

    async def work(session: Session) -> list[str]:
        names = ("TOKEN", "PLAIN", "SECRET", "OTHER")
        return [r.content for r in await session.call([call("variable", name=n) for n in names])]

    async def inside_a_loop() -> McpPart:
        return mcp_tools(f"TOKEN='x $SECRET' PLAIN=${{OTHER}}! {COMMAND}")

    shown = with_box([asyncio.run(inside_a_loop())], work)
    assert shown == ["x s3cret", "other!", "unset", "unset"]
    server = Server.parse("Authorization='Bearer $SECRET' https://example.org/mcp")
    assert (server.url, server.settings) == ("https://example.org/mcp", {"Authorization": "Bearer s3cret"})
    assert "s3cret" not in repr(server) + server.label


def test_odd_schemas_are_read() -> None:
    from mcp.types import Tool

    schema = {"type": "object", "properties": {"a": True, "b": {"items": True, "anyOf": [True, {"type": "null"}]}}}
    assert _plain(schema)["properties"] == {"a": {}, "b": {"items": True, "anyOf": [{}, {"type": "null"}]}}
    broken = _offer(Tool(name="a.b", input_schema={"type": "object", "properties": {"x": {"type": "no type"}}}))
    assert (broken.name, broken.remote, broken.parameters) == ("a_b", "a.b", {"type": "object"})


SCRIPT = """
import asyncio, sys
from agentropy.tools import make_toolbox, mcp_tools
from agentropy.trajectory import ToolCall

async def main():
    box = make_toolbox([mcp_tools(sys.argv[1])])
    await box.start()
    session, _ = await box.open({}, 0)
    print((await session.call([ToolCall("pid", {})]))[0].content, flush=True)
    await session.call([ToolCall("hang", {})])

asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_no_server(sent: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    threading.Timer(0.5, process.send_signal, [sent]).start()
    _, errors = process.communicate(timeout=60)
    assert not alive(pid)
    if sent == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
        for noise in ("never retrieved", "was destroyed", "RuntimeError", "ResourceWarning", "Exception ignored"):
            assert noise not in errors
