"""Keeps the first and the last bytes of an endless stream."""

from __future__ import annotations


class Capture:
    """At most `keep` bytes of a stream in memory: its head and its tail; the middle is only counted."""

    __slots__ = ("_half", "_head", "_tail", "total")

    def __init__(self, keep: int) -> None:
        self._half = keep // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take in the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half:
                del self._tail[: -self._half]

    def take(self) -> tuple[str, bool]:
        """(text, whether something was left out), and start afresh. No character is cut in two."""
        head, tail, half = bytes(self._head), bytes(self._tail), self._half
        left_out = self.total - len(head) - min(len(tail), half)
        self._head.clear()
        self._tail.clear()
        self.total = 0
        if left_out <= 0:
            return (head + tail).decode("utf-8", "backslashreplace"), False
        tail = tail[-half:]
        kept_head, kept_tail = _whole_end(head), _whole_start(tail)
        left_out += len(head) - len(kept_head) + len(tail) - len(kept_tail)
        first, last = (part.decode("utf-8", "backslashreplace") for part in (kept_head, kept_tail))
        return f"{first}\n[... {left_out} bytes left out ...]\n{last}", True


def _whole_end(data: bytes) -> bytes:
    """Without a character that has begun but not ended."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < length else data
    return data


def _whole_start(data: bytes) -> bytes:
    """Without the rest of a character that began earlier."""
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
