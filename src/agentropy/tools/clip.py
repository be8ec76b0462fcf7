"""Text of foreign servers, made fit for a trajectory."""

from __future__ import annotations

MAX_CHARS = 8000
"""A first bound on what a server says, so that no megabyte is tokenized; the limit that counts is the protocol's."""


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """The text with its middle left out where it is longer than `limit`, and half surrogates replaced by `?`."""
    if len(text) > limit:
        head, tail = limit * 3 // 4, limit // 4
        text = f"{text[:head]}\n[{len(text) - head - tail} characters left out]\n{text[-tail:]}"
    return text.encode("utf-8", "replace").decode()
