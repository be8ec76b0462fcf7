"""The text of single tokens: characters or, where one holds half a character, bytes."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentropy.errors import UserError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def find_tokenizer(place: Path) -> Any:
    """The tokenizer in a folder (`tokenizer_config.json`). Raises UserError where it does not load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(place))
    except Exception as error:  # a broken file can fail anywhere in the parsers
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the tokenizer in {place} does not load ({why}); name another with --model") from None


def tokenizer_places(directory: Path) -> list[Path]:
    """Folders of a run directory that may hold its tokenizer, the likeliest first."""
    places = [directory / "tokenizer", directory / "model", *sorted(directory.glob("checkpoints/*/model"))]
    return [p for p in places if (p / "tokenizer_config.json").is_file()]


class TokenBytes:
    """The bytes that a token stands for: `token_bytes(id)`. Special tokens are their own names."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {i: str(t.content) for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = backend.decoder if backend is not None else None
        text = json.dumps(_decoders(decoder))
        self._style = "byte-level" if "ByteLevel" in text else "pieces" if "\\u2581" in text else "plain"
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text(self, ids: tuple[int, ...]) -> str:
        """The text of several tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self, ids)).decode("utf-8", "replace")

    def _find(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8", "surrogatepass")
        try:
            piece = self._tokenizer.convert_ids_to_tokens(token)
        except (OverflowError, IndexError, ValueError, TypeError):
            piece = None
        if piece is None:
            return f"⟨no token {token}⟩".encode()
        if self._style == "byte-level":
            table = _bytes_of_characters()
            return b"".join(bytes([table[c]]) if c in table else c.encode("utf-8", "replace") for c in piece)
        if self._style == "pieces":
            byte = BYTE_TOKEN.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode("utf-8", "replace")
        return str(self._tokenizer.decode([token])).encode("utf-8", "replace")


def _decoders(decoder: Any) -> Any:
    try:
        return json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None


@lru_cache(1)
def _bytes_of_characters() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable Latin-1 stands for itself, the rest is moved up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


class Vocabulary:
    """The distinct tokens of a page, numbered by first appearance. `entries[i]` is `[id, text]`, or `[id, null, hex]`
    for a token whose bytes are no whole characters; an id is null where the source gave none."""

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        self.entries: list[list[Any]] = []
        self._token_bytes = token_bytes
        self._index: dict[tuple[int | None, str | None], int] = {}

    def index(self, token: int | None, text: str | None = None) -> int:
        """The number of a token. `text` is its text where the source gave it."""
        key = (token, text)
        if key not in self._index:
            self._index[key] = len(self.entries)
            self.entries.append(self._entry(token, text))
        return self._index[key]

    def _entry(self, token: int | None, text: str | None) -> list[Any]:
        if text is not None:
            return [token, text]
        if self._token_bytes is None or token is None:
            return [token, f"⟨{token}⟩ "]
        raw = self._token_bytes(token)
        try:
            return [token, raw.decode("utf-8")]
        except UnicodeDecodeError:
            return [token, None, raw.hex(" ").upper()]
