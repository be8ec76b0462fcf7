"""The pool of grading workers: hangs, deaths and closing cost no other answer its place and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import psutil

from agentropy.evaluation.grading import make_grader
from agentropy.evaluation.grading.graders import MathGrader
from agentropy.evaluation.grading.pool import WorkerPool

HANGS = r"\int_0^1 \int_0^x \sin(\sin(\sin(x y^2+\cos(x^3)))) \sqrt{1+\tan(x)^{5}} dy dx"


def test_a_hang_costs_its_own_place_only() -> None:
    async def run() -> None:
        grader = MathGrader(workers=2, timeout=1.0)
        try:
            await grader.grade("x+1", ["1+x"])
            started = time.monotonic()
            hostile = [grader.grade(f"\\boxed{{{HANGS} + {i}}}", ["y"]) for i in range(2)]
            honest = [grader.grade(f"\\boxed{{{i}+x}}", [f"x+{i}"]) for i in range(40)]
            verdicts = await asyncio.gather(*hostile, *honest)
            assert time.monotonic() - started < 12.0
            assert all(v.correct for v in verdicts[2:])
            assert not any(v.correct for v in verdicts[:2])
        finally:
            await grader.aclose()

    asyncio.run(run())


def test_a_late_worker_is_killed_and_replaced() -> None:
    pool = WorkerPool(1, timeout=0.2)
    try:
        assert pool.submit("1+x", "x+1").result()[0].startswith("equal")
        (child,) = _workers()
        child.suspend()  # a worker that never answers
        assert pool.submit("2+x", "x+2").result(timeout=20)[0] == "timeout"
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert pool.submit("3+x", "x+3").result(timeout=20)[0].startswith("equal")
        assert pool.kills == 1
    finally:
        pool.close()
    assert not _workers()


def test_a_dead_worker_costs_nothing() -> None:
    pool = WorkerPool(1, timeout=5.0)
    try:
        pool.submit("1+x", "x+1").result()
        (child,) = _workers()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert pool.submit("2+x", "x+2").result(timeout=20)[0].startswith("equal")
    finally:
        pool.close()


def test_closing_answers_what_was_waiting() -> None:
    pool = WorkerPool(1, timeout=5.0)
    pool.submit("1+x", "x+1").result()
    (child,) = _workers()
    child.suspend()
    waiting = [pool.submit(f"{i}+x", f"x+{i}") for i in range(5)]
    time.sleep(0.1)
    pool.close()
    assert [future.result(timeout=5)[0] for future in waiting].count("no_worker") >= 4
    assert not _workers()
    assert pool.submit("1+x", "x+1").result()[0].startswith("equal")  # it starts again
    pool.close()


def test_nothing_is_left_behind() -> None:
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        grader = make_grader("math", workers=1)
        assert grader.grade_now("\\boxed{x+1}", ["1+x"]).correct
        grader.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not _workers()


def test_grading_works_off_the_main_thread() -> None:
    verdicts: list[bool | None] = []
    grader = MathGrader(workers=1)

    def work() -> None:
        verdicts.append(grader.grade_now("\\boxed{\\sum_{k=1}^{10} k}", ["55"]).correct)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    grader.close()
    assert verdicts == [True]


def _workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "agentropy.evaluation.grading.worker" in child.cmdline():
                found.append(child)
    return found
