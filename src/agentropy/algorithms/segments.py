"""Reductions over ragged sets: the tokens of a turn, the turns of a trajectory, the trajectories of a group.

`index[i]` names the set of `values[i]`; sets are numbered 0..n-1 and may be empty. `where` (True = counts) selects
entries instead of multiplying by a mask, so a NaN or an infinity in an entry left out cannot reach a result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _selected(values: Tensor, index: Tensor, where: Tensor | None) -> tuple[Tensor, Tensor]:
    return (values, index) if where is None else (values[where], index[where])


def segment_count(index: Tensor, n: int, where: Tensor | None = None) -> Tensor:
    """Number of entries of each set. Returns int64 `[n]`."""
    if where is not None:
        index = index[where]
    return torch.bincount(index, minlength=n) if index.numel() else index.new_zeros(n)


def segment_sum(values: Tensor, index: Tensor, n: int, where: Tensor | None = None) -> Tensor:
    """Sum of each set, float64 `[n]`; 0 for an empty one."""
    values, index = _selected(values, index, where)
    return torch.zeros(n, dtype=torch.float64, device=values.device).index_add_(0, index, values.double())


def segment_mean(values: Tensor, index: Tensor, n: int, where: Tensor | None = None) -> Tensor:
    """Mean of each set, float64 `[n]`; NaN for an empty one."""
    count = segment_count(index, n, where)
    mean = segment_sum(values, index, n, where) / count.clamp(min=1)
    return mean.masked_fill(count == 0, float("nan"))


def segment_std(values: Tensor, index: Tensor, n: int, where: Tensor | None = None, *, ddof: int) -> Tensor:
    """Standard deviation of each set with `ddof` 1 (sample) or 0 (population), float64 `[n]`; 0 where count <= ddof."""
    values, index = _selected(values, index, where)
    count = segment_count(index, n)
    deviation = values.double() - segment_mean(values, index, n)[index]
    variance = segment_sum(deviation.square(), index, n) / (count - ddof).clamp(min=1)
    return variance.sqrt()


def segment_spread(values: Tensor, index: Tensor, n: int, where: Tensor | None = None) -> Tensor:
    """Largest minus smallest value of each set, float64 `[n]`; 0 for an empty one, exactly 0 where all are equal."""
    values, index = _selected(values, index, where)
    out = torch.zeros(n, dtype=torch.float64, device=values.device)
    high = out.scatter_reduce(0, index, values.double(), "amax", include_self=False)
    low = out.scatter_reduce(0, index, values.double(), "amin", include_self=False)
    return high - low


def segment_any(flags: Tensor, index: Tensor, n: int) -> Tensor:
    """True for the sets that hold a True. Bool `[n]`."""
    out = torch.zeros(n, dtype=torch.bool, device=flags.device)
    out[index[flags]] = True
    return out


def suffix_sum(values: Tensor, index: Tensor, n: int) -> Tensor:
    """For each entry the sum of itself and the later entries of its set, float64; `index` must be sorted."""
    running = values.double().cumsum(0)
    total = segment_sum(values, index, n)
    before = torch.cat([total.new_zeros(1), total.cumsum(0)[:-1]]) if n else total
    return total[index] - (running - before[index]) + values.double()
