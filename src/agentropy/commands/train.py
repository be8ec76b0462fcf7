"""`agentropy train`: from a configuration to a run directory."""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import Any

from agentropy.errors import UserError

SHORT = {
    "method": "grpo, simpletir, tao-rl (default), tepo-sparse, tepo-dense, arpo, aepo",
    "world": "arithmetic (default) or facts",
    "tasks": "train on questions from a file, hf:NAME or reasoning-gym:TASK instead of a world",
    "model": "directory or hub id of a causal LM (default: the world's embedded agent)",
    "tools": "built-in tools, comma-separated: python, search (corpus.jsonl beside the questions) or search:FILE",
    "steps": "training steps (default 60)",
    "seed": "default 0",
    "out": "run directory (default runs/…)",
    "log": "trackers, comma-separated: tensorboard, wandb, trackio, mlflow",
}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "train",
        help="train an agent by reinforcement learning",
        description="Train an agent. With no option: TAO-RL on the arithmetic world with its embedded agent.",
        epilog="Every key of the configuration is an option by its dotted name, such as --rollout.samples 16 or "
        "--method_options.alpha 0.05; --list-options prints them all.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML configuration; options on the command line go on top")
    parser.add_argument("--resume", metavar="DIR", help="go on with a run (its --steps may change)")
    parser.add_argument("--list-options", action="store_true", help="print every key of the configuration and leave")
    for name, text in SHORT.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), help=text)
    parser.set_defaults(run=run, takes_extra=True)


def run(args: argparse.Namespace) -> int:
    """Train and print a table of before and after."""
    # Idle OpenMP threads that spin starve everything else on a small machine; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from agentropy.config import RunConfig, dotted_keys, parse_overrides

    if args.list_options:
        for key, text in dotted_keys().items():
            default = functools.reduce(getattr, key.split("."), RunConfig())
            print(f"--{key}  {text}".rstrip() + ("" if default is None else f"  (default: {_written(default)})"))
        return 0
    short = [f"--{name}={getattr(args, name)}" for name in SHORT if getattr(args, name) is not None]
    from agentropy.training.distributed import ALONE, Ranks, launched, run_joined
    from agentropy.training.session import resume, start

    def work(ranks: Ranks) -> int:
        overrides = parse_overrides([*short, *args.extra])
        if args.resume and args.config:
            raise UserError("--resume goes on with the run's own config.yaml; leave out --config")
        return resume(args.resume, overrides, ranks) if args.resume else start(args.config, overrides, ranks)

    return run_joined(work) if launched() else work(ALONE)


def _written(default: Any) -> str:
    """A value as one types it: true and not True."""
    return default if isinstance(default, str) else json.dumps(default)
