"""Read any number of trajectories in bounded memory: numbers of every call are kept, texts go to a file, and whole
questions are held as a sample.

Long files in the project's own format are cut into pieces at line ends and read by several processes.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from agentropy.analysis.decode import decoder
from agentropy.analysis.effects import CHUNK, Decode, outline_batch, rows_of
from agentropy.analysis.imports import Options, Source
from agentropy.analysis.imports.parts import parse
from agentropy.analysis.outlines import Outlines, pack
from agentropy.analysis.tables import columns_of
from agentropy.errors import UserError
from agentropy.trajectory import STATUSES, STOPS, Trajectory, from_json

PIECE = 4 << 20
"""Bytes of a file that one task reads."""
PARALLEL_FROM = 48 << 20
"""Bytes of input below which starting processes costs more than it saves."""
EXTREMES = 10
EVERYTHING = 2**63 - 1
SAMPLE_TOKENS = 500_000
"""Tokens of trajectories that are held; some 100 bytes each."""
NUMBERS = (
    "call",
    "calls",
    "seconds",
    "entropy_before",
    "entropy_change",
    "reducing",
    "score",
    "parallel",
    "repeated",
    "inherited",
    "estimated",
)
"""Columns of the table of calls that are kept for all calls."""


@dataclass(frozen=True)
class Piece:
    """What came of some trajectories of one source, in order.

    calls: columns over calls; trajectories: columns over trajectories; tools: names that `calls["tool"]` counts from.
    rows: the whole table's columns, with texts cut. lowest, highest, again, unused: rows to show.
    held: the trajectories whose question belongs to the sample.
    """

    source: int
    calls: dict[str, np.ndarray[Any, Any]]
    trajectories: dict[str, np.ndarray[Any, Any]]
    tools: tuple[str, ...]
    rows: dict[str, list[Any]]
    lowest: list[dict[str, Any]]
    highest: list[dict[str, Any]]
    again: list[dict[str, Any]]
    unused: list[dict[str, Any]]
    outlines: Outlines
    held: list[tuple[int, Trajectory]]


def digest(source: Source, t: Trajectory) -> int:
    """A number for the trajectory's group: those of one question in one file belong together."""
    name = f"{source.path}\0{t.question_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def make_piece(
    index: int, source: Source, trajectories: Sequence[Trajectory], decode: Decode | None, limit: int
) -> Piece:
    """Analyse some trajectories of a source; those of questions with a digest below `limit` are held."""
    batch = outline_batch(trajectories)
    groups = [digest(source, t) for t in trajectories]
    rows = list(rows_of(trajectories, batch, decode))
    for row in rows:
        row["source"] = source.name
    counts = batch.call_start.diff().tolist()
    tools: dict[str, int] = {}
    calls = {name: np.array([r[name] for r in rows], dtype=np.float32) for name in NUMBERS}
    calls["entropy_change"] = np.array([r["entropy_change"] for r in rows], dtype=np.float64)
    calls["tool"] = np.array([tools.setdefault(r["tool"], len(tools)) for r in rows], dtype=np.int32)
    calls["status"] = np.array([STATUSES.index(r["status"]) for r in rows], dtype=np.int8)
    calls["used"] = np.array([-1 if r["result_used"] is None else r["result_used"] for r in rows], dtype=np.int8)
    calls["group"] = np.repeat(np.array(groups, dtype=np.int64), counts) if rows else np.zeros(0, dtype=np.int64)
    faulty = [t.stop == "error" or any(r.status == "lost" for r in t.results) for t in trajectories]
    measured = [any(s.entropies for s in t.segments) for t in trajectories]
    calls["faulty"] = np.repeat(np.array(faulty, dtype=bool), counts)
    calls["measured"] = np.repeat(np.array(measured, dtype=bool), counts)
    columns = {
        "group": np.array(groups, dtype=np.int64),
        "score": batch.score.numpy(),
        "calls": np.array(counts, dtype=np.int32),
        "tokens": np.array([_sampled(t) for t in trajectories], dtype=np.float32),
        "stop": np.array([STOPS.index(t.stop) for t in trajectories], dtype=np.int8),
        "estimated": np.array([t.entropy_kind != "exact" for t in trajectories], dtype=bool),
        "measured": np.array(measured, dtype=bool),
        "faulty": np.array(faulty, dtype=bool),
    }
    falling = sorted((r for r in rows if r["entropy_change"] < 0), key=change_of)
    rising = sorted((r for r in rows if r["entropy_change"] > 0), key=change_of, reverse=True)
    return Piece(
        source=index,
        calls=calls,
        trajectories=columns,
        tools=tuple(tools),
        rows=columns_of(rows),
        lowest=distinct(falling),
        highest=distinct(rising),
        again=list(islice((r for r in rows if r["repeated"]), EXTREMES)),
        unused=list(islice((r for r in rows if r["result_used"] is False), EXTREMES)),
        outlines=pack(batch, groups),
        held=[(group, t) for group, t in zip(groups, trajectories, strict=True) if group < limit],
    )


def _sampled(t: Trajectory) -> float:
    """The number of the policy's tokens; NaN where the source has its text as a whole."""
    known = t.ids_kind == "sampled" or any(s.logprobs is not None for s in t.segments)
    return float(t.model_tokens) if known else math.nan


def change_of(row: Mapping[str, Any]) -> float:
    """dH of a row."""
    return float(row["entropy_change"])


def distinct(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rows, each call of a question once: samples of a question often make the same call."""
    out: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        out.setdefault((row["question_id"], row["tool"], row["arguments"]), row)
        if len(out) == EXTREMES:
            break
    return list(out.values())


@dataclass
class Sample:
    """Whole groups with the smallest digests, as many as the budget of tokens holds; all of them, where they fit."""

    budget: int = SAMPLE_TOKENS
    limit: int = EVERYTHING
    held: dict[int, list[tuple[int, Trajectory]]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, source: int, found: Iterable[tuple[int, Trajectory]]) -> None:
        """Take trajectories with their groups' digests; groups beyond the budget are let go."""
        for group, t in found:
            if group < self.limit:
                self.held.setdefault(group, []).append((source, t))
                self.tokens += _weight(t)
        while self.tokens > self.budget and len(self.held) > 1:
            self.limit = max(self.held)
            self.tokens -= sum(_weight(t) for _, t in self.held.pop(self.limit))

    @property
    def complete(self) -> bool:
        """True where nothing was let go."""
        return self.limit == EVERYTHING

    @property
    def trajectories(self) -> list[tuple[int, Trajectory]]:
        """What is held, in the order of sources, and of the stream within them."""
        return sorted((pair for group in self.held.values() for pair in group), key=lambda pair: pair[0])


def _weight(t: Trajectory) -> int:
    text = sum(len(r.content) for r in t.results) // 8
    alternatives = sum(len(token) for s in t.segments for token in s.alternatives or ())
    return sum(len(s.ids) for s in t.segments) + 2 * alternatives + text + 50


@dataclass(frozen=True)
class Task:
    """A piece of a long file: the bytes from `start` to `end`, both at line ends."""

    index: int
    source: Source
    start: int
    end: int
    limit: int
    model: str | None


def read_pieces(
    sources: Sequence[Source],
    options: Options,
    sample: Sample,
    *,
    model: str | None = None,
    workers: int | None = None,
    piece_bytes: int = PIECE,
) -> Iterator[Piece]:
    """The pieces of all sources, in order. `sample` takes what is to be held.

    Args:
        model: folder of the tokenizer; None: that of the run that a file lies in.
        workers: processes; None: as many as there are cores, none for little input.
    Raises: UserError where something cannot be read.
    """
    size = sum(_size(s.path) for s in sources if s.format == "agentropy" and s.path.suffix != ".json")
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 8) if size >= PARALLEL_FROM else 0
    if not workers:
        for index, source in enumerate(sources):
            yield from _whole(index, source, options, sample, model)
        return
    # Not forked: the parent may have threads.
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_start_worker)
    try:
        for index, source in enumerate(sources):
            if source.format == "agentropy" and source.path.suffix != ".json":
                yield from _parallel(pool, workers, index, source, options, sample, model, piece_bytes)
            else:
                yield from _whole(index, source, options, sample, model)
    finally:
        pool.shutdown(cancel_futures=True)


def _context() -> Any:
    import multiprocessing

    return multiprocessing.get_context("spawn")


def _start_worker() -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work, and says so once
    torch.set_num_threads(1)
    gc.disable()  # what is read has no cycles, and looking for them takes a fifth of the time


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _whole(index: int, source: Source, options: Options, sample: Sample, model: str | None) -> Iterator[Piece]:
    decode = decoder(source.path, model)
    stream = iter(source.read(options))
    while part := list(islice(stream, CHUNK)):
        piece = make_piece(index, source, part, decode, sample.limit)
        sample.add(index, piece.held)
        yield piece


def _parallel(
    pool: ProcessPoolExecutor,
    workers: int,
    index: int,
    source: Source,
    options: Options,
    sample: Sample,
    model: str | None,
    piece_bytes: int,
) -> Iterator[Piece]:
    if options.score is not None:
        next(iter(source.read(options)), None)  # says what is wrong with it
    waiting: deque[Future[Piece]] = deque()
    for start, end in cuts(source.path, piece_bytes):
        waiting.append(pool.submit(read_piece, Task(index, source, start, end, sample.limit, model)))
        if len(waiting) > 2 * workers:
            yield _taken(waiting.popleft(), sample)
    while waiting:
        yield _taken(waiting.popleft(), sample)


def _taken(future: Future[Piece], sample: Sample) -> Piece:
    piece = future.result()
    sample.add(piece.source, piece.held)
    return piece


def cuts(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Cut a file at line ends into pieces of about `size` bytes."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = 0
        while start < end:
            file.seek(min(start + size, end))
            file.readline()
            stop = file.tell()
            yield start, stop
            start = stop


_decoders: dict[tuple[str, str | None], Decode | None] = {}
"""Of this process: a tokenizer is loaded once, not once a piece."""


def read_piece(task: Task) -> Piece:
    """Read and analyse a piece of a file, in a process of its own."""
    key = (str(task.source.path), task.model)
    if key not in _decoders:
        _decoders[key] = decoder(task.source.path, task.model)
    with task.source.path.open("rb") as file:
        file.seek(task.start)
        data = file.read(task.end - task.start)
    trajectories = []
    at = task.start
    for raw in data.split(b"\n"):
        if raw.strip():
            trajectories.append(_one(raw, task.source.path, at))
        at += len(raw) + 1
    return make_piece(task.index, task.source, trajectories, _decoders[key], task.limit)


def _one(raw: bytes, path: Path, at: int) -> Trajectory:
    try:
        return from_json(parse(raw, "it is"))
    except UserError as error:
        with path.open("rb") as file:
            line = file.read(at).count(b"\n") + 1
        text = str(error)
        what = text.removeprefix("it is: ") if text.startswith("it is: ") else text
        raise UserError(f"{path}, line {line}: {what}") from None
