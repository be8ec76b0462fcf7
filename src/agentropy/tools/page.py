"""The `read_page` tool: the main text of a page of the public web."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentropy.errors import UserError
from agentropy.tools.base import Tool
from agentropy.tools.cache import DiskCache, cache_directory
from agentropy.tools.clip import clip
from agentropy.tools.page_address import Failed, Permit, Refused, Resolve, parse_url
from agentropy.tools.page_pool import Extractor
from agentropy.tools.parts import PartSession, StaticPart
from agentropy.tools.schema import ArgumentError
from agentropy.tools.web_host import Pacer
from agentropy.trajectory import ToolResult

if TYPE_CHECKING:
    from agentropy.tools.page_fetch import Fetcher

INTERVAL, CONCURRENCY = 0.5, 2
"""Seconds between two requests to a host, and requests to it at once."""

_DESCRIPTION = "Read a web page: returns its main text, piece by piece where it is long."
_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "description": "Address of the page, with http:// or https://."},
        "start": {"type": "integer", "description": "Number of the character to start at; 0 if left out."},
    },
    "required": ["url"],
}


class PagePart:
    """The `read_page` tool. Made by `page_tool`."""

    def __init__(
        self,
        timeout: float,
        max_chars: int,
        cache: DiskCache,
        resolve: Resolve | None,
        permit: Permit,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self._timeout = timeout
        self._max_chars = max_chars
        self._cache = cache
        self._resolve = resolve
        self._permit = permit
        self._ssl_context = ssl_context
        self._fetcher: Fetcher | None = None
        self._extractor: Extractor | None = None
        # Faults of a page's server are part of the web, and told to the model; only our own processes can be lost.
        self._session = StaticPart([Tool("read_page", _DESCRIPTION, _PARAMETERS, self._run)], keeps_time=True)

    @property
    def specs(self) -> list[dict[str, Any]]:
        return self._session.specs

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        start = arguments.get("start") or 0
        if start < 0:
            raise ArgumentError('argument "start" must not be negative')
        try:
            # Before the cache is asked, so that all that is refused is refused in the same way.
            url = parse_url(clip(arguments["url"]), self._permit).url
            page = await self._cache.fetch(url, lambda: self._read(url), _is_page)
        except (Refused, Failed) as error:
            return ToolResult(f"Error: {error}", "error")
        return self._show(page, start)

    async def _read(self, url: str) -> dict[str, str]:
        if self._fetcher is None or self._extractor is None:
            from agentropy.tools.page_fetch import Fetcher, resolve

            pacer = Pacer(INTERVAL, CONCURRENCY)
            self._fetcher = Fetcher(
                pacer=pacer,
                timeout=self._timeout,
                resolve=self._resolve or resolve,
                permit=self._permit,
                ssl_context=self._ssl_context,
            )
            self._extractor = Extractor()
        fetched = await self._fetcher.fetch(url)
        return {"url": fetched.url, **await self._extractor.extract(fetched)}

    def _show(self, page: Mapping[str, str], start: int) -> ToolResult:
        text = page["text"]
        if start >= len(text):
            return ToolResult(f"Error: the page has {len(text)} characters, none from {start} on", "error")
        end = start + self._max_chars
        head = "\n".join(p for p in (page["title"], page["url"]) if p) + "\n\n" if not start else ""
        left = len(text) - end
        rest = f"\n\n[{left} more characters; read on with start={end}]" if left > 0 else ""
        return ToolResult(clip(f"{head}{text[start:end]}{rest}", self._max_chars + 1000))

    async def start(self) -> None:
        return None

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[PartSession, str | None]:
        return self._session, None

    async def close(self) -> None:
        fetcher, extractor = self._fetcher, self._extractor
        self._fetcher = self._extractor = None
        await self._cache.close()
        if fetcher is not None and extractor is not None:
            await asyncio.gather(fetcher.close(), extractor.close())


def _is_page(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("url", "title", "text"))


def page_tool(
    *,
    timeout: float = 20.0,
    max_chars: int = 6000,
    cache: Path | str | None = None,
    resolve: Resolve | None = None,
    permit: Permit = frozenset(),
    ssl_context: ssl.SSLContext | None = None,
) -> PagePart:
    """The built-in tool `read_page(url, start=0)`: main text of a public page of HTML, plain text or JSON.

    timeout: seconds that a page may take to arrive, with its redirects. max_chars: length of a piece. cache: folder of
    the pages; None: under $AGENTROPY_CACHE or ~/.cache/agentropy.
    resolve, permit and ssl_context are for tests: how names become numbers, which (address, port) pairs count as
    public, and whose certificates are trusted. No configuration reaches them.

    Raises UserError where `trafilatura` is missing.
    """
    try:
        import trafilatura  # noqa: F401
    except ImportError:
        raise UserError("read-page needs the package trafilatura: pip install 'agentropy[web]'") from None
    if timeout <= 0 or max_chars < 100:
        raise UserError("read-page needs a timeout above 0 seconds and pieces of at least 100 characters")
    return PagePart(timeout, max_chars, DiskCache(cache or cache_directory("pages")), resolve, permit, ssl_context)
