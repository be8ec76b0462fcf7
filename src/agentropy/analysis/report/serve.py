"""The live page: the report's page, which asks a server on loopback whether there is more to show."""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agentropy.analysis.report.build import BUDGET, Cache, page_of_files
from agentropy.analysis.report.page import compress, render
from agentropy.errors import UserError
from agentropy.methods.base import Method

WATCHED = (
    "config.yaml",
    "metrics.jsonl",
    "evaluation-*.json",
    "results.json",
    "trajectories.jsonl",
    "trajectories/*.jsonl",
)
PATIENCE = 4.0
"""A page is made again after so many times the CPU time that the last one took: watching must not slow the run."""
LONGEST_WAIT = 60.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass
class LivePage:
    """What a live page shows now. `source` may not exist yet."""

    source: Path
    method: Method | None = None
    model: Path | None = None
    cache: Cache = field(default_factory=Cache)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stamp: str = ""
    _body: bytes = b""
    _after: float = 0.0
    _warm: bool = False

    def answer(self, have: str) -> bytes | None:
        """The data as gzipped JSON; None where the page that has the stamp `have` has it all."""
        with self._lock:
            if time.monotonic() >= self._after and (stamp := self._fingerprint()) != self._stamp:
                began = time.thread_time()
                self._body = compress(self._data() | {"stamp": stamp})
                self._stamp = stamp
                if self._warm:  # the first time pays for imports
                    self._after = time.monotonic() + min(PATIENCE * (time.thread_time() - began), LONGEST_WAIT)
                self._warm = bool(self.cache.texts)
            return None if have == self._stamp else self._body

    def _fingerprint(self) -> str:
        paths = (
            [p for name in WATCHED for p in sorted(self.source.glob(name))] if self.source.is_dir() else [self.source]
        )
        state = []
        for path in paths:
            try:
                stat = path.stat()
                state.append((str(path), stat.st_mtime_ns, stat.st_size))
            except OSError:  # not there, or just renamed
                state.append((str(path), 0, -1))
        return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()

    def _data(self) -> dict[str, Any]:
        if not self.source.exists():
            return {"waiting": f"Waiting for {self.source}: there is no such run yet."}
        if self.source.is_dir() and not any(next(self.source.glob(n), None) for n in WATCHED):
            return {"waiting": f"Waiting for {self.source}: the run has written nothing yet."}
        try:
            return page_of_files(self.source, method=self.method, model=self.model, budget=BUDGET, cache=self.cache)
        except UserError as error:
            return {"waiting": f"This cannot be shown: {error}"}
        except OSError as error:  # such as one removed between listing and reading
            return {"waiting": f"This cannot be read: {error.filename}: {error.strerror}"}


def make_server(live: LivePage, port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1; port 0 takes a free one. Raises UserError where the port cannot be had."""
    page = gzip.compress(render(None, str(live.source)).encode("utf-8"), mtime=0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # no connection outlives its answer, nor the server
        timeout = 60

        def do_GET(self) -> None:
            where = urlsplit(self.path)
            # A page of another site can point a name of its own at 127.0.0.1, but cannot make the browser hide it. The
            # port may be another: that of a tunnel.
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                self.reply(421, b"this server answers at 127.0.0.1 only\n", "text/plain")
            elif where.path == "/":
                self.reply(200, page, "text/html; charset=utf-8", packed=True)
            elif where.path == "/data":
                body = live.answer(parse_qs(where.query).get("have", [""])[0])
                if body is None:
                    self.reply(204, b"", "application/json")
                else:
                    self.reply(200, body, "application/json", packed=True)
            else:
                self.reply(404, b"there is nothing here but / and /data\n", "text/plain")

        def reply(self, status: int, body: bytes, kind: str, packed: bool = False) -> None:
            if packed and "gzip" not in self.headers.get("Accept-Encoding", ""):
                body, packed = gzip.decompress(body), False
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            if packed:
                self.send_header("Content-Encoding", "gzip")
                self.send_header("Vary", "Accept-Encoding")
            self.end_headers()
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):  # the page was closed
                return

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are no news."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on 127.0.0.1:{port}: {why}; choose another --port, or 0 for a free one"
        ) from None
    server.daemon_threads = True
    return server


def serve(server: ThreadingHTTPServer, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `ready` gets the address."""
    ready(f"http://127.0.0.1:{server.server_address[1]}/")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
