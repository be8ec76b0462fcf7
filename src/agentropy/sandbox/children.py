"""The supervisor's record of one forked child: its pipes, its clock, why it was stopped, and what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentropy.sandbox.capture import Capture

if TYPE_CHECKING:
    from agentropy.sandbox.forkserver import ForkServer

READ_SIZE = 1 << 16
TICKS = os.sysconf("SC_CLK_TCK")
IDLE_CPU_S = 0.1
LOCKED, LOCK_FAILED = 1, 2


@dataclass(slots=True, eq=False)
class Call:
    """One program (or one cell of a session) that a client has asked for."""

    id: int
    code: bytes
    stdin: bytes | None
    timeout: float
    seed: int
    echo: bool
    full: bool
    """Whether it wants the fork server with numpy and sympy."""
    session: str | None = None
    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0
    retried: bool = False
    reset: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """A client's session: at most one child, and the cells that wait for it."""

    key: str
    seed: int
    child: Child | None = None
    waiting: deque[Call] = field(default_factory=deque)
    busy: bool = False
    used: float = field(default_factory=time.monotonic)
    lost: bool = False
    """The child is gone without the client knowing yet."""


class Child:
    """A running child. The supervisor owns the reading ends of its pipes and decides when it has to stop."""

    def __init__(self, number: int, server: ForkServer, call: Call, session: Session | None, keep: int) -> None:
        self.number = number
        self.server = server
        self.call: Call | None = call
        self.session = session
        self.out, self.err = Capture(keep), Capture(keep)
        self.out_fd, self.out_theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.err_fd, self.err_theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for descriptor in (self.out_theirs, self.err_theirs):
            os.set_blocking(descriptor, True)
        self.mark = 0
        self.pid = 0
        self.pidfd = -1
        self.channel: socket.socket | None = None
        self.pending = b""
        self.made = time.monotonic()
        self.measured = 0.0
        self.deadline = float("inf")
        self.verdict: str | None = None
        self.interrupted = False
        self.stopped = False
        self.idle_cpu = -1.0
        self.closed = False
        self.scratch: str | None = None
        self.user = -1

    def read(self, descriptor: int) -> int:
        """Take in what one pipe holds now. Returns the number of bytes; 0 when it is empty for now, -1 at its end."""
        try:
            data = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return 0
        if not data:
            return -1
        if descriptor == self.out_fd:
            self.out.add(data)
        else:
            if not self.mark:
                self.mark = data[0]
                data = data[1:]
            self.err.add(data)
        return len(data) + 1

    def drain(self) -> None:
        """Take in all that is left, up to what is worth keeping."""
        for descriptor in (self.out_fd, self.err_fd):
            for _ in range(64):
                if self.read(descriptor) <= 0:
                    break

    def start_clock(self, moment: float) -> None:
        """The call, if there is one, has begun."""
        if self.call is not None:
            self.call.started = moment
            self.deadline = moment + self.call.timeout

    def outcome(self, call: Call) -> dict[str, Any]:
        """What the call has written, and its times; the streams start afresh."""
        out, out_cut = self.out.take()
        err, err_cut = self.err.take()
        now = time.monotonic()
        started = call.started or now
        times = {"duration": now - started, "queue": started - call.submitted}
        return {"stdout": out, "stderr": err, "truncated": out_cut or err_cut, **times}

    def written(self) -> int:
        """Bytes written to both streams since the call began."""
        return self.out.total + self.err.total

    def kill(self, why: str | None, number: int = signal.SIGKILL) -> None:
        """Send a signal; `why` becomes the status unless an earlier reason is there."""
        if why is not None and self.verdict is None:
            self.verdict = why
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def park(self) -> None:
        """Stop a session between cells if it left threads behind: they would use a core that nobody counts."""
        self.idle_cpu = -1.0
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{self.pid}/task").st_nlink != 3:
                self._stop()

    def check_idle(self) -> None:
        """Stop a session that says it waits for a cell and computes all the same."""
        if self.stopped:
            return
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / TICKS
            if self.idle_cpu < 0:
                self.idle_cpu = used
            elif used - self.idle_cpu > IDLE_CPU_S:
                self._stop()

    def _stop(self) -> None:
        self.kill(None, signal.SIGSTOP)
        self.stopped = True

    def wake(self) -> None:
        """Undo `park`."""
        if self.stopped:
            self.kill(None, signal.SIGCONT)
            self.stopped = False

    def close_theirs(self) -> None:
        """Close the ends that the child has by now."""
        for descriptor in (self.out_theirs, self.err_theirs):
            if descriptor >= 0:
                os.close(descriptor)
        self.out_theirs = self.err_theirs = -1

    def close(self) -> None:
        """Close everything we hold for this child."""
        self.close_theirs()
        for descriptor in (self.out_fd, self.err_fd, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self.out_fd = self.err_fd = self.pidfd = -1
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def status_of(child: Child, wait_status: int) -> tuple[str, int | None]:
    """(status, exit code) from what the kernel and our own clock say; nothing the program wrote counts."""
    code = os.waitstatus_to_exitcode(wait_status)
    if child.verdict is not None:
        return "crash" if child.closed else child.verdict, None if code < 0 else code
    if child.mark != LOCKED:
        return "sandbox_error", None
    if code == -signal.SIGXCPU:
        return "timeout", None
    if code < 0:
        return "crash", None
    return ("ok" if code == 0 else "error"), code
