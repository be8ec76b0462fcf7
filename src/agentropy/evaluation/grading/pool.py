"""Persistent worker processes for the slow path of the maths grader, each with a deadline on its pipe.

A thread or a signal can't stop sympy in its own process, so each worker is a fresh interpreter that is killed, waited
for and replaced when an answer takes longer than its limit. That answer alone is lost: the others wait in one queue and
go to whichever worker is free.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import IO

Reply = tuple[str, str]
"""(reason, detail) as `symbolic.compare` gives it, or ("timeout", …), ("died", …), ("no_worker", …)."""

START_LIMIT = 120.0
# A worker is replaced after so many answers, because the caches of the symbolic libraries only grow.
ANSWERS_A_WORKER = 5000


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        source = str(Path(__file__).resolve().parents[3])
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": source if not path else source + os.pathsep + path,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        # A session of its own: Ctrl-C at the terminal is for the caller to handle.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentropy.evaluation.grading.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self.answered = 0
        self._buffer = b""
        if self._line(START_LIMIT) != b"ready":
            self.stop()
            raise OSError("a grading worker could not be started")

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    def _line(self, limit: float) -> bytes | None:
        """The next line, b"" when the process has ended, None when the limit (seconds) has passed."""
        deadline = time.monotonic() + limit
        descriptor = self._pipes()[1].fileno()
        while b"\n" not in self._buffer:
            # At least one look after the deadline: the caller's own process may have been held up, not the worker.
            ready = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def ask(self, gold: str, answer: str, limit: float) -> Reply:
        """The reply on one pair; after "timeout" or "died" the worker must be stopped."""
        try:
            stdin = self._pipes()[0]
            stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            stdin.flush()
            line = self._line(limit)
            if line == b"loading":
                line = self._line(START_LIMIT)
                line = self._line(limit) if line == b"loaded" else line
        except OSError as error:
            return "died", str(error)
        if line is None:
            return "timeout", f"no verdict within {limit:g} s"
        if not line:
            return "died", "the grading worker ended"
        self.answered += 1
        reason, detail = json.loads(line)
        return str(reason), str(detail)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass


_Job = tuple[str, str, float, "Future[Reply]"]


class _State:
    """What the threads share; holds no reference to the pool, so that a forgotten pool is collected."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.workers: dict[int, _Worker] = {}
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.closed = threading.Event()
        self.kills = 0


def _serve(state: _State, slot: int) -> None:
    """One thread: takes jobs and asks its own worker, replacing it when it is late or dead."""
    while (job := state.jobs.get()) is not None:
        gold, answer, limit, future = job
        if not future.set_running_or_notify_cancel():
            continue
        reply = _ask(state, slot, gold, answer, limit)
        future.set_result(reply)
    _retire(state, slot)


def _retire(state: _State, slot: int) -> None:
    with state.lock:
        worker = state.workers.pop(slot, None)
    if worker is not None:
        worker.stop()


def _ask(state: _State, slot: int, gold: str, answer: str, limit: float) -> Reply:
    reply: Reply = ("no_worker", "the grader was closed")
    for _ in range(2):  # a worker that died between two answers is no fault of the second
        if state.closed.is_set():
            return reply
        worker = state.workers.get(slot)
        fresh = worker is None
        if worker is None:
            try:
                worker = _Worker()
            except OSError as error:
                return "no_worker", str(error)
            with state.lock:
                if state.closed.is_set():
                    worker.stop()
                    return reply
                state.workers[slot] = worker
        reply = worker.ask(gold, answer, limit)
        if reply[0] in ("timeout", "died"):
            state.kills += 1
            _retire(state, slot)
        elif worker.answered >= ANSWERS_A_WORKER:
            _retire(state, slot)
        if reply[0] != "died" or fresh or state.closed.is_set():
            break
    return reply


def _close(state: _State) -> None:
    with state.lock:
        state.closed.set()
        workers = list(state.workers.values())
    for _ in state.threads:
        state.jobs.put(None)
    for worker in workers:
        worker.process.kill()
    for thread in state.threads:
        if thread is not threading.current_thread():
            thread.join(timeout=10)
    while True:  # what was still waiting
        try:
            job = state.jobs.get_nowait()
        except queue.Empty:
            break
        if job is not None and job[3].set_running_or_notify_cancel():
            job[3].set_result(("no_worker", "the grader was closed"))


class WorkerPool:
    """`workers` processes, started on first use. Thread-safe; usable from any event loop by `asyncio.wrap_future`.

    timeout: seconds an answer may take, starting when a ready worker gets it.
    """

    def __init__(self, workers: int = 2, timeout: float = 5.0) -> None:
        if workers < 1 or timeout <= 0:
            raise ValueError("a pool needs at least one worker and a positive timeout")
        self.size = workers
        self.timeout = timeout
        self._state: _State | None = None
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[[_State], WorkerPool] | None = None

    @property
    def kills(self) -> int:
        """How many workers had to be killed or were found dead."""
        return self._state.kills if self._state else 0

    def submit(self, gold: str, answer: str, timeout: float | None = None) -> Future[Reply]:
        """Queue one pair, with its own limit (seconds) if given. The future never raises: failures are replies."""
        future: Future[Reply] = Future()
        with self._lock:
            state = self._state
            if state is None:
                state = self._state = _State()
                self._finalizer = weakref.finalize(self, _close, state)
            # Another thread is worth its start only when all are busy, but a queue that is served late costs more.
            if len(state.threads) < self.size:
                thread = threading.Thread(target=_serve, args=(state, len(state.threads)), daemon=True)
                thread.name = f"grading-{len(state.threads)}"
                state.threads.append(thread)
                thread.start()
            state.jobs.put((gold, answer, timeout or self.timeout, future))
        return future

    def close(self) -> None:
        """Kill the workers and wait for them. What was waiting gets a "no_worker" reply. The pool can be used again."""
        with self._lock:
            state, self._state = self._state, None
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()
        if state is not None:
            _close(state)
