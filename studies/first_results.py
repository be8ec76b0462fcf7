"""The table and the curves of docs/first-results.md: five methods, two worlds, several seeds, `agentropy train` each.

    .venv/bin/python studies/first_results.py                 # everything; about an hour on two quiet cores
    .venv/bin/python studies/first_results.py --seeds 0 --methods grpo tao-rl --worlds facts

Runs lie in runs/first-results; those that are complete are not run again, those that were killed go on. Two run at
once, one thread each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

METHODS = ("grpo", "simpletir", "tao-rl", "tepo-sparse", "tepo-dense")
WORLDS = ("arithmetic", "facts")
ROOT = Path(__file__).parents[1]
COLUMNS = (
    ("eval/avg", "Avg@8", 100),
    ("eval/pass", "Pass@8", 100),
    ("greedy/avg", "greedy", 100),
    ("tool/calls_per_question", "calls", 1),
    ("eval/calls_need_0", "calls, none needed", 1),
    ("tool/effective_ratio", "effective", 1),
    ("tool/valid_rate", "valid", 1),
    ("length/model_tokens", "tokens", 1),
    ("fluctuation", "grad. norm std/mean", 1),
    ("sampled", "trajectories sampled, thousands", 1),
)


def run_directory(out: Path, world: str, method: str, seed: int) -> Path:
    return out / f"{world}-{method}-{seed}"


def train(out: Path, world: str, method: str, seed: int, steps: int) -> None:
    """One run in a process of its own, with its output in a file."""
    directory = run_directory(out, world, method, seed)
    if (directory / "evaluation-after.json").is_file():
        return
    command = [sys.executable, "-m", "agentropy.cli", "train"]
    if (directory / "config.yaml").is_file():
        command += ["--resume", str(directory)]
    else:
        command += ["--world", world, "--method", method, "--seed", str(seed), "--steps", str(steps)]
        command += ["--out", str(directory), "--evaluation.questions", "128"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (out / f"{directory.name}.log").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT).returncode
    print(f"{directory.name}: {'done' if code == 0 else f'failed with exit code {code}, see {log.name}'}", flush=True)


def read(directory: Path) -> dict[str, Any]:
    """The numbers of a finished run."""
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    norms = [m["optim/grad_norm"] for m in metrics if m.get("optim/grad_norm") is not None]
    after = json.loads((directory / "evaluation-after.json").read_text())
    after["fluctuation"] = statistics.stdev(norms) / statistics.mean(norms)
    samples = yaml.safe_load((directory / "config.yaml").read_text())["rollout"]["samples"]
    after["sampled"] = sum(m["filter/questions_sampled"] for m in metrics) * samples / 1000
    before = json.loads((directory / "evaluation-before.json").read_text())
    return {"before": before, "after": after, "metrics": metrics}


def cell(values: list[float | None], scale: float) -> str:
    """Mean and sample standard deviation over seeds."""
    numbers = [v * scale for v in values if v is not None and math.isfinite(v)]
    if not numbers:
        return "–"
    digits = 1 if scale == 100 else 2
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.{digits}f}{spread}"


def table(out: Path, world: str, methods: list[str], seeds: list[int]) -> str:
    """The Markdown table of a world."""
    lines = [
        "| " + " | ".join(["method", *(label for _, label, _ in COLUMNS)]) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    start: list[dict[str, Any]] = []
    rows = []
    for method in methods:
        runs = [
            read(d)
            for seed in seeds
            if (d := run_directory(out, world, method, seed)).joinpath("evaluation-after.json").is_file()
        ]
        if not runs:
            continue
        start = start or [r["before"] for r in runs]
        cells = [cell([r["after"].get(name) for r in runs], scale) for name, _, scale in COLUMNS]
        rows.append(f"| {method} | " + " | ".join(cells) + " |")
    cells = [cell([r.get(name) for r in start], scale) for name, _, scale in COLUMNS]
    lines.append("| *warm start* | " + " | ".join(cells) + " |")
    return "\n".join(lines + rows)


def curves(out: Path, worlds: list[str], methods: list[str], seeds: list[int], path: Path) -> None:
    """Learning curves: mean over seeds, band from the lowest to the highest seed, smoothed over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (("reward/accuracy", "training accuracy"), ("tool/calls_per_question", "calls a question"))
    figure, axes = plt.subplots(len(panels), len(worlds), figsize=(5 * len(worlds), 6), squeeze=False, sharex=True)
    # Okabe and Ito's palette, told apart by colour-blind readers; line styles carry the same information.
    colours = ("#000000", "#56B4E9", "#D55E00", "#009E73", "#CC79A7")
    styles = ("-", "--", "-", "-.", ":")
    for column, world in enumerate(worlds):
        for method, colour, style in zip(METHODS, colours, styles, strict=True):
            if method not in methods:
                continue
            runs = [run_directory(out, world, method, s) for s in seeds]
            series = [read(d)["metrics"] for d in runs if (d / "evaluation-after.json").is_file()]
            if not series:
                continue
            for row, (name, label) in enumerate(panels):
                n = min(len(s) for s in series)
                smooth = []
                for s in series:
                    values = [m.get(name) if m.get(name) is not None else math.nan for m in s[:n]]
                    smooth.append([statistics.mean(values[max(0, i - 4) : i + 1]) for i in range(n)])
                steps = range(1, n + 1)
                axis = axes[row][column]
                axis.plot(
                    steps, [statistics.mean(v) for v in zip(*smooth, strict=True)], style, color=colour, label=method
                )
                low, high = ([f(v) for v in zip(*smooth, strict=True)] for f in (min, max))
                axis.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
                axis.set_ylabel(label if column == 0 else "")
                axis.set_title(world if row == 0 else "")
                axis.grid(alpha=0.3)
        axes[-1][column].set_xlabel("step")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "first-results")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "first-results.svg")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        # Seeds outermost: whatever is interrupted has whole comparisons.
        jobs = [
            pool.submit(train, args.out, world, method, seed, args.steps)
            for seed in args.seeds
            for world in args.worlds
            for method in args.methods
        ]
        for job in jobs:
            job.result()
    for world in args.worlds:
        print(f"\n### {world}\n\n{table(args.out, world, args.methods, args.seeds)}")
    curves(args.out, args.worlds, args.methods, args.seeds, args.figure)


if __name__ == "__main__":
    main()
