"""A small web server for tests, on loopback, whose answers are functions of the request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes]


class Site:
    """What a server saw, and how it answers: `answer(path, headers)` gives status, headers and body."""

    def __init__(self, answer: Callable[[str, Any], Answer | None]) -> None:
        self.answer = answer
        self.paths: list[str] = []
        self.agents: set[str] = set()
        self.hosts: set[str] = set()
        self.port = 0


@contextmanager
def serve(answer: Callable[[str, Any], Answer | None]) -> Iterator[Site]:
    """A running server. An answer of None closes the connection without a word."""
    site = Site(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.paths.append(self.path)
            site.agents.add(self.headers["User-Agent"])
            site.hosts.add(self.headers["Host"])
            given = site.answer(self.path, self)
            if given is None:
                self.close_connection = True
                return
            status, headers, body = given
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has had enough

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
