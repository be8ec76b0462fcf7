"""Does a call that helped lower the entropy? The pilot study of docs/results.md, on the agents before any training.

Whether a call helped is measured without entropy: from the state before the call and from the state after its result
the agent goes on `--continuations` times, and the rates of right answers are compared. "Before" is taken twice: the
agent goes on freely (it may call the same or another tool again), and it has to answer at once. Then the AUROC of -dH
for telling the calls that helped from the others, with an interval by bootstrap over questions.

    .venv/bin/python studies/pilot.py                            # both worlds and levels, about 20 minutes
    .venv/bin/python studies/pilot.py --settings facts --questions 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from agentropy.algorithms.entropy import entropy_change
from agentropy.batch import make_batch
from agentropy.config import RunConfig
from agentropy.policies.base import SamplingParams
from agentropy.rollout.loop import Attempt, finish, rollout, take_turns
from agentropy.seeds import derive
from agentropy.tasks.base import Task
from agentropy.training.collect import attempts_for
from agentropy.training.setup import Setup, build
from agentropy.trajectory import Segment, Trajectory

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, dict[str, Any]] = {
    f"{world} {level}".removesuffix(" default"): {
        "world": world,
        "world_options": {"level": level} if level != "default" else {},
    }
    for world in ("arithmetic", "facts")
    for level in ("default", "hard")
}
ANSWER = "<answer>"
AT_ONCE = 4000


def states(trajectory: Trajectory) -> list[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
    """For each executed call the segments before the call's own tokens, and those up to its result."""
    out = []
    for i, segment in enumerate(trajectory.segments):
        if segment.kind == "result" and trajectory.segments[i - 1].kind == "call":
            out += [(trajectory.segments[: i - 1], trajectory.segments[: i + 1])] * len(segment.results)
    return out


async def go_on(
    setup: Setup, task: Task, start: Sequence[Segment], seeds: Sequence[int], extra: Sequence[int]
) -> float:
    """The mean score of continuations from a state; `extra` are tokens that the agent is made to begin with."""
    prefix = [i for s in start for i in s.ids]
    params = SamplingParams(1.0, max_new_tokens=setup.limits.max_new_tokens)
    handles = setup.policy.open([*prefix, *extra], seeds)

    async def one(handle: Any, seed: int) -> float:
        attempt = Attempt(task, f"{task.id}/{seed}", seed)
        session, _ = await setup.agent.toolbox.open(task.row, seed)
        segments = [*start, Segment("prompt", tuple(extra))] if extra else list(start)
        if extra:  # forced to answer: what follows is the answer's text and its end
            out = await setup.policy.generate(handle, (), params, setup.agent.dialect.stop)
            turn = setup.agent.dialect.read((*extra, *out.ids), out.finish)
            answer, stop = turn.answer, "answer"
        else:
            answer, stop = await take_turns(setup.agent, handle, session, segments, params, setup.limits)
        setup.policy.close(handle)
        done = await finish(setup.agent, attempt, session, segments, answer, stop)  # type: ignore[arg-type]
        await session.close()
        return 0.0 if done.score is None else done.score

    return float(np.mean(await asyncio.gather(*(one(h, s) for h, s in zip(handles, seeds, strict=True)))))


async def measure(setting: str, questions: int, samples: int, continuations: int, seed: int) -> list[dict[str, Any]]:
    """One row a call of the agent before training."""
    setup = build(RunConfig(**SETTINGS[setting]))
    tasks = {t.id: t for t in setup.tasks.split("validation")[:questions]}
    await setup.agent.toolbox.start()
    rows: list[dict[str, Any]] = []
    forced = setup.tokenizer(ANSWER, add_special_tokens=False).input_ids
    try:
        with setup.policy.rollout():
            params = SamplingParams(1.0, max_new_tokens=setup.limits.max_new_tokens)
            attempts = attempts_for(list(tasks.values()), samples, seed, "pilot")
            sampled = await rollout(setup.agent, attempts, params, setup.limits)
            for t in sampled:
                change = entropy_change(make_batch([t])).change.tolist()
                for k, ((before, after), result, dh) in enumerate(zip(states(t), t.results, change, strict=True)):
                    rows.append(
                        {
                            "setting": setting,
                            "question": t.question_id,
                            "trajectory": t.trajectory_id,
                            "k": k,
                            "need": t.extra.get("need"),
                            "status": result.status,
                            "dh": dh,
                            "score": t.score,
                            "states": (before, after),
                        }
                    )
            for start in range(0, len(rows), max(1, AT_ONCE // (3 * continuations))):
                part = rows[start : start + max(1, AT_ONCE // (3 * continuations))]
                await asyncio.gather(*(fill(setup, tasks, row, continuations, forced, seed) for row in part))
                print(f"{setting}: {min(start + len(part), len(rows))}/{len(rows)} calls", flush=True)
    finally:
        await setup.close()
    return rows


async def fill(
    setup: Setup, tasks: dict[str, Task], row: dict[str, Any], n: int, forced: Sequence[int], seed: int
) -> None:
    """The rates of right answers before and after one call."""
    before, after = row.pop("states")
    task = tasks[row["question"]]

    def seeds(tag: str) -> list[int]:
        return [derive(seed, "pilot", row["trajectory"], row["k"], tag, i) for i in range(n)]

    row["after"] = await go_on(setup, task, after, seeds("after"), ())
    row["before"] = await go_on(setup, task, before, seeds("before"), ())
    row["at once"] = await go_on(setup, task, before, seeds("at once"), forced)


def auroc(score: np.ndarray[Any, Any], label: np.ndarray[Any, Any]) -> float:
    """Probability that a positive has the higher score, ties counting half. NaN without both kinds."""
    positive, negative = score[label], np.sort(score[~label])
    if not len(positive) or not len(negative):
        return math.nan
    below = np.searchsorted(negative, positive, "left")
    upto = np.searchsorted(negative, positive, "right")
    return float((below + upto).mean() / 2 / len(negative))


def interval(
    rows: Sequence[dict[str, Any]], value: Callable[[Sequence[dict[str, Any]]], float], resamples: int = 1000
) -> str:
    """`value` of the rows with a 95 % percentile interval by bootstrap over questions."""
    rng = np.random.default_rng(0)
    by_question: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_question.setdefault(row["question"], []).append(row)
    groups = list(by_question.values())
    means = []
    for _ in range(resamples):
        drawn = rng.integers(0, len(groups), len(groups))
        means.append(value([row for i in drawn for row in groups[i]]))
    low, high = np.nanquantile(means, [0.025, 0.975]) if not np.isnan(means).all() else (math.nan, math.nan)
    point = value(rows)
    return "–" if math.isnan(point) else f"{point:.2f} [{low:.2f}, {high:.2f}]"


def helped_auroc(base: str, clear: bool, n: int) -> Callable[[Sequence[dict[str, Any]]], float]:
    """AUROC of -dH for calls after which the rate of right answers is higher than `base`.

    `clear` leaves out calls whose two rates are less than two standard errors apart, unless they are equal.
    """

    def value(rows: Sequence[dict[str, Any]]) -> float:
        a = np.array([r["after"] for r in rows])
        b = np.array([r[base] for r in rows])
        dh = np.array([r["dh"] for r in rows], dtype=float)
        spread = np.sqrt((a * (1 - a) + b * (1 - b)) / n)
        keep = ~np.isnan(dh) & ((np.abs(a - b) >= 2 * spread) if clear else True)
        return auroc(-dh[keep], (a > b)[keep])

    return value


def correlation(base: str) -> Callable[[Sequence[dict[str, Any]]], float]:
    """Spearman's rank correlation of -dH with the gain in the rate of right answers."""

    def value(rows: Sequence[dict[str, Any]]) -> float:
        dh = np.array([r["dh"] for r in rows], dtype=float)
        gain = np.array([r["after"] - r[base] for r in rows])
        keep = ~np.isnan(dh)
        if keep.sum() < 3 or np.ptp(gain[keep]) == 0:
            return math.nan
        return float(np.corrcoef(_ranks(-dh[keep]), _ranks(gain[keep]))[0, 1])

    return value


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[place]  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all calls": lambda r: True,
    "none needed": lambda r: r["need"] == 0,
    "needed": lambda r: (r["need"] or 0) >= 1,
    "status ok": lambda r: r["status"] == "ok",
    "not ok": lambda r: r["status"] != "ok",
    "first of a chain": lambda r: (r["need"] or 0) >= 2 and r["k"] == 0,
}


def table(rows: Sequence[dict[str, Any]], n: int) -> str:
    """The Markdown table: one line a setting and kind of call."""
    head = (
        "| | calls | dH<0 | right after | right before | right at once | AUROC, before | clear cases "
        "| AUROC, at once | clear cases | rank corr., at once |"
    )
    lines = [head, "|---|" + "---|" * 10]
    for setting in dict.fromkeys(r["setting"] for r in rows):
        for kind, belongs in KINDS.items():
            some = [r for r in rows if r["setting"] == setting and belongs(r)]
            if len(some) < 20:
                continue
            rates = [f"{np.mean([r[k] for r in some]):.2f}" for k in ("after", "before", "at once")]
            cells = [
                interval(some, helped_auroc(base, clear, n))
                for base in ("before", "at once")
                for clear in (False, True)
            ]
            lower = f"{np.mean([r['dh'] < 0 for r in some]):.2f}"
            cells.append(interval(some, correlation("at once")))
            lines.append(f"| {setting}: {kind} | {len(some)} | {lower} | " + " | ".join([*rates, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--continuations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "pilot")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for setting in args.settings:
        new = asyncio.run(measure(setting, args.questions, args.samples, args.continuations, args.seed))
        (args.out / f"{setting.replace(' ', '-')}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in new))
        rows += new
    out = table(rows, args.continuations)
    (args.out / "table.md").write_text(out + "\n")
    print(out)


if __name__ == "__main__":
    main()
