"""The supervisor's care for children: start them, keep their clocks and caps, collect what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentropy.sandbox.children import LOCK_FAILED, Call, Child, Session, status_of
from agentropy.sandbox.forkserver import ForkServer, sealed_file
from agentropy.sandbox.program import CELL, OUTCOME
from agentropy.sandbox.scratch import Scratch, usage
from agentropy.sandbox.wire import Events

GRACE_S = 0.5  # between the interrupt of a cell and the kill of its session
ANSWER_S = 20.0  # a fork server that takes longer over an order is replaced
TICK_S = 0.05  # how often scratch directories are measured
COUNT_S = 5.0  # how often the threads of a shared user are counted
IDLE_LOOK_S = 1.0  # how often idle sessions are looked after
USERS = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """A call is over, or (`call` None) the child of an idle session is gone. Status `lost`: its fork server died."""

    call: Call | None
    session: Session | None
    server: ForkServer
    status: str
    fields: dict[str, Any]


class Runs:
    """Children that run a call, and session children that wait for one. `done` gets every outcome."""

    def __init__(self, config: dict[str, Any], events: Events, done: Callable[[Ended], None]) -> None:
        self._limits: dict[str, int] = config["limits"]
        self._first_user: int = config["first_user"]
        self._events = events
        self._done = done
        self._children: dict[int, Child] = {}
        self._busy: dict[int, Child] = {}
        self._numbers = 0
        self._users = list(range(USERS, -1, -1))
        self._scratch: Scratch | None = None
        self._counted = (-COUNT_S, 0)
        self._looked = 0.0

    def busy(self) -> int:
        """How many children run a call."""
        return len(self._busy)

    # --- start ---

    def start(self, call: Call, server: ForkServer, session: Session | None, namespaces: bool) -> None:
        """Start a child for a call, or for a session with its first cell."""
        self._numbers += 1
        try:
            child = Child(self._numbers, server, call, session, self._limits["output"])
        except OSError as error:  # out of descriptors
            self._done(Ended(call, session, server, "sandbox_error", {"stdout": "", "stderr": str(error)}))
            return
        child.user = self._users.pop()
        self._children[child.number] = self._busy[child.number] = child
        passed: list[int] = []
        try:
            user = self._first_user + child.user
            if not namespaces:
                if self._scratch is None:
                    self._scratch = Scratch()
                child.scratch = self._scratch.make(str(child.user), user if server.about["own_user"] else None)
            passed.append(_stdin(call))
            if session is None:
                passed.append(sealed_file(call.code))
            else:
                child.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                child.channel.setblocking(False)
                passed.append(theirs.detach())
            order = {
                "id": child.number,
                "session": session is not None,
                "seed": call.seed if session is None else session.seed,
                "echo": call.echo,
                "scratch": child.scratch,
                "user": user,
                "cpu": int(call.timeout) + 2 if session is None else 0,
                "processes": self._process_limit(server),
            }
            server.send(order, [passed[0], child.out_theirs, child.err_theirs, passed[1]])
        except OSError as error:
            self._finish(child, "sandbox_error", None, {"stderr": str(error)})
            return
        finally:
            for descriptor in passed:
                os.close(descriptor)
        child.close_theirs()
        self._events.watch(child.out_fd, lambda: self._read(child, child.out_fd))
        self._events.watch(child.err_fd, lambda: self._read(child, child.err_fd))
        if session is not None:
            assert child.channel is not None
            session.child = child
            call.reset, session.lost = session.lost, False
            self._events.watch(child.channel.fileno(), lambda: self._hear_cell(child))
            self.run_cell(child, call)

    def _process_limit(self, server: ForkServer) -> int:
        """RLIMIT_NPROC counts all threads of a user: without one of its own a call gets room above what is there."""
        if server.about["own_user"] or server.about["user_namespace"]:
            return self._limits["threads"]
        now = time.monotonic()
        if now - self._counted[0] > COUNT_S:
            self._counted = (now, threads_of(os.getuid()))
        return self._counted[1] + 8 * self._limits["threads"]

    def run_cell(self, child: Child, call: Call) -> None:
        """Give a session's child its next cell."""
        child.call, child.interrupted = call, False
        self._busy[child.number] = child
        child.wake()
        if child.pidfd >= 0:
            child.start_clock(time.monotonic())
        child.pending += CELL.pack(len(call.code), call.echo) + call.code
        self._send_cell(child)

    def _send_cell(self, child: Child) -> None:
        if child.channel is None:
            return
        try:
            while child.pending:
                child.pending = child.pending[child.channel.send(child.pending) :]
        except BlockingIOError:
            pass
        except OSError:
            child.pending = b""  # it is dying; its end will be reported
        self._events.writing(child.channel.fileno(), bool(child.pending))

    # --- clocks and caps ---

    def next_check(self) -> float:
        """The moment when `check` has something to do."""
        moments = [child.deadline for child in self._busy.values()]
        if any(child.scratch is not None for child in self._busy.values()):
            moments.append(time.monotonic() + TICK_S)
        return min(moments, default=float("inf"))

    def check(self, now: float) -> ForkServer | None:
        """Stop what is late or uses too much. Returns a fork server that does not answer, if there is one."""
        if now - self._looked > IDLE_LOOK_S:
            self._looked = now
            for child in self._children.values():
                if child.call is None and child.pid:
                    child.check_idle()
        for child in list(self._busy.values()):
            if child.pidfd < 0 and now - child.made > ANSWER_S:
                return child.server
            if now >= child.deadline:
                self._late(child, now)
            if child.scratch is not None and now - child.measured > TICK_S:
                child.measured = now
                if usage(child.scratch, self._limits["scratch"], self._limits["scratch_files"]):
                    child.kill("disk_limit")
        return None

    def _late(self, child: Child, now: float) -> None:
        if child.session is None or child.interrupted:
            child.kill("timeout")
            child.deadline = float("inf")
        else:
            child.interrupted = True
            child.kill(None, signal.SIGINT)
            child.deadline = now + GRACE_S

    def cancel(self, number: int) -> None:
        """The client no longer wants this call: as if its time were over."""
        for child in self._busy.values():
            if child.call is not None and child.call.id == number:
                child.deadline = 0.0

    # --- what children and fork servers say ---

    def hear(self, report: dict[str, Any], descriptors: list[int]) -> None:
        """A fork server's report: a child was started, has ended, or could not be started."""
        child = self._children.get(report["id"])
        if child is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif "pid" in report:
            child.pid, child.pidfd = report["pid"], descriptors[0]
            child.start_clock(report["at"])
            if child.verdict is not None:
                child.kill(None)
        elif "status" in report:
            child.drain()
            status, code = status_of(child, report["status"])
            if child.mark == LOCK_FAILED:
                status = "sandbox_error"
            self._finish(child, status, code, {"cpu": report["cpu"], "rss": report["rss"] // 1024})
        else:
            self._finish(child, "sandbox_error", None, {"stderr": report["failed"]})

    def _read(self, child: Child, descriptor: int) -> None:
        if child.read(descriptor) < 0:
            self._events.unwatch(descriptor)
        if child.written() > self._limits["output_kill"]:
            self._stop(child, "output_limit")

    def _stop(self, child: Child, why: str) -> None:
        if child.call is None and child.session is not None:
            self.detach(child.session)
        else:
            child.kill(why)

    def _hear_cell(self, child: Child) -> None:
        if child.pending:
            self._send_cell(child)
        assert child.channel is not None
        try:
            data = child.channel.recv(OUTCOME.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        call = child.call
        if len(data) != OUTCOME.size or call is None:
            self._events.unwatch(child.channel.fileno())
            if data or call is None:
                self._stop(child, "crash")  # it abuses its channel, or ended while idle
            elif child.verdict is None:  # it is dying, and its end will be reported; or it closed the channel
                child.deadline = min(child.deadline, time.monotonic() + GRACE_S)
                child.interrupted, child.closed = True, True
            return
        if child.verdict is not None:
            return  # it is being killed; the end will be reported
        child.drain()
        outcome, cpu, rss = OUTCOME.unpack(data)
        fields = child.outcome(call) | {"exit": outcome, "cpu": cpu, "rss": rss // 1024}
        status = "timeout" if child.interrupted else "ok" if outcome == 0 else "error"
        child.call, child.deadline = None, float("inf")
        del self._busy[child.number]
        child.park()
        self._done(Ended(call, child.session, child.server, status, fields))

    # --- ends ---

    def detach(self, session: Session) -> None:
        """End a session's idle child at once as far as the session is concerned; it starts anew with its next cell."""
        child = session.child
        if child is not None:
            session.child, session.lost, child.session = None, True, None
            child.kill("sandbox_error")

    def drop(self, server: ForkServer) -> None:
        """A fork server is gone and its children with it."""
        for child in [child for child in self._children.values() if child.server is server]:
            child.kill(None)
            self._finish(child, "lost", None, {})

    def _finish(self, child: Child, status: str, code: int | None, fields: dict[str, Any]) -> None:
        call = child.call
        if call is not None:
            fields = child.outcome(call) | {"exit": code} | fields
        self._children.pop(child.number, None)
        self._busy.pop(child.number, None)
        for descriptor in (child.out_fd, child.err_fd):
            self._events.unwatch(descriptor)
        if child.channel is not None:
            self._events.unwatch(child.channel.fileno())
        child.close()
        self._users.append(child.user)
        if child.scratch is not None and self._scratch is not None:
            self._scratch.remove(child.scratch)
        if child.session is not None:
            child.session.child, child.session.lost = None, call is None
            if call is not None:
                call.reset = True
        self._done(Ended(call, child.session, child.server, status, fields))

    def end(self) -> None:
        """Kill every child and delete all scratch directories."""
        for child in self._children.values():
            child.kill(None)
        if self._scratch is not None:
            self._scratch.close()


def _stdin(call: Call) -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if call.stdin is None else sealed_file(call.stdin)


def threads_of(user: int) -> int:
    """The number of threads that a user has on this machine, by /proc."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count
