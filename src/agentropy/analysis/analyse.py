"""The whole analysis of any mix of sources, in one pass: what `agentropy analyze` prints and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentropy.analysis.imports import Options, Source
from agentropy.analysis.methods import verdicts
from agentropy.analysis.outlines import join
from agentropy.analysis.stream import EXTREMES, Piece, Sample, change_of, distinct, read_pieces
from agentropy.analysis.summary import Tables, summarise
from agentropy.analysis.tables import CallWriter
from agentropy.errors import UserError
from agentropy.trajectory import Trajectory

SHOWN = (
    "source",
    "question_id",
    "trajectory_id",
    "call",
    "calls",
    "tool",
    "arguments",
    "status",
    "result",
    "entropy_before",
    "entropy_after",
    "entropy_change",
    "score",
    "estimated",
)
"""Columns of a call that is shown as an example."""
SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Analysis:
    """`report` is what `analysis.json` holds; `held` are whole questions with the place of their source, for a page."""

    report: dict[str, Any]
    held: list[tuple[int, Trajectory]]
    calls: Mapping[str, np.ndarray[Any, Any]]
    """Columns over all calls (`Piece.calls`); `tools` are what `calls["tool"]` counts from."""
    tools: Sequence[str]


def analyse(
    sources: Sequence[Source],
    options: Options,
    methods: Sequence[str],
    *,
    table: Path | None = None,
    model: str | None = None,
    workers: int | None = None,
    sample: Sample | None = None,
) -> Analysis:
    """Read everything once and say what the calls did and what methods would make of the trajectories.

    Args:
        methods: names for `agentropy.analysis.methods.verdicts`.
        table: where the table of calls is written; None: nowhere.
        model, workers: as in `read_pieces`.
    Raises: UserError where something cannot be read or written, or where there is nothing to read.
    """
    sample = Sample() if sample is None else sample
    pieces: list[Piece] = []
    tools: dict[str, int] = {}
    kept: dict[str, list[dict[str, Any]]] = {"lowest": [], "highest": [], "again": [], "unused": []}
    with CallWriter(table) if table is not None else nullcontext() as writer:
        for piece in read_pieces(sources, options, sample, model=model, workers=workers):
            if writer is not None and piece.rows["call"]:
                writer.write(piece.rows)
            kept["lowest"] = distinct(sorted(kept["lowest"] + piece.lowest, key=change_of))
            kept["highest"] = distinct(sorted(kept["highest"] + piece.highest, key=change_of, reverse=True))
            kept["again"] = (kept["again"] + piece.again)[:EXTREMES]
            kept["unused"] = (kept["unused"] + piece.unused)[:EXTREMES]
            pieces.append(_numbers_only(piece, tools))
        if writer is not None:
            writer.close()
    if not any(len(p.trajectories["score"]) for p in pieces):
        raise UserError(f"no trajectories in {', '.join(str(s.path) for s in sources)}")
    tables = Tables(_joined(pieces, "calls"), _joined(pieces, "trajectories"), list(tools), sources)
    report = {"sources": _sources(tables)} | summarise(tables)
    report["most_useful"] = [_shown(r) for r in kept["lowest"]]
    report["least_useful"] = [_shown(r) for r in kept["highest"]]
    report["repeated"]["examples"] = [_shown(r) for r in kept["again"]]
    report["unused"]["examples"] = [_shown(r) for r in kept["unused"]]
    held = sample.trajectories
    outlines = join([p.outlines for p in pieces])
    report["methods"] = verdicts(methods, outlines, [(sources[i].name, t) for i, t in held])
    report["sample"] = {"trajectories": len(held), "complete": sample.complete}
    report["notes"] = notes(report)
    return Analysis(report, held, tables.calls, tables.tools)


def _numbers_only(piece: Piece, tools: dict[str, int]) -> Piece:
    """The piece without its texts, its tools counted over all pieces, and with the place of its source."""
    codes = np.array([tools.setdefault(name, len(tools)) for name in piece.tools], dtype=np.int32)
    calls = piece.calls | {"source": np.full(len(piece.calls["tool"]), piece.source, dtype=np.int32)}
    if len(codes):
        calls["tool"] = codes[piece.calls["tool"]]
    trajectories = piece.trajectories | {
        "source": np.full(len(piece.trajectories["score"]), piece.source, dtype=np.int32)
    }
    return Piece(piece.source, calls, trajectories, (), {}, [], [], [], [], piece.outlines, [])


def _joined(pieces: Sequence[Piece], which: str) -> dict[str, np.ndarray[Any, Any]]:
    columns = [getattr(p, which) for p in pieces]
    return {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}


def _sources(tables: Tables) -> list[dict[str, Any]]:
    trajectories = np.bincount(tables.trajectories["source"], minlength=len(tables.sources))
    calls = np.bincount(tables.calls["source"], minlength=len(tables.sources))
    return [
        {"name": s.name, "path": str(s.path), "format": s.format, "trajectories": int(t), "calls": int(c)}
        for s, t, c in zip(tables.sources, trajectories, calls, strict=True)
    ]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name in SHOWN:
        value = row[name]
        if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
            value = value[: SHOWN_CHARACTERS - 1] + "…"
        out[name] = None if isinstance(value, float) and value != value else value
    return out


def notes(report: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers."""
    out = []
    entropies, n = report["entropies"], report["trajectories"]
    formats = {s["format"] for s in report["sources"]}
    if entropies["estimated"]:
        out.append(
            f"The entropies of {entropies['estimated']} of {n} trajectories are estimates from the likeliest tokens, "
            "and so is what their calls did to them (docs/analysis.md says how far off that is)."
        )
    if entropies["missing"]:
        ask = "; a chat server gives log-probabilities with logprobs=true, top_logprobs=20" if "chat" in formats else ""
        out.append(f"{entropies['missing']} of {n} trajectories have no entropies, so their calls have no dH{ask}.")
    if formats - {"agentropy"}:
        out.append("How calls went was read from the text of their results, where the source does not say.")
    if report["graded"] == 0:
        out.append("No trajectory has a score: every filter and reward of the methods needs one.")
    elif report["groups"] == n and n > 1:
        out.append(
            "Each question has one trajectory: methods that compare trajectories of a question learn nothing here."
        )
    if not report["sample"]["complete"]:
        out.append(
            f"Shares of bonus are measured on {report['sample']['trajectories']} trajectories, a sample of whole "
            "questions; everything else on all."
        )
    if report["inherited_calls"]:
        out.append(
            f"{report['inherited_calls']} calls were inherited from a parent trajectory; they count in each branch."
        )
    return out
