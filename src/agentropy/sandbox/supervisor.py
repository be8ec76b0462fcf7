"""The process between the trainer and the programs: it keeps the queue, the clocks and the caps.

It is a process of its own so that a trainer busy with a training step cannot delay a kill. What children write is
only data to it; nothing is ever unpickled or evaluated. One thread, one epoll, standard library only. It lives as
long as its client's socket.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from agentropy.sandbox import scratch, selftest
from agentropy.sandbox.children import LOCK_FAILED, Call, Child, Session, status_of
from agentropy.sandbox.forkserver import ForkServer, sealed_file
from agentropy.sandbox.program import CELL, OUTCOME

WANTS_FULL = re.compile(
    rb"\b(?:numpy|sympy|mpmath|scipy|pandas|matplotlib|sklearn|statsmodels|seaborn|networkx|pylab)\b"
)
GRACE_S = 0.5  # between the interrupt of a cell and the kill of its session
START_S = 20.0  # a fork server that takes longer to answer an order is replaced
TICK_S = 0.05  # how often scratch directories are measured
COUNT_S = 5.0  # how often the threads of a shared user are counted
DEATHS, DEATHS_WITHIN_S = 3, 60.0


class Supervisor:
    """All state of the process; `serve` is its life."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.limits: dict[str, int] = config["limits"]
        self.client = socket.socket(fileno=config["fd"])
        self.client.setblocking(False)
        self.inbox, self.outbox = bytearray(), bytearray()
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.namespaces: bool = config["namespaces"]
        self.servers: dict[str, ForkServer] = {}
        self.deaths: list[float] = []
        self.broken = ""
        self.children: dict[int, Child] = {}
        self.sessions: dict[str, Session] = {}
        self.queues: dict[str, deque[Call]] = {"lean": deque(), "full": deque(), "cell": deque()}
        self.running = 0
        self.number = 0
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.users = list(range(4096, -1, -1))
        self.scratch: scratch.Scratch | None = None
        self.counted = (-COUNT_S, 0)
        self.announced = False
        self.alive = True

    # --- life ---

    def serve(self) -> None:
        """Answer the client until it goes away; then end every process we started."""
        self._watch(self.client.fileno(), self._read_client)
        self._start_server("lean")
        parent = os.getppid()
        try:
            while self.alive and os.getppid() == parent:
                wait = 1.0
                if self.timers:
                    wait = min(wait, max(0.0, self.timers[0][0] - time.monotonic()))
                for descriptor, _ in self.poll.poll(wait):
                    handler = self.handlers.get(descriptor)
                    if handler is not None:
                        handler()
                now = time.monotonic()
                while self.timers and self.timers[0][0] <= now:
                    heapq.heappop(self.timers)[2]()
                self._pump()
                self._flush_client()
        finally:
            for child in self.children.values():
                child.kill(None)
            for server in self.servers.values():
                server.end()
            if self.scratch is not None:
                self.scratch.close()

    def _watch(self, descriptor: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self.handlers[descriptor] = handler
        self.poll.register(descriptor, events)

    def _unwatch(self, descriptor: int) -> None:
        if self.handlers.pop(descriptor, None) is not None:
            self.poll.unregister(descriptor)

    def _after(self, moment: float, action: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.timers, (moment, self.number, action))

    # --- client ---

    def _read_client(self) -> None:
        try:
            data = self.client.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.alive = False
            return
        self.inbox += data
        while len(self.inbox) >= 4:
            end = 4 + int.from_bytes(self.inbox[:4], "little")
            if len(self.inbox) < end:
                break
            message = json.loads(self.inbox[4:end])
            del self.inbox[:end]
            self._obey(message)

    def _flush_client(self) -> None:
        while self.outbox:
            try:
                del self.outbox[: self.client.send(self.outbox[: 1 << 20])]
            except BlockingIOError:
                self.poll.modify(self.client.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return
            except OSError:
                self.alive = False
                return
        self.poll.modify(self.client.fileno(), select.EPOLLIN)

    def _tell(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        self.outbox += len(text).to_bytes(4, "little") + text

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["op"]
        if kind == "run":
            code = message["code"].encode("utf-8", "surrogatepass")
            stdin = None if message["stdin"] is None else _bytes(message["stdin"])
            key = message["session"]
            full = bool(self.config["preload"]) and WANTS_FULL.search(code) is not None
            call = Call(
                message["id"], code, stdin, message["timeout"], message["seed"], message["echo"], full, session=key
            )
            self._submit(call)
        elif kind == "open":
            self.sessions[message["session"]] = Session(message["session"], message["seed"])
        elif kind == "close":
            session = self.sessions.pop(message["session"], None)
            if session is not None:
                self._end_session(session)
        elif kind == "cancel":
            self._cancel(message["id"])

    def _submit(self, call: Call) -> None:
        limit = self.limits["code"]
        if len(call.code) > limit:
            self._answer(call, "error", stderr=f"the program has {len(call.code)} bytes; at most {limit} are allowed\n")
        elif self.broken:
            self._answer(call, "sandbox_error", stderr=self.broken)
        elif sum(map(len, self.queues.values())) >= self.limits["queue"]:
            self._answer(call, "busy")
        elif call.session is None:
            self.queues["full" if call.full else "lean"].append(call)
        else:
            session = self.sessions.get(call.session)
            if session is None:
                self._answer(call, "sandbox_error", stderr="the session is closed")
                return
            session.waiting.append(call)
            self._next_cell(session)

    def _next_cell(self, session: Session) -> None:
        if session.busy or not session.waiting:
            return
        session.busy = True
        call = session.waiting.popleft()
        queue = "cell" if session.child is not None else "full" if call.full else "lean"
        self.queues[queue].append(call)

    def _cancel(self, number: int) -> None:
        for queue in (*self.queues.values(), *(session.waiting for session in self.sessions.values())):
            for call in queue:
                if call.id == number:
                    queue.remove(call)
                    session = self.sessions.get(call.session or "")
                    if session is not None and queue is not session.waiting:
                        session.busy = False
                        self._next_cell(session)
                    return
        for child in self.children.values():
            if child.call is not None and child.call.id == number:
                child.kill("timeout")

    def _answer(self, call: Call, status: str, **fields: Any) -> None:
        self._tell({"id": call.id, "status": status, "reset": call.reset, **fields})

    # --- fork servers ---

    def _start_server(self, name: str) -> None:
        order = {
            "namespaces": self.namespaces,
            "preload": self.config["preload"] if name == "full" else [],
            "trees": self.config["trees"],
            "unsafe": self.config["unsafe"],
            "limits": self.limits,
            "first_user": self.config["first_user"],
        }
        server = self.servers[name] = ForkServer(name, order)
        self._watch(server.socket.fileno(), lambda: self._read_server(server))
        self._after(
            time.monotonic() + 120.0, lambda: None if server.about else self._lose_server(server, "did not start")
        )

    def _read_server(self, server: ForkServer) -> None:
        while self.servers.get(server.name) is server:
            try:
                received = server.receive()
            except EOFError:
                self._lose_server(server, "died")
                return
            if received is None:
                return
            report, descriptors = received
            if "ready" in report:
                server.about = report
                self._self_test(server)
            elif "failed" in report and "id" not in report:
                server.about = report
            else:
                self._hear_of_child(report, descriptors)

    def _lose_server(self, server: ForkServer, how: str) -> None:
        if self.servers.get(server.name) is not server:
            return
        self._unwatch(server.socket.fileno())
        server.end()
        for child in [child for child in self.children.values() if child.server is server]:
            child.kill(None)
            self._drop(child)
        del self.servers[server.name]
        reason = server.about.get("failed", f"the {server.name} fork server {how}")
        if not self.announced:
            if self.namespaces and self.config["isolation"] != "namespaces":
                self.config["no_namespaces"] = reason
                self.namespaces = False
                self._start_server("lean")
            else:
                self._tell({"op": "failed", "reason": reason, "no_namespaces": self.config.get("no_namespaces", "")})
                self._flush_client()
                self.alive = False
            return
        now = time.monotonic()
        self.deaths = [moment for moment in self.deaths if now - moment < DEATHS_WITHIN_S] + [now]
        if len(self.deaths) >= DEATHS:
            self.broken = f"{reason}; {len(self.deaths)} times within {DEATHS_WITHIN_S:.0f} s"
            for queue in self.queues.values():
                while queue:
                    self._answer(queue.popleft(), "sandbox_error", stderr=self.broken)
            self._tell({"op": "broken", "reason": self.broken})
            return
        self._start_server(server.name)

    def _self_test(self, server: ForkServer) -> None:
        call = Call(-1, selftest.PROGRAM.encode(), None, 10.0, 0, False, server.name == "full")
        self.running += 1
        self._spawn(call, server)

    def _judge_self_test(self, server: ForkServer, status: str, out: str, err: str) -> None:
        leaks = selftest.leaks(out) if status == "ok" else [f"self-test: {status} {err.strip()}"]
        threads = server.about["threads"]
        if threads != 1:
            leaks.append(f"a preloaded library started {threads - 1} threads, which fork can't copy")
        if leaks and not self.config["unsafe"]:
            server.about["failed"] = "; ".join(leaks)
            self._lose_server(server, "failed its self-test")
            return
        server.ready = True
        if self.announced:
            return
        self.announced = True
        about = {**server.about, "leaks": leaks, "no_namespaces": self.config.get("no_namespaces", "")}
        self._tell({"op": "ready", "about": about, "proven": selftest.proven(out)})
        if self.config["preload"]:
            self._start_server("full")

    # --- children ---

    def _pump(self) -> None:
        """Start waiting calls while there are free slots, oldest first, each on the fork server it wants."""
        while self.running < self.config["workers"] and not self.broken:
            ready = []
            for name, queue in self.queues.items():
                server = self.servers.get(name)
                if queue and (name == "cell" or (server is not None and server.ready)):
                    ready.append((queue[0].submitted, name))
            if not ready:
                return
            name = min(ready)[1]
            call = self.queues[name].popleft()
            self.running += 1
            session = self.sessions.get(call.session or "")
            if call.session is not None and session is None:
                self.running -= 1
                self._answer(call, "sandbox_error", stderr="the session is closed")
            elif session is not None and session.child is not None:
                self._run_cell(session.child, call)
            elif name == "cell":  # its child has died meanwhile
                self.running -= 1
                self.queues["full" if call.full else "lean"].append(call)
            else:
                self._spawn(call, self.servers[name], session)

    def _spawn(self, call: Call, server: ForkServer, session: Session | None = None) -> None:
        self.number += 1
        child = Child(self.number, server, call, session, self.limits["output"])
        child.user = self.users.pop()
        user = self.config["first_user"] + child.user
        passed: list[int] = []
        try:
            if session is not None:
                self._make_room()
                child.call, session.child = None, child
                call.reset, session.lost = session.lost, False
            if not self.namespaces:
                child.scratch = self._scratch().make(str(child.user), user if server.about["own_user"] else None)
            passed.append(
                os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if call.stdin is None else sealed_file(call.stdin)
            )
            if session is None:
                passed.append(sealed_file(call.code))
            else:
                child.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                child.channel.setblocking(False)
                passed.append(theirs.detach())
            order = {
                "id": child.number,
                "session": session is not None,
                "seed": session.seed if session is not None else call.seed,
                "echo": call.echo,
                "scratch": child.scratch,
                "user": user,
                "cpu": 0 if session is not None else int(call.timeout) + 2,
                "processes": self._process_limit(server),
            }
            server.send(order, [passed[0], child.out_theirs, child.err_theirs, passed[1]])
        except OSError as error:
            self.children[child.number] = child
            child.call = call
            self._finish(child, "sandbox_error", None, {"stderr": f"{error}"})
            return
        finally:
            for descriptor in passed:
                os.close(descriptor)
        child.close_theirs()
        self.children[child.number] = child
        self._watch(child.out_fd, lambda: self._hear(child, child.out_fd))
        self._watch(child.err_fd, lambda: self._hear(child, child.err_fd))
        self._after(time.monotonic() + START_S, lambda: self._check_start(child))
        if child.scratch is not None:
            self._after(time.monotonic() + TICK_S, lambda: self._measure(child))
        if session is not None:
            assert child.channel is not None
            self._watch(child.channel.fileno(), lambda: self._hear_cell(child))
            self._run_cell(child, call)

    def _scratch(self) -> scratch.Scratch:
        if self.scratch is None:
            self.scratch = scratch.Scratch()
        return self.scratch

    def _process_limit(self, server: ForkServer) -> int:
        """RLIMIT_NPROC counts all threads of a user: without one of its own a call gets room above what is there."""
        if server.about["own_user"] or server.about["user_namespace"]:
            return self.limits["threads"]
        now = time.monotonic()
        if now - self.counted[0] > COUNT_S:
            self.counted = (now, threads_of(os.getuid()))
        return self.counted[1] + 8 * self.limits["threads"]

    def _check_start(self, child: Child) -> None:
        if child.number in self.children and child.pidfd < 0:
            self._lose_server(child.server, "does not answer")

    def _hear_of_child(self, report: dict[str, Any], descriptors: list[int]) -> None:
        child = self.children.get(report["id"])
        if child is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif "pid" in report:
            child.pid, child.pidfd, child.started = report["pid"], descriptors[0], report["at"]
            if child.verdict is not None:
                child.kill(None)
            if child.call is not None:
                self._set_clock(child, child.call, report["at"])
        elif "status" in report:
            child.report = report
            self._reap(child)
        else:
            self._finish(child, "sandbox_error", None, {"stderr": report["failed"]})

    def _set_clock(self, child: Child, call: Call, start: float) -> None:
        call.started = start
        child.deadline = start + call.timeout
        self._after(child.deadline, lambda: self._check_clock(child, call))

    def _check_clock(self, child: Child, call: Call) -> None:
        if child.call is not call or child.number not in self.children:
            return
        if child.session is None or child.interrupted:
            child.kill("timeout")
            return
        child.interrupted = True
        child.kill(None, signal.SIGINT)
        self._after(time.monotonic() + GRACE_S, lambda: self._check_clock(child, call))

    def _measure(self, child: Child) -> None:
        if child.number not in self.children or child.scratch is None:
            return
        if child.call is not None and scratch.usage(
            child.scratch, self.limits["scratch"], self.limits["scratch_files"]
        ):
            child.kill("disk_limit")
        self._after(time.monotonic() + TICK_S, lambda: self._measure(child))

    def _hear(self, child: Child, descriptor: int) -> None:
        if child.read(descriptor) < 0:
            self._unwatch(descriptor)
        if child.written() > self.limits["output_kill"]:
            child.kill("output_limit")

    def _reap(self, child: Child) -> None:
        child.drain()
        status, code = status_of(child, child.report["status"])
        if child.mark == LOCK_FAILED:
            status = "sandbox_error"
        self._finish(child, status, code, {"cpu": child.report["cpu"], "rss": child.report["rss"] // 1024})

    def _finish(self, child: Child, status: str, code: int | None, fields: dict[str, Any]) -> None:
        """The child is gone: answer its call and forget it."""
        call, session = child.call, child.session
        out, out_cut = child.out.take()
        err, err_cut = child.err.take()
        self._forget(child)
        if session is not None:
            session.child, session.lost = None, call is None
            session.busy = False
            if call is not None:
                call.reset = True
        if call is None:
            if session is not None:
                self._next_cell(session)
            return
        self.running -= 1
        if call.id < 0:
            self._judge_self_test(child.server, status, out, err)
            return
        duration = time.monotonic() - (call.started or time.monotonic())
        queued = (call.started or time.monotonic()) - call.submitted
        self._answer(
            call,
            status,
            **{
                "stdout": out,
                "stderr": err,
                "duration": duration,
                "queue": queued,
                "exit": code,
                "truncated": out_cut or err_cut,
            }
            | fields,
        )
        if session is not None:
            self._next_cell(session)

    def _forget(self, child: Child) -> None:
        self.children.pop(child.number, None)
        for descriptor in (child.out_fd, child.err_fd):
            self._unwatch(descriptor)
        if child.channel is not None:
            self._unwatch(child.channel.fileno())
        child.close()
        self.users.append(child.user)
        if child.scratch is not None:
            self._scratch().remove(child.scratch)

    def _drop(self, child: Child) -> None:
        """The child's fork server is gone: run a stateless call once more, else own up."""
        call = child.call
        if call is not None and child.session is None and not call.retried and call.id >= 0:
            call.retried = True
            self._forget(child)
            self.running -= 1
            self.queues["full" if call.full else "lean"].appendleft(call)
        elif call is not None and call.id < 0:
            self._forget(child)
            self.running -= 1
        else:
            self._finish(child, "sandbox_error", None, {})

    # --- sessions ---

    def _run_cell(self, child: Child, call: Call) -> None:
        child.call = call
        child.interrupted = False
        child.wake()
        if child.pidfd >= 0:
            self._set_clock(child, call, time.monotonic())
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
        self.poll.modify(child.channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if child.pending else 0))

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
        call, session = child.call, child.session
        if len(data) != OUTCOME.size or call is None or session is None:  # it died, or closed or abused its channel
            self._unwatch(child.channel.fileno())
            if call is None and session is not None:
                session.child, session.lost = None, True
                child.session = None
                child.kill(None)
            elif data:
                child.kill("crash")
            else:
                self._after(time.monotonic() + GRACE_S, lambda: child.kill("crash"))
            return
        child.drain()
        outcome, cpu, rss = OUTCOME.unpack(data)
        out, out_cut = child.out.take()
        err, err_cut = child.err.take()
        if child.verdict is not None:
            return  # it is being killed; the end will be reported
        child.call = None
        self.running -= 1
        session.busy, session.used = False, time.monotonic()
        status = "timeout" if child.interrupted else "ok" if outcome == 0 else "error"
        fields = {
            "stdout": out,
            "stderr": err,
            "duration": session.used - call.started,
            "queue": call.started - call.submitted,
        }
        self._answer(call, status, **fields, exit=outcome, truncated=out_cut or err_cut, cpu=cpu, rss=rss // 1024)
        child.park()
        self._next_cell(session)

    def _make_room(self) -> None:
        """End the session that is idle for longest when there are too many, and those idle for too long."""
        idle = [s for s in self.sessions.values() if s.child is not None and not s.busy]
        live = sum(session.child is not None for session in self.sessions.values())
        idle.sort(key=lambda session: session.used)
        now = time.monotonic()
        for session in idle:
            if live < self.limits["sessions"] and now - session.used < self.limits["session_idle"]:
                break
            self._end_session(session)
            live -= 1

    def _end_session(self, session: Session) -> None:
        child = session.child
        for call in session.waiting:
            self._answer(call, "sandbox_error", stderr="the session is closed")
        session.waiting.clear()
        if child is not None:
            child.kill("sandbox_error")


def _bytes(text: str) -> bytes:
    """Input as bytes; what `surrogateescape` decoded comes back as it was."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def threads_of(user: int) -> int:
    """The number of threads that a user has on this machine, by /proc."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


def main(argument: str) -> None:
    """Run a supervisor with the JSON configuration `argument`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(KeyboardInterrupt):
        Supervisor(json.loads(argument)).serve()
    sys.exit(0)
