"""Interpreters that keep their state, one a trajectory."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from agentropy.sandbox import Limits, LocalSandbox, Session

T = TypeVar("T")


def within(work: Callable[[LocalSandbox], Awaitable[T]], **options: Any) -> T:
    async def wrapped() -> T:
        async with LocalSandbox(**{"workers": 2, "preload": (), **options}) as sandbox:
            return await work(sandbox)

    return asyncio.run(wrapped())


def test_state_stays_between_cells_and_apart_between_sessions() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as first, sandbox.session() as second:
            assert (await first.run("import math\nx = 3\nopen('f', 'w').write('kept')")).stdout == "4\n"
            assert (await first.run("def f(): return math.floor(x + 0.5)")).stdout == ""
            assert (await first.run("f(), open('f').read()")).stdout == "(3, 'kept')\n"
            assert "NameError" in (await second.run("x")).stderr
            assert "FileNotFoundError" in (await second.run("open('f')")).stderr
            assert (await first.run("x += 1\nx")).stdout == "4\n"

    within(work)


def test_errors_exits_and_interrupts_leave_the_state() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            await session.run("x = 1")
            failed = await session.run("def f():\n    return x / 0\nf()")
            assert failed.status == "error"
            assert 'File "<cell 2>", line 2, in f\n    return x / 0' in failed.stderr
            assert (await session.run("raise SystemExit(3)")).status == "error"
            assert (await session.run("exit()")).status == "ok"
            for hang in ("while True: pass", "import time; time.sleep(60)"):
                late = await session.run(f"print('on')\n{hang}", timeout=0.3)
                assert (late.status, late.stdout, late.session_reset) == ("timeout", "on\n", False)
                assert late.duration < 0.8
            again = await session.run("x")
            assert (again.stdout, again.session_reset) == ("1\n", False)

    within(work)


def test_a_cell_that_ignores_the_interrupt_costs_the_state() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            await session.run("x = 1")
            stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
            late = await session.run(stubborn, timeout=0.2)
            assert (late.status, late.session_reset) == ("timeout", True)
            assert late.duration < 2
            after = await session.run("'x' in globals()")
            assert (after.stdout, after.session_reset) == ("False\n", False)

    within(work)


def test_a_crash_costs_the_state_and_says_so() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            await session.run("x = 1")
            crashed = await session.run("print('b')\nimport os\nos.abort()")
            assert (crashed.status, crashed.stdout, crashed.session_reset) == ("crash", "b\n", True)
            assert "earlier variables are gone" in crashed.for_model()
            assert (await session.run("1")).stdout == "1\n"

    within(work)


def test_a_session_that_dies_between_cells() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            pid = int((await session.run("import os; x = 1; os.getpid()")).stdout)
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.3)
            after = await session.run("'x' in globals()")
            assert (after.status, after.stdout, after.session_reset) == ("ok", "False\n", True)

    within(work)


def test_channel_abuse_hurts_only_the_session_itself() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as liar, sandbox.session() as other:
            await other.run("y = 7")
            forged = await liar.run("import os\nos.write(3, b'\\x00' * 13)\nos.write(3, b'x' * 999)\nraise ValueError")
            assert forged.status in ("ok", "crash", "error")
            await liar.run("import os\nos.closerange(3, 64)")
            assert (await liar.run("1")).stdout in ("1\n", "")
            assert (await liar.run("2")).stdout == "2\n"
            assert (await other.run("y")).stdout == "7\n"

    within(work)


def test_output_and_disk_limits_end_a_session() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            flood = await session.run("while True: print('x' * 10000)")
            assert (flood.status, flood.session_reset) == ("output_limit", True)
            assert (await session.run("print('fresh')")).stdout == "fresh\n"
            full = await session.run(
                "import time\nfor i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))\n    time.sleep(0.005)"
            )
            assert full.status in ("disk_limit", "error")

    within(work)
    within(work, isolation="landlock")


def test_a_fork_has_the_same_state_and_goes_its_own_way() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session(seed=4) as session:
            await session.run("import random\nx = random.random()\nlog = []")
            await session.run("log.append(x); 1/0")
            twin = await session.fork()
            try:
                mine, theirs = await session.run("x, log, random.random()"), await twin.run("x, log, random.random()")
                assert mine.stdout == theirs.stdout
                await twin.run("x = 'changed'")
                assert (await session.run("x")).stdout != "'changed'\n"
                assert (await twin.run("x")).stdout == "'changed'\n"
            finally:
                await twin.close()

    within(work)


def test_seed_of_a_session() -> None:
    async def work(sandbox: LocalSandbox) -> list[str]:
        shown = []
        for seed in (1, 1, 2):
            async with sandbox.session(seed=seed) as session:
                shown.append((await session.run("import random; random.random()")).stdout)
        return shown

    first, second, third = within(work)
    assert first == second != third


def test_128_sessions_at_once_on_two_workers() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async def trajectory(i: int) -> None:
            async with sandbox.session(seed=i) as session:
                await session.run(f"x = {i}")
                for k in range(3):
                    result = await session.run("x += 1; x", timeout=5)
                    assert (result.status, result.stdout, result.session_reset) == ("ok", f"{i + k + 1}\n", False)

        await asyncio.gather(*(trajectory(i) for i in range(128)))

    within(work)


def test_too_many_sessions_end_the_one_idle_for_longest() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        sessions = [await sandbox.open_session() for _ in range(4)]
        for i, session in enumerate(sessions[:3]):
            await session.run(f"x = {i}")
        await sessions[0].run("x")
        await sessions[3].run("x = 3")  # the fourth: session 1 has to go
        assert (await sessions[0].run("x")).stdout == "0\n"
        lost = await sessions[1].run("'x' in globals()")
        assert (lost.stdout, lost.session_reset) == ("False\n", True)
        for session in sessions:
            await session.close()

    within(work, limits=Limits(sessions=3))


def test_idle_sessions_end_after_a_while() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as old, sandbox.session() as new:
            await old.run("x = 1")
            await asyncio.sleep(0.4)
            await new.run("x = 1")
            assert (await old.run("1")).session_reset

    within(work, limits=Limits(session_idle_s=0.2))


def test_threads_left_behind_do_not_run_between_cells() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            await session.run("n = 0\nimport threading\ndef f():\n    global n\n    while True: n += 1")
            await session.run("threading.Thread(target=f, daemon=True).start()")
            before = int((await session.run("n")).stdout)
            await asyncio.sleep(0.5)
            grown = int((await session.run("n")).stdout) - before
            cell = int((await session.run("a = n\nimport time\ntime.sleep(0.25)\nn - a")).stdout)
            assert grown < cell

    within(work)


def test_a_session_that_pretends_to_wait_is_stopped() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            pid = int((await session.run("import os, time; os.getpid()")).stdout)
            forged = "os.write(3, bytes(13))\nwhile True: pass"
            assert (await session.run(forged, timeout=60)).status == "ok"
            deadline = time.monotonic() + 20
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            assert (await session.run("1", timeout=0.5)).status == "timeout"

    within(work)


def test_closing_ends_the_process_and_later_cells_start_anew() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        session = await sandbox.open_session()
        pid = int((await session.run("import os; os.getpid()")).stdout)
        assert Path(f"/proc/{pid}").exists()
        await session.close()
        deadline = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert not Path(f"/proc/{pid}").exists()
        again = await session.run("'os' in globals()")
        assert (again.stdout, again.session_reset) == ("False\n", True)
        await session.close()

    within(work)


def test_cells_of_one_session_keep_their_order() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        async with sandbox.session() as session:
            await session.run("log = []")
            await asyncio.gather(*(session.run(f"import time; time.sleep(0.01); log.append({i})") for i in range(10)))
            assert (await session.run("log == list(range(10))")).stdout == "True\n"

    within(work)


def test_a_session_costs_little_and_descriptors_come_back() -> None:
    async def work(sandbox: LocalSandbox) -> None:
        assert sandbox._process is not None
        table = f"/proc/{sandbox._process.pid}/fd"
        before = len(os.listdir(table))

        async def one() -> Session:
            session = await sandbox.open_session()
            await session.run("1")
            return session

        sessions = await asyncio.gather(*(one() for _ in range(40)))
        assert len(os.listdir(table)) > before + 100
        for session in sessions:
            await session.close()
        deadline = time.monotonic() + 5
        while len(os.listdir(table)) > before and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert len(os.listdir(table)) == before

    within(work)
