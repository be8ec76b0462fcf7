"""What comes back from a program: output, echo, tracebacks, limits, times, seeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from agentropy.errors import UserError
from agentropy.sandbox import ExecutionResult, Limits, LocalSandbox, SandboxBusy, run_sync

T = TypeVar("T")


class Pool:
    """A sandbox and the loop it lives in, shared by the tests of this file."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.sandbox = LocalSandbox(**options)
        self.loop.run_until_complete(self.sandbox.start())

    def __call__(self, code: str, **options: Any) -> ExecutionResult:
        return self.loop.run_until_complete(self.sandbox.call(code, **options))

    def wait(self, work: Callable[[LocalSandbox], Awaitable[T]]) -> T:
        async def wrapped() -> T:
            return await work(self.sandbox)

        return self.loop.run_until_complete(wrapped())

    def close(self) -> None:
        self.loop.run_until_complete(self.sandbox.close())
        self.loop.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(workers=2, preload=())
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("x = 3", ""),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("None", ""),
        ("def f(): return 5\nf()", "5\n"),
        ("if True:\n    7", ""),
        ("1; 2", "2\n"),
        ("", ""),
        ("# nothing", ""),
        ("[i for i in range(3)]  # a list", "[0, 1, 2]\n"),
    ],
)
def test_last_expression_is_echoed_as_in_a_repl(pool: Pool, code: str, shown: str) -> None:
    assert pool(code).stdout == shown
    assert pool(code, echo=False).stdout == ("a\n" if "print" in code else "")


def test_order_is_kept_and_no_call_blocks_another(pool: Pool) -> None:
    codes = ["import time; time.sleep(0.5); print(0)", "print(1)", "1/0", "print(3)"]
    results = pool.wait(lambda sandbox: sandbox.execute(codes))
    assert [r.stdout for r in results] == ["0\n", "1\n", "", "3\n"]
    assert [r.status for r in results] == ["ok", "ok", "error", "ok"]


def test_the_clock_starts_with_the_program_not_with_the_call(pool: Pool) -> None:
    results = pool.wait(lambda sandbox: sandbox.execute(["import time; time.sleep(0.3)"] * 8, timeout=0.9))
    assert {r.status for r in results} == {"ok"}
    assert max(r.queue_time for r in results) > 0.5
    assert max(r.duration for r in results) < 0.9


def test_timeout_keeps_output_and_ends_near_the_limit(pool: Pool) -> None:
    started = time.monotonic()
    result = pool("print('first')\nimport sys\nprint('warned', file=sys.stderr)\nwhile True: pass", timeout=0.4)
    assert (result.status, result.stdout, result.stderr) == ("timeout", "first\n", "warned\n")
    assert 0.4 <= result.duration < 1.0
    assert time.monotonic() - started < 3.0
    assert "time limit of 0.4 s" in result.for_model()


def test_output_is_cut_in_the_middle_between_characters(pool: Pool) -> None:
    result = pool("print('é' * 40000 + 'END')")
    assert result.truncated
    assert result.status == "ok"
    head, note, tail = result.stdout.split("\n")[:3]
    assert set(head) == {"é"}
    assert tail.endswith("END")
    assert set(tail) == {"é", "E", "N", "D"}
    left_out = int(note.split()[1])
    assert left_out + len(head.encode()) + len(tail.encode()) + 1 == 80004
    assert len(result.stdout.encode()) < 33_000


def test_short_output_is_not_cut(pool: Pool) -> None:
    result = pool("print('x' * 32000)")
    assert (len(result.stdout), result.truncated) == (32001, False)


def test_too_much_output_stops_the_program(pool: Pool) -> None:
    result = pool("print('begin')\nwhile True: print('spam ' * 1000)")
    assert result.status == "output_limit"
    assert result.stdout.startswith("begin\n")
    assert result.truncated


def test_traceback_has_no_frame_of_ours_and_shows_source(pool: Pool) -> None:
    result = pool("def f(x):\n    return 1 / x\n\nf(0)")
    expected = (
        'Traceback (most recent call last):\n  File "main.py", line 4, in <module>\n    f(0)\n'
        '  File "main.py", line 2, in f\n    return 1 / x\n           ~~^~~\nZeroDivisionError: division by zero\n'
    )
    assert result.stderr.replace("    ~^^^\n", "") == expected
    assert result.exit_code == 1


def test_syntax_error_shows_the_line_and_nothing_of_ours(pool: Pool) -> None:
    result = pool("x = 1\nprint(x")
    assert result.stderr.startswith('  File "main.py", line 2\n    print(x\n')
    assert "SyntaxError: '(' was never closed" in result.stderr


def test_for_model_keeps_the_useful_end() -> None:
    stderr = "Traceback (most recent call last):\n" + "".join(f'  File "main.py", line {i}\n' for i in range(50))
    result = ExecutionResult("error", stdout="partial\n", stderr=stderr + "ValueError: bad\n")
    text = result.for_model(traceback_lines=3)
    assert text.split("\n") == [
        "partial",
        "Traceback (most recent call last):",
        "  ...",
        '  File "main.py", line 48',
        '  File "main.py", line 49',
        "ValueError: bad",
    ]
    long = ExecutionResult("ok", stdout="a" * 3000 + "b" * 3000).for_model(max_chars=100)
    assert long == "a" * 50 + "\n[... 5900 characters left out ...]\n" + "b" * 50


def test_a_crash_keeps_what_was_printed(pool: Pool) -> None:
    result = pool("print('before')\nimport ctypes\nctypes.string_at(0)")
    assert (result.status, result.stdout, result.exit_code) == ("crash", "before\n", None)


def test_stdin(pool: Pool) -> None:
    assert pool("import sys\nprint(sys.stdin.read().upper())", stdin="één\n").stdout == "ÉÉN\n\n"
    assert pool("import sys; sys.stdin.buffer.read()", stdin="\udcff").stdout == "b'\\xff'\n"


def test_seeds_fix_random_numbers(pool: Pool) -> None:
    code = "import random\nrandom.random(), hash('a'), list({'x', 'y', 'z'})"
    same = {pool(code, seed=5).stdout for _ in range(3)}
    assert len(same) == 1
    assert pool(code, seed=6).stdout not in same


def test_numpy_is_seeded_too() -> None:
    codes = ["import numpy as np\nprint(np.random.rand())"] * 2
    pool = Pool(workers=1)
    try:
        first, second = pool.wait(lambda sandbox: sandbox.execute(codes, seed=3))
        other = pool(codes[0], seed=4)
    finally:
        pool.close()
    assert first.stdout == second.stdout
    assert other.stdout != first.stdout


def test_too_long_a_program_is_an_error_without_being_read(pool: Pool) -> None:
    result = pool("#" * (1 << 20) + "\n1/0")
    assert result.status == "error"
    assert "1048580 bytes" in result.stderr


def test_own_limits_hold() -> None:
    pool = Pool(workers=1, preload=(), limits=Limits(memory_mb=200, output_kb=1, code_kb=1))
    try:
        assert pool("bytearray(300 << 20)").status == "error"
        assert len(pool("print('x' * 5000)").stdout) < 1100
        assert pool("#" * 2000).status == "error"
        assert pool("print(1)").stdout == "1\n"
    finally:
        pool.close()


def test_a_full_queue_is_said_so() -> None:
    pool = Pool(workers=1, preload=(), limits=Limits(queue=2))

    async def flood(sandbox: LocalSandbox) -> list[Any]:
        calls = (sandbox.call("import time; time.sleep(0.2)") for _ in range(6))
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        results = pool.wait(flood)
        assert any(isinstance(r, SandboxBusy) for r in results)
        assert pool("print(1)").status == "ok"
    finally:
        pool.close()


def test_a_cancelled_call_frees_its_slot(pool: Pool) -> None:
    async def cancel(sandbox: LocalSandbox) -> ExecutionResult:
        tasks = [asyncio.create_task(sandbox.call("while True: pass", timeout=60)) for _ in range(5)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await sandbox.call("print('free')")

    started = time.monotonic()
    assert pool.wait(cancel).stdout == "free\n"
    assert time.monotonic() - started < 10


def test_one_sandbox_in_two_event_loops() -> None:
    sandbox = LocalSandbox(workers=1, preload=())

    async def once() -> str:
        return (await sandbox.execute(["print('here')"]))[0].stdout

    assert asyncio.run(once()) == "here\n"
    assert asyncio.run(once()) == "here\n"
    asyncio.run(sandbox.close())


def test_wrong_use_is_refused(pool: Pool) -> None:
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            pool("1", timeout=timeout)
    with pytest.raises(TypeError):
        pool(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="isolation"):
        LocalSandbox(isolation="none")
    with pytest.raises(UserError, match="worker"):
        LocalSandbox(workers=0)


def test_run_sync() -> None:
    result = run_sync("print(input())\n2 + 2", stdin="x\n")
    assert (result.stdout, result.ok) == ("x\n4\n", True)
