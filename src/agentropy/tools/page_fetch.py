"""Fetching a page from the public internet: checked address, checked redirects, bounded time and size.

A name is resolved once, all its addresses are checked, and the connection goes to one of these: what the name means
later, to anybody, plays no part. Proxies of the environment are not used, since they would resolve names themselves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
import zlib
from collections.abc import Iterable
from typing import Any
from urllib.parse import urljoin
from urllib.robotparser import RobotFileParser

import httpcore

from agentropy.tools.functions import in_thread
from agentropy.tools.page_address import Failed, Fetched, Permit, Refused, Resolve, Target, check_public, parse_url
from agentropy.tools.web_host import LONGEST_WAIT, Pacer, retry_after, user_agent

MAX_REDIRECTS = 5
MAX_BODY = 5 << 20
"""Bytes of a page, after decompression."""
MAX_ROBOTS = 256 << 10
CONNECT_LIMIT = 5.0
READABLE = ("text/", "application/xhtml", "application/xml", "application/json", "application/ld+json")


async def resolve(host: str, port: int) -> list[str]:
    """By the system's resolver, in a thread that holds nobody back."""
    import socket

    found = await in_thread(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class _Backend(httpcore.AsyncNetworkBackend):
    """Connects only to public addresses. Names are resolved here, between check and connection nothing lies."""

    def __init__(self, resolve: Resolve, permit: Permit) -> None:
        self._resolve = resolve
        self._permit = permit
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            texts = [str(ipaddress.ip_address(host))]
        except ValueError:
            try:
                texts = await self._resolve(host, port)
            except OSError:
                raise Failed(f"the name {host} cannot be resolved") from None
        addresses = [ipaddress.ip_address(t) for t in texts]
        for address in addresses:
            if (str(address), port) not in self._permit:
                try:
                    check_public(address)
                except Refused:
                    raise Refused(f"{host} is not a public address") from None
        error: Exception = Failed(f"the name {host} has no address")
        for address in addresses[:4]:
            try:
                return await self._inner.connect_tcp(str(address), port, CONNECT_LIMIT, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as caught:
                error = caught
        raise error

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise Refused("only http:// and https:// addresses can be read")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Clock:
    """The time that a page may still take. It runs while its server has the word, not while we wait for our turn."""

    def __init__(self, limit: float) -> None:
        self.limit = self.left = limit


class Fetcher:
    """Fetches pages, keeping to robots.txt. One a run; belongs to one event loop.

    timeout: seconds that a page may take with all its redirects. resolve: how names become numbers. permit: (address,
    port) pairs that count as public. ssl_context: for tests with certificates of their own.
    """

    def __init__(
        self,
        *,
        pacer: Pacer,
        timeout: float,
        resolve: Resolve = resolve,
        permit: Permit = frozenset(),
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        import httpx

        self._pacer = pacer
        self._timeout = timeout
        self._permit = permit
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or httpx.create_ssl_context(),
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=_Backend(resolve, permit),
        )
        self._robots: dict[str, asyncio.Task[RobotFileParser]] = {}

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._robots.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.aclose()

    async def fetch(self, url: str) -> Fetched:
        """The page at a URL. Raises Refused, Failed or TimeoutError, whose messages are for the model."""
        clock = _Clock(self._timeout)
        target = parse_url(url, self._permit)
        for _ in range(MAX_REDIRECTS + 1):
            robots = await self._robots_of(target)
            if not robots.can_fetch(user_agent(), target.url):
                raise Refused(f"{target.host} asks programs not to read this page (robots.txt)")
            answer = await self._get(target, clock, MAX_BODY)
            if isinstance(answer, Fetched):
                return answer
            target = parse_url(urljoin(target.url, answer), self._permit)
        raise Failed(f"the page redirects more than {MAX_REDIRECTS} times")

    async def _robots_of(self, target: Target) -> RobotFileParser:
        key = f"{target.scheme}://{target.authority}"
        task = self._robots.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            if len(self._robots) > 10_000:
                self._robots.clear()
            task = self._robots[key] = asyncio.create_task(self._read_robots(target))
        return await asyncio.shield(task)

    async def _read_robots(self, target: Target) -> RobotFileParser:
        """The rules of a site: none where it has no robots.txt; everything forbidden where its server fails."""
        rules, clock = RobotFileParser(), _Clock(self._timeout)
        place = Target(target.scheme, target.host, target.port, "/robots.txt")
        for _ in range(MAX_REDIRECTS + 1):
            try:
                answer = await self._get(place, clock, MAX_ROBOTS, page=False)
            except _Status as error:
                if error.code >= 500 or error.code == 429:
                    raise Failed(f"{target.host} answers HTTP {error.code}") from None
                break
            if isinstance(answer, Fetched):
                rules.parse(answer.body.decode("utf-8", "replace").splitlines())
                return rules
            place = parse_url(urljoin(place.url, answer), self._permit)
        rules.parse([])
        return rules

    async def _get(self, target: Target, clock: _Clock, limit: int, page: bool = True) -> Fetched | str:
        """One request: the answer, or where it redirects to. Raises Refused, TimeoutError, Failed or its _Status."""
        async with self._pacer.turn(target.host):
            began = time.monotonic()
            try:
                async with asyncio.timeout(clock.left):
                    return await self._request(target, limit, page)
            except (TimeoutError, httpcore.TimeoutException):
                raise TimeoutError(f"{target.host} did not send the page within {clock.limit:g} s") from None
            except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError) as error:
                why = " ".join(str(error).split())[:200]
                raise Failed(f"the connection to {target.host} failed{f' ({why})' if why else ''}") from None
            finally:
                clock.left -= time.monotonic() - began

    async def _request(self, target: Target, limit: int, page: bool) -> Fetched | str:
        headers = {
            "Host": target.authority,
            "User-Agent": user_agent(),
            "Accept": "text/html, application/xhtml+xml, text/plain, application/json;q=0.9, */*;q=0.1",
            "Accept-Encoding": "gzip",
            "Connection": "close",
        }
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
        )
        async with self._pool.stream("GET", url, headers=list(headers.items())) as response:
            told = {k.decode("latin-1").lower(): v for k, v in response.headers}
            if response.status in (301, 302, 303, 307, 308) and told.get("location"):
                return told["location"].decode("utf-8", "replace")
            if response.status != 200:
                wait = retry_after(told.get("retry-after", b"").decode("latin-1"))
                if response.status in (429, 503) and wait:
                    self._pacer.rest(target.host, min(wait, LONGEST_WAIT))
                raise _Status(response.status)
            kind = told.get("content-type", b"").decode("latin-1")
            if page:
                _check_kind(kind)
            encoding = told.get("content-encoding", b"").decode("latin-1")
            return Fetched(target.url, kind, await _read(response, encoding, limit, cut=not page))


class _Status(Failed):
    def __init__(self, code: int) -> None:
        super().__init__(f"the server answers HTTP {code}")
        self.code = code


def _check_kind(kind: str) -> None:
    name = kind.partition(";")[0].strip().lower()
    if name == "application/pdf":
        raise Failed("the address gives a PDF, which cannot be read; look for a web page with the same content")
    readable = name.startswith(READABLE) or name.endswith(("+xml", "+json"))
    if name and (name.startswith("image/") or not readable):
        raise Failed(f"the address gives {name[:80]}, which cannot be read")


async def _read(response: httpcore.Response, encoding: str, limit: int, cut: bool) -> bytes:
    """The body, decompressed. Beyond `limit` bytes it is cut, or Failed is raised."""
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise Failed(f"the page is compressed by {encoding[:20]}, which was not asked for")
    inflate = zlib.decompressobj(31) if "gzip" in encoding else None
    body = b""
    async for chunk in response.aiter_stream():
        while chunk:
            try:
                part = inflate.decompress(chunk, limit + 1) if inflate else chunk
            except zlib.error:
                raise Failed("the page is damaged (not gzip)") from None
            chunk = inflate.unconsumed_tail if inflate else b""
            body += part
            if len(body) > limit:
                if cut:
                    return body[:limit]
                raise Failed(f"the page is larger than {limit >> 20} MB")
    return body
