"""Whole training steps beside TRL's `GRPOTrainer`, in one run: `python -m benchmarks.trl [--steps 7] [--threads 1 2]`.

Both sides load the same checkpoint (a Qwen3 of 1.1 million parameters with Qwen3's chat template), get the same tool (a
Python function), the same questions and the same reward, and do one optimiser update a batch: 8 questions x 8 samples,
float32, no KL term. Two jobs:

* fixed: random weights, exactly 64 new tokens, no calls;
* calls: a model that is taught here to call the tool, so that nearly every trajectory has a call, a result, an answer.

TRL runs in `.venv-trl`, which is made on first use, with settings that are fast here: no gradient
checkpointing, no logging, no mixed precision. Each side is a process of its own; the two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.trl_side import CALLS, add, question, reward, summary

ROOT = Path(__file__).resolve().parent.parent
TRL_VENV = ROOT / ".venv-trl"
WORK = ROOT / "build" / "benchmark-trl"
TRL_PINS = (("torch==2.13.0",), ("trl==1.16.0", "transformers==5.24.0", "jmespath"))


# -- TRL's side -------------------------------------------------------------------------------------------------------


def trl_python() -> str:
    """The interpreter of TRL's environment, made if it is not there."""
    python, complete = TRL_VENV / "bin" / "python", TRL_VENV / ".complete"
    wanted = json.dumps(TRL_PINS)
    if not complete.is_file() or complete.read_text() != wanted:
        print(f"installing TRL in {TRL_VENV} (once; a minute or two)", flush=True)
        venv.create(TRL_VENV, with_pip=True)
        for packages in TRL_PINS:  # torch alone and first: an open range would fetch CUDA libraries
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        complete.write_text(wanted)
    return str(python)


def chat_template() -> str:
    """Qwen3's template, byte for byte as TRL knows it (it refuses tools for any other)."""
    (found,) = TRL_VENV.glob("lib/python3*/site-packages/trl/chat_templates/qwen3.jinja")
    return found.read_text(encoding="utf-8")


# -- our side ---------------------------------------------------------------------------------------------------------


def run(job: dict[str, Any]) -> dict[str, float]:
    """Train with agentropy's trainer in this process and return medians a step."""
    import torch

    from agentropy.config import RunConfig, resolved
    from agentropy.evaluation.score import Scorer
    from agentropy.methods import make_method
    from agentropy.policies.base import Finish, Stop
    from agentropy.policies.loading import load_model
    from agentropy.policies.local import LocalPolicy
    from agentropy.protocols.base import Turn
    from agentropy.protocols.hermes import HermesDialect
    from agentropy.rollout.loop import Agent, Limits
    from agentropy.tasks.base import Task
    from agentropy.tools.session import make_toolbox
    from agentropy.training.collect import Collected
    from agentropy.training.setup import Setup
    from agentropy.training.trainer import Trainer

    class FixedLength(HermesDialect):
        """Nothing ends a turn but its length, and all text is the answer."""

        def __init__(self, tokenizer: Any) -> None:
            super().__init__(tokenizer, hint="")
            self.stop = Stop()

        def read(self, ids: Sequence[int], finish: Finish) -> Turn:
            return Turn(len(ids), answer=self.text.decode_bytes(ids).decode("utf-8", "replace"))

    class Questions:
        name = "benchmark"

        def train(self, index: int) -> Task:
            text, gold = question(index)
            return Task(str(index), text, (gold,), "math")

        def split(self, split: Literal["validation", "test"]) -> Sequence[Task]:
            return ()

    steps: list[dict[str, float]] = []

    class Clock:
        """Takes the time between the ends of steps, and what the trainer says about them."""

        def start(self) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
            wall, cpu = time.perf_counter(), time.process_time()
            if metrics["optim/updates"] != 1:
                raise RuntimeError("a step without update: every group was all alike")
            times = {"wall": wall - self.wall, "cpu": cpu - self.cpu, "rollout": metrics["time/rollout"]}
            steps.append(times | measured[-1])
            self.wall, self.cpu = wall, cpu

        def say(self, text: str) -> None:
            pass

        def close(self) -> None:
            pass

    measured: list[dict[str, float]] = []

    class Counting(Trainer):
        def _learn(self, collected: Collected, before: Any) -> None:
            batch = collected.batch
            measured.append(
                {
                    "tokens": float(sum(t.model_tokens for t in collected.sampled)),
                    "all_tokens": float(len(batch.tokens)),
                    "calls": float(CALLS[0]),
                    "prompt": float(max(len(t.segments[0].ids) for t in collected.sampled)),
                    "spread": float((collected.shaped.advantages != 0).float().mean()),
                }
            )
            CALLS[0] = 0
            super()._learn(collected, before)

    async def grade(task: Task, answer: str) -> float:
        return reward(answer, None if job["fixed"] else task.answers[0])

    config = resolved(
        RunConfig.model_validate(
            {
                "model": job["model"],
                "tasks": "benchmark",
                "method": "grpo",
                "steps": job["warm_up"] + job["steps"],
                "device": "cpu",
                "rollout": {
                    "questions": job["questions"],
                    "samples": job["samples"],
                    "max_new_tokens": job["max_new_tokens"],
                },
                "optim": {"lr": job["lr"], "minibatches": 1},
                "checkpoint": {"every": 10**6},
            }
        )
    )
    torch.set_num_threads(job["threads"])
    model, tokenizer = load_model(job["model"], device="cpu")
    policy = LocalPolicy(model, tokenizer, max_slots=config.rollout.max_slots)
    dialect = FixedLength(tokenizer) if job["fixed"] else HermesDialect(tokenizer, hint="", answer_format="text")
    toolbox, scorer, clock = make_toolbox([add]), Scorer(), Clock()
    setup = Setup(
        agent=Agent(policy, dialect, toolbox, grade),
        policy=policy,
        model=model,
        tokenizer=tokenizer,
        tasks=Questions(),
        method=make_method("grpo"),
        limits=Limits(2, job["max_new_tokens"], policy.info.max_context),
        lr=job["lr"],
        scorer=scorer,
        source_name="benchmark",
        description="",
    )

    async def train(directory: Path) -> None:
        await toolbox.start()
        trainer = Counting(config, setup, directory, [], clock)
        clock.start()
        await trainer.run()
        await setup.close()

    with tempfile.TemporaryDirectory() as out:
        (Path(out) / "trajectories").mkdir()
        asyncio.run(train(Path(out)))
    return summary(steps, job["warm_up"])


# -- both -------------------------------------------------------------------------------------------------------------


def measure(command: Sequence[str], job: Mapping[str, Any]) -> dict[str, float]:
    """Run one side in a process of its own."""
    threads = str(job["threads"])
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [*command, json.dumps(job)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def show(
    name: str, threads: int, batch: int, theirs: Sequence[dict[str, float]], ours: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Print one line a side and the ratio. Medians over the rounds of each round's median step."""
    sides = {}
    for side, rounds in (("TRL", theirs), ("agentropy", ours)):
        m = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        sides[side] = m | {"trajectories/s": batch / m["wall"], "tokens/s": m["tokens"] / m["wall"]}
        print(
            f"{name:6} {threads:7} {side:10} {sides[side]['trajectories/s']:14.1f} {sides[side]['tokens/s']:9.0f} "
            f"{m['wall']:7.2f} {m['cpu']:9.2f} {m['tokens'] / batch:11.1f} {m['calls'] / batch:8.2f} "
            f"{m['prompt']:7.0f}",
            flush=True,
        )
    pairs = list(zip(theirs, ours, strict=True))
    wall, cpu = ([t[key] / o[key] for t, o in pairs] for key in ("wall", "cpu"))
    ratios = {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}
    print(
        f"{name:6} {threads:7} ratio      {ratios['wall']:13.2f}x   "
        f"(rounds {min(wall):.2f} to {max(wall):.2f}); CPU {ratios['cpu']:.2f}x less",
        flush=True,
    )
    return {"job": name, "threads": threads, "sides": sides, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["fixed", "calls"], choices=["fixed", "calls"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="how often the two sides take turns")
    parser.add_argument("--steps", type=int, default=7, help="steps that count, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--trl-accumulate", type=int, default=1, help="micro-batches of TRL's update")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL's default, which is slower")
    parser.add_argument("--teach-steps", type=int, default=150)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    python = trl_python()
    from benchmarks.trl_model import make_checkpoints

    models = make_checkpoints(WORK, chat_template(), args.teach_steps)
    batch = args.questions * args.samples
    print(f"{args.questions} questions x {args.samples} samples, {args.new_tokens} new tokens; ", end="")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("job    threads side       trajectories/s  tokens/s  s/step CPU-s/step tokens/traj calls/traj prompt")
    rows = []
    for name in args.jobs:
        for threads in args.threads:
            job = {
                "model": str(models[name]),
                "fixed": name == "fixed",
                "threads": threads,
                "questions": args.questions,
                "samples": args.samples,
                # A taught model stops by itself, at about 60 tokens; this is for those that do not.
                "max_new_tokens": args.new_tokens if name == "fixed" else 3 * args.new_tokens // 2,
                "steps": args.steps,
                "warm_up": args.warm_up,
                "accumulate": args.trl_accumulate,
                "checkpointing": args.trl_checkpointing,
                "lr": 1e-6,
            }
            theirs, ours = [], []
            for _ in range(args.rounds):
                ours.append(measure([sys.executable, "-m", "benchmarks.trl", "--worker"], job))
                theirs.append(measure([python, "-P", str(ROOT / "benchmarks" / "trl_side.py")], job))
            rows.append(show(name, threads, batch, theirs, ours))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(run(json.loads(sys.argv[2]))))
    else:
        main()
