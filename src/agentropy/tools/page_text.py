"""The process that takes the text out of pages: `python -m agentropy.tools.page_text`.

For each page one JSON line {"url", "kind", "size"} and `size` bytes on stdin, one JSON line {"title", "text"} or
{"error"} on stdout. Hostile pages can keep a parser busy for ever or crash it: the parent keeps the clock and kills.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import sys

from agentropy.worker_process import begin

MAX_TEXT = 200_000
"""Characters of a page that are kept."""

_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def decode(body: bytes, kind: str) -> str:
    """The text of a page: by its byte order mark, the charset of its Content-Type or of its <meta>, else as UTF-8 where
    it is that, and as Windows-1252 where it is not."""
    named = [name for bom, name in _BOMS if body.startswith(bom)]
    if match := re.search(r"charset\s*=\s*[\"']?([A-Za-z0-9_:.-]{1,40})", kind, re.IGNORECASE):
        named.append(match[1])
    if meta := _CHARSET.search(body[:4096]):
        named.append(meta[1].decode("ascii"))
    for name in named:
        name = "cp1252" if name.lower() in ("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii") else name
        with contextlib.suppress(LookupError, ValueError):
            # "replace": a page with one wrong byte is still a page in its own charset.
            return body.decode(name, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")


def read_page(body: bytes, kind: str, url: str) -> dict[str, str]:
    """Title and main text of a page, or what is wrong with it."""
    name = kind.partition(";")[0].strip().lower()
    if body.startswith(b"%PDF-"):
        return {"error": "the address gives a PDF, which cannot be read; look for a web page with the same content"}
    text = decode(body, kind)
    if "\0" in text[:100_000]:
        return {"error": "the address gives binary data, which cannot be read"}
    if name in ("text/html", "application/xhtml+xml") or (not name and text.lstrip().startswith("<")):
        title, text = _main_text(text, url)
    else:
        title = ""
    if not text.strip():
        return {"error": "the page has no text that could be read (it may be made by scripts)"}
    return {"title": title[:300], "text": text.strip()[:MAX_TEXT]}


def _main_text(html: str, url: str) -> tuple[str, str]:
    import trafilatura

    found = trafilatura.bare_extraction(html, url=url, include_comments=False, include_tables=True, with_metadata=True)
    title = str(getattr(found, "title", None) or "")
    text = str(getattr(found, "text", None) or "")
    return title, text or trafilatura.html2txt(html)


def main() -> None:
    """Serve pages until stdin ends."""
    answers = begin()
    import trafilatura  # noqa: F401

    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        page = json.loads(line)
        body = sys.stdin.buffer.read(page["size"])
        try:
            reply = read_page(body, page["kind"], page["url"])
        except (Exception, MemoryError) as error:
            reply = {"error": f"the page cannot be read ({type(error).__name__})"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
