"""The python tool on the real sandbox: statuses, state, branches, order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from agentropy.sandbox import LocalSandbox
from agentropy.tools import make_toolbox, python_tool
from agentropy.tools.python import STATUS
from agentropy.tools.session import Session
from agentropy.trajectory import ToolCall, ToolResult


def code(text: str) -> ToolCall:
    return ToolCall("python", {"code": text})


def with_session(work: Callable[[Session], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with LocalSandbox(workers=2, preload=()) as sandbox:
            box = make_toolbox([python_tool(sandbox, **options)])
            await box.start()
            session, _ = await box.open({}, 7)
            try:
                return await work(session)
            finally:
                await session.close()
                await box.close()

    return asyncio.run(main())


def test_statuses_and_what_the_model_sees() -> None:
    async def work(session: Session) -> list[ToolResult]:
        return await session.call(
            [
                code("print('größe 東京 🙂')\n6 * 7"),
                code("print('before')\n1 / 0"),
                code("print('partial', flush=True)\nwhile True: pass"),
                code("import os\nos.abort()"),
                code("def f(:"),
                code("x = 1"),
                ToolCall("python", {}),
                ToolCall("python", {"code": 5}),
            ]
        )

    results = with_session(work, timeout=1.0)
    assert [r.status for r in results] == ["ok", "error", "timeout", "error", "error", "ok", "invalid", "ok"]
    assert results[0].content == "größe 東京 🙂\n42"
    assert results[1].content.startswith("before\n")
    assert "ZeroDivisionError: division by zero" in results[1].content
    assert "partial" in results[2].content
    assert "time limit" in results[2].content
    assert "SyntaxError" in results[4].content
    assert results[5].content == ""
    assert results[7].content == "5"
    assert results[2].seconds >= 1
    assert 0 < results[0].seconds < 5


def test_the_sandbox_keeps_the_time_not_the_toolbox() -> None:
    async def main() -> ToolResult:
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            session, _ = await make_toolbox([python_tool(sandbox)], timeout=0.05).open({}, 0)
            return (await session.call([code("import time\ntime.sleep(0.2)\nprint('done')")]))[0]

    result = asyncio.run(main())
    assert (result.status, result.content) == ("ok", "done")


def test_stateless_calls_know_nothing_of_each_other() -> None:
    async def work(session: Session) -> list[ToolResult]:
        await session.call([code("x = 5")])
        return await session.call([code("print(x)")])

    [result] = with_session(work)
    assert result.status == "error"
    assert "NameError" in result.content


def test_echo_can_be_switched_off() -> None:
    async def work(session: Session) -> list[ToolResult]:
        return await session.call([code("1 + 1")])

    assert with_session(work, echo=False)[0].content == ""
    assert with_session(work, stateful=True, echo=False)[0].content == ""
    assert with_session(work)[0].content == "2"


def test_stateful_sessions_keep_state_in_order_and_branch() -> None:
    async def work(session: Session) -> None:
        both = await session.call([code("x = [1]\nprint(x)"), code("x.append(2)\nprint(x)")])
        assert [r.content for r in both] == ["[1]", "[1, 2]"], "one interpreter, cells in order"
        branch = await session.fork()
        assert (await branch.call([code("x.append(3)\nx")]))[0].content == "[1, 2, 3]"
        assert (await session.call([code("x")]))[0].content == "[1, 2]"
        await branch.close()
        assert (await session.call([code("x")]))[0].content == "[1, 2]"

    with_session(work, stateful=True)


def test_a_branch_before_the_first_call_has_a_state_of_its_own() -> None:
    async def work(session: Session) -> None:
        branch = await session.fork()
        await session.call([code("y = 1")])
        assert "NameError" in (await branch.call([code("y")]))[0].content
        await branch.close()

    with_session(work, stateful=True)


def test_the_seed_of_the_trajectory_reaches_the_program() -> None:
    async def work(session: Session) -> list[ToolResult]:
        program = code("import random\nprint(random.random())")
        return [*await session.call([program]), *await session.call([program])]

    first, second = with_session(work)
    assert first.content == second.content


def test_the_text_can_be_made_by_the_caller() -> None:
    async def work(session: Session) -> list[ToolResult]:
        return await session.call([code("print(1)"), code("1/0")])

    def terse(execution: Any) -> str:
        return str(execution.stdout.strip()) or "Error"

    assert [r.content for r in with_session(work, form=terse)] == ["1", "Error"]


def test_every_status_of_the_sandbox_is_mapped() -> None:
    from typing import get_args

    from agentropy.sandbox.results import Status

    assert set(STATUS) == set(get_args(Status))


class Broken:
    """A sandbox that fails as scripted: statuses, or exceptions."""

    def __init__(self, *script: str | Exception) -> None:
        self.script: Iterator[str | Exception] = iter(script)
        self.runs = 0

    async def execute(self, codes: list[str], **options: Any) -> list[Any]:
        from agentropy.sandbox import ExecutionResult

        self.runs += 1
        step = next(self.script)
        if isinstance(step, Exception):
            raise step
        return [ExecutionResult(step, stdout="out\n")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "status", "runs"),
    [
        (["sandbox_error", "ok"], "ok", 2),
        (["sandbox_error"] * 3, "lost", 3),
        ([RuntimeError("queue full"), OSError("gone"), "ok"], "ok", 3),
        (["timeout"], "timeout", 1),
        (["crash"], "error", 1),
        (["disk_limit"], "error", 1),
    ],
)
def test_faults_of_the_sandbox_are_repeated_and_never_the_programs(script: list[Any], status: str, runs: int) -> None:
    sandbox = Broken(*script)

    async def main() -> ToolResult:
        session, _ = await make_toolbox([python_tool(sandbox)]).open({}, 0)
        return (await session.call([code("print(1)")]))[0]

    assert asyncio.run(main()).status == status
    assert sandbox.runs == runs


def test_an_own_sandbox_is_closed_with_the_toolbox_and_a_given_one_is_not() -> None:
    async def main() -> None:
        box = make_toolbox([python_tool()])
        session, _ = await box.open({}, 0)
        assert (await session.call([code("print(1)")]))[0].content == "1"
        await box.close()
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            given = make_toolbox([python_tool(sandbox)])
            await given.start()
            await given.close()
            assert (await sandbox.execute(["print(2)"]))[0].stdout == "2\n"

    asyncio.run(main())
