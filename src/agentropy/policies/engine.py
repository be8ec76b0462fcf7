"""The decoding loop over the rows of a cache. It knows rows and tokens; who sits in a row and when is `local.py`'s
affair.

A row's cache holds every token but its last one, which is the next input: so a fresh prompt, a fork and a turn that
goes on after a tool's result all look the same, and logits are computed in decode steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentropy.policies.base import Finish, SamplingParams
from agentropy.policies.cache import SlotCache
from agentropy.policies.parts import ModelParts
from agentropy.policies.sampling import sample, uniforms
from agentropy.policies.stops import STOP_TOKEN, StopTable

COLUMN_BUCKET = 32
CHUNK_TOKENS = 8192
"""Most tokens, padding included, in one prefill forward."""
FORCED_STEPS = 0
"""Appended tokens that ride along in decode steps, one a step, rather than in a prefill of their own."""
KEPT_BYTES = 1 << 28
MIN_LIVE = 0.75
"""Rows are moved together when fewer than this share of those computed are live."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One row's order: feed `pending` (at least one token, from position `start` on), then sample up to length
    `end`."""

    row: int
    start: int
    pending: Sequence[int]
    end: int
    seed: int
    params: SamplingParams
    stop: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A row whose turn ended, with what it sampled."""

    row: int
    ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    stopped: bool


class Engine:
    """Rows of token ids, positions and sampling parameters on the device, with the model's cache beside them."""

    def __init__(self, parts: ModelParts, stops: StopTable, max_rows: int, max_context: int) -> None:
        self.parts = parts
        self.stops = stops
        self.max_rows = max_rows
        self.max_context = max_context
        self.device = parts.device
        self.cache = SlotCache(max_rows, max_context)
        self.steps = 0
        self.computed_rows = 0
        self.prefilled_tokens = 0
        self.width = 0
        self.host = np.zeros((0, 6), dtype=np.int64)
        self._allocate(0)

    def _allocate(self, rows: int) -> None:
        def grown(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            new = torch.zeros(shape, dtype=dtype, device=self.device)
            old: Tensor | None = getattr(self, name, None)
            if old is not None and rows:
                new[: len(old)] = old
            return new

        width = self.max_context + 2
        self.ids = grown("ids", (rows, width), torch.long)
        self.logprobs = grown("logprobs", (rows, width), torch.float32)
        self.entropies = grown("entropies", (rows, width), torch.float32)
        self.uniforms = grown("uniforms", (rows, width), torch.float32)
        # One row of numbers a slot: position of the next input, length known before sampling, length limit, live,
        # stop, top-k.
        self.numbers = grown("numbers", (rows, 6), torch.long)
        self.temperature = grown("temperature", (rows,), torch.float32)
        self.top_p = grown("top_p", (rows,), torch.float32)
        host = np.zeros((rows, 6), dtype=np.int64)
        if rows:
            host[: len(self.host)] = self.host
        self.host = host
        self.n_rows = rows
        self.width = min(self.width, rows)
        self._plain = True
        self._forced = False

    def reset(self) -> None:
        """Forget all rows. Their memory is freed, unless it is so little that allocating it again would cost more."""
        if self.memory_bytes() > KEPT_BYTES:
            self.cache.drop()
            self._allocate(0)
        self.host[:] = 0
        self.numbers.zero_()
        self.width = 0

    @property
    def n_active(self) -> int:
        """Rows that are being decoded."""
        return int(self.host[: self.width, 3].sum())

    def memory_bytes(self) -> int:
        """Bytes held by the cache and the row buffers."""
        return self.cache.memory_bytes() + sum(x.numel() * x.element_size() for x in self._buffers())

    def _buffers(self) -> tuple[Tensor, ...]:
        return self.ids, self.logprobs, self.entropies, self.uniforms, self.numbers, self.temperature, self.top_p

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy caches: `(source row, target row, columns)`; all sources are read before any target is written."""
        if copies:
            sources, targets, columns = zip(*copies, strict=True)
            self._ensure_rows(max(targets) + 1)
            self.cache.copy_rows(sources, targets, max(columns))

    def _ensure_rows(self, rows: int) -> None:
        if rows > self.n_rows:
            self._allocate(min(self.max_rows, max(rows, 2 * self.n_rows, 8)))

    @torch.no_grad()
    def start(self, turns: Sequence[Turn]) -> None:
        """Write the orders of some rows, prefill what is pending but for the last token, and make the rows live."""
        if not turns:
            return
        self._ensure_rows(max(turn.row for turn in turns) + 1)
        fed = [len(t.pending) - 1 if len(t.pending) - 1 > FORCED_STEPS else 0 for t in turns]
        self._prefill([(t.row, t.start, t.pending[:n]) for t, n in zip(turns, fed, strict=True) if n])

        rows = self._indices([t.row for t in turns])
        known = np.array([t.start + len(t.pending) for t in turns], dtype=np.int64)
        numbers = np.array(
            [
                (t.start + n, k, t.end, 1, t.stop, t.params.top_k)
                for t, n, k in zip(turns, fed, known.tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        self.host[[t.row for t in turns]] = numbers
        self.numbers[rows] = torch.from_numpy(numbers).to(self.device)
        self.temperature[rows] = torch.tensor([t.params.temperature for t in turns], device=self.device)
        self.top_p[rows] = torch.tensor([t.params.top_p for t in turns], device=self.device)

        left = max(len(t.pending) - n for t, n in zip(turns, fed, strict=True))
        pending = np.zeros((len(turns), left), dtype=np.int64)
        for line, turn, n in zip(pending, turns, fed, strict=True):
            line[: len(turn.pending) - n] = turn.pending[n:]
        self._write(self.ids, rows, numbers[:, 0], pending)
        longest = int((numbers[:, 2] - known).max())
        seeds = np.array([t.seed & 0xFFFFFFFFFFFFFFFF for t in turns], dtype=np.uint64)
        drawn = uniforms(seeds[:, None], known[:, None] + np.arange(max(longest, 1)))
        self._write(self.uniforms, rows, known, drawn)
        self.width = max(self.width, *(t.row + 1 for t in turns))
        self._note_modes()

    def _write(self, buffer: Tensor, rows: Tensor, starts: Any, values: Any) -> None:
        columns = np.minimum(starts[:, None] + np.arange(values.shape[1]), buffer.shape[1] - 1)
        buffer[rows.unsqueeze(1), torch.from_numpy(columns).to(self.device)] = torch.from_numpy(values).to(self.device)

    def _note_modes(self) -> None:
        live = self.host[: self.width, 3] > 0
        temperature = self.temperature[: self.width].cpu().numpy()
        top_p = self.top_p[: self.width].cpu().numpy()
        self._plain = bool((temperature[live] == 1.0).all())
        self._any_top_k = bool((self.host[: self.width, 5][live] > 0).any())
        self._any_top_p = bool((top_p[live] < 1.0).any())
        self._forced = bool((self.host[: self.width, 0] + 1 < self.host[: self.width, 1])[live].any())

    def _prefill(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        queue = sorted(pieces, key=lambda piece: (-len(piece[2]), piece[0]))
        while queue:
            longest = min(len(queue[0][2]), CHUNK_TOKENS)
            n = 1
            while n < len(queue) and 2 * len(queue[n][2]) >= longest and (n + 1) * longest <= CHUNK_TOKENS:
                n += 1
            batch, queue = queue[:n], queue[n:]
            self._chunk([(row, start, ids[:longest]) for row, start, ids in batch])
            rest = [(row, start + longest, ids[longest:]) for row, start, ids in batch if len(ids) > longest]
            queue = sorted([*rest, *queue], key=lambda piece: (-len(piece[2]), piece[0])) if rest else queue

    def _chunk(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        longest = max(len(ids) for _, _, ids in pieces)
        ids = np.zeros((len(pieces), longest), dtype=np.int64)
        positions = np.array([start for _, start, _ in pieces], dtype=np.int64)[:, None] + np.arange(longest)
        targets = positions.copy()
        for i, (_, _, piece) in enumerate(pieces):
            ids[i, : len(piece)] = piece
            targets[i, len(piece) :] = -1
        columns = self._columns(max(start + len(piece) for _, start, piece in pieces))
        queries = torch.from_numpy(np.minimum(positions, self.max_context - 1)).to(self.device)
        self.cache.chunk_of([row for row, _, _ in pieces], torch.from_numpy(targets).to(self.device), columns)
        mask = self.parts.masks(queries, columns, self.parts.dtype)
        self.parts.decode(torch.from_numpy(ids).to(self.device), queries, mask, self.cache)
        self.prefilled_tokens += sum(len(piece) for _, _, piece in pieces)

    def _columns(self, length: int) -> int:
        return min(-(-length // COLUMN_BUCKET) * COLUMN_BUCKET, self.max_context)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Decode one token in every live row; give back the rows whose turn this ended."""
        width, host = self.width, self.host[: self.width]
        live = host[:, 3] > 0
        columns = self._columns(int(host[live, 0].max()) + 1)
        numbers = self.numbers[:width]
        position = numbers[:, 0]
        queries = position.unsqueeze(1)
        ids = self.ids[:width]
        self.cache.step_of(position, columns)
        mask = self.parts.masks(queries, columns, self.parts.dtype)
        hidden = self.parts.decode(ids.gather(1, queries), queries, mask, self.cache)
        logits = self.parts.head(hidden[:, 0]).float()

        following = queries + 1
        tokens, logprobs, entropies = sample(
            logits,
            self.uniforms[:width].gather(1, following).squeeze(1),
            None if self._plain else self.temperature[:width],
            numbers[:, 5] if self._any_top_k else None,
            self.top_p[:width] if self._any_top_p else None,
        )
        if self._forced:
            forced = following.squeeze(1) < numbers[:, 1]
            tokens = torch.where(forced, ids.gather(1, following).squeeze(1), tokens)
        ids.scatter_(1, following, tokens.unsqueeze(1))
        self.logprobs[:width].scatter_(1, following, logprobs.unsqueeze(1))
        self.entropies[:width].scatter_(1, following, entropies.unsqueeze(1))
        hits = self.stops.table[numbers[:, 4], tokens]
        fired = ((hits > 0) | (following.squeeze(1) + 1 >= numbers[:, 2])) & (numbers[:, 3] > 0)
        if self._forced:
            fired &= ~forced
            self._forced = bool((host[live, 0] + 2 < host[live, 1]).any())
        position += numbers[:, 3]
        host[:, 0] += host[:, 3]
        self.steps += 1
        self.computed_rows += width
        return self._finish(fired.nonzero().flatten().tolist(), hits)

    def _finish(self, rows: list[int], hits: Tensor) -> list[Finished]:
        finished = []
        for row in rows:
            position, known, end, _, stop, _ = self.host[row].tolist()
            hit = int(hits[row])
            turn: list[int] = self.ids[row, known : position + 1].tolist()
            stopped = bool(hit & STOP_TOKEN) or (hit > 0 and self.stops.completes(stop, turn))
            if not stopped and position + 1 < end:
                continue
            spans = (self.logprobs[row, known : position + 1], self.entropies[row, known : position + 1])
            finished.append(Finished(row, turn, spans[0].tolist(), spans[1].tolist(), stopped))
        self.idle([f.row for f in finished])
        return finished

    def idle(self, rows: Sequence[int]) -> None:
        """Stop decoding these rows. Their caches stay as they are."""
        if rows:
            self.host[rows, 3] = 0
            self.numbers[self._indices(rows), 3] = 0

    def compact(self) -> list[tuple[int, int]]:
        """Move the live rows together when too many others are computed with them; gives back the swaps it made."""
        live = self.host[: self.width, 3] > 0
        n = int(live.sum())
        self.width = int(live.nonzero()[0].max()) + 1 if n else 0
        if n == 0 or n >= MIN_LIVE * self.width:
            return []
        holes = [row for row in range(n) if not live[row]]
        movers = [row for row in range(n, self.width) if live[row]]
        to, source = self._indices(holes + movers), self._indices(movers + holes)
        self.cache.copy_rows(movers + holes, holes + movers, int(self.host[holes + movers, 0].max()))
        for buffer in self._buffers():
            buffer[to] = buffer[source]
        self.host[holes + movers] = self.host[movers + holes]
        self.width = n
        return list(zip(holes, movers, strict=True))


def finish_of(finished: Finished, length: int, max_context: int) -> Finish:
    """Why a turn ended, given the sequence's length after it."""
    if finished.stopped:
        return "stop"
    return "context_full" if length >= max_context else "length"
