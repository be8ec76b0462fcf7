"""Does `AgentropyGRPOTrainer` reach what `agentropy train` reaches? TAO-RL on the facts world, several seeds, both.

    make test-trl                                          # sets up .venv-trl, if it is not there
    .venv/bin/python studies/trl_equivalence.py            # 3 seeds, 60 steps; about 40 minutes on two quiet cores
    .venv/bin/python studies/trl_equivalence.py --seeds 0 --steps 2 --questions 8

Both sides start from the shipped agent, sample 16 questions x 8 trajectories a step (and others for those that the
filters remove, up to twice as many), learn in two updates with AdamW at the same learning rate, and answer the same
test questions with the same random numbers. TRL deals trajectories to the two updates where `agentropy train` deals
questions, and draws its questions from a data set; so the runs differ, and their averages should not.

Runs lie in runs/trl-equivalence; those that are complete are not run again, those that were killed go on from their
last checkpoint. `results.json` there has the numbers of the last call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORLD, METHOD = "facts", "tao-rl"
QUESTIONS, SAMPLES, TOKENS, RESULT_TOKENS, TIMEOUT, UPDATES = 16, 8, 128, 64, 2.0, 2
"""The defaults of `agentropy train` for the embedded agents."""
RESULT = "evaluation-after.json"
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Quantiles of Student's t for a 95% interval of the mean, by the number of seeds."""


# -- TRL's side, in TRL's environment ---------------------------------------------------------------------------------


def train_in_trl(directory: Path, seed: int, steps: int, questions: int) -> None:
    """Train, evaluate, and write `evaluation-after.json`."""
    import torch
    from datasets import Dataset
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig

    from agentropy.integrations.trl import AgentropyGRPOTrainer
    from agentropy.rollout.parts import assemble_toolbox
    from agentropy.tasks.worlds import make_world

    torch.set_num_threads(1)
    world = make_world(WORLD, seed=seed)
    tasks = [world.tasks.train(i) for i in range(2 * QUESTIONS * steps)]
    rows = [{"prompt": [{"role": "user", "content": t.question}], "id": t.id, "answer": list(t.answers)} for t in tasks]
    (grader,) = {t.grader for t in tasks}
    args = GRPOConfig(
        output_dir=str(directory),
        seed=seed,
        per_device_train_batch_size=QUESTIONS * SAMPLES // UPDATES,
        steps_per_generation=UPDATES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        max_steps=steps * UPDATES,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="steps",
        save_steps=10 * UPDATES,
        save_total_limit=1,
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = AgentropyGRPOTrainer(
        str(world.warm_start()),
        args=args,
        train_dataset=Dataset.from_list(rows),
        method=METHOD,
        tools=assemble_toolbox(world.tools(TIMEOUT), timeout=TIMEOUT, world=world, seed=seed),
        grader=grader,
        protocol="tags",
        max_result_tokens=RESULT_TOKENS,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(directory)) if directory.is_dir() else None)
    trainer.save_model(str(directory / "model"))
    trainer.close()
    metrics = asyncio.run(evaluate(trainer.model, trainer.processing_class, world, seed, questions))
    unfinished = directory / f".{RESULT}"
    unfinished.write_text(json.dumps(metrics))
    unfinished.rename(directory / RESULT)


async def evaluate(model: Any, tokenizer: Any, world: Any, seed: int, questions: int) -> dict[str, float]:
    """The test questions as `agentropy train` asks them after training, with the same seeds."""
    from agentropy.evaluation.score import Scorer
    from agentropy.evaluation.summary import evaluation_metrics
    from agentropy.policies.base import SamplingParams
    from agentropy.protocols import make_dialect
    from agentropy.rollout.loop import Agent, Limits, rollout
    from agentropy.rollout.parts import assemble_toolbox, local_policy
    from agentropy.seeds import derive
    from agentropy.training.collect import attempts_for

    policy = local_policy(model, tokenizer, name="trl", max_slots=128, max_context=None)
    toolbox = assemble_toolbox(world.tools(TIMEOUT), timeout=TIMEOUT, world=world, seed=seed)
    scorer = Scorer()
    agent = Agent(policy, make_dialect("tags", tokenizer, max_result_tokens=RESULT_TOKENS), toolbox, scorer)
    await toolbox.start()
    tasks = world.tasks.split("test")[:questions]
    attempts = attempts_for(tasks, SAMPLES, derive(seed, "evaluation"), "eval")
    limits, params = Limits(5, TOKENS, policy.info.max_context), SamplingParams(max_new_tokens=TOKENS)
    trajectories = []
    with policy.rollout():
        for start in range(0, len(attempts), 4 * 128):
            trajectories += await rollout(agent, attempts[start : start + 4 * 128], params, limits)
    await toolbox.close()
    await scorer.close()
    return evaluation_metrics(trajectories)


# -- both -------------------------------------------------------------------------------------------------------------


def run(out: Path, side: str, seed: int, steps: int, questions: int) -> float | None:
    """One run in a process of its own, with its output in a file. Returns its Avg@8, None where it failed."""
    directory = out / f"{side}-{seed}-{steps}"
    if not (directory / RESULT).is_file():
        if side == "trl":
            arguments = ["--trl-side", str(directory), "--seeds", str(seed)]
            command = [str(ROOT / ".venv-trl/bin/python"), "-P", __file__, *arguments]
            command += ["--steps", str(steps), "--questions", str(questions)]
        else:
            command = [str(ROOT / ".venv/bin/python"), "-m", "agentropy.cli", "train"]
            if (directory / "config.yaml").is_file():
                command += ["--resume", str(directory)]
            else:
                command += ["--world", WORLD, "--method", METHOD, "--seed", str(seed), "--steps", str(steps)]
                command += ["--evaluation.questions", str(questions), "--evaluation.before", "false"]
                command += ["--evaluation.greedy", "false", "--out", str(directory)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (out / f"{directory.name}.log").open("a") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT).returncode
        word = "done" if code == 0 else f"failed with exit code {code}, see {log.name}"
        print(f"{directory.name}: {word}", flush=True)
        if code:
            return None
    return float(json.loads((directory / RESULT).read_text())["eval/avg"])


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean over seeds; infinite for one seed."""
    n = len(values)
    return T_95.get(n, 1.96) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--questions", type=int, default=128, help="test questions, 8 trajectories each")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/trl-equivalence")
    parser.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_side is not None:
        train_in_trl(args.trl_side, args.seeds[0], args.steps, args.questions)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [(side, seed) for seed in args.seeds for side in ("embedded", "trl")]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda j: run(args.out, j[0], j[1], args.steps, args.questions), jobs))
    if any(value is None for value in found):
        sys.exit("some runs failed")
    scores = {side: [v for (s, _), v in zip(jobs, found, strict=True) if s == side] for side in ("embedded", "trl")}
    table: dict[str, Any] = {"steps": args.steps, "seeds": args.seeds, "questions": args.questions}
    print("\n| trainer | Avg@8 by seed | mean | 95% interval |\n|---|---|---|---|")
    for side, values in scores.items():
        mean, half = statistics.mean(values), interval(values)
        table[side] = {"by_seed": values, "mean": mean, "half_interval": half if math.isfinite(half) else None}
        shown = ", ".join(f"{100 * v:.1f}" for v in values)
        print(f"| {side} | {shown} | {100 * mean:.1f} | ± {100 * half:.1f} |")
    gap = table["trl"]["mean"] - table["embedded"]["mean"]
    inside = abs(gap) <= interval(scores["embedded"])
    table["inside"] = inside
    print(f"\nTRL's mean is {100 * gap:+.1f} points from the embedded trainer's, ", end="")
    print("inside its interval" if inside else "outside its interval")
    (args.out / "results.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
