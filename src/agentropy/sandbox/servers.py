"""The supervisor's care for its fork servers: find the strongest isolation that works, prove it, replace what dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from agentropy.sandbox import selftest
from agentropy.sandbox.forkserver import ForkServer
from agentropy.sandbox.wire import Events

START_S = 120.0  # importing numpy and sympy from a cold disk on a busy machine
DEATHS, DEATHS_WITHIN_S = 3, 60.0


class Servers:
    """The fork servers `lean` and `full`. `lean` comes first and decides for both; `full` starts when wanted.

    `hear` gets every report about a child; `test` starts the self-test on a server, whose outcome comes to `judge`;
    `lost` is called when a server is gone; `tell` reaches the client.
    """

    def __init__(
        self,
        config: dict[str, Any],
        events: Events,
        hear: Callable[[dict[str, Any], list[int]], None],
        test: Callable[[ForkServer], None],
        lost: Callable[[ForkServer], None],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._events = events
        self._hear, self._test, self._lost, self._tell = hear, test, lost, tell
        self._live: dict[str, ForkServer] = {}
        self._deaths: list[float] = []
        self._announced = False
        self._no_namespaces = ""
        self.namespaces: bool = config["namespaces"]
        self.failed = False
        """Whether none could be started at all."""
        self.broken = ""
        """Why no server is started any more: they died too often."""

    def ready(self, name: str) -> ForkServer | None:
        """The server of this name, if it can take orders."""
        server = self._live.get(name)
        return server if server is not None and server.ready else None

    def want(self, name: str) -> ForkServer | None:
        """As `ready`, and start it if it is not there: `full` costs a second and 70 MB, which many runs never need."""
        if self._announced and not self.broken and name not in self._live:
            self.start(name)
        return self.ready(name)

    def start(self, name: str) -> None:
        """Start a server; it is ready when it has passed its self-test."""
        config = self._config
        order = {
            "namespaces": self.namespaces,
            "preload": config["preload"] if name == "full" else [],
            **{key: config[key] for key in ("trees", "unsafe", "limits", "first_user")},
        }
        server = self._live[name] = ForkServer(name, order)
        self._events.watch(server.socket.fileno(), lambda: self._read(server))

    def _read(self, server: ForkServer) -> None:
        while self._live.get(server.name) is server:
            try:
                received = server.receive()
            except EOFError:
                self.lose(server, "died")
                return
            if received is None:
                return
            report, descriptors = received
            if "ready" in report:
                server.about = report
                self._test(server)
            elif "id" not in report:
                server.about = report  # it says why it ends
            else:
                self._hear(report, descriptors)

    def check(self, now: float) -> None:
        """Give up servers that don't become ready."""
        for server in list(self._live.values()):
            if not server.ready and now - server.started > START_S:
                self.lose(server, "did not start")

    def judge(self, server: ForkServer, status: str, out: str, err: str) -> None:
        """Take the outcome of a self-test: the server may work, or has to go."""
        leaks = selftest.leaks(out) if status == "ok" else [f"the self-test ended with {status} {err.strip()}"]
        threads = server.about["threads"]
        if threads != 1:
            leaks.append(f"a preloaded library started {threads - 1} threads, which fork can't copy")
        if leaks and not self._config["unsafe"]:
            server.about["failed"] = "; ".join(leaks)
            self.lose(server, "failed its self-test")
            return
        server.ready = True
        if not self._announced:
            self._announced = True
            about = {**server.about, "leaks": leaks, "no_namespaces": self._no_namespaces}
            self._tell({"op": "ready", "about": about, "proven": selftest.proven(out)})

    def lose(self, server: ForkServer, how: str) -> None:
        """End a server and start what comes in its place, if anything."""
        if self._live.get(server.name) is not server:
            return
        self._events.unwatch(server.socket.fileno())
        server.end()
        del self._live[server.name]
        reason = server.about.get("failed", f"the {server.name} fork server {how}")
        now = time.monotonic()
        self._deaths = [moment for moment in self._deaths if now - moment < DEATHS_WITHIN_S] + [now]
        if not self._announced:
            self._try_less(reason)
        elif len(self._deaths) >= DEATHS:
            self.broken = f"{reason}; {len(self._deaths)} times within {DEATHS_WITHIN_S:.0f} s"
            self._tell({"op": "broken", "reason": self.broken})
        else:
            self.start(server.name)
        self._lost(server)

    def _try_less(self, reason: str) -> None:
        """Before the first success: without namespaces if they were only wanted, else not at all."""
        self._deaths.clear()
        if self.namespaces and self._config["isolation"] != "namespaces":
            self._no_namespaces = reason
            self.namespaces = False
            self.start("lean")
        else:
            self.failed = True
            self._tell({"op": "failed", "reason": reason, "no_namespaces": self._no_namespaces})

    def end(self) -> None:
        """Kill them all; their children die with them."""
        for server in self._live.values():
            server.end()
