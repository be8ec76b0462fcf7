"""Sessions: arguments checked, limits kept, faults told apart, nothing frozen by a slow tool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest

from agentropy.errors import UserError
from agentropy.tools import ArgumentError, Tool, ToolLost, from_environment, from_function, make_toolbox, with_faults
from agentropy.tools.session import Box
from agentropy.trajectory import ToolCall, ToolResult


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: First.
        b: Second.
    """
    return a + b


async def shout(word: str) -> str:
    """Shouts.

    Args:
        word: What.
    """
    await asyncio.sleep(0)
    return word.upper()


def nap(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "rested"


def boom(kind: str) -> str:
    """Fails.

    Args:
        kind: How.
    """
    errors: dict[str, BaseException] = {
        "value": ValueError("bad 東京"),
        "empty": KeyError(),
        "stop": StopIteration(3),
        "exit": SystemExit(1),
        "interrupt": KeyboardInterrupt(),
        "timeout": TimeoutError("too slow"),
        "connection": ConnectionRefusedError("no server"),
    }
    raise errors[kind]


def options(
    mode: Literal["a", "b"],
    tags: list[int],
    extra: dict[str, float] | None = None,
    either: int | str = 0,
    on: bool = True,
) -> str:
    """Takes much.

    Args:
        mode: One of two.
        tags: Numbers.
        extra: More numbers.
        either: Anything.
        on: A switch.
    """
    return repr((mode, tags, extra, either, on))


def run(box: Box, *calls: ToolCall, row: Mapping[str, Any] | None = None) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        await box.start()
        session, _ = await box.open(row or {}, 0)
        try:
            return await session.call(calls)
        finally:
            await session.close()
            await session.close()
            await box.close()
            await box.close()

    return asyncio.run(main())


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool, arguments)


def test_functions_sync_and_async_in_order() -> None:
    box = make_toolbox([add, shout])
    assert [s["function"]["name"] for s in box.specs] == ["add", "shout"]
    assert box.specs[0]["function"]["parameters"]["required"] == ["a"]
    assert "return" not in box.specs[0]["function"]["parameters"]
    results = run(box, call("shout", word="é東"), call("add", a=2), call("add", a=2, b=3))
    assert [r.content for r in results] == ["É東", "3", "5"]
    assert {r.status for r in results} == {"ok"}


def test_a_slow_synchronous_tool_freezes_no_other_rollout() -> None:
    box = make_toolbox([nap])

    async def main() -> tuple[float, int]:
        sessions = [(await box.open({}, i))[0] for i in range(8)]
        ticks = 0

        async def clock() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        ticking = asyncio.create_task(clock())
        start = time.perf_counter()
        results = await asyncio.gather(*(s.call([call("nap", seconds=1)]) for s in sessions))
        spent = time.perf_counter() - start
        ticking.cancel()
        assert all(r[0].content == "rested" and r[0].seconds >= 1 for r in results)
        return spent, ticks

    spent, ticks = asyncio.run(main())
    assert spent < 3
    assert ticks > 10


def test_the_calls_of_a_turn_run_at_once() -> None:
    start = time.perf_counter()
    run(make_toolbox([nap]), *(call("nap", seconds=0.3) for _ in range(6)))
    assert time.perf_counter() - start < 1.5


def test_max_concurrency_bounds_and_waiting_is_not_counted() -> None:
    start = time.perf_counter()
    box = make_toolbox([nap], timeout=0.5, max_concurrency=2)
    results = run(box, *(call("nap", seconds=0.2) for _ in range(6)))
    assert time.perf_counter() - start >= 0.6
    assert [r.status for r in results] == ["ok"] * 6
    assert all(0.15 < r.seconds < 0.5 for r in results)


def test_a_call_beyond_its_time_is_given_up() -> None:
    async def forever(word: str) -> str:
        """Hangs.

        Args:
            word: Any.
        """
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(word)
            raise
        return ""

    cancelled: list[str] = []
    start = time.perf_counter()
    box = make_toolbox([forever, nap, shout], timeout=0.1)
    results = run(box, call("forever", word="x"), call("nap", seconds=1), call("shout", word="y"))
    assert [r.status for r in results] == ["timeout", "timeout", "ok"]
    assert "within 0.1 s" in results[0].content
    assert cancelled == ["x"]
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("kind", "status", "content"),
    [
        ("value", "error", "Error: ValueError: bad 東京"),
        ("empty", "error", "Error: KeyError"),
        ("stop", "error", "Error: RuntimeError: StopIteration(3)"),
        ("exit", "error", "Error: RuntimeError: SystemExit(1)"),
        ("interrupt", "error", "Error: RuntimeError: KeyboardInterrupt()"),
        ("timeout", "timeout", "Timeout: too slow"),
        ("connection", "lost", "Tool unavailable: no server"),
    ],
)
def test_exceptions_become_results(kind: str, status: str, content: str) -> None:
    [result] = run(make_toolbox([boom]), call("boom", kind=kind))
    assert (result.status, result.content) == (status, content)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (ToolCall("nothing"), "there is no tool 'nothing'; the tools are: add, options"),
        (ToolCall("", error="not JSON: x"), "not JSON: x"),
        (call("add"), 'argument "a" is missing (the arguments are: "a", "b")'),
        (call("add", a=1, c=2), 'unknown argument "c" (the arguments are: "a", "b")'),
        (call("add", a="three"), 'argument "a" must be of type integer, not string'),
        (call("add", a=1.5), "must be of type integer, not number"),
        (call("add", a=True), "must be of type integer, not boolean"),
        (call("add", a=None), "must be of type integer, not null"),
        (call("options", mode="c", tags=[]), "must be one of 'a', 'b'"),
        (call("options", mode="a", tags=[1, "x"]), 'argument "tags", item 1 must be of type integer'),
        (call("options", mode="a", tags=[], extra={"k": "v"}), 'argument "extra", "k" must be of type number'),
        (call("options", mode="a", tags=[], either=[]), "must be of type integer or string, not array"),
    ],
)
def test_what_cannot_run_is_told_and_does_not_run(made: ToolCall, words: str) -> None:
    [result] = run(make_toolbox([add, options]), made)
    assert result.status == "invalid"
    assert words in result.content
    assert result.content.startswith("Invalid call: ")


def test_unambiguous_arguments_are_coerced() -> None:
    box = make_toolbox([add, shout, options])
    results = run(
        box,
        call("add", a="3", b=4.0),
        call("shout", word=7),
        call("options", mode="b", tags=["1"], extra={"k": "0.5"}, either="x", on="False"),
        call("options", mode="b", tags=[], extra=None, either=3),
    )
    assert [r.content for r in results] == ["7", "7", "('b', [1], {'k': 0.5}, 'x', False)", "('b', [], None, 3, True)"]


def test_only_faults_of_ours_are_repeated() -> None:
    runs: list[str] = []

    def maker(name: str, fails: int, error: Callable[[], Exception]) -> Tool:
        async def work(arguments: Mapping[str, Any]) -> ToolResult:
            runs.append(name)
            if runs.count(name) <= fails:
                raise error()
            return ToolResult("done")

        return Tool(name, "", {"type": "object", "properties": {}}, work)

    box = make_toolbox(
        [
            maker("flaky", 2, lambda: ToolLost("down")),
            maker("dead", 9, lambda: ToolLost("down")),
            maker("wrong", 1, lambda: ValueError("no")),
            maker("fine", 0, lambda: ValueError("no")),
        ]
    )
    results = run(box, *(call(n) for n in ("flaky", "dead", "wrong", "fine")))
    assert [r.status for r in results] == ["ok", "lost", "error", "ok"]
    assert {n: runs.count(n) for n in runs} == {"flaky": 3, "dead": 3, "wrong": 1, "fine": 1}


def test_results_keep_their_own_status_reward_and_stop() -> None:
    async def grade(arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult("over", "error", reward=0.5, stop=True)

    [result] = run(make_toolbox([Tool("grade", "", {"type": "object", "properties": {}}, grade)]), call("grade"))
    assert (result.content, result.status, result.reward, result.stop) == ("over", "error", 0.5, True)


def test_a_schema_without_properties_takes_anything_and_a_tool_may_refuse() -> None:
    async def work(arguments: Mapping[str, Any]) -> ToolResult:
        if "z" in arguments:
            raise ArgumentError("z is too much")
        return ToolResult(repr(dict(arguments)))

    box = make_toolbox([Tool("free", "", {"type": "object"}, work)])
    results = run(box, call("free", x=1), call("free", z=1))
    assert [(r.status, r.content) for r in results] == [
        ("ok", "{'x': 1}"),
        ("invalid", "Invalid call: free: z is too much"),
    ]


def test_words_can_be_chosen() -> None:
    box = make_toolbox([add], say=lambda status, message: status)
    assert [r.content for r in run(box, call("nope"), call("add"))] == ["invalid", "invalid"]


class Guess:
    """As TRL's users write it."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.target = 0
        self.log: list[int] = []

    def reset(self, **row: Any) -> str | None:
        self.target = int(row["target"])
        return f"Between {row['low']} and 9."

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: The guess.
        """
        time.sleep(0.02 * (5 - number) if number < 5 else 0)
        self.log.append(number)
        return "right" if number == self.target else "wrong"

    async def count(self) -> int:
        """Counts the guesses."""
        return len(self.log)

    def history(self) -> list[int]:
        """Lists the guesses."""
        return self.log

    def get_reward(self) -> float:
        return 1.0 if self.target in self.log else 0.0

    def _hidden(self) -> None: ...


def test_environment_classes_of_trl_work_as_they_are() -> None:
    Guess.made = 0

    async def main() -> None:
        box = make_toolbox([Guess, add])
        assert sorted(s["function"]["name"] for s in box.specs) == ["add", "count", "guess", "history"]
        first, text = await box.open({"target": 4, "low": 1}, 0)
        second, _ = await box.open({"target": 5, "low": 1}, 1)
        assert text == "Between 1 and 9."
        assert Guess.made == 2, "the object that showed the tools serves the first trajectory"
        results = await first.call([call("guess", number=n) for n in (1, 2, 4)])
        assert [r.content for r in results] == ["wrong", "wrong", "right"]
        assert (await first.call([call("history")]))[0].content == "[1, 2, 4]", (
            "in order, though later ones are quicker"
        )
        assert await first.reward() == 1.0
        assert await second.reward() == 0.0
        branch = await first.fork()
        await branch.call([call("guess", number=9)])
        assert (await branch.call([call("count")]))[0].content == "4"
        assert (await first.call([call("count"), call("add", a=1)]))[0].content == "3"

    asyncio.run(main())


def test_a_lost_call_of_an_environment_is_not_repeated() -> None:
    class Env:
        runs = 0

        def reset(self, **row: Any) -> None: ...

        def step(self) -> str:
            """Steps."""
            Env.runs += 1
            raise ConnectionError("gone")

    assert run(make_toolbox([Env]), call("step"))[0].status == "lost"
    assert Env.runs == 1, "its state may have changed before the connection broke"


def test_environments_close_fork_and_async_reset() -> None:
    closed: list[str] = []

    class Env:
        def __init__(self, name: str) -> None:
            self.name = name
            self.lock = asyncio.Lock

        async def reset(self, **row: Any) -> None: ...

        def look(self) -> str:
            """Looks."""
            return self.name

        def fork(self) -> Env:
            return Env(self.name + "'")

        async def close(self) -> None:
            closed.append(self.name)

    async def main() -> None:
        box = make_toolbox([from_environment(lambda: Env("e"))])
        assert [s["function"]["name"] for s in box.specs] == ["look"]
        session, text = await box.open({}, 0)
        assert text is None
        branch = await session.fork()
        assert (await branch.call([call("look")]))[0].content == "e'"
        assert await session.reward() is None
        await branch.close()
        await session.close()

    asyncio.run(main())
    assert closed == ["e'", "e"]


def test_what_cannot_be_copied_is_told() -> None:
    class Env:
        def __init__(self) -> None:
            self.file = open(__file__)  # noqa: SIM115

        def reset(self, **row: Any) -> None: ...

        def look(self) -> str:
            """Looks."""
            return ""

        def close(self) -> None:
            self.file.close()

    async def main() -> None:
        session, _ = await make_toolbox([Env]).open({}, 0)
        with pytest.raises(UserError, match="Env cannot be copied"):
            await session.fork()
        await session.close()

    asyncio.run(main())


def test_a_failing_reset_closes_what_was_opened() -> None:
    closed: list[int] = []

    class First:
        def reset(self, **row: Any) -> None: ...
        def one(self) -> str:
            """One."""
            return ""

        def close(self) -> None:
            closed.append(1)

    class Second:
        def reset(self, **row: Any) -> None:
            raise ValueError("no such row")

        def two(self) -> str:
            """Two."""
            return ""

    with pytest.raises(ValueError, match="no such row"):
        asyncio.run(make_toolbox([First, Second]).open({}, 0))
    assert closed == [1]


def no_hints(x):  # type: ignore[no-untyped-def]
    """Has none."""


def no_docs(x: int) -> int:
    return x


class NoReset:
    def tool(self) -> str:
        """A tool."""
        return ""


class NoTools:
    def reset(self, **row: Any) -> None: ...


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([no_hints], "no_hints"),
        ([no_docs], "no_docs"),
        ([3], "3 is no tool"),
        ([add, add], "two tools are called 'add'"),
        ([NoReset], "no method reset"),
        ([NoTools], "no public method"),
        ([make_toolbox([add])], "no part of a toolbox"),
        ([with_faults(make_toolbox([add]), [])], "no part of a toolbox"),
    ],
)
def test_unusable_tools_fail_at_the_start(parts: Sequence[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_toolbox(parts)


def test_a_machine_that_lacks_something_stops_the_run() -> None:
    async def work(arguments: Mapping[str, Any]) -> ToolResult:
        raise UserError("no sandbox here")

    with pytest.raises(UserError, match="no sandbox here"):
        run(make_toolbox([Tool("python", "", {"type": "object"}, work)]), call("python"))
    with pytest.raises(UserError, match="max_concurrency"):
        make_toolbox([add], max_concurrency=0)


def test_renamed_functions_and_values_that_are_no_json() -> None:
    def give() -> Any:
        """Gives a set."""
        return {1}

    tool = from_function(give, name="other")
    assert tool.name == "other"
    assert tool.spec()["function"]["name"] == "other"
    assert run(make_toolbox([tool]), call("other"))[0].content == "{1}"
