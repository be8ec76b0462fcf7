"""Ids to text and text to ids, without ever losing a byte or inventing a special token.

`TokenText` gives the bytes of every token, so that a place in the text can be turned into a token index although tokens
may end in the middle of a character, and it encodes untrusted text (what a tool printed) so that no control token can
come out of it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from agentropy.errors import UserError

_CONTROL_LIKE = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or decoder in a tokenizer's JSON, sequences flattened."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        inner = part.get("decoders") or part.get("normalizers") or part.get("pretokenizers") or []
        return [s for p in inner for s in _steps(p)]
    return [part]


class _Pieces(dict[int, bytes]):
    """The bytes of a token, worked out when first asked for."""

    def __init__(self, tokenizer: Any, kind: str, added: dict[int, str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._kind = kind
        self._added = added
        self._alphabet = _byte_level_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        self[token_id] = piece
        return piece

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self._kind == "byte-level":
            try:
                return bytes([self._alphabet[c] for c in token])
            except KeyError:
                return token.encode()
        if self._kind == "metaspace":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        if self._kind == "verbatim":
            return token.encode()
        return str(self._tokenizer.decode([token_id])).encode()


class TokenText:
    """The text side of a tokenizer (any fast Hugging Face tokenizer).

    Byte-level BPE, sentencepiece with byte fallback and plain vocabularies are read exactly. Of other tokenizers
    (WordPiece) a token's text is what `decode` makes of it alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"{type(tokenizer).__name__} is no fast tokenizer; load it with transformers.AutoTokenizer, which "
                "converts sentencepiece models"
            )
        self.tokenizer = tokenizer
        tokens = tokenizer.added_tokens_decoder
        self.added: dict[int, str] = {int(i): t.content for i, t in tokens.items()}
        specials = {int(i) for i in tokenizer.all_special_ids}
        self.forbidden: frozenset[int] = frozenset(
            i for i, t in tokens.items() if i in specials or t.special or _CONTROL_LIKE.fullmatch(t.content.strip())
        )
        """Ids that tool text never turns into: every special token, and added ones that look like control tokens."""
        self._control = self._pattern(self.added[i] for i in self.forbidden)
        self._counts: dict[str, int] = {}
        self.pieces: dict[int, bytes] = _Pieces(tokenizer, _kind(backend), self.added)

    @staticmethod
    def _pattern(contents: Iterable[str]) -> re.Pattern[str] | None:
        alternatives = sorted({c for c in contents if c}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, alternatives))) if alternatives else None

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of a run of tokens, special tokens included."""
        return b"".join(map(self.pieces.__getitem__, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a run of tokens; bytes that are no UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_at(self, ids: Sequence[int], offset: int) -> int:
        """Index of the token that holds the byte at `offset` of `decode_bytes(ids)`; len(ids) at the end."""
        ends = list(accumulate(len(self.pieces[i]) for i in ids))
        return bisect_right(ends, offset)

    def single(self, text: str) -> int | None:
        """The id of the added token with exactly this text, if there is one."""
        return next((i for i, content in self.added.items() if content == text), None)

    @cached_property
    def _anchor(self) -> str:
        """A special token to encode behind, for tokenizers that put a space before the first word of a text."""
        alone = self.encode("x")
        for name in ("eos_token", "bos_token"):
            token = str(getattr(self.tokenizer, name, None) or "")
            if token:
                ids = self.encode(token + "x")
                if ids[:1] == self.encode(token) and ids[1:] != alone:
                    return token
        return ""

    @cached_property
    def bos(self) -> list[int]:
        """What the tokenizer puts before a text that no chat template wrote: its BOS, or nothing."""
        bos = self.tokenizer.bos_token_id
        return [int(bos)] if bos is not None and bos in self.tokenizer("x")["input_ids"][:1] else []

    def encode(self, text: str) -> list[int]:
        """Ids of trusted text (a template): special tokens in it are read as such. No BOS is added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_after(self, text: str) -> list[int]:
        """Like `encode`, for text that goes on after a special token (no space is put before its first word)."""
        return self.encode(self._anchor + text)[1:] if self._anchor else self.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of untrusted text. Never yields an id of `forbidden`, whatever the text says."""
        return self._defuse(text)

    def is_plain(self, text: str) -> bool:
        """True where the text spells out no control token."""
        return self._control is None or self._control.search(text) is None

    def encode_mixed(self, parts: Sequence[tuple[str, bool]], start: bool = False) -> list[int]:
        """Ids of template text with untrusted text in it: `parts` are (text, trusted) in order.

        Untrusted text without control tokens gives exactly the ids of the whole text encoded at once, which is what a
        fully rendered chat template gives. `start`: this is the beginning of a sequence.
        """
        whole = "".join(text for text, _ in parts)
        got = self.encode(whole) if start else self.encode_after(whole)
        meant = sum(self._count_control(text) for text, trusted in parts if trusted)
        if self._control is None or sum(i in self.forbidden for i in got) == meant:
            return got
        ids: list[int] = []
        plain: list[str] = []
        for text, trusted in parts:
            if not trusted:
                plain.append(text)
                continue
            at = 0
            for match in self._control.finditer(text):
                plain.append(text[at : match.start()])
                ids += self._defuse("".join(plain))
                ids += self.encode(match[0])
                plain, at = [], match.end()
            plain.append(text[at:])
        return ids + self._defuse("".join(plain))

    def _count_control(self, trusted: str) -> int:
        """How many control tokens a piece of a template holds."""
        if trusted not in self._counts:
            self._counts[trusted] = sum(i in self.forbidden for i in self.encode(trusted))
        return self._counts[trusted]

    def _defuse(self, text: str) -> list[int]:
        """Encode text, broken after the first character of whatever would become a control token."""
        ids: list[int] = []
        for piece in self._break(text):
            got = self.encode_after(piece)
            if not self.forbidden.isdisjoint(got):
                # A control token that a normalizer made (full-width brackets, case): letter by letter, then without.
                got = [i for c in piece for i in self.encode_after(c) if i not in self.forbidden]
            ids += got
        return ids

    def _break(self, text: str) -> list[str]:
        if self._control is None or not text:
            return [text] if text else []
        pieces, at = [], 0
        while match := self._control.search(text, at):
            pieces.append(text[at : match.start() + 1])
            at = match.start() + 1
        return [*pieces, text[at:]]

    def cut(self, text: str, max_tokens: int) -> str:
        """The text, or its head and tail around a note that counts what was left out, if it has too many tokens.

        Cut between characters. The result has at most `max_tokens` tokens, but for a few where the limit is smaller
        than the note itself. Of more than 64,000 characters only the ends are encoded, and the count is an estimate.
        """
        if max_tokens <= 0:
            return ""
        if len(text) <= max_tokens // _MOST_TOKENS_A_CHARACTER:
            return text
        if len(text) <= 2 * _END:
            head = tail = self._spans(text)
            total = max(len(head), len(self.encode_plain(text)))
            head_text = tail_text = text
        else:
            head_text, tail_text = text[:_END], text[-_END:]
            head, tail = self._spans(head_text), self._spans(tail_text)
            total = max(round(len(head) * len(text) / _END), max_tokens + 1)
        if total <= max_tokens:
            return text
        keep = max_tokens - len(self.encode_plain(_note(total)))
        while True:
            keep = max(keep, 2)
            front = head_text[: _end_of_first(head, (keep + 1) // 2)]
            back = tail_text[_start_of_last(tail, keep // 2) :]
            short = front + _note(total - keep) + back
            excess = len(self.encode_plain(short)) - max_tokens
            if excess <= 0 or keep == 2:
                return short
            keep -= excess

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of a text lies in it, in characters."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["offset_mapping"])


_MOST_TOKENS_A_CHARACTER = 4
_END = 32_000


def _end_of_first(spans: Sequence[tuple[int, int]], count: int) -> int:
    """Where the first `count` tokens end. A character whose later bytes lie beyond is left out whole."""
    return spans[count][0] if count < len(spans) else spans[-1][1]


def _start_of_last(spans: Sequence[tuple[int, int]], count: int) -> int:
    """Where the last `count` tokens begin, after any character that begins before them."""
    if count >= len(spans):
        return 0
    return max(spans[-count][0], spans[-count - 1][1]) if count else spans[-1][1]


def _note(left_out: int) -> str:
    return f"\n[… {left_out} tokens left out …]\n"


def _kind(backend: Any) -> str:
    """How a vocabulary's strings stand for text: `byte-level`, `metaspace`, `verbatim` or `unknown`."""
    spec = json.loads(backend.to_str())
    decoder = _steps(spec.get("decoder"))
    types = {s["type"] for s in decoder}
    if "ByteLevel" in types:
        return "byte-level"
    if "Metaspace" in types or "ByteFallback" in types or any("▁" in str(s.get("pattern")) for s in decoder):
        return "metaspace"
    if types <= {"Fuse"}:
        return "verbatim"
    return "unknown"
