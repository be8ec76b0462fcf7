"""Numbers about scored samples: Avg@K, Pass@k, majority vote, code lines, bootstrap intervals, gradient fluctuation.

Pure numpy and plain Python. Questions are the unit of resampling: samples of one question are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def avg_at_k(scores: Sequence[Sequence[float]]) -> float:
    """Avg@K: the mean over questions of the mean score of their samples. NaN without questions.

    scores: [Q] questions of K samples each (K may differ). Raises ValueError for a question without samples.
    """
    if not scores:
        return math.nan
    if any(len(question) == 0 for question in scores):
        raise ValueError("a question has no samples")
    return float(np.mean([np.mean(question) for question in scores]))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate that one of k samples is right: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    n samples, c of them right, k <= n. Computed as a sum of logarithms, so it is exact to rounding for any n.
    Raises ValueError for impossible counts.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    drawn = np.arange(k, dtype=np.float64)
    return -math.expm1(math.fsum(np.log1p(-c / (n - drawn)).tolist()))


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Pass@k: the mean of `pass_at_k`. correct: [Q] questions of n >= k samples. NaN without questions."""
    if not correct:
        return math.nan
    return float(np.mean([pass_at_k(len(question), sum(map(bool, question)), k) for question in correct]))


def majority(answers: Sequence[str | None], key: Callable[[str], Hashable] | None = None) -> int | None:
    """Index of the first sample that gave the most frequent answer; None if no sample answered.

    key: maps an answer to what counts as the same answer (default: the answer without blanks at its ends). Of equally
    frequent answers the one given first wins, so the result doesn't depend on hashing.
    """
    counts: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(answers):
        if answer is not None and answer.strip():
            counts.setdefault((key or str.strip)(answer), []).append(i)
    if not counts:
        return None
    return max(counts.values(), key=lambda indices: (len(indices), -indices[0]))[0]


def majority_at_k(
    answers: Sequence[Sequence[str | None]],
    scores: Sequence[Sequence[float]],
    key: Callable[[str], Hashable] | None = None,
) -> float:
    """maj@K: the mean over questions of the score of the majority answer; 0 where no sample answered."""
    if len(answers) != len(scores):
        raise ValueError("answers and scores are of different lengths")
    if not answers:
        return math.nan
    picked = [majority(given, key) for given in answers]
    return float(np.mean([0.0 if i is None else row[i] for i, row in zip(picked, scores, strict=True)]))


@dataclass(frozen=True)
class CodeLines:
    """Lines of a program. total: all of them; stripped: those neither blank nor a comment by themselves."""

    total: int
    stripped: int


def code_lines(code: str) -> CodeLines:
    """Counts the lines of a program as TAO-RL reports them."""
    lines = code.splitlines()
    return CodeLines(len(lines), sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#")))


def effective_ratio(reducing: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Share of calls that lowered entropy: (micro, over all calls; macro, mean over trajectories that called).

    reducing: [N] trajectories, one flag a call. NaN where there are no calls.
    """
    with_calls = [flags for flags in reducing if len(flags)]
    if not with_calls:
        return math.nan, math.nan
    micro = sum(sum(map(bool, flags)) for flags in with_calls) / sum(len(flags) for flags in with_calls)
    return micro, float(np.mean([np.mean([bool(flag) for flag in flags]) for flags in with_calls]))


# Intervals


@dataclass(frozen=True)
class Estimate:
    """A mean and its percentile bootstrap interval [low, high] at `level`."""

    mean: float
    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True)
class Difference:
    """B minus A: an Estimate with the two-sided bootstrap p-value of "no difference"."""

    mean: float
    low: float
    high: float
    p_value: float
    level: float = 0.95


# Resamples are drawn in blocks, so that a block of indices stays under about 8 MB.
_BLOCK = 1_000_000


def _resampled_means(values: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """[resamples] means of values [Q] drawn with replacement."""
    count = len(values)
    out: list[Floats] = []
    done = 0
    while done < resamples:
        rows = min(resamples - done, max(1, _BLOCK // count))
        out.append(values[rng.integers(0, count, size=(rows, count))].mean(axis=1))
        done += rows
    return np.concatenate(out)


def _limits(means: Floats, level: float) -> tuple[float, float]:
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _vector(values: Sequence[float] | Floats, what: str) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{what} must be a non-empty list of finite numbers")
    return array


def bootstrap_questions(
    values: Sequence[float] | Floats, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """Mean over questions with a percentile bootstrap interval. values: [Q], one number a question (its mean score)."""
    array = _vector(values, "values")
    low, high = _limits(_resampled_means(array, resamples, np.random.default_rng(seed)), level)
    return Estimate(float(array.mean()), low, high, level)


def bootstrap_seeds(
    values: Sequence[Sequence[float]] | Floats, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """Mean over training seeds and questions; both are resampled, seeds first, the same questions for every seed drawn.

    values: [R, Q], a row a seed. With few seeds (3) the interval is too narrow: say how many there were.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("values must be a non-empty table of finite numbers, a row a seed")
    rng = np.random.default_rng(seed)
    runs, questions = array.shape
    means = np.empty(resamples)
    for i in range(resamples):
        rows = rng.integers(0, runs, size=runs)
        means[i] = array[rows].mean(axis=0)[rng.integers(0, questions, size=questions)].mean()
    low, high = _limits(means, level)
    return Estimate(float(array.mean()), low, high, level)


def paired_bootstrap(
    a: Sequence[float] | Floats,
    b: Sequence[float] | Floats,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """B minus A over the same questions, in the same order; questions are resampled as pairs.

    a, b: [Q]. The p-value is twice the smaller share of resampled differences on one side of 0 (ties count for both
    sides), with one added to both counts so that it is never 0.
    """
    first, second = _vector(a, "a"), _vector(b, "b")
    if first.shape != second.shape:
        raise ValueError(f"a and b must be of the same questions, got {len(first)} and {len(second)}")
    difference = second - first
    means = _resampled_means(difference, resamples, np.random.default_rng(seed))
    low, high = _limits(means, level)
    side = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p_value = min(1.0, 2 * (side + 1) / (resamples + 1))
    return Difference(float(difference.mean()), low, high, p_value, level)


# Gradient norms


@dataclass(frozen=True)
class Fluctuation:
    """How restless a series of gradient norms is. NaN where there are too few finite values.

    cv: standard deviation (population) over mean. window_cv: mean of the same over every window of consecutive values.
    mean_change: mean absolute change from one step to the next. spike_rate: share of norms over 3 times the median of
    the window before them. non_finite: how many norms were NaN or infinite; they are left out of the rest.
    """

    cv: float
    window_cv: float
    mean_change: float
    spike_rate: float
    non_finite: int


def gradient_fluctuation(norms: Sequence[float] | Floats, window: int = 10) -> Fluctuation:
    """Fluctuation of pre-clip gradient norms, one a step. Std over mean, because filters change the scale.

    A series shorter than the window is one window.
    """
    if window < 2:
        raise ValueError("window must be at least 2")
    array: Any = np.asarray(norms, dtype=np.float64).reshape(-1)
    finite = array[np.isfinite(array)]
    lost = int(array.size - finite.size)
    if finite.size < 2:
        return Fluctuation(math.nan, math.nan, math.nan, math.nan, lost)
    windows = np.lib.stride_tricks.sliding_window_view(finite, min(window, finite.size))
    means = windows.mean(axis=1)
    local = windows.std(axis=1)[means > 0] / means[means > 0]
    medians = [float(np.median(finite[max(0, i - window) : i])) for i in range(1, finite.size)]
    spikes = [bool(value > 3 * median) for value, median in zip(finite[1:], medians, strict=True)]
    return Fluctuation(
        cv=float(finite.std() / finite.mean()) if finite.mean() > 0 else math.nan,
        window_cv=float(local.mean()) if local.size else math.nan,
        mean_change=float(np.abs(np.diff(finite)).mean()),
        spike_rate=float(np.mean(spikes)),
        non_finite=lost,
    )
