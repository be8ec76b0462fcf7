"""Faults on purpose: as often as asked, the same on every run, with the status that was asked for."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.tools import delay, make_toolbox, outage, with_faults, wrong
from agentropy.tools.faults import shift_number
from agentropy.trajectory import ToolCall, ToolResult

RAN: list[int] = []


def square(x: int) -> str:
    """Squares.

    Args:
        x: A number.
    """
    RAN.append(x)
    return f"it is {x * x}" if x >= 0 else "nothing"


def fail() -> str:
    """Fails."""
    raise ValueError("12")


def go(faults: Any, seed: int = 0, trajectories: int = 40, box_seed: int = 0, **options: Any) -> list[list[ToolResult]]:
    async def main() -> list[list[ToolResult]]:
        box = with_faults(make_toolbox([square, fail]), faults, seed=box_seed, **options)
        await box.start()
        out = []
        for i in range(trajectories):
            session, text = await box.open({}, seed + i)
            assert text is None
            one = []
            for k in range(5):
                one += await session.call([ToolCall("square", {"x": k + 20}), ToolCall("square", {"x": k + 20})])
            out.append(one)
            await session.close()
        await box.close()
        return out

    return asyncio.run(main())


def statuses(results: list[list[ToolResult]]) -> list[list[tuple[str, str]]]:
    return [[(r.status, r.content) for r in one] for one in results]


def test_faults_come_as_often_as_asked() -> None:
    flat = [r for one in go([outage(0.2), delay(0.1), wrong(0.3)]) for r in one]
    assert len(flat) == 400
    counts = {
        "error": sum(r.status == "error" for r in flat),
        "timeout": sum(r.status == "timeout" for r in flat),
    }
    right = {f"it is {x * x}" for x in range(20, 25)}
    lied = [r for r in flat if r.status == "ok" and r.content not in right]
    assert 50 < counts["error"] < 110
    assert 20 < counts["timeout"] < 65
    assert 85 < len(lied) < 155
    assert all(r.content.startswith("it is ") and len(r.content) == len("it is 400") for r in lied)


def test_they_repeat_exactly_and_depend_on_seed_trajectory_and_call() -> None:
    faults = [outage(0.3), wrong(0.3)]
    first = statuses(go(faults))
    assert first == statuses(go(faults))
    assert first[1:] == statuses(go(faults, seed=1, trajectories=39))
    assert first != statuses(go(faults, box_seed=1))
    assert len({tuple(one) for one in first}) > 30
    assert len({r for one in first for r in one[:2]}) > 2, "two calls of one turn differ"


def test_a_failed_call_does_not_run_and_a_wrong_one_does() -> None:
    RAN.clear()
    assert all(r.content == "down" for one in go([outage(1, "down")], trajectories=1) for r in one)
    assert RAN == []
    go([wrong(1)], trajectories=1)
    assert len(RAN) == 10


def test_what_fails_by_itself_stays_and_what_has_no_digit_is_lost() -> None:
    async def main() -> list[ToolResult]:
        session, _ = await with_faults(make_toolbox([square, fail]), [wrong(1)]).open({}, 0)
        calls = [ToolCall("fail"), ToolCall("square", {"x": -1}), ToolCall("nope"), ToolCall("", error="bad")]
        return await session.call(calls)

    failed, lost, unknown, unread = asyncio.run(main())
    assert (failed.status, failed.content) == ("error", "Error: ValueError: 12")
    assert (lost.status, lost.content) == ("ok", "")
    assert [unknown.status, unread.status] == ["invalid", "invalid"]


def test_only_the_named_tools_fail() -> None:
    async def main() -> list[ToolResult]:
        box = with_faults(make_toolbox([square, fail]), [outage(1, "down")], tools=["fail"])
        assert len(box.specs) == 2
        session, _ = await box.open({}, 0)
        return await session.call([ToolCall("square", {"x": 2}), ToolCall("fail")])

    assert [r.content for r in asyncio.run(main())] == ["it is 4", "down"]


def test_a_lie_can_be_made_to_measure() -> None:
    rng = random.Random(0)
    for text, value in (("34", 34), ("{'coins': 120}", 120), ("34 coins", 34), ("-7", 7), ("1 and 2000", 2000)):
        for _ in range(50):
            lie = shift_number(text, rng)
            number = int(re.findall(r"\d+", lie)[-1])
            before, after = text.rsplit(str(value), 1)
            assert lie == f"{before}{number}{after}"
            assert 1 <= abs(number - value) <= max(2, value // 10)
    assert shift_number("as pens", rng) == "as pens"
    assert len(shift_number("9" * 5000, rng)) >= 5000
    flat = [r.content for one in go([wrong(0.5, lambda text, rng: f"{text}, surely")]) for r in one]
    assert 120 < sum(t.endswith(", surely") for t in flat) < 280


def test_a_branch_goes_on_where_the_trunk_is() -> None:
    async def main() -> tuple[list[str], list[str]]:
        session, _ = await with_faults(make_toolbox([square]), [outage(0.5)]).open({}, 3)
        await session.call([ToolCall("square", {"x": 1})] * 3)
        branch = await session.fork()
        ahead = [await s.call([ToolCall("square", {"x": 1})] * 20) for s in (session, branch)]
        return [r.content for r in ahead[0]], [r.content for r in ahead[1]]

    trunk, branch = asyncio.run(main())
    assert trunk == branch
    assert len(set(trunk)) == 2


def test_unusable_settings_are_told() -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        outage(1.5)
    with pytest.raises(UserError, match="add up"):
        with_faults(make_toolbox([square]), [outage(0.6), delay(0.6)])
    with pytest.raises(UserError, match="no tool 'python'"):
        with_faults(make_toolbox([square]), [outage(0.6)], tools=["python"])
