"""Web search on a real server: results, cache, manners, and a server that fails in every way."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.tools import SearxNG, WebResult, make_toolbox, web_search_tool
from agentropy.tools.cache import DiskCache
from agentropy.tools.web import read_results, show_results
from agentropy.tools.web_host import Pacer, retry_after
from agentropy.trajectory import ToolCall, ToolResult
from web_server import Answer, serve

FOUND = {
    "query": "x",
    "results": [
        {"title": "Größe\n 東京", "url": "https://example.org/a", "content": "one  two"},
        {"title": "Bad", "url": "javascript:alert(1)", "content": ""},
        {"title": None, "url": "https://example.org/b"},
        "rubbish",
        {"title": "no address"},
    ],
}


def ask(url: Any, cache: Path, queries: list[str], **options: Any) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        box = make_toolbox([web_search_tool(url, cache=cache, **options)])
        await box.start()
        session, _ = await box.open({}, 0)
        try:
            return await session.call([ToolCall("web_search", {"query": q}) for q in queries])
        finally:
            await session.close()
            await box.close()

    return asyncio.run(main())


def good(path: str, request: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(FOUND).encode()


def test_results_are_compact_and_asked_for_once(tmp_path: Path) -> None:
    with serve(good) as site:
        url = f"http://127.0.0.1:{site.port}/?categories=science"
        results = ask(url, tmp_path, [" größe  x", "größe x", "größe x"])
        results += ask(url, tmp_path, ["größe x"])
    assert site.paths == ["/search?categories=science&q=gr%C3%B6%C3%9Fe+x&format=json"]
    assert {a.split("/")[0] for a in site.agents} == {"agentropy"}
    for result in results:
        assert result.status == "ok"
        assert result.content == ("[1] Größe 東京\nhttps://example.org/a\none two\n\n[2]\nhttps://example.org/b")


def test_no_results_is_ok_and_an_empty_query_invalid(tmp_path: Path) -> None:
    with serve(lambda path, request: (200, {}, b'{"results": []}')) as site:
        results = ask(f"http://127.0.0.1:{site.port}/search", tmp_path, ["x", " ", "y" * 501, "\ud800"])
    assert [(r.status, r.content) for r in results[:1]] == [("ok", "No results.")]
    assert [r.status for r in results[1:]] == ["invalid", "invalid", "ok"]


def test_faults_of_the_engine_cost_retries_then_are_lost(tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def flaky(path: str, request: Any) -> Answer | None:
        seen[path] = seen.get(path, 0) + 1
        if "dead" in path:
            return 500, {}, b"oops"
        bad: list[Answer | None] = [(502, {}, b""), (200, {}, b'{"results": ['), None]
        return good(path, request) if seen[path] > 3 else bad[(len(seen) + seen[path]) % 3]

    with serve(flaky) as site:
        url = f"http://127.0.0.1:{site.port}"
        *alive, dead = ask(SearxNG(url, interval=0, tries=4), tmp_path, ["a", "b", "c", "dead"])
        assert [r.status for r in alive] == ["ok", "ok", "ok"]
        assert (dead.status, dead.content) == ("lost", "Tool unavailable: the search engine failed: HTTP 500")
        assert max(seen.values()) == 4
    (gone,) = ask(SearxNG(url, tries=2), tmp_path, ["other"])
    assert gone.status == "lost"
    assert "ConnectError" in gone.content
    assert ask(url, tmp_path, ["a"])[0].status == "ok", "what is in the cache needs no server"


def test_retry_after_is_kept(tmp_path: Path) -> None:
    times: list[float] = []

    def busy(path: str, request: Any) -> Answer:
        times.append(time.monotonic())
        return (429, {"Retry-After": "1"}, b"") if len(times) == 1 else good(path, request)

    with serve(busy) as site:
        (result,) = ask(f"http://127.0.0.1:{site.port}", tmp_path, ["a"])
    assert result.status == "ok"
    assert times[1] - times[0] >= 0.99
    with serve(lambda path, request: (429, {"Retry-After": "86400"}, b"")) as site:
        (result,) = ask(f"http://127.0.0.1:{site.port}", tmp_path, ["b"])
    assert (result.status, len(site.paths)) == ("lost", 1)
    assert retry_after(email.utils.formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=3)
    assert retry_after("soon") is None
    assert retry_after("-1") is None


def test_a_stalled_engine_is_lost(tmp_path: Path) -> None:
    def stall(path: str, request: Any) -> Answer:
        request.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{")
        time.sleep(1.5)
        return 200, {}, b""

    with serve(stall) as site:
        (result,) = ask(SearxNG(f"http://127.0.0.1:{site.port}", tries=1, timeout=0.5), tmp_path, ["a"])
    assert (result.status, result.content) == (
        "lost",
        "Tool unavailable: the search engine failed: no answer within 0.5 s",
    )


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (403, {}, "HTTP 403: it refuses; a SearXNG needs json"),
        (404, {}, "HTTP 404: it is no SearXNG"),
        (401, {}, "HTTP 401: it wants a password"),
        (301, {"Location": "https://example.org/"}, "HTTP 301: it has moved"),
    ],
)
def test_an_engine_that_is_none_ends_the_run(
    tmp_path: Path, status: int, headers: dict[str, str], message: str
) -> None:
    with serve(lambda path, request: (status, headers, b"")) as site, pytest.raises(UserError, match=message):
        ask(f"http://127.0.0.1:{site.port}", tmp_path, ["a"])


def test_what_is_no_address_is_told() -> None:
    for url in ("", "localhost:8888", "ftp://x", "http://", "http://[x"):
        with pytest.raises(UserError, match="a search engine is an address"):
            web_search_tool(url)
    with pytest.raises(UserError, match="k is 0"):
        web_search_tool("http://localhost", k=0)
    assert "secret" not in SearxNG("http://name:secret@localhost").name


def test_another_engine(tmp_path: Path) -> None:
    class Own:
        name = "own"

        async def search(self, query: str) -> list[WebResult]:
            return [WebResult(query, f"https://example.org/{i}", "s" * 1000) for i in range(9)]

        async def close(self) -> None:
            pass

    (result,) = ask(Own(), tmp_path, ["q"], k=2)
    assert result.content.count("https://") == 2
    assert len(result.content) < 800


def test_rubbish_of_an_engine_is_no_result() -> None:
    for body in (b"", b"null", b"[]", b"{}", b'{"results": 1}', b"\xff", b"[" * 100_000):
        assert read_results(body) is None
    assert read_results(b'{"results": [1, {"url": "http://a b"}, {"url": "http://[x"}]}') == []
    assert len(show_results([WebResult("t" * 10**6, "https://e.org/" + "u" * 10**6, "s" * 10**6)] * 5)) < 9000


def test_a_damaged_cache_is_a_missing_one(tmp_path: Path) -> None:
    with serve(good) as site:
        url = f"http://127.0.0.1:{site.port}"
        ask(url, tmp_path, ["a"])
        (entry,) = tmp_path.rglob("*.json")
        whole = entry.read_text()
        key = json.loads(whole)["key"]
        for broken in ("", whole[:-5], "[]", '{"key": "other", "value": []}', json.dumps({"key": key, "value": [1]})):
            entry.write_text(broken)
            assert ask(url, tmp_path, ["a"])[0].status == "ok"
            assert entry.read_text() == whole
    assert len(site.paths) == 6
    assert not list(tmp_path.rglob("*.tmp"))
    (tmp_path / "file").write_text("")
    DiskCache(tmp_path / "file").put("k", 1)  # no folder can be made here: nothing is kept, nothing is raised


def test_who_asks_at_the_same_time_shares_the_answer_and_the_fault(tmp_path: Path) -> None:
    async def main() -> None:
        cache, made = DiskCache(tmp_path), 0

        async def make() -> str:
            nonlocal made
            made += 1
            await asyncio.sleep(0.05)
            if made == 1:
                raise ConnectionError("no")
            return "value"

        first = [asyncio.create_task(cache.fetch("k", make, bool)) for _ in range(5)]
        assert all(isinstance(r, ConnectionError) for r in await asyncio.gather(*first, return_exceptions=True))
        second = [asyncio.create_task(cache.fetch("k", make, bool)) for _ in range(5)]
        await asyncio.sleep(0.01)
        second[0].cancel()
        assert await asyncio.gather(*second[1:]) == ["value"] * 4
        assert made == 2
        await cache.close()

    asyncio.run(main())


def test_requests_to_a_host_are_spaced_and_few_at_once() -> None:
    async def main() -> None:
        pacer, running, most, starts = Pacer(0.05, 2), 0, 0, []

        async def one(host: str) -> None:
            nonlocal running, most
            async with pacer.turn(host):
                if host == "a":
                    starts.append(time.monotonic())
                    running += 1
                    most = max(most, running)
                    await asyncio.sleep(0.12)
                    running -= 1

        await asyncio.gather(*(one("a") for _ in range(5)), one("b"))
        assert most == 2
        assert min(b - a for a, b in itertools.pairwise(starts)) >= 0.045

    asyncio.run(main())
