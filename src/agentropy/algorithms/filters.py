"""Which trajectories are learned from, and why the others are not.

A filter takes a `Selection` and hands back a smaller one. The first reason that applies to a trajectory stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_any, segment_count, segment_spread
from agentropy.batch import OK, Batch

REASONS = (
    "lost",
    "all-calls-failed",
    "void-turn",
    "truncated",
    "single-survivor",
    "not-discriminative",
)
Population = Literal["survivors", "all"]
"""Who counts in group statistics: the trajectories that no filter has removed, or all but the lost ones."""


@dataclass(frozen=True)
class Selection:
    """`reason[N]` int64: -1 for a trajectory that is kept, else the index into REASONS of what removed it."""

    reason: Tensor

    @property
    def kept(self) -> Tensor:
        """`[N]` bool, True for trajectories that are learned from."""
        return self.reason < 0

    @property
    def why(self) -> tuple[str | None, ...]:
        """For each trajectory None (kept) or the reason."""
        return tuple(None if code < 0 else REASONS[code] for code in self.reason.tolist())

    def population(self, which: Population) -> Tensor:
        """`[N]` bool, True for the trajectories that count in group statistics. Lost ones never do."""
        return self.kept if which == "survivors" else self.reason != REASONS.index("lost")

    def without(self, dropped: Tensor, reason: str) -> Selection:
        """The selection less `dropped[N]` (True = remove); trajectories removed earlier keep their reason."""
        return replace(self, reason=torch.where(self.kept & dropped, REASONS.index(reason), self.reason))


def select_found(batch: Batch) -> Selection:
    """Everything but the trajectories that a fault of the machinery spoilt; they are left out of every statistic."""
    everything = torch.full((batch.n_trajectories,), -1, dtype=torch.int64, device=batch.lost.device)
    return Selection(everything).without(batch.lost, "lost")


def execution_validity(batch: Batch, selection: Selection) -> Selection:
    """TAO-RL, criterion 1: remove trajectories with at least one call of which none is `ok`. No call keeps."""
    n = batch.n_trajectories
    any_call = segment_count(batch.call_trajectory, n) > 0
    any_ok = segment_any(batch.call_status == OK, batch.call_trajectory, n)
    return selection.without(any_call & ~any_ok, "all-calls-failed")


def void_turns(batch: Batch, selection: Selection) -> Selection:
    """SimpleTIR: remove trajectories with a turn that holds neither a complete call nor an answer."""
    return selection.without(batch.void, "void-turn")


def truncated(batch: Batch, selection: Selection) -> Selection:
    """DAPO's overlong filtering: remove trajectories that a length limit cut off."""
    return selection.without(batch.truncated, "truncated")


def discriminability(
    batch: Batch,
    selection: Selection,
    reward: Tensor,
    population: Population = "survivors",
    tolerance: float = 1e-3,
) -> Selection:
    """TAO-RL, criterion 2: remove groups whose rewards are all alike (pass rate 0 or 1), `max R - min R < tolerance`.

    Args:
        reward: `[N]`, the outcomes that the test compares.
        population: "survivors" tests what earlier filters left; "all" tests the whole group as the released code does,
            so that a group may stay with survivors that are all alike. A lone survivor is removed in both.
    """
    n = batch.n_groups
    single = segment_count(batch.group_of, n, selection.kept) == 1
    members = selection.population(population)
    selection = selection.without(single[batch.group_of], "single-survivor")
    alike = segment_spread(reward, batch.group_of, n, members) < tolerance
    return selection.without(alike[batch.group_of], "not-discriminative")
