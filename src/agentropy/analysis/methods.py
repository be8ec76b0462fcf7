"""What each method would make of trajectories: what its filters drop and why, what it rewards, what its bonus adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from agentropy.algorithms.filters import REASONS
from agentropy.analysis.effects import outline
from agentropy.batch import Batch, make_batch
from agentropy.errors import UserError
from agentropy.methods import Method, make_method, method_options
from agentropy.trajectory import Trajectory

DEFAULT = ("tao-rl", "tepo-sparse", "tepo-dense", "simpletir")


def build(name: str) -> Method:
    """A method with its defaults, which takes estimates of entropies too. Raises UserError for an unknown name."""
    method = make_method(name)
    return make_method(name, accept_estimates=True) if "accept_estimates" in method_options(name) else method


def verdict(name: str, batch: Batch) -> dict[str, Any]:
    """What a method makes of a batch of outlines.

    Returns: kept and dropped trajectories by reason, groups that are left, the share of kept trajectories without any
    advantage, the mean reward of the method and of the outcome; or `{"why_not": …}` where it cannot be applied.
    """
    method = replace(build(name), bonus=None)  # a bonus looks at single tokens, which outlines do not have
    try:
        shaped = method.shape(batch)
    except UserError as error:
        return {"why_not": str(error)}
    m = shaped.metrics
    dropped = {reason: int(m[f"filter/{reason.replace('-', '_')}"]) for reason in REASONS}
    return {
        "trajectories": batch.n_trajectories,
        "kept": int(m["filter/kept"]),
        "dropped": {reason: n for reason, n in dropped.items() if n},
        "groups": batch.n_groups,
        "groups_kept": int(m["filter/groups_kept"]),
        "no_signal_share": m.get("filter/no_signal_share"),
        "reward_mean": m.get("reward/mean"),
        "accuracy": m.get("reward/accuracy"),
        "bonus_share": None,
    }


def bonus_share(name: str, held: Sequence[tuple[str, Trajectory]]) -> float | None:
    """What a method's bonus adds to the sizes of the advantages, as a share of their sum before; None without a bonus.

    Args:
        held: whole groups with the name of their file, file by file. Each file is shaped as one update batch, as a
            step of training is.
    """
    method = build(name)
    if method.bonus is None:
        return None
    added = mass = 0.0
    for _, group in groupby(held, key=lambda pair: pair[0]):
        batch = make_batch([replace(t, parent_id=None, fork_at=None) for _, t in group])
        try:
            shaped, plain = method.shape(batch), replace(method, bonus=None).shape(batch)
        except UserError:
            return None
        added += float((shaped.advantages.double() - plain.advantages.double()).abs().sum())
        mass += float(plain.advantages.double().abs().sum())
    return added / mass if mass else 0.0


def verdicts(
    names: Sequence[str], batch: Batch, held: Sequence[tuple[str, Trajectory]]
) -> Mapping[str, dict[str, Any]]:
    """`verdict` of each method, with its `bonus_share` over the trajectories that are `held`."""
    out = {}
    for name in names:
        found = verdict(name, batch)
        if "why_not" not in found:
            found["bonus_share"] = bonus_share(name, held)
        out[name] = found
    return out


def outlines_of(trajectories: Sequence[Trajectory]) -> Batch:
    """The batch of the outlines of trajectories, for `verdict`."""
    return make_batch([outline(t) for t in trajectories])
