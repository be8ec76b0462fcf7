"""Where a turn ends: a table over the vocabulary, so that python looks at a row only when its token may have ended
it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentropy.errors import UserError
from agentropy.policies.base import Stop

STOP_TOKEN = 1
MAYBE_STRING = 2


class StopTable:
    """`table[n_stops, V]` uint8: STOP_TOKEN where a token stops, MAYBE_STRING where it could complete a stop string."""

    def __init__(self, tokenizer: Any, vocab_size: int, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._bytes: list[bytes] | None = None
        self._bytes_known = False
        self._index: dict[Stop, int] = {}
        self._strings: list[tuple[bytes, ...]] = []
        self.table: Tensor = torch.zeros(0, vocab_size, dtype=torch.uint8, device=device)

    def index(self, stop: Stop) -> int:
        """The row of `table` for this stop, made when it is new.

        Raises:
            UserError: a stop token that is not in the vocabulary, an empty stop string, or strings without a tokenizer.
        """
        found = self._index.get(stop)
        if found is not None:
            return found
        outside = [t for t in stop.token_ids if not 0 <= t < self._vocab_size]
        if outside:
            raise UserError(f"stop tokens {outside} are not in the model's vocabulary of {self._vocab_size}")
        if any(not s for s in stop.strings):
            raise UserError("an empty stop string would end every turn at once: remove it")
        row = torch.zeros(self._vocab_size, dtype=torch.uint8)
        strings = tuple(s.encode() for s in stop.strings)
        if strings:
            row |= self._candidates(strings)
        for token in stop.token_ids:
            row[token] |= STOP_TOKEN
        self.table = torch.cat([self.table, row.to(self.table.device).unsqueeze(0)])
        self._index[stop] = len(self._strings)
        self._strings.append(strings)
        return self._index[stop]

    def _candidates(self, strings: tuple[bytes, ...]) -> Tensor:
        if self._tokenizer is None:
            raise UserError("stop strings need a tokenizer: give one to LocalPolicy, or use stop token ids")
        if not self._bytes_known:
            self._bytes = token_bytes(self._tokenizer, self._vocab_size)
            self._bytes_known = True
        if self._bytes is None:
            return torch.full((self._vocab_size,), MAYBE_STRING, dtype=torch.uint8)
        hits = [any(_may_complete(token, s) for s in strings) for token in self._bytes]
        return torch.tensor(hits).to(torch.uint8) * MAYBE_STRING

    def completes(self, index: int, turn: list[int]) -> bool:
        """Whether the last token of this turn completes one of the stop strings."""
        strings = self._strings[index]
        if self._bytes is not None:
            reach = max(len(s) for s in strings) + 8
            text = b"".join(self._bytes[t] for t in turn[-reach:])
            if not any(s in text for s in strings):
                return False
        # A decoder may drop spaces or give up a whole run of bytes that is no UTF-8, so the text has the last word.
        text = self._tokenizer.decode(turn, skip_special_tokens=False).encode()
        return any(s in text for s in strings)

    def end(self, ids: Sequence[int], stop: Stop) -> tuple[int, bool]:
        """How many ids of a turn there are up to the first stop, and whether there is one."""
        index = self.index(stop)
        flags: list[int] = self.table[index].tolist()
        for i, token in enumerate(ids):
            flag = flags[token] if token < len(flags) else 0
            if flag & STOP_TOKEN or (flag & MAYBE_STRING and self.completes(index, [*ids[: i + 1]])):
                return i + 1, True
        return len(ids), False


def _may_complete(token: bytes, stop: bytes) -> bool:
    """Whether some text ending in `token` can contain `stop` with its end inside `token`."""
    return stop in token or any(stop.endswith(token[:n]) for n in range(1, min(len(token), len(stop)) + 1))


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes] | None:
    """The bytes each token stands for, or None for a tokenizer whose text is not the concatenation of its tokens'
    bytes.

    Knows byte-level BPE (GPT-2, Llama 3, Qwen) and sentencepiece with byte fallback (Llama 2, Gemma).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    vocabulary = tokenizer.get_vocab()
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    result = [b""] * vocab_size
    if kinds == ["ByteLevel"]:
        to_byte = {char: byte for byte, char in enumerate(_byte_level_alphabet())}
        for token, index in vocabulary.items():
            if index < vocab_size:
                if token not in added and all(c in to_byte for c in token):
                    result[index] = bytes(to_byte[c] for c in token)
                else:
                    result[index] = token.encode()
        return result
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        for token, index in vocabulary.items():
            if index < vocab_size:
                if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                    result[index] = bytes([int(token[3:5], 16)])
                else:
                    result[index] = token.replace("▁", " ").encode()
        return result
    return None


def _byte_level_alphabet() -> list[str]:
    """The 256 characters that GPT-2's byte-level BPE writes for the bytes 0 to 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet, spare = [], 256
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet
