"""From the data of a page to one HTML file that needs nothing else, and fetches nothing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from html import escape
from importlib import resources
from typing import Any

SCRIPTS = ("core.js", "charts.js", "overview.js", "tokens.js", "viewer.js", "list.js", "app.js")


def compress(data: Any) -> bytes:
    """The data as gzipped JSON in ASCII; the same data gives the same bytes."""
    return gzip.compress(json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii"), 6, mtime=0)


def render(data: Any | None, title: str) -> str:
    """The page. Without data it is the live one, which asks the server that it came from.

    Nothing of the data can be read as markup: it is base64. The policy lets only this page's own script and style run,
    and forbids every request (the live page may ask its server).
    """
    assets = resources.files(__package__).joinpath("assets")
    style = assets.joinpath("style.css").read_text("utf-8")
    script = "".join(assets.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";(() => {{\n{script}\n}})();'
    connect = "'none'" if data is not None else "'self'"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src {connect}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = assets.joinpath("page.html").read_text("utf-8")
    parts = {
        "{{policy}}": policy,
        "{{title}}": escape(title),
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": "" if data is None else base64.b64encode(compress(data)).decode("ascii"),
    }
    out = []
    while page:  # a title that holds a placeholder must stay as it is
        place, name = min(((page.find(n), n) for n in parts if n in page), default=(len(page), ""))
        out += [page[:place], parts.get(name, "")]
        page = page[place + len(name) :]
    return "".join(out)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
