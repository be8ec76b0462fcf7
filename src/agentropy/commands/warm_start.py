"""`agentropy warm-start`: make the small agent of a world by supervised learning on a flawed expert's traces."""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("warm-start", help="make the warm-started agent of a world (about 3 minutes of CPU)")
    parser.add_argument(
        "--world", default="arithmetic", help="arithmetic (default), facts, arithmetic-hard or facts-hard"
    )
    parser.add_argument("--size", default="default", help="of the agent: small, default or large, factors of 4 apart")
    parser.add_argument("--out", metavar="DIR", help="where to save it (default: the cache, by the recipe's hash)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="batches to learn from (default: the recipe's)")
    parser.add_argument("--traces", type=int, default=0, help="expert traces to write (default: the recipe's)")
    parser.add_argument("--questions", type=int, default=128, help="test questions of the evaluation after it; 0: none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make it, say where it is and what it can do."""
    import dataclasses
    import os
    from pathlib import Path

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from agentropy.errors import UserError
    from agentropy.training.warm_start import evaluate, load_or_make, recipe_of, train_warm_start

    recipe = recipe_of(args.world, args.size)
    for name in ("steps", "traces", "questions"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} must not be negative")
    torch.set_num_threads(1)
    recipe = dataclasses.replace(recipe, seed=args.seed)
    if args.steps:
        recipe = dataclasses.replace(recipe, steps=args.steps)
    if args.traces:
        recipe = dataclasses.replace(recipe, traces=args.traces)
    if args.out is None:
        out = load_or_make(recipe)
    else:
        out = Path(args.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an empty folder")
        try:  # not after minutes of work
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {out} ({error.strerror}); choose another --out") from None
        if not os.access(out, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to the folder {out}; choose another --out")
        train_warm_start(recipe, out)
    print(f"saved in {out}")
    if args.questions:
        numbers = evaluate(args.world, out, args.questions)
        print("on test questions: " + ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()))
    return 0
