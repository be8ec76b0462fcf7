"""What happens when a process of the sandbox dies, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from agentropy.errors import UserError
from agentropy.sandbox import LocalSandbox
from sandbox_harness import descendants, parent, programs_alive

SOURCE = Path(__file__).parents[1] / "src"


def supervisor_of(sandbox: LocalSandbox) -> int:
    assert sandbox._process is not None
    return sandbox._process.pid


def fork_servers(sandbox: LocalSandbox) -> list[int]:
    supervisor = supervisor_of(sandbox)
    return [pid for pid in descendants(supervisor) if parent(pid) == supervisor]


def gone(pids: list[int], within: float = 5.0) -> list[int]:
    """Those of `pids` that are still there after a while (a zombie counts as gone)."""
    deadline = time.monotonic() + within
    while True:
        left = [pid for pid in pids if state(pid) not in ("", "Z")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def until(condition: Callable[[], bool], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.01)


async def a_lasting_program(sandbox: LocalSandbox) -> None:
    """Wait for a program that is no self-test."""
    for _ in range(60):
        before = programs_alive(sandbox)
        await asyncio.sleep(0.5)
        if set(before) & set(programs_alive(sandbox)):
            return
    raise AssertionError("no program runs")


def test_a_dead_fork_server_is_replaced_and_stateless_calls_run_again() -> None:
    async def work() -> None:
        async with LocalSandbox(workers=2, preload=()) as sandbox:
            session = await sandbox.open_session()
            await session.run("x = 1")
            calls = [asyncio.create_task(sandbox.call("import time; time.sleep(0.5); print('done')")) for _ in range(4)]
            cell = asyncio.create_task(session.run("import time; time.sleep(0.5)", timeout=5))
            await until(lambda: len(programs_alive(sandbox)) == 3)
            victims = fork_servers(sandbox)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            results = await asyncio.gather(*calls)
            assert [(r.status, r.stdout) for r in results] == [("ok", "done\n")] * 4
            assert time.monotonic() - started < 10
            outcome = await cell  # it may have waited in the queue, then it ran on the new server
            assert outcome.session_reset
            assert outcome.status in ("sandbox_error", "ok")
            assert (await session.run("1")).stdout == "1\n"
            assert set(fork_servers(sandbox)).isdisjoint(victims)
            await session.close()

    asyncio.run(work())


def test_a_call_that_kills_two_fork_servers_is_not_run_a_third_time() -> None:
    async def work() -> None:
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            call = asyncio.create_task(sandbox.call("import time; time.sleep(30)", timeout=60))
            for _ in range(2):
                await a_lasting_program(sandbox)
                os.kill(fork_servers(sandbox)[0], signal.SIGKILL)
                await until(lambda: not programs_alive(sandbox))
            result = await call
            assert result.status == "sandbox_error"
            assert (await sandbox.call("print(1)")).stdout == "1\n"

    asyncio.run(work())


def test_fork_servers_that_keep_dying_are_given_up() -> None:
    async def work() -> None:
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            for _ in range(3):
                await until(lambda: len(fork_servers(sandbox)) == 1)
                os.kill(fork_servers(sandbox)[0], signal.SIGKILL)
                await until(lambda: sandbox._broken != "" or len(fork_servers(sandbox)) == 1)
                await asyncio.sleep(0.3)
            result = await sandbox.call("print(1)")
            assert result.status == "sandbox_error"
            assert "3 times" in result.stderr
            await sandbox.close()
            with pytest.raises(UserError, match="keeps failing"):
                await sandbox.start()

    asyncio.run(work())


def test_a_dead_supervisor_takes_everything_with_it_and_is_replaced() -> None:
    async def work() -> None:
        async with LocalSandbox(workers=2, preload=()) as sandbox:
            session = await sandbox.open_session()
            await session.run("x = 1")
            calls = [asyncio.create_task(sandbox.call("while True: pass", timeout=60)) for _ in range(3)]
            await until(lambda: len(programs_alive(sandbox)) == 3)
            everything = [supervisor_of(sandbox), *descendants(supervisor_of(sandbox))]
            os.kill(everything[0], signal.SIGKILL)
            results = await asyncio.gather(*calls)
            assert {r.status for r in results} == {"sandbox_error"}
            assert gone(everything) == []
            assert (await sandbox.execute(["print('again')"]))[0].stdout == "again\n"
            after = await session.run("'x' in globals()")
            assert (after.stdout, after.session_reset) == ("False\n", True)

    asyncio.run(work())


def test_nothing_outlives_a_killed_trainer(tmp_path: Path) -> None:
    script = (
        "import asyncio\nfrom agentropy.sandbox import LocalSandbox\n"
        "async def main():\n"
        "    sandbox = LocalSandbox(workers=2, preload=(), isolation='landlock')\n"
        "    await sandbox.start()\n"
        "    calls = [asyncio.create_task(sandbox.call('while True: pass', timeout=60)) for _ in range(2)]\n"
        "    await asyncio.sleep(0.3)\n"
        "    print(sandbox._process.pid, flush=True)\n"
        "    await asyncio.gather(*calls)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert trainer.stdout is not None
    supervisor = int(trainer.stdout.readline())
    everything = [supervisor, *descendants(supervisor)]
    assert len(everything) >= 4
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(everything) == []
    pattern = f"agentropy-sandbox-{os.geteuid()}-{supervisor}-*"
    deadline = time.monotonic() + 5
    while left := [d for place in ("/dev/shm", tmp_path) for d in Path(place).glob(pattern)]:
        assert time.monotonic() < deadline, left


def test_directories_of_killed_supervisors_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentropy.sandbox import scratch

    monkeypatch.setattr(scratch, "places", lambda: [str(tmp_path)])
    dead = tmp_path / f"{scratch.PREFIX}{os.geteuid()}-dead"
    (dead / "3" / "left").mkdir(parents=True)
    other = tmp_path / f"{scratch.PREFIX}{os.geteuid() + 1}-other"
    other.mkdir()
    living = scratch.Scratch()
    assert dead.exists()  # it might just have been made
    monkeypatch.setattr(scratch, "FRESH_S", 0.0)
    second = scratch.Scratch()
    assert sorted(tmp_path.iterdir()) == sorted([other, Path(living.path), Path(second.path)])
    living.close()
    second.close()
    assert list(tmp_path.iterdir()) == [other]


def test_hostile_directories_are_removed_without_following_links(tmp_path: Path) -> None:
    from agentropy.sandbox import scratch

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(outside)
    (top / "loop").symlink_to(top)
    here = os.getcwd()
    os.chdir(top)
    try:
        for _ in range(1200):  # deeper than Python can recurse
            os.mkdir("deep")
            os.chdir("deep")
        Path("link").symlink_to(outside)
    finally:
        os.chdir(here)
    (top / "shut").mkdir()
    (top / "shut" / "inner").mkdir(mode=0)
    os.chmod(top / "shut", 0)
    scratch.remove_tree(str(top))
    assert not top.exists()
    assert (outside / "kept").read_text() == "x"


@pytest.mark.parametrize("isolation", ["strict", "landlock"])
def test_timeouts_leave_no_process_and_no_descriptor(isolation: str) -> None:
    asyncio.run(time_out(80, isolation))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_timeouts_leave_no_process_and_no_descriptor() -> None:
    asyncio.run(time_out(1000, "strict"))


async def time_out(count: int, isolation: str) -> None:
    async with LocalSandbox(workers=4, preload=(), isolation=isolation) as sandbox:
        await sandbox.execute(["print(1)"] * 8)
        processes = [supervisor_of(sandbox), *fork_servers(sandbox), os.getpid()]
        before = [descriptors(pid) for pid in processes]
        results = await sandbox.execute(["while True: pass", "import time; time.sleep(9)"] * (count // 2), timeout=0.05)
        assert {r.status for r in results} == {"timeout"}
        assert programs_alive(sandbox) == []
        assert [descriptors(pid) for pid in processes] == before
        supervisor = Path(f"/proc/{processes[0]}/status").read_text()
        assert int(supervisor.split("VmRSS:")[1].split()[0]) < 60_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_400_mixed_calls_with_hostile_ones() -> None:
    hostile = [
        "import os\nos.kill(os.getppid(), 9)",
        "while True: pass",
        "import ctypes\nctypes.string_at(0)",
        "a = []\nwhile True: a.append(bytearray(1 << 24))",
        "import os\nos.closerange(0, 100)",
    ]

    async def work() -> None:
        async with LocalSandbox() as sandbox:
            await sandbox.execute(["import sympy"] * 4, timeout=60)
            before = descriptors(supervisor_of(sandbox))
            codes = [
                hostile[i // 10 % 5] if i % 10 == 0 else f"import sympy\nprint(sympy.factorint({i}))"
                for i in range(400)
            ]
            results = await sandbox.execute(codes, timeout=2.0)
            for i, result in enumerate(results):
                assert (result.status == "ok") or i % 10 == 0, (codes[i], result)
            assert programs_alive(sandbox) == []
            assert descriptors(supervisor_of(sandbox)) == before

    asyncio.run(work())


def test_a_stalled_trainer_does_not_delay_a_kill() -> None:
    async def work() -> None:
        async with LocalSandbox(workers=1, preload=()) as sandbox:
            call = asyncio.create_task(sandbox.call("while True: pass", timeout=0.3))
            await until(lambda: len(programs_alive(sandbox)) == 1)
            time.sleep(1.5)  # the event loop stands still
            assert programs_alive(sandbox) == []
            result = await call
            assert (result.status, result.duration < 0.9) == ("timeout", True)

    asyncio.run(work())
