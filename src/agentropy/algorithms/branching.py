"""Branching rollouts (ARPO, arXiv 2507.19849; AEPO, arXiv 2510.14545): where to fork, and what shared tokens earn.

A trajectory is forked right after a tool's result. Its branches, the *leaves* of a question's tree, share the tokens up
to there. Entropies are in nats. Letters: T tokens, N trajectories, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentropy.algorithms.segments import segment_mean
from agentropy.batch import Batch

Decision = Literal["threshold-draw", "threshold", "draw"]
"""When a state is forked: `P > tau` and a uniform draw below P; `P > tau` alone (the papers); the draw alone (the
released ARPO code)."""
Timing = Literal["after", "before"]
"""Whose entropy decides: that of the turn after the tool's result (the papers), or of the turn before it (the released
code, which is one call late)."""
Split = Literal["round", "released"]
"""How AEPO's share of the budget becomes a whole number: rounded, or the released code's floor + 1."""
Estimation = Literal["soft", "hard"]
"""What shared tokens earn: each leaf its own advantage, or all of them the mean of their leaves."""


@dataclass(frozen=True)
class Branching:
    """How a question's tree grows; the defaults are those of ARPO.

    name: of the method, for messages.
    roots: trajectories that start at the prompt; None: half of the budget, rounded up.
    beam: branches that a fork makes out of one, the trunk included.
    window: entropies are means over the first so many tokens of a turn.
    base, beta, tau: of `branch_probability` and `forks`.
    fork_penalty: AEPO's, per fork in a row on the path; 0 switches it off.
    split_beta: AEPO's split of the budget by a pilot trajectory; None takes `roots` as they are.
    """

    name: str = "arpo"
    roots: int | None = None
    beam: int = 2
    window: int = 20
    base: float = 0.5
    beta: float = 0.2
    tau: float = 0.5
    decision: Decision = "threshold-draw"
    timing: Timing = "after"
    fork_penalty: float = 0.0
    split_beta: float | None = None
    split: Split = "round"

    def initial_roots(self, budget: int) -> int:
        """Trajectories that start at the prompt where no pilot says otherwise."""
        return -(-budget // 2) if self.roots is None else self.roots


def window_entropy(entropies: Sequence[float], window: int) -> float:
    """Mean entropy of the first `window` tokens of a turn, of fewer where it is shorter; NaN for an empty turn."""
    first = entropies[:window]
    return math.fsum(first) / len(first) if first else math.nan


def penalty(consecutive: int, step: float = 0.05) -> float:
    """AEPO's factor `max(0, 1 - step * l)` for l consecutive forks on a path."""
    return max(0.0, 1.0 - step * consecutive)


def branch_probability(now: float, first: float, vocab_size: int, base: float = 0.5, beta: float = 0.2) -> float:
    """`P = clip(base + beta * d, 0, 1)`, `d = (H_now - H_first) / log V` (ARPO, section 3.1).

    Args:
        now: window entropy of the turn after the result; first: of the trajectory's first turn; nats.
        vocab_size: V; the largest entropy there is is its logarithm.
    Returns: 0 where an entropy is not defined (NaN).
    """
    d = (now - first) / math.log(vocab_size) if vocab_size > 1 else 0.0
    return 0.0 if math.isnan(d) else min(max(base + beta * d, 0.0), 1.0)


def forks(probability: float, draw: float, tau: float = 0.5, decision: Decision = "threshold-draw") -> bool:
    """True where the state is forked. `draw` is uniform in [0, 1)."""
    above, drawn = probability > tau, draw < probability
    return above if decision == "threshold" else drawn if decision == "draw" else above and drawn


def split_budget(budget: int, root: float, tool: float, beta: float = 0.5, split: Split = "round") -> int:
    """AEPO's number of roots, `N = clamp(round(G * sigmoid(beta * (H_root - H_tool))), 1, G)`; halves round up.

    Args:
        budget: G. root: mean entropy at the start of the pilot; tool: after its tool results; nats. NaN for either (a
            pilot without calls) says nothing about the difference, which then counts as 0.
    """
    x = beta * (root - tool)
    share = 0.5 if math.isnan(x) else 1.0 / (1.0 + math.exp(-min(max(x, -700.0), 700.0)))
    whole = math.floor(budget * share) + 1 if split == "released" else math.floor(budget * share + 0.5)
    return min(max(whole, 1), budget)


def token_origin(batch: Batch) -> Tensor:
    """`[T]` int64: for each token the one of the batch that was really sampled or fed; itself unless it was inherited.

    Tokens that leaves share have one origin.
    """
    origin = torch.arange(batch.n_tokens, device=batch.tokens.device)
    parents, places, starts = batch.parent_of.tolist(), batch.fork_at.tolist(), batch.token_start.tolist()
    done = [parent < 0 for parent in parents]
    for child in range(batch.n_trajectories):
        line = []
        while not done[child]:  # ancestors first
            line.append(child)
            done[child] = True
            child = parents[child]
        for i in reversed(line):
            n, own, other = places[i], starts[i], starts[parents[i]]
            origin[own : own + n] = origin[other : other + n]
    return origin


def shared_tokens(batch: Batch) -> Tensor:
    """`[T]` bool: True for model tokens that stand in the batch once more because a leaf inherited them."""
    inherited = token_origin(batch) != torch.arange(batch.n_tokens, device=batch.tokens.device)
    return batch.is_model & inherited


def hard_advantages(batch: Batch, advantages: Tensor, members: Tensor) -> Tensor:
    """ARPO's hard estimation: each token gets the mean advantage of the leaves that it belongs to.

    Args:
        advantages: `[T]`, one number a trajectory.
        members: `[N]` bool, True for leaves that count in the mean.
    Returns: `[T]`; unchanged outside the members.
    """
    counted = members[batch.trajectory_of]
    origin = token_origin(batch)
    mean = segment_mean(advantages, origin, batch.n_tokens, counted)[origin]
    return torch.where(counted, mean, advantages.double())


def count_once(batch: Batch, mask: Tensor) -> Tensor:
    """`[T]` bool: of tokens in `mask` that share an origin only the first stays."""
    places = mask.nonzero().squeeze(-1)
    origin = token_origin(batch)[places]
    first = torch.full((batch.n_tokens,), batch.n_tokens, device=places.device)
    first = first.scatter_reduce(0, origin, places, "amin")
    out = torch.zeros_like(mask)
    out[places[first[origin] == places]] = True
    return out
