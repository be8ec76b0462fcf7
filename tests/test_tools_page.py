"""The page reader: what must be refused, with real servers on loopback, and what a page may do to us."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trafilatura", reason="the extra web is not installed")

from agentropy.errors import UserError
from agentropy.tools import make_toolbox, page_tool
from agentropy.tools.named import tool_by_name
from agentropy.tools.page_address import Fetched, Refused, is_public, parse_url
from agentropy.tools.page_pool import Extractor
from agentropy.tools.page_text import decode, read_page
from agentropy.trajectory import ToolCall, ToolResult
from web_server import Answer, Site, serve

HTML = {"Content-Type": "text/html; charset=utf-8"}
TEXT = "The quick brown fox jumps over the lazy dog near the river. "

REFUSED = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://2130706433/",
    "http://0177.0.0.1/",
    "http://0x7f.0.0.1/",
    "http://0x7f000001/",
    "http://017700000001/",
    "http://0/",
    "http://0.0.0.0/",
    "http://127.0.0.1./",
    "http://127.0.0.1.:80/",
    "http://00127.0.0.1/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::127.0.0.1]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[fc00::1]/",
    "http://[fd00:ec2::254]/",
    "http://[fec0::1]/",
    "http://[ff02::1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::10.0.0.1]/",
    "http://[64:ff9b:1::1]/",
    "http://[2002:7f00:1::]/",
    "http://[2002:a00:1::1]/",
    "http://[2001:0:1::1]/",
    "http://[2001:db8::1]/",
    "http://[100::1]/",
    "http://[3fff::1]/",
    "http://[5f00::1]/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://172.31.255.255/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://100.64.0.1/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://192.0.0.192/",
    "http://192.0.2.1/",
    "http://198.18.0.1/",
    "http://198.51.100.1/",
    "http://203.0.113.1/",
    "http://224.0.0.1/",
    "http://239.255.255.250/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://localhost/",
    "http://localhost./",
    "http://LOCALHOST/",
    "http://a.localhost/",
    "http://localhost.localdomain/",
    "http://printer/",
    "http://metadata.google.internal/",
    "http://router.local/",
    "http://nas.lan/",
    "http://x.home.arpa/",
    "http://service.corp/",
    "http://example.org@127.0.0.1/",
    "http://127.0.0.1@example.org/",
    "http://user:pass@example.org/",
    "http://@example.org/",
    "http://example.org:22/",
    "http://example.org:6379/",
    "http://example.org:8080/",
    "http://example.org:0/",
    "http://example.org:99999/",
    "file:///etc/passwd",
    "ftp://example.org/",
    "gopher://example.org:70/_x",
    "data:text/html,x",
    "javascript:alert(1)",
    "dict://example.org/",
    "//example.org/",
    "example.org",
    "/etc/passwd",
    "http:",
    "http://",
    "http:///",
    "http://?",
    "http:///etc/passwd",
    "http:example.org",
    "http://[",
    "http://]/",
    "http://[::1",
    "http://[v1.x]/",
    "http://example.org\\@127.0.0.1/",
    "http://127.0.0.1\\example.org/",
    "http://exa%6dple.org/",
    "http://127.0.0.1%2f/",
    "http://１２７.０.０.１/",
    "http://127。0。0。1/",
    "http://①②⑦.⓪.⓪.①/",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/",
    "http://-/",
    "http://a..org/",
    "http://.org/",
    "http://*.org/",
    "http://0x7f.1/",
    "http://1.1/",
    "http://0x.0x.0x.0x/",
    "http://256.256.256.256/",
    "http://1.2.3.4.5/",
    "http://127.0.0.0x1/",
]

ALSO_REFUSED = [
    "",
    " ",
    "http://127.0.0.1\t/",
    "http://example.org/\r\nHost: 127.0.0.1",
    "http://exam\u00adple.org/ x",
    "http://exa\tmple.org/",
    "http://example.org/" + "a" * 3000,
    "\x00http://example.org/",
    "http://" + "a" * 64 + ".org/",
]


@pytest.mark.parametrize("url", REFUSED + ALSO_REFUSED)
def test_hostile_addresses_are_refused(url: str) -> None:
    with pytest.raises(Refused):
        parse_url(url)


def test_ordinary_addresses_are_read() -> None:
    for url, target in [
        ("https://en.wikipedia.org/wiki/Zürich?x=ä b".replace(" ", "+"), None),
        (" http://example.org ", "http://example.org/"),
        ("HTTPS://Example.ORG.:443/a%20b#part", "https://example.org/a%20b"),
        ("http://example.org:443/", "http://example.org:443/"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://1.1.1.1/", "http://1.1.1.1/"),
        ("http://[2606:4700::1111]/x", "http://[2606:4700::1111]/x"),
        ("http://[64:ff9b::1.1.1.1]/", "http://[64:ff9b::101:101]/"),
        ("http://a_b.example.com/?q=[1]", "http://a_b.example.com/?q=[1]"),
    ]:
        parsed = parse_url(url).url
        assert parsed == (target or "https://en.wikipedia.org/wiki/Z%C3%BCrich?x=%C3%A4+b")


def test_public_numbers() -> None:
    for text in (
        "8.8.8.8",
        "100.63.255.255",
        "100.128.0.0",
        "172.32.0.1",
        "192.0.1.1",
        "2001:4860:4860::8888",
        "2a00::1",
    ):
        assert is_public(ipaddress.ip_address(text))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentropy.tools.page.INTERVAL", 0.0)


class World:
    """Names that mean loopback in the test, and how often each was resolved."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host == "gone.example":
            raise OSError("no such name")
        if host == "private.example":
            return ["127.0.0.1"]
        if host == "mixed.example":
            return ["93.184.216.34", "10.0.0.1"]
        return [self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]]


def read(
    answer: Callable[[str, Any], Answer | None],
    urls: list[str],
    cache: Path,
    world: World | None = None,
    timeout: float = 20.0,
) -> tuple[list[ToolResult], Site]:
    """What the tool says of addresses; {0} is the port of a server, where 127.0.0.1 and two names may be read."""
    world = world or World("127.0.0.1")
    with serve(answer) as site:
        permit = frozenset({("127.0.0.1", site.port), ("site.example", site.port), ("other.example", site.port)})

        async def main() -> list[ToolResult]:
            box = make_toolbox([page_tool(cache=cache, resolve=world.resolve, permit=permit, timeout=timeout)])
            await box.start()
            session, _ = await box.open({}, 0)
            try:
                calls = [ToolCall("read_page", {"url": u.format(site.port)}) for u in urls]
                return await session.call(calls)
            finally:
                await session.close()
                await box.close()

        return asyncio.run(main()), site


def page(body: str = f"<p>{TEXT * 5}</p>") -> bytes:
    html = f"<html><head><title>Größe 東京</title></head><body><nav>Menu</nav><article>{body}</article></body></html>"
    return html.encode()


def plain(path: str, request: Any) -> Answer:
    if path == "/robots.txt":
        return 200, {}, b"User-agent: *\nDisallow: /secret\n\nUser-agent: agentropy\nDisallow: /private\n"
    if path == "/gzip":
        return 200, HTML | {"Content-Encoding": "gzip"}, gzip.compress(page())
    if path == "/text":
        return 200, {"Content-Type": "text/plain"}, "größe\n".encode()
    if path == "/json":
        return 200, {"Content-Type": "application/json"}, b'{"a": 1}'
    return 200, HTML, page()


def test_pages_are_read_once_and_kept(tmp_path: Path) -> None:
    urls = [
        f"http://site.example:{{0}}/{name}" for name in ("a", "a#part", "gzip", "text", "json", "private", "secret")
    ]
    results, site = read(plain, urls, tmp_path)
    a, again, zipped, text, json_, private, secret = results
    head = f"Größe 東京\nhttp://site.example:{site.port}/a\n\nThe quick brown fox"
    assert a.status == "ok"
    assert a.content.startswith(head)
    assert "Menu" not in a.content
    assert again.content == a.content
    assert zipped.content.endswith(TEXT.strip())
    assert text.content.endswith("\n\ngröße")
    assert json_.content.endswith('{"a": 1}')
    assert (private.status, secret.status) == ("error", "ok")
    assert "robots.txt" in private.content
    assert sorted(site.paths) == ["/a", "/gzip", "/json", "/robots.txt", "/secret", "/text"]
    assert site.hosts == {f"site.example:{site.port}"}
    assert all(agent.startswith("agentropy/") for agent in site.agents)


def test_a_long_page_comes_in_pieces(tmp_path: Path) -> None:
    body = "".join(f"<p>Paragraph {i}. {TEXT}</p>" for i in range(300))
    with serve(lambda path, request: (200, HTML, page(body))) as site:
        permit = frozenset({("127.0.0.1", site.port)})

        async def main() -> list[ToolResult]:
            box = make_toolbox([page_tool(cache=tmp_path, permit=permit)])
            session, _ = await box.open({}, 0)
            url = f"http://127.0.0.1:{site.port}/long"
            calls = [ToolCall("read_page", {"url": url, "start": s}) for s in (0, 6000, 10**9, -1, None)]
            results = await session.call(calls)
            await box.close()
            return results

        first, second, beyond, negative, none = asyncio.run(main())
    assert "more characters; read on with start=6000]" in first.content
    assert 6000 < len(first.content) < 6400
    assert second.status == "ok"
    assert "Größe" not in second.content
    assert (beyond.status, negative.status, none.status) == ("error", "invalid", "invalid")
    assert "none from 1000000000 on" in beyond.content


def redirect(path: str, request: Any) -> Answer:
    port = request.server.server_port
    to = {
        "/1": f"http://other.example:{port}/2",
        "/2": "3#x",
        "/3": "/größe".encode().decode("latin-1"),
        "/loop": "/loop",
        "/loopback": f"http://127.0.0.2:{port}/",
        "/metadata": "http://169.254.169.254/latest/",
        "/localhost": "//localhost/",
        "/file": "file:///etc/passwd",
        "/private": "http://private.example/",
        "/userinfo": f"http://x@site.example:{port}/",
    }
    if path in to:
        return 302, {"Location": to[path]}, b""
    return (404, {}, b"") if path in ("/robots.txt", "/missing") else (200, HTML, page())


def test_redirects_are_followed_by_hand_and_checked_each_time(tmp_path: Path) -> None:
    names = ("1", "loop", "loopback", "metadata", "localhost", "file", "private", "userinfo", "missing")
    results, site = read(redirect, [f"http://site.example:{{0}}/{name}" for name in names], tmp_path)
    assert results[0].status == "ok"
    assert f"http://other.example:{site.port}/gr%C3%B6%C3%9Fe" in results[0].content
    assert [r.status for r in results[1:]] == ["error"] * 8
    expected = (
        "more than 5 times",
        "is not read",
        "169.254",
        "localhost",
        "only http",
        "private.example",
        "user name",
        "404",
    )
    for result, part in zip(results[1:], expected, strict=True):
        assert part in result.content
        assert "\n" not in result.content
    assert site.paths.count("/loop") == 6


def test_names_that_mean_something_private_are_refused(tmp_path: Path) -> None:
    urls = [f"http://{name}.example/" for name in ("private", "mixed", "gone")]
    results, site = read(plain, urls, tmp_path)
    assert [r.status for r in results] == ["error"] * 3
    assert "private.example is not a public address" in results[0].content
    assert "mixed.example is not a public address" in results[1].content, "one private address is one too many"
    assert "cannot be resolved" in results[2].content
    assert site.paths == []


def test_a_name_that_changes_its_meaning_gains_nothing(tmp_path: Path) -> None:
    # Public at every check that could be made beforehand, loopback at the next: the checked answer is the used one.
    with serve(plain) as bait:
        world = World("127.0.0.1", "127.0.0.3")
        (result,), site = read(plain, ["http://site.example:{0}/"], tmp_path, world)
        assert result.status == "error"
        assert "not a public address" in result.content
        assert site.paths == ["/robots.txt"]
        assert world.asked == ["site.example", "site.example"], "each connection resolves once and goes to that answer"
        assert bait.paths == []


def test_pages_that_cannot_be_read(tmp_path: Path) -> None:
    answers: dict[str, Answer | None] = {
        "pdf": (200, {"Content-Type": "application/pdf"}, b"%PDF-1.7"),
        "hidden-pdf": (200, HTML, b"%PDF-1.7 text"),
        "image": (200, {"Content-Type": "image/svg+xml"}, b"<svg/>"),
        "binary": (200, {}, b"\x00\x01" * 100),
        "empty": (200, HTML, b""),
        "scripts": (200, HTML, b"<html><body><script>1</script></body></html>"),
        "large": (200, HTML, b"x" * (6 << 20)),
        "bomb": (200, HTML | {"Content-Encoding": "gzip"}, gzip.compress(b"x" * (50 << 20))),
        "no-gzip": (200, HTML | {"Content-Encoding": "gzip"}, b"plain"),
        "brotli": (200, HTML | {"Content-Encoding": "br"}, b"x"),
        "broken": None,
        "error": (503, {}, b""),
    }
    says = [
        "gives a PDF", "gives a PDF", "image/svg+xml", "binary data", "no text", "no text", "larger than 5 MB",
        "larger than 5 MB", "not gzip", "br", "connection to", "HTTP 503",
    ]  # fmt: skip

    def answer(path: str, request: Any) -> Answer | None:
        return (404, {}, b"") if path == "/robots.txt" else answers[path[1:]]

    results, _ = read(answer, [f"http://127.0.0.1:{{0}}/{name}" for name in answers], tmp_path)
    for name, result, part in zip(answers, results, says, strict=True):
        assert (name, result.status) == (name, "error")
        assert part in result.content, name
        assert len(result.content) < 300
    assert not list(tmp_path.rglob("*.json")), "only pages are kept"


def test_a_server_that_drips_is_a_timeout(tmp_path: Path) -> None:
    def drip(path: str, request: Any) -> Answer:
        if path == "/robots.txt":
            return 404, {}, b""
        request.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n")
        for _ in range(40):
            request.wfile.write(b"x")
            time.sleep(0.1)
        return 200, {}, b""

    (result,), _ = read(drip, ["http://127.0.0.1:{0}/"], tmp_path, timeout=1.5)
    assert result.status == "timeout"
    assert "did not send the page within 1.5 s" in result.content
    assert result.seconds < 5


def test_a_site_whose_rules_cannot_be_had_is_not_read(tmp_path: Path) -> None:
    (result,), site = read(lambda path, request: (500, {}, b""), ["http://127.0.0.1:{0}/"], tmp_path)
    assert (result.status, site.paths) == ("error", ["/robots.txt"])


def test_a_page_that_holds_its_reader_is_given_up() -> None:
    # Text takes a while to find in a page of so many paragraphs; the process is killed, and the next page gets another.
    long = Fetched("https://example.org/", "text/html", b"<p>Some text.</p>" * 250_000)
    fine = Fetched("https://example.org/", "text/html", page())

    async def main() -> None:
        extractor = Extractor(workers=1, timeout=0.001)
        with pytest.raises(Exception, match="could not be found within"):
            await extractor.extract(long)
        await extractor.close()
        extractor = Extractor(workers=1, timeout=60)
        assert "quick brown" in (await extractor.extract(fine))["text"]
        running = asyncio.create_task(extractor.extract(long))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert "quick brown" in (await extractor.extract(fine))["text"]
        await extractor.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("größe".encode(), "text/html", "größe"),
        ("größe".encode("latin-1"), "text/html", "größe"),
        ("größe".encode("latin-1"), "text/html; charset=ISO-8859-1", "größe"),
        ("東京".encode("shift_jis"), 'text/html; charset="Shift_JIS"', "東京"),
        ('<meta charset="euc-jp">東京'.encode("euc-jp"), "text/html", '<meta charset="euc-jp">東京'),
        ("\ufeffgröße".encode("utf-16-le"), "text/html; charset=utf-8", "größe"),
        ("größe".encode(), "text/html; charset=no-such", "größe"),
        ("größe".encode(), "text/html; charset=zlib", "größe"),
        ("“x”".encode("cp1252"), "text/plain", "“x”"),
    ],
)
def test_charsets(body: bytes, kind: str, text: str) -> None:
    assert decode(body, kind) == text


def test_text_is_bounded_and_unknown_kinds_are_guessed() -> None:
    assert len(read_page(b"x" * 10**6, "text/plain", "https://e.org/")["text"]) == 200_000
    assert read_page(page(), "", "https://e.org/")["title"] == "Größe 東京"


def test_from_the_command_line_nothing_private_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTROPY_CACHE", str(tmp_path))

    async def main(url: str) -> ToolResult:
        box = make_toolbox([tool_by_name("read-page", 5.0)])
        session, _ = await box.open({}, 0)
        (result,) = await session.call([ToolCall("read_page", {"url": url})])
        await box.close()
        return result

    with serve(plain) as site:
        for url in (f"http://127.0.0.1:{site.port}/", f"http://localhost:{site.port}/", "http://127.0.0.1/"):
            result = asyncio.run(main(url))
            assert result.status == "error"
            assert "Error: " in result.content
    assert site.paths == []
    for name in ("read-page:x", "read-page:permit", "web-search", "web-search:"):
        with pytest.raises(UserError, match=r"no built-in tool|needs the address"):
            tool_by_name(name, 5.0)
