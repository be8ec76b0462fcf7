"""Worker processes that take the text out of pages, each killed and replaced when it takes too long."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from agentropy.tools.functions import in_thread
from agentropy.tools.page_address import Failed, Fetched
from agentropy.tools.parts import ToolLost

START_LIMIT = 60.0


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        source = str(Path(__file__).resolve().parents[2])
        path = os.environ.get("PYTHONPATH")
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": "/",  # nothing that a page could make use of
            "PYTHONPATH": source if not path else source + os.pathsep + path,
            "OMP_NUM_THREADS": "1",
        }
        # A session of its own: Ctrl-C at the terminal is for the caller to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentropy.tools.page_text"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._ready = False
        self._lock = threading.Lock()

    def _line(self, limit: float) -> bytes | None:
        """The next line, b"" when the process has ended, None when the limit (seconds) has passed."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit
        descriptor = self._process.stdout.fileno()
        buffer = b""
        while not buffer.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b""
            buffer += chunk
        return buffer

    def ask(self, page: Fetched, limit: float) -> bytes | None:
        """The reply's line, b"" when the process has died, None when it took too long: it must be stopped then."""
        with self._lock:
            if not self._ready:
                if self._line(START_LIMIT) != b"ready\n":
                    raise ToolLost("the process that reads pages does not start")
                self._ready = True
            assert self._process.stdin is not None
            head = {"url": page.url, "kind": page.kind, "size": len(page.body)}
            try:
                self._process.stdin.write(json.dumps(head).encode() + b"\n" + page.body)
                self._process.stdin.flush()
            except OSError:
                return b""
            return self._line(limit)

    def stop(self) -> None:
        self._process.kill()
        with self._lock:  # a thread that waits for an answer sees the end first
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        pass


class Extractor:
    """Up to `workers` processes, started when needed. timeout: seconds a page may take. Belongs to one event loop."""

    def __init__(self, workers: int = 2, timeout: float = 10.0) -> None:
        self._slots = asyncio.Semaphore(workers)
        self._timeout = timeout
        self._idle: list[_Worker] = []

    async def extract(self, page: Fetched) -> dict[str, str]:
        """{"title", "text"} of a page. Raises Failed for a page that has none or takes too long, ToolLost for a fault
        of the process."""
        async with self._slots:
            worker = self._idle.pop() if self._idle else _Worker()
            try:
                line = await in_thread(lambda: worker.ask(page, self._timeout))
            except BaseException:
                worker.stop()
                raise
            if not line:
                worker.stop()
                if line is None:
                    raise Failed(f"the page's text could not be found within {self._timeout:g} s")
                raise Failed("the page cannot be read (it ends the program that reads it)")
            self._idle.append(worker)
        reply: dict[str, str] = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().stop()
