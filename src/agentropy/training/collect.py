"""One batch of trajectories: sample questions, and sample more for those that the method's filters removed.

Dynamic sampling (DAPO) in rounds: the first is as large as the batch; each further one asks for the questions that are
missing, and guesses from the recent share of kept groups how many to draw for them. It is bounded by `max_oversample`,
and a step then trains on what it has. Nothing is ever duplicated to fill a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentropy.batch import Batch, make_batch
from agentropy.evaluation.summary import rollout_metrics
from agentropy.methods.base import Method, Shaped
from agentropy.policies.base import SamplingParams
from agentropy.rollout.loop import Agent, Attempt, Limits, RolloutFunction
from agentropy.seeds import derive
from agentropy.tasks.base import Task, TaskSource
from agentropy.training.checkpoint import Progress
from agentropy.trajectory import Trajectory


@dataclass(frozen=True)
class Collected:
    """What a step has to learn from. `sampled` is everything that was drawn, `filtered` what the filters made of it
    (the `filter/` metrics of `Shaped`); `batch` and `shaped` cover the groups that go into the update (all of them
    where the method removes no groups)."""

    sampled: list[Trajectory]
    filtered: dict[str, float]
    batch: Batch
    shaped: Shaped
    trajectories: list[Trajectory]
    rounds: int
    questions: int


# What was made of the batch of the update, where rollout_metrics and the filters' counts cover all that was sampled.
SHAPED_PREFIXES = ("entropy/bonus", "entropy/exact", "reward/mean", "reward/advantage", "batch/")


def collected_metrics(collected: Collected) -> dict[str, float]:
    """Metrics of what a step sampled and made of it, under the names of docs/metrics.md; NaN where there are none."""
    metrics = rollout_metrics(collected.sampled) | collected.filtered
    metrics |= {k: v for k, v in collected.shaped.metrics.items() if k.startswith(SHAPED_PREFIXES)}
    return metrics | {
        "batch/trajectories": float(collected.shaped.kept.sum()),
        "batch/questions": float(collected.batch.n_groups),
        "filter/questions_sampled": float(collected.questions),
        "filter/rounds": float(collected.rounds),
    }


def attempts_for(tasks: Sequence[Task], samples: int, seed: int, tag: str) -> list[Attempt]:
    """`samples` attempts at each task. Trajectory seeds hang on (seed, tag, question, sample) alone.

    A question that occurs again (small sets of questions do, within a batch) goes on counting its samples, or its
    trajectories would be the first ones once more.
    """
    attempts: list[Attempt] = []
    drawn: Counter[str] = Counter()
    for task in tasks:
        for k in range(drawn[task.id], drawn[task.id] + samples):
            attempts.append(Attempt(task, f"{task.id}/{tag}/{k}", derive(seed, tag, task.id, k)))
        drawn[task.id] += samples
    return attempts


async def collect(
    agent: Agent,
    method: Method,
    source: TaskSource,
    progress: Progress,
    *,
    questions: int,
    samples: int,
    max_oversample: float,
    params: SamplingParams,
    limits: Limits,
    seed: int,
    roll: RolloutFunction,
) -> Collected:
    """Sample one batch and shape it. Advances `progress.next_index` and `progress.keep_rate`."""
    budget = math.floor(questions * max_oversample)
    sampled: list[Trajectory] = []
    groups: list[list[Trajectory]] = []
    drawn = rounds = 0
    want = questions
    while want > 0 and drawn < budget:
        count = min(want if not rounds else math.ceil(want / max(progress.keep_rate, 0.25)), budget - drawn)
        tasks = [source.train(progress.next_index + i) for i in range(count)]
        tag = f"train-{progress.next_index}"
        progress.next_index += count
        drawn += count
        rounds += 1
        out = await roll(agent, attempts_for(tasks, samples, seed, tag), params, limits)
        sampled += out
        new = [out[i : i + samples] for i in range(0, len(out), samples)]
        if method.filters:
            kept = method.shape(make_batch(out)).kept
            new = [g for i, g in enumerate(new) if bool(kept[i * samples : (i + 1) * samples].any())]
            progress.keep_rate += 0.5 * (len(new) / count - progress.keep_rate)
        groups += new
        want = questions - len(groups)
    trajectories = [t for g in groups[:questions] for t in g]
    batch = make_batch(trajectories)
    shaped = method.shape(batch)
    over = shaped if len(trajectories) == len(sampled) else method.shape(make_batch(sampled))
    filtered = {k: v for k, v in over.metrics.items() if k.startswith("filter/")}
    return Collected(sampled, filtered, batch, shaped, trajectories, rounds, drawn)
