"""The table and the figure of "A finding" in docs/analysis.md: an agent before and after TEPO-sparse and GRPO.

.venv/bin/python studies/finding.py         # trains both agents (five minutes of CPU), then counts and draws
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentropy.analysis import call_effects, decoder, read

ROOT = Path(__file__).parents[1]
METHODS = ("tepo-sparse", "grpo")


def train(out: Path, method: str, seed: int) -> Path:
    """A run with the defaults in the `facts` world, unless it is there; one that was stopped goes on."""
    directory = out / f"{method}-{seed}"
    if not (directory / "evaluation-after.json").is_file():
        new = ["--method", method, "--world", "facts", "--seed", str(seed), "--out", str(directory)]
        old = ["--resume", str(directory)]
        arguments = old if (directory / "config.yaml").is_file() else new
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run([sys.executable, "-m", "agentropy.cli", "train", *arguments], env=environment, check=True)
    return directory


def calls_of(directory: Path, when: str) -> Any:
    """The calls of the test questions, and how many answers each need had: (frame, {need: trajectories})."""
    path = directory / "trajectories" / f"test-{when}.jsonl"
    needs: dict[int, list[float]] = {}
    for t in read(path):
        needs.setdefault(t.extra["need"], []).append(t.score or 0.0)
    return call_effects(read(path), decoder(directory)), needs


def table(label: str, frame: Any, needs: dict[int, list[float]]) -> list[str]:
    """Lines of the Markdown table: questions that need no search, and the others."""
    lines = []
    for name, wanted in (("none needed", [0]), ("needed", [n for n in needs if n])):
        some = frame[frame.need.isin(wanted)]
        scores = [s for n in wanted for s in needs[n]]
        never = some.result_used.dropna()
        lines.append(
            f"| {label}, {name} | {sum(scores) / len(scores):.2f} | {len(some) / len(scores):.2f} "
            f"| {some.entropy_before.mean():.2f} | {some.entropy_after.mean():.2f} | {some.entropy_change.mean():+.2f} "
            f"| {some.reducing.mean():.0%} | {some.repeated.mean():.0%} | {1 - never.mean():.0%} |"
            if len(some) >= 10
            else f"| {label}, {name} | {sum(scores) / len(scores):.2f} | {len(some) / len(scores):.2f} |" + " – |" * 6
        )
    return lines


def draw(frames: dict[str, Any], path: Path) -> None:
    """Distributions of dH, calls a question on the vertical axis, by whether a search was needed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    matplotlib.rcParams["svg.hashsalt"] = "agentropy"
    figure, axes = plt.subplots(1, len(frames), figsize=(4 * len(frames), 3), sharex=True, sharey=True)
    bins = np.linspace(-1.0, 1.0, 41)
    for axis, (label, (frame, needs)) in zip(axes, frames.items(), strict=True):
        count = sum(map(len, needs.values()))
        parts = [frame[frame.need > 0].entropy_change.dropna(), frame[frame.need == 0].entropy_change.dropna()]
        axis.hist(
            [p.clip(-1, 1) for p in parts],
            bins,
            weights=[np.full(len(p), 1 / count) for p in parts],
            stacked=True,
            color=["#56B4E9", "#D55E00"],
            label=["a search is needed", "none is needed"],
            hatch=["", "//"],
            edgecolor="white",
            linewidth=0.3,
        )
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("dH of a call, nats")
    axes[0].set_ylabel("calls a question")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "finding")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "finding.svg")
    args = parser.parse_args()
    runs = {method: train(args.out, method, args.seed) for method in METHODS}
    frames = {"before training": calls_of(runs["tepo-sparse"], "before")}
    frames |= {f"after {method}": calls_of(directory, "after") for method, directory in runs.items()}
    print("| | right | calls | H before | H after | dH | effective | repeated | result never used |")
    print("|---|" + "---|" * 8)
    for label, (frame, needs) in frames.items():
        print("\n".join(table(label, frame, needs)))
    draw(frames, args.figure)


if __name__ == "__main__":
    main()
