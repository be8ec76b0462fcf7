"""Outlines of many trajectories (`effects.outline`) as arrays: small enough to keep all, whatever their length.

Groups of a question may lie far apart in a stream, and filters need them whole. So each piece of the stream leaves its
outlines behind, and at the end they are joined to one batch that any method can shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentropy.batch import Batch

_OFFSETS = {
    "segment_of": "segments",
    "trajectory_of": "trajectories",
    "turn_of": "turns",
    "token_start": "tokens",
    "turn_start": "turns",
    "call_start": "calls",
    "turn_trajectory": "trajectories",
    "call_trajectory": "trajectories",
    "call_turn": "turns",
}
"""Columns that count from the beginning of the batch, and what they count."""
_UNUSED = ("tokens", "logprobs", "parent_of", "fork_at", "group_of")


@dataclass(frozen=True)
class Outlines:
    """The columns of a batch of outlines, and a key for the group of each trajectory (`[N]` int64)."""

    columns: dict[str, np.ndarray[Any, Any]]
    groups: np.ndarray[Any, Any]
    tools: tuple[str, ...]
    exact: bool

    @property
    def sizes(self) -> dict[str, int]:
        """How many of each there are."""
        c = self.columns
        return {
            "segments": int(c["segment_of"].max(initial=-1)) + 1,
            "trajectories": len(c["score"]),
            "turns": len(c["turn_trajectory"]),
            "tokens": len(c["kind_of"]),
            "calls": len(c["call_turn"]),
        }


def pack(batch: Batch, groups: Sequence[int]) -> Outlines:
    """The columns of a batch as arrays, in as few bytes as they need."""
    columns = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name not in _UNUSED:
            array = value.numpy()
            columns[field.name] = array.astype(np.int32) if array.dtype == np.int64 else array
    return Outlines(columns, np.array(groups, dtype=np.int64), batch.tools, batch.entropies_exact)


def join(parts: Sequence[Outlines]) -> Batch:
    """One batch of all outlines, in order. Trajectories with the same key form a group; names are left out."""
    totals = dict.fromkeys(("segments", "trajectories", "turns", "tokens", "calls"), 0)
    pieces: dict[str, list[np.ndarray[Any, Any]]] = {}
    tools: dict[str, int] = {}
    for part in parts:
        for name, array in part.columns.items():
            if name == "call_tool":
                codes = np.array([tools.setdefault(t, len(tools)) for t in part.tools], dtype=np.int64)
                array = codes[array] if len(array) else array
            elif counted := _OFFSETS.get(name):
                shifted = array.astype(np.int64) + totals[counted]
                array = np.where(array < 0, -1, shifted) if name == "turn_of" else shifted
                if name.endswith("_start") and pieces.get(name):
                    array = array[1:]  # the last part's end is this one's beginning
            pieces.setdefault(name, []).append(array)
        for counted, size in part.sizes.items():
            totals[counted] += size
    values: dict[str, Any] = {}
    for name, arrays in pieces.items():
        whole = np.concatenate(arrays)
        values[name] = torch.from_numpy(whole.astype(np.int64) if whole.dtype.kind == "i" else whole)
    n, tokens = totals["trajectories"], totals["tokens"]
    _, group_of = np.unique(np.concatenate([p.groups for p in parts]), return_inverse=True)
    model = values["is_model"]
    return Batch(
        **values,
        tokens=torch.zeros(tokens, dtype=torch.int64),
        logprobs=torch.zeros(tokens, dtype=torch.float32),
        group_of=torch.from_numpy(group_of.astype(np.int64)),
        parent_of=torch.full((n,), -1, dtype=torch.int64),
        fork_at=torch.full((n,), -1, dtype=torch.int64),
        tools=tuple(tools),
        trajectory_ids=("",) * n,
        question_ids=("",) * n,
        has_logprobs=False,
        has_entropies=not bool(values["entropies"][model].isnan().any()),
        entropies_exact=all(p.exact for p in parts),
        has_ids=False,
    )
