"""Tokens with log-probabilities as chat servers return them: `logprobs.content[]` of the OpenAI API."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from agentropy.errors import UserError
from agentropy.trajectory import Segment, SegmentKind, ToolCall

NOTHING = float("-inf")


@dataclass(frozen=True)
class ChatTokens:
    """The tokens of one message. `entropies` is None where neither they nor alternatives were returned; `exact` is
    False where some are estimates from the likeliest tokens."""

    pieces: tuple[bytes, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[tuple[str, float], ...], ...]
    entropies: tuple[float, ...] | None
    exact: bool

    @property
    def data(self) -> bytes:
        """The text as bytes."""
        return b"".join(self.pieces)

    def token_at(self, offset: int) -> int:
        """The index of the token that holds the byte at `offset`; the number of tokens at the end."""
        return bisect_right(list(accumulate(map(len, self.pieces))), offset)

    def segment(self, kind: SegmentKind, start: int, end: int, calls: Sequence[ToolCall] = ()) -> Segment:
        """The tokens from `start` to `end` as a segment."""
        part = slice(start, end)
        return Segment(
            kind,
            (0,) * len(self.pieces[part]),
            self.logprobs[part],
            None if self.entropies is None else self.entropies[part],
            calls=tuple(calls),
            tokens=tuple(as_text(p) for p in self.pieces[part]),
            alternatives=self.alternatives[part] if any(self.alternatives) else None,
        )


def as_text(piece: bytes) -> str:
    """A token's text; bytes that are no whole character become half surrogates, so that nothing is lost."""
    return piece.decode("utf-8", "surrogateescape")


def chat_tokens(logprobs: Any, where: str) -> ChatTokens | None:
    """Read the `logprobs` of a choice or a message; None where there are none.

    Reads of each entry of `content` (after those of `reasoning_content`, which some servers keep apart): `token`,
    `bytes`, `logprob`, `top_logprobs[].{token, bytes, logprob}`, and `entropy` where a server gives it. Raises
    UserError.
    """
    if logprobs is None:
        return None
    if isinstance(logprobs, Mapping):
        entries = [*(logprobs.get("reasoning_content") or []), *(logprobs.get("content") or [])]
    else:
        entries = logprobs
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        raise UserError(f"{where}: 'logprobs' is neither a list of tokens nor an object with 'content'")
    if not entries:
        return None
    pieces, own, alternatives, known = [], [], [], []
    for entry in entries:
        piece, logprob = _piece(entry, where), _logprob(entry, where)
        top = entry.get("top_logprobs") or []
        likely = tuple((as_text(_piece(t, where)), _logprob(t, where)) for t in top)
        pieces.append(piece)
        own.append(logprob)
        alternatives.append(likely)
        known.append(entry.get("entropy"))
    given = [float(h) if isinstance(h, int | float) and math.isfinite(h) else None for h in known]
    exact = all(h is not None for h in given)
    entropies: list[float] | None = [h for h in given if h is not None]
    if not exact:
        entropies = None if not all(alternatives) else _estimates(pieces, own, alternatives, given)
    return ChatTokens(
        tuple(pieces), tuple(own), tuple(alternatives), None if entropies is None else tuple(entropies), exact
    )


def _estimates(
    pieces: Sequence[bytes],
    own: Sequence[float],
    alternatives: Sequence[tuple[tuple[str, float], ...]],
    given: Sequence[float | None],
) -> list[float]:
    """Entropies estimated from the alternatives, exact ones where they were given.

    The sampled token is counted apart where it is not among the likeliest, or the least of them: some servers add it to
    them, and the tail must not begin at it.
    """
    import torch

    from agentropy.algorithms.estimates import entropy_with_tail

    rows, apart = [], []
    for piece, logprob, likely in zip(pieces, own, alternatives, strict=True):
        text = as_text(piece)
        row = sorted((value for name, value in likely if name != text), reverse=True)
        among = any(name == text for name, _ in likely) and (not row or logprob > row[-1])
        rows.append([*row, logprob] if among else row)
        apart.append(NOTHING if among else logprob)
    width = max(map(len, rows))
    padded = torch.tensor([row + [NOTHING] * (width - len(row)) for row in rows], dtype=torch.float64)
    alone = torch.tensor(apart, dtype=torch.float64).exp()
    rest = 1.0 - padded.exp().sum(-1) - alone
    estimates = (entropy_with_tail(padded, rest) + torch.special.entr(alone)).tolist()
    return [e if h is None else h for e, h in zip(estimates, given, strict=True)]


def _piece(entry: Mapping[str, Any], where: str) -> bytes:
    """The bytes of a token. A server that gives no `bytes` gives the text alone."""
    data = entry.get("bytes")
    if isinstance(data, list):
        try:
            return bytes(data)
        except (TypeError, ValueError):
            raise UserError(f"{where}: 'bytes' of a token holds something else than bytes") from None
    token = entry.get("token")
    if not isinstance(token, str):
        raise UserError(f"{where}: a token of 'logprobs' has no 'token'")
    return token.encode("utf-8", "surrogatepass")


def _logprob(entry: Mapping[str, Any], where: str) -> float:
    value = entry.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
        raise UserError(f"{where}: 'logprob' {value!r} of a token is no log-probability")
    return min(float(value), 0.0)
