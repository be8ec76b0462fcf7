"""The `web_search` tool: titles, addresses and snippets from a search engine that the user names."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from agentropy.errors import UserError
from agentropy.tools.base import Tool
from agentropy.tools.cache import DiskCache, cache_directory
from agentropy.tools.clip import clip
from agentropy.tools.parts import PartSession, StaticPart, ToolLost
from agentropy.tools.schema import ArgumentError
from agentropy.tools.web_host import LONGEST_WAIT, Pacer, retry_after, user_agent
from agentropy.trajectory import ToolResult

if TYPE_CHECKING:
    import httpx

MAX_QUERY = 500
"""Characters of a query."""
MAX_BODY = 4 << 20
"""Bytes of an engine's answer."""
MAX_KEPT = 20
"""Results of a query that are kept, whatever the tool shows of them."""


@dataclass(frozen=True, slots=True)
class WebResult:
    """A page found."""

    title: str
    url: str
    snippet: str


class SearchEngine(Protocol):
    """What the tool needs of an engine."""

    @property
    def name(self) -> str:
        """Tells engines apart, for the cache."""
        ...

    async def search(self, query: str) -> Sequence[WebResult]:
        """The results, best first. Raises ToolLost for a fault of the engine, UserError where it cannot be used."""
        ...

    async def close(self) -> None: ...


class SearxNG:
    """An engine that answers as SearXNG does: `GET URL/search?q=…&format=json`.

    url: of the instance, or of its `/search`; further parameters in it (`?categories=science`) are sent along.
    interval: seconds between two requests. concurrency: requests at once. tries: requests for one query, where the
    engine fails or asks to wait. timeout: seconds an answer may take.
    """

    def __init__(
        self, url: str, *, interval: float = 0.2, concurrency: int = 4, tries: int = 4, timeout: float = 20.0
    ) -> None:
        import httpx

        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host or "%" in parts.host:
            raise UserError(f"a search engine is an address such as http://localhost:8888, not {url!r}")
        path = parts.path.rstrip("/")
        self._url = parts.copy_with(path=path if path.endswith("/search") else f"{path}/search", fragment=None)
        self._host = parts.netloc.decode("ascii", "replace")
        self._pace = interval, concurrency
        self._pacer = Pacer(*self._pace)
        self._tries = tries
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None
        self._answered = False

    @property
    def name(self) -> str:
        return str(self._url.copy_with(username=None, password=None))

    async def search(self, query: str) -> list[WebResult]:
        """As `SearchEngine.search`."""
        import httpx

        if self._client is None:
            headers = {"User-Agent": user_agent(), "Accept": "application/json"}
            self._client = httpx.AsyncClient(headers=headers, timeout=self._timeout)
        why = ""
        for attempt in range(self._tries):
            if attempt:
                await asyncio.sleep(0.5 * 2 ** (attempt - 1) * (0.5 + random.random()))
            try:
                async with self._pacer.turn(self._host), asyncio.timeout(self._timeout):
                    status, told, body = await self._get(query)
            except TimeoutError:
                why = f"no answer within {self._timeout:g} s"
                continue
            except httpx.HTTPError as error:
                why = f"{type(error).__name__} {error}".strip()
                continue
            if status == 200:
                results = read_results(body)
                if results is not None:
                    self._answered = True
                    return results
                why = "its answer is not the JSON of SearXNG"
                continue
            why = f"HTTP {status}"
            if status in _ADVICE and not self._answered:
                raise UserError(f"the search engine {self.name} answers HTTP {status}: {_ADVICE[status]}")
            wait = retry_after(told.get("retry-after")) if status in (429, 503) else None
            if wait is not None:
                if wait > LONGEST_WAIT:
                    raise ToolLost(f"the search engine asks to wait {wait:.0f} s")
                self._pacer.rest(self._host, wait)
            elif status < 500 and status != 429:
                break
        raise ToolLost(f"the search engine failed: {why}")

    async def _get(self, query: str) -> tuple[int, Mapping[str, str], bytes]:
        assert self._client is not None
        url = self._url.copy_merge_params({"q": query, "format": "json"})
        async with self._client.stream("GET", url) as response:
            body = b""
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY:
                    return 200, {}, b""
            return response.status_code, response.headers, body

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        self._pacer = Pacer(*self._pace)  # what it holds belongs to this event loop
        if client is not None:
            await client.aclose()


_MOVED = "it has moved; give the address that a browser ends at"
_ADVICE = dict.fromkeys((301, 302, 307, 308), _MOVED) | {
    401: "it wants a password; put it into the address as http://NAME:PASSWORD@HOST",
    403: "it refuses; a SearXNG needs json in search.formats of its settings.yml",
    404: "it is no SearXNG; give the address of the instance, such as http://localhost:8888",
}
"""What to do about an engine that has never answered; once it has, these are passing faults."""


def read_results(body: bytes) -> list[WebResult] | None:
    """The results in an answer of SearXNG, without those that lack a web address; None where it is no such answer."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        return None
    out = []
    for item in found:
        if not isinstance(item, dict) or not isinstance(url := item.get("url"), str) or not _is_web(url):
            continue
        out.append(WebResult(_line(item.get("title")), url, _line(item.get("content"))))
    return out[:MAX_KEPT]


def _is_web(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https") and not any(c.isspace() for c in url)
    except ValueError:
        return False


def _line(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


Format = Callable[[Sequence[WebResult]], str]
"""Makes the text for the model from the results, best first."""


def show_results(results: Sequence[WebResult]) -> str:
    """Numbered results: title, address, snippet of at most 300 characters."""
    shown = []
    for n, r in enumerate(results, 1):
        snippet = r.snippet if len(r.snippet) <= 300 else r.snippet[:299] + "…"
        shown.append("\n".join(part for part in (f"[{n}] {r.title[:200]}".rstrip(), r.url, snippet) if part))
    return clip("\n\n".join(shown))


class WebSearchPart:
    """The `web_search` tool. Made by `web_search_tool`."""

    def __init__(self, engine: SearchEngine, k: int, form: Format, nothing: str, cache: DiskCache) -> None:
        self._engine = engine
        self._k = k
        self._form = form
        self._nothing = nothing
        self._cache = cache
        # Not to be repeated when lost: the engine's client has tried again already, with the pauses it was told.
        tool = Tool("web_search", _DESCRIPTION, _PARAMETERS, self._run)
        self._session = StaticPart([tool], keeps_time=True, repeatable=False)

    @property
    def specs(self) -> list[dict[str, Any]]:
        return self._session.specs

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        query = " ".join(clip(arguments["query"], 4 * MAX_QUERY).split())
        if not query:
            raise ArgumentError("the query is empty")
        if len(query) > MAX_QUERY:
            raise ArgumentError(f"the query has more than {MAX_QUERY} characters")

        async def ask() -> list[dict[str, str]]:
            return [asdict(r) for r in await self._engine.search(query)]

        kept = await self._cache.fetch(f"{self._engine.name}\n{query}", ask, _are_results)
        results = [WebResult(**r) for r in kept][: self._k]
        return ToolResult(self._form(results) if results else self._nothing)

    async def start(self) -> None:
        return None

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[PartSession, str | None]:
        return self._session, None

    async def close(self) -> None:
        await self._cache.close()
        await self._engine.close()


def _are_results(value: Any) -> bool:
    names = {"title", "url", "snippet"}
    return isinstance(value, list) and all(
        isinstance(r, dict) and r.keys() == names and all(isinstance(v, str) for v in r.values()) for r in value
    )


_DESCRIPTION = "Search the web. Returns titles, addresses and short extracts of the pages that fit the query best."
_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What to look for."}},
    "required": ["query"],
}


def web_search_tool(
    engine: SearchEngine | str,
    *,
    k: int = 5,
    form: Format = show_results,
    nothing: str = "No results.",
    cache: Path | str | None = None,
) -> WebSearchPart:
    """The built-in tool `web_search(query)`: the best `k` results of an engine.

    engine: the address of a SearXNG, or another `SearchEngine`. form: makes the text for the model. nothing: what is
    said where nothing was found (status ok). cache: folder of the answers; None: under $AGENTROPY_CACHE or
    ~/.cache/agentropy. A query with an answer in the cache is not sent.
    """
    if not 1 <= k <= MAX_KEPT:
        raise UserError(f"web search k is {k}, must be between 1 and {MAX_KEPT}")
    if isinstance(engine, str):
        engine = SearxNG(engine)
    return WebSearchPart(engine, k, form, nothing, DiskCache(cache or cache_directory("web-search")))
