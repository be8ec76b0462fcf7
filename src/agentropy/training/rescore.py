"""The trainer's own numbers for what another engine sampled: log-probabilities, entropies of the whole vocabulary.

A server tells a few of the likeliest tokens, so entropies made of them are estimates; methods that learn from entropies
need exact ones. They come from one forward pass of the policy as it is, before the update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from agentropy.policies.scoring import score
from agentropy.training.update import micro_batches
from agentropy.trajectory import Segment, Trajectory

TRAINER_LOGPROBS = "trainer_logprobs"
"""Key of a segment: the trainer's log-probability of each token, beside `logprobs`, which are the sampler's."""


async def rescore(
    model: Any, trajectories: Sequence[Trajectory], *, temperature: float, micro_batch_tokens: int
) -> list[Trajectory]:
    """The same trajectories with exact entropies, and `trainer_logprobs` in each segment of the policy's.

    Between forward passes others have their turn: signs of life of a rank, Ctrl-C.

    Args:
        model: the policy that sampled, or should have; its training mode is left as it was.
        temperature: that of sampling; 0 counts as 1.
        micro_batch_tokens: tokens in one forward pass.
    """
    # Up to the last token that was sampled: a result that ended a trajectory may reach beyond the model's window.
    ends = [_end(t) for t in trajectories]
    rows = [i for i, end in enumerate(ends) if end]
    found: dict[int, tuple[list[float], list[float]]] = {}
    was_training = model.training
    model.eval()
    try:
        for run in micro_batches([ends[i] for i in rows], micro_batch_tokens):
            members = [rows[k] for k in run]
            with torch.no_grad():
                found |= _score(model, {i: trajectories[i] for i in members}, ends, temperature)
            await asyncio.sleep(0)
    finally:
        model.train(was_training)
    return [_with(t, *found.get(i, ([], []))) for i, t in enumerate(trajectories)]


def _end(t: Trajectory) -> int:
    """How many tokens there are up to the last one that the policy sampled; 0 where it sampled none."""
    place = end = 0
    for s in t.segments:
        place += len(s.ids)
        end = place if s.is_model and s.ids else end
    return end


def _score(
    model: Any, members: dict[int, Trajectory], ends: Sequence[int], temperature: float
) -> dict[int, tuple[list[float], list[float]]]:
    sequences = [t.ids[: ends[i]] for i, t in members.items()]
    where = [
        torch.tensor([s.is_model for s in t.segments for _ in s.ids][: ends[i]], dtype=torch.bool)
        for i, t in members.items()
    ]
    prompts = [len(t.prompt) for t in members.values()]
    scores = score(model, sequences, temperature=temperature, where=torch.cat(where), prompts=prompts)
    assert scores.entropies is not None
    lengths = [len(s) for s in sequences]
    logprobs = torch.split(scores.logprobs.cpu(), lengths)
    entropies = torch.split(scores.entropies.cpu(), lengths)
    return {
        i: (p.clamp(max=0.0).tolist(), h.clamp(min=0.0).tolist())
        for i, p, h in zip(members, logprobs, entropies, strict=True)
    }


def _with(t: Trajectory, logprobs: Sequence[float], entropies: Sequence[float]) -> Trajectory:
    segments: list[Segment] = []
    place = 0
    for s in t.segments:
        span = slice(place, place + len(s.ids))
        place += len(s.ids)
        if s.is_model:
            extra = dict(s.extra) | {TRAINER_LOGPROBS: list(logprobs[span])}
            s = replace(s, entropies=tuple(entropies[span]), extra=extra)
        segments.append(s)
    return replace(t, segments=tuple(segments), entropy_kind="exact")


def trainer_logprobs(trajectories: Sequence[Trajectory]) -> Tensor:
    """`[T]` float32, in the order of `make_batch`; 0 outside the policy's tokens. They must have been rescored."""
    values = chain.from_iterable(
        s.extra[TRAINER_LOGPROBS] if s.is_model else [0.0] * len(s.ids) for t in trajectories for s in t.segments
    )
    return torch.tensor(list(values), dtype=torch.float32)
