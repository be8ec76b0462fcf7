"""Between the padded tensors of a training engine and our `Batch`: pure functions that know no engine.

An engine holds rows of equal length, ours are ragged. `padded` and `flat` move per-token values one way and the other.
Where an engine only carries tensors from where trajectories are sampled to where they are shaped, `to_columns` puts
all that the algorithms need of a trajectory into per-token columns, and `from_columns` takes it out again.

Letters: B rows, W columns of a padded tensor, T tokens and N trajectories of a Batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_args

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_count
from agentropy.batch import PROMPT, Batch
from agentropy.errors import UserError
from agentropy.trajectory import (
    KINDS,
    STATUSES,
    Segment,
    SegmentKind,
    Status,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
)

PADDING = -1
"""In `Columns.kinds`: no token stands here."""
STATUS_BITS = 3
MOST_RESULTS = 63 // STATUS_BITS
"""Results of one turn that a 64-bit number holds."""
_STOPS: tuple[StopReason, ...] = get_args(StopReason)
_STATUSES: tuple[Status, ...] = get_args(Status)
_KINDS: tuple[SegmentKind, ...] = get_args(SegmentKind)


# -- values of tokens -------------------------------------------------------------------------------------------------


def completion_starts(batch: Batch) -> Tensor:
    """`[N]`: how many tokens of each trajectory are its prompt, so where the completion of an engine begins."""
    return segment_count(batch.trajectory_of, batch.n_trajectories, batch.kind_of == PROMPT)


def padded(
    batch: Batch,
    values: Tensor,
    width: int,
    *,
    rows: Tensor | None = None,
    starts: Tensor | None = None,
    fill: float | bool = 0,
) -> Tensor:
    """Per-token values of a batch as an engine's rows, aligned on the left.

    Args:
        values: `[T]`.
        width: columns; tokens beyond are left out (an engine drops a result that nothing follows).
        rows: `[B]` indices of trajectories; None: all.
        starts: `[N]`, the token of its trajectory with which a row begins, such as `completion_starts`; None: the
            first.
        fill: where a row has no token.
    Returns: `[B, width]`, of the dtype of the values.
    """
    index, there = _places(batch, width, rows, starts)
    out = torch.full(index.shape, fill, dtype=values.dtype, device=values.device)
    out[there] = values[index[there]]
    return out


def flat(
    batch: Batch, rows_of_values: Tensor, *, rows: Tensor | None = None, starts: Tensor | None = None, fill: float = 0
) -> Tensor:
    """An engine's rows as per-token values of a batch: what `padded` makes, backwards.

    Args:
        rows_of_values: `[B, W]`, row i belongs to trajectory `rows[i]` (None: i) from its token `starts` on.
    Returns: `[T]`, with `fill` for tokens that no row covers.
    """
    index, there = _places(batch, int(rows_of_values.shape[1]), rows, starts)
    out = torch.full((batch.n_tokens,), fill, dtype=rows_of_values.dtype, device=rows_of_values.device)
    out[index[there]] = rows_of_values[there]
    return out


def _places(batch: Batch, width: int, rows: Tensor | None, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each place of a padded tensor the token that stands there, and whether there is one."""
    rows = torch.arange(batch.n_trajectories, device=batch.tokens.device) if rows is None else rows
    begin = batch.token_start[rows]
    if starts is not None:
        begin = begin + starts[rows]
    index = begin.unsqueeze(1) + torch.arange(width, device=batch.tokens.device)
    return index, index < batch.token_start[rows + 1].unsqueeze(1)


def with_scores(trajectory: Trajectory, logprobs: Sequence[float], entropies: Sequence[float]) -> Trajectory:
    """The trajectory with other log-probabilities and (exact) entropies at its model tokens.

    Both have an entry for each token of the trajectory; those at tokens of others are not looked at.
    """
    segments, at = [], 0
    for s in trajectory.segments:
        span = slice(at, at + len(s.ids))
        at += len(s.ids)
        if s.is_model:
            s = dataclasses.replace(s, logprobs=tuple(logprobs[span]), entropies=tuple(entropies[span]))
        segments.append(s)
    return dataclasses.replace(trajectory, segments=tuple(segments), entropy_kind="exact")


# -- trajectories as columns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Trajectories as per-token columns `[B, W]`, padded on the right, and a few values of each row `[B]`.

    ids[B, W]        int64
    kinds[B, W]      int64, PROMPT, REASONING, CALL or RESULT of `agentropy.batch`; -1 where no token stands
    segments[B, W]   int64, the number of the token's segment in its trajectory
    calls[B, W]      int64, at the first token of a `call` segment how many calls it holds; 0 elsewhere
    statuses[B, W]   int64, at the first token of a `result` segment the statuses of its results, three bits each,
                     the first one lowest, each the index of the status plus one; 0 elsewhere
    logprobs[B, W]   float64, of the sampler; NaN where there are none
    entropies[B, W]  float64, likewise
    score[B]         float64, NaN where it could not be graded
    stop[B]          int64, index into the reasons of `StopReason`
    answered[B]      bool, an answer was given
    exact[B]         bool, the entropies are no estimates
    """

    ids: Tensor
    kinds: Tensor
    segments: Tensor
    calls: Tensor
    statuses: Tensor
    logprobs: Tensor
    entropies: Tensor
    score: Tensor
    stop: Tensor
    answered: Tensor
    exact: Tensor


def to_columns(trajectories: Sequence[Trajectory]) -> Columns:
    """All that filters, rewards and advantages need of trajectories, as tensors.

    Texts, names of tools, forks, and segments without a token are lost: a call is a call of "", and a segment that
    holds calls or results needs a token to hold them.
    Raises: UserError where results or calls have no token, or more than 21 results are in one segment.
    """
    width = max((len(t.ids) for t in trajectories), default=0)
    shape = (len(trajectories), width)
    whole = {n: torch.zeros(shape, dtype=torch.int64) for n in ("ids", "segments", "calls", "statuses")}
    real = {n: torch.full(shape, torch.nan, dtype=torch.float64) for n in ("logprobs", "entropies")}
    kinds = torch.full(shape, PADDING, dtype=torch.int64)
    for i, t in enumerate(trajectories):
        at = 0
        for number, s in enumerate(t.segments):
            end = at + len(s.ids)
            if at == end and (s.calls or s.results):
                raise UserError(f"trajectory {t.trajectory_id!r}: a {s.kind} segment without tokens cannot be a column")
            if at == end:
                continue
            whole["ids"][i, at:end] = torch.tensor(s.ids)
            whole["segments"][i, at:end] = number
            kinds[i, at:end] = KINDS.index(s.kind)
            whole["calls"][i, at] = len(s.calls)
            whole["statuses"][i, at] = _pack(t.trajectory_id, s.results)
            for name, values in (("logprobs", s.logprobs), ("entropies", s.entropies)):
                if values is not None:
                    real[name][i, at:end] = torch.tensor(values, dtype=torch.float64)
            at = end
    return Columns(
        **whole,
        **real,
        kinds=kinds,
        score=torch.tensor([torch.nan if t.score is None else t.score for t in trajectories], dtype=torch.float64),
        stop=torch.tensor([_STOPS.index(t.stop) for t in trajectories], dtype=torch.int64),
        answered=torch.tensor([t.answer is not None for t in trajectories], dtype=torch.bool),
        exact=torch.tensor([t.entropy_kind == "exact" for t in trajectories], dtype=torch.bool),
    )


def from_columns(columns: Columns, question_ids: Sequence[str], trajectory_ids: Sequence[str]) -> list[Trajectory]:
    """Trajectories out of columns; `make_batch` of them shapes as those did that `to_columns` was given."""
    out = []
    for i, (question, name) in enumerate(zip(question_ids, trajectory_ids, strict=True)):
        there = int((columns.kinds[i] != PADDING).sum())
        row: dict[str, list[Any]] = {
            f.name: getattr(columns, f.name)[i, :there].tolist() for f in dataclasses.fields(Columns)[:7]
        }
        segments = []
        for _, group in groupby(range(there), key=row["segments"].__getitem__):
            places = list(group)
            first, span = places[0], slice(places[0], places[-1] + 1)
            results = _unpack(row["statuses"][first])
            segments.append(
                Segment(
                    _KINDS[row["kinds"][first]],
                    tuple(row["ids"][span]),
                    _known(row["logprobs"][span]),
                    _known(row["entropies"][span]),
                    calls=tuple(ToolCall("") for _ in range(row["calls"][first])),
                    results=tuple(ToolResult("", status) for status in results),
                )
            )
        score = float(columns.score[i])
        out.append(
            Trajectory(
                question_id=question,
                trajectory_id=name,
                question="",
                segments=tuple(segments),
                answer="" if bool(columns.answered[i]) else None,
                score=None if score != score else score,
                stop=_STOPS[int(columns.stop[i])],
                entropy_kind="exact" if bool(columns.exact[i]) else "top-k",
            )
        )
    return out


def _pack(name: str, results: Sequence[ToolResult]) -> int:
    if len(results) > MOST_RESULTS:
        raise UserError(f"trajectory {name!r}: {len(results)} results in one turn, a column holds {MOST_RESULTS}")
    return sum((STATUSES.index(r.status) + 1) << (STATUS_BITS * i) for i, r in enumerate(results))


def _unpack(packed: int) -> list[Status]:
    statuses = []
    while packed:
        statuses.append(_STATUSES[(packed & ((1 << STATUS_BITS) - 1)) - 1])
        packed >>= STATUS_BITS
    return statuses


def _known(values: list[float]) -> tuple[float, ...] | None:
    """None where the values were not recorded."""
    return None if any(v != v for v in values) else tuple(values)
