"""`setup`: code of a question that runs in the Python tool before the agent's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.tasks import load_tasks, make_world
from agentropy.tools import make_toolbox, python_tool
from agentropy.trajectory import ToolCall, ToolResult


def run(
    row: dict[str, Any], *codes: str, stateful: bool = False, fork_after: int | None = None, timeout: float = 10.0
) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        box = make_toolbox([python_tool(stateful=stateful, timeout=timeout)])
        await box.start()
        try:
            session, _ = await box.open(row, 0)
            out = []
            for i, code in enumerate(codes):
                out += await session.call([ToolCall("python", {"code": code})])
                if i == fork_after:
                    session = await session.fork()
            await session.close()
            return out
        finally:
            await box.close()

    return asyncio.run(main())


SETUP = "d = {'eggs': 34}\nopen('note.txt', 'w').write('hello')"


@pytest.mark.parametrize("stateful", [False, True])
def test_the_agent_s_code_finds_what_the_setup_left(stateful: bool) -> None:
    results = run(
        {"setup": SETUP},
        "print(d['eggs'])",
        "d['eggs'] = 1",
        "print(d['eggs'], open('note.txt').read())",
        stateful=stateful,
    )
    assert [r.status for r in results] == ["ok"] * 3
    assert results[0].content == "34"
    # Without state each call starts anew; a session goes on.
    assert results[2].content == ("1 hello" if stateful else "34 hello")


@pytest.mark.parametrize("stateful", [False, True])
def test_faults_of_the_agent_stay_its_own(stateful: bool) -> None:
    results = run({"setup": SETUP}, "print(d['pens'])", "print(d['eggs'", "d['eggs'] * 2", stateful=stateful)
    assert [r.status for r in results] == ["error", "error", "ok"]
    assert "KeyError: 'pens'" in results[0].content
    assert "SyntaxError" in results[1].content
    assert results[2].content == "68"


def test_a_session_that_died_is_set_up_again_and_a_forked_one_is_set_up() -> None:
    died = run({"setup": SETUP}, "d['x'] = 1", "import os; os._exit(3)", "print(sorted(d))", stateful=True)
    assert died[1].status == "error"
    assert died[2].content == "['eggs']"
    forked = run({"setup": SETUP}, "d['x'] = 1", "print(sorted(d))", stateful=True, fork_after=0)
    assert forked[1].content == "['eggs', 'x']"


@pytest.mark.parametrize("stateful", [False, True])
def test_a_setup_that_fails_is_the_question_s_fault(stateful: bool) -> None:
    with pytest.raises(UserError, match=r"setup of a question fails .*ZeroDivisionError"):
        run({"setup": "1 / 0"}, "print(1)", stateful=stateful)
    with pytest.raises(UserError, match="a text, not dict"):
        run({"setup": {}}, "print(1)", stateful=stateful)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_setup_without_end_is_lost_not_the_agent_s_timeout(stateful: bool) -> None:
    (result,) = run({"setup": "while True: pass"}, "print(1)", stateful=stateful, timeout=0.2)
    assert result.status == "lost"
    (result,) = run({"setup": "d = 1"}, "while d: pass", stateful=stateful, timeout=1.0)
    assert result.status == "timeout"


def test_task_files_may_have_setups(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"What is d? {i}", "answer": str(i), "setup": f"d = {i}"} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = load_tasks(str(path))
    assert {t.row["setup"] for t in source.tasks} == {f"d = {i}" for i in range(4)}  # type: ignore[attr-defined]
    path.write_text(json.dumps(rows[0] | {"setup": ["d = 1"]}))
    with pytest.raises(UserError, match=r"line 1: 'setup' is Python code, a text, not list"):
        load_tasks(str(path))


def test_the_hard_world_s_tool_sees_the_data_of_its_question() -> None:
    async def ask() -> list[ToolResult]:
        world = make_world("arithmetic", level="hard", kinds=("look",))
        box = make_toolbox(world.tools())
        await box.start()
        try:
            out = []
            for task in world.tasks.split("test")[:3]:
                session, _ = await box.open(task.row, 0)
                item = task.question.rstrip("?").split()[-1]
                out += await session.call([ToolCall("python", {"code": f"print(d['{item}'])"})])
                assert task.answers[0] in out[-1].content
                await session.close()
            return out
        finally:
            await box.close()

    assert all(r.status == "ok" for r in asyncio.run(ask()))
