"""The process between the trainer and the programs: it keeps the queue, the clocks and the caps.

It is a process of its own so that a trainer busy with a training step cannot delay a kill. What children write is
only data to it; nothing is ever unpickled or evaluated. One thread, one epoll, standard library only. It lives as
long as its client's socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

from agentropy.sandbox import selftest
from agentropy.sandbox.children import Call, Session
from agentropy.sandbox.forkserver import ForkServer
from agentropy.sandbox.runs import Ended, Runs
from agentropy.sandbox.servers import Servers
from agentropy.sandbox.wire import Events, Frames, frame

WANTS_FULL = re.compile(
    rb"\b(?:numpy|sympy|mpmath|scipy|pandas|matplotlib|sklearn|statsmodels|seaborn|networkx|pylab)\b"
)
SELF_TEST = -1  # the number of its call; clients count from 0
DESCRIPTORS_OF_A_SESSION = 4  # two pipes, the channel, the process
CHUNK = 1 << 20


class Supervisor:
    """The queue and the sessions; `Servers` and `Runs` do the rest."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._limits: dict[str, int] = config["limits"]
        self._client = socket.socket(fileno=config["fd"])
        self._client.setblocking(False)
        self._frames, self._outbox, self._stuck = Frames(), bytearray(), False
        self._events = Events()
        self._runs = Runs(config, self._events, self._done)
        self._servers = Servers(config, self._events, self._runs.hear, self._self_test, self._lost, self._tell)
        self._sessions: dict[str, Session] = {}
        self._queues: dict[str, deque[Call]] = {"lean": deque(), "full": deque(), "cell": deque()}
        self._alive = True

    def serve(self) -> None:
        """Answer the client until it goes away; then end every process we started."""
        self._events.watch(self._client.fileno(), self._read_client)
        self._servers.start("lean")
        parent = os.getppid()
        try:
            while self._alive and os.getppid() == parent:
                now = time.monotonic()
                self._events.turn(max(0.0, min(1.0, self._runs.next_check() - now)))
                now = time.monotonic()
                silent = self._runs.check(now)
                if silent is not None:
                    self._servers.lose(silent, "does not answer")
                self._servers.check(now)
                self._pump()
                self._flush_client()
                if self._servers.failed and not self._outbox:
                    return
        finally:
            self._runs.end()
            self._servers.end()

    # --- client ---

    def _read_client(self) -> None:
        try:
            data = self._client.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._alive = False
            return
        for message in self._frames.feed(data):
            self._obey(message)

    def _flush_client(self) -> None:
        stuck = False
        while self._outbox and self._alive and not stuck:
            try:
                del self._outbox[: self._client.send(self._outbox[:CHUNK])]
            except BlockingIOError:
                stuck = True
            except OSError:
                self._alive = False
        if stuck != self._stuck:
            self._stuck = stuck
            self._events.writing(self._client.fileno(), stuck)

    def _tell(self, message: dict[str, Any]) -> None:
        self._outbox += frame(message)

    def _answer(self, call: Call, status: str, **fields: Any) -> None:
        self._tell({"id": call.id, "status": status, "reset": call.reset, **fields})

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["op"]
        if kind == "run":
            code = message["code"].encode("utf-8", "surrogatepass")
            stdin = None if message["stdin"] is None else as_bytes(message["stdin"])
            full = bool(self._config["preload"]) and WANTS_FULL.search(code) is not None
            options = {name: message[name] for name in ("id", "timeout", "seed", "echo", "session")}
            self._submit(Call(code=code, stdin=stdin, full=full, **options))
        elif kind == "open":
            self._sessions[message["session"]] = Session(message["session"], message["seed"])
        elif kind == "close":
            self._close(message["session"])
        elif kind == "cancel":
            self._cancel(message["id"])

    # --- queue ---

    def _submit(self, call: Call) -> None:
        limit = self._limits["code"]
        if len(call.code) > limit:
            self._answer(call, "error", stderr=f"the program has {len(call.code)} bytes; at most {limit} are allowed\n")
        elif self._servers.broken:
            self._answer(call, "sandbox_error", stderr=self._servers.broken)
        elif sum(map(len, self._queues.values())) >= self._limits["queue"]:
            self._answer(call, "busy")
        elif call.session is None:
            self._queues["full" if call.full else "lean"].append(call)
        elif call.session not in self._sessions:
            self._answer(call, "sandbox_error", stderr="the session is closed")
        else:
            session = self._sessions[call.session]
            session.waiting.append(call)
            self._next_cell(session)

    def _next_cell(self, session: Session) -> None:
        """Cells of a session run one after another: the next one enters the queue when the last one has left it."""
        if not session.busy and session.waiting:
            session.busy = True
            self._enqueue(session, session.waiting.popleft())

    def _enqueue(self, session: Session, call: Call) -> None:
        self._queues["cell" if session.child is not None else "full" if call.full else "lean"].append(call)

    def _pump(self) -> None:
        """Start waiting calls while there are free slots, oldest first, each on the fork server it wants."""
        while self._runs.busy() < self._config["workers"] and not self._servers.broken:
            ready = [
                (queue[0].submitted, name)
                for name, queue in self._queues.items()
                if queue and (name == "cell" or self._servers.want(name) is not None)
            ]
            if not ready:
                return
            name = min(ready)[1]
            call = self._queues[name].popleft()
            session = self._sessions.get(call.session or "")
            server = self._servers.ready(name)
            if call.session is not None and session is None:
                self._answer(call, "sandbox_error", stderr="the session is closed")
            elif session is not None and session.child is not None:
                self._runs.run_cell(session.child, call)
            elif session is not None and server is None:  # its child has died meanwhile
                self._enqueue(session, call)
            elif server is not None:
                if session is not None:
                    self._make_room()
                self._runs.start(call, server, session, self._servers.namespaces)

    def _cancel(self, number: int) -> None:
        self._runs.cancel(number)
        for queue in self._queues.values():
            for call in [call for call in queue if call.id == number]:
                queue.remove(call)
                session = self._sessions.get(call.session or "")
                if session is not None:
                    session.busy = False
                    self._next_cell(session)
        for session in self._sessions.values():
            for call in [call for call in session.waiting if call.id == number]:
                session.waiting.remove(call)

    # --- outcomes ---

    def _self_test(self, server: ForkServer) -> None:
        test = Call(SELF_TEST, selftest.PROGRAM.encode(), None, 10.0, 0, False, server.name == "full", None)
        self._runs.start(test, server, None, self._servers.namespaces)

    def _done(self, ended: Ended) -> None:
        call, session, status = ended.call, ended.session, ended.status
        if call is not None and call.id == SELF_TEST:
            if status != "lost":
                self._servers.judge(ended.server, status, ended.fields["stdout"], ended.fields["stderr"])
        elif call is not None and status == "lost" and session is None and not call.retried:
            call.retried = True  # nothing of a stateless call has been seen yet, so it may run once more
            self._queues["full" if call.full else "lean"].appendleft(call)
        elif call is not None:
            self._answer(call, "sandbox_error" if status == "lost" else status, **ended.fields)
        if session is not None:
            session.busy, session.used = False, time.monotonic()
            self._next_cell(session)

    def _lost(self, server: ForkServer) -> None:
        self._runs.drop(server)
        if not self._servers.broken:
            return
        for queue in (*self._queues.values(), *(session.waiting for session in self._sessions.values())):
            while queue:
                self._answer(queue.popleft(), "sandbox_error", stderr=self._servers.broken)

    # --- sessions ---

    def _make_room(self) -> None:
        """End sessions that are idle for too long and, when there are too many, the one idle for longest."""
        live = [session for session in self._sessions.values() if session.child is not None]
        idle = sorted((session for session in live if not session.busy), key=lambda session: session.used)
        excess = len(live) + 1 - self._limits["sessions"]
        now = time.monotonic()
        for i, session in enumerate(idle):
            if i >= excess and now - session.used < self._limits["session_idle"]:
                break
            self._runs.detach(session)

    def _close(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        for call in session.waiting:
            self._answer(call, "sandbox_error", stderr="the session is closed")
        session.waiting.clear()
        if session.child is not None and session.child.call is None:
            self._runs.detach(session)
        elif session.child is not None:
            session.child.kill("sandbox_error")


def as_bytes(text: str) -> bytes:
    """Input as bytes; what `surrogateescape` decoded comes back as it was."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def main(argument: str) -> None:
    """Run a supervisor with the JSON configuration `argument`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = json.loads(argument)
    room = (hard - 100) // DESCRIPTORS_OF_A_SESSION if hard != resource.RLIM_INFINITY else 4000
    config["limits"]["sessions"] = max(1, min(config["limits"]["sessions"], room, 4000))
    with contextlib.suppress(KeyboardInterrupt):
        Supervisor(config).serve()
    sys.exit(0)
