"""`agentropy launch verl`: a method inside verl, on as many GPUs and nodes as verl has."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentropy.errors import UserError


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("launch", help="train inside another engine: verl, for many GPUs")
    engines = parser.add_subparsers(dest="engine", metavar="ENGINE", required=True)
    v = engines.add_parser(
        "verl",
        help="train with verl 0.9 on a Ray cluster (pip install 'agentropy[verl]')",
        description="Write the questions as verl reads them and its configuration, and start its trainer with a method "
        "of agentropy (docs/verl.md).",
        epilog="Further arguments are Hydra overrides for verl, and win: trainer.logger=[console,wandb] "
        "+agentropy.method_options.alpha=0.05 +ray_kwargs.ray_init.address=auto",
        allow_abbrev=False,
    )
    v.add_argument(
        "--method", default="tao-rl", help="grpo, simpletir, tao-rl (default), tepo-sparse, tepo-dense, arpo, aepo"
    )
    v.add_argument("--model", required=True, help="directory or hub id of a causal LM")
    v.add_argument("--tasks", required=True, help="questions: a file, hf:NAME:SPLIT or reasoning-gym:TASK")
    v.add_argument("--tools", default="python", help="built-in tools, comma-separated (default: python)")
    v.add_argument("--protocol", default="hermes", help="hermes (default), fence or tags")
    v.add_argument("--system", help="system prompt")
    v.add_argument("--sandbox", default="strict", help="strict (default), namespaces, unsafe or a server's URL")
    v.add_argument("--turns", type=int, default=5, help="turns of the policy a trajectory (default: 5)")
    v.add_argument("--questions", type=int, default=128, help="questions a step (default: 128)")
    v.add_argument("--samples", type=int, default=8, help="trajectories a question (default: 8)")
    v.add_argument("--minibatch", type=int, help="questions an update (default: all of a step)")
    v.add_argument("--prompt-tokens", type=int, default=2048, help="longest prompt, tools included (default: 2048)")
    v.add_argument(
        "--response-tokens", type=int, default=8192, help="longest response, results included (default: 8192)"
    )
    v.add_argument("--lr", type=float, default=1e-6, help="learning rate (default: 1e-6)")
    v.add_argument("--gpus", type=int, default=8, help="GPUs a node (default: 8)")
    v.add_argument("--nodes", type=int, default=1, help="nodes (default: 1)")
    v.add_argument("--steps", type=int, help="training steps (default: 30 passes over the questions, verl's default)")
    v.add_argument("--seed", type=int, default=0, help="default 0")
    v.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/verl-…)")
    v.add_argument("--dry-run", action="store_true", help="write the files and show the command, but do not start it")
    v.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides for verl's configuration")
    v.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files, check the configuration where verl is installed, start verl. Returns verl's exit code."""
    from agentropy.config import split_list
    from agentropy.integrations.verl.launch import Launch, check, overrides, write_data
    from agentropy.integrations.verl.options import read_options, tool_of
    from agentropy.methods import make_method
    from agentropy.tasks.files import load_tasks
    from agentropy.trajectory import write_lines

    installed = importlib.util.find_spec("verl") is not None
    if not installed and not args.dry_run:
        raise UserError("verl is not installed here: pip install 'agentropy[verl]', or look at it with --dry-run")
    _check_numbers(args)
    if args.model.startswith(("/", ".", "~")) and not Path(args.model).expanduser().is_dir():
        raise UserError(f"--model {args.model}: there is no such folder")
    stray = [o for o in args.overrides if "=" not in o and not o.startswith("~")]
    if stray:
        raise UserError(f"{stray[0]!r} is no override for verl: write KEY=VALUE")
    group = {
        "method": args.method,
        "tools": split_list(args.tools),
        "protocol": args.protocol,
        "sandbox": args.sandbox,
        "max_turns": args.turns,
        "seed": args.seed,
    }
    if args.system is not None:
        group["system"] = args.system
    folder = Path(args.out or f"runs/verl-{args.method}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    launch = Launch(
        model=args.model,
        options=read_options({"agentropy": group}),
        folder=folder,
        questions=args.questions,
        samples=args.samples,
        minibatch=args.minibatch or args.questions,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        gpus=args.gpus,
        nodes=args.nodes,
        steps=args.steps,
        lr=args.lr,
    )
    make_method(launch.options.method)
    for name in launch.options.tools:  # what the workers would find out when the GPUs are taken
        tool_of(name, launch.options.tool_timeout)
    given = [*overrides(launch), *args.overrides]
    source = load_tasks(args.tasks, seed=args.seed)
    if installed:
        check(given)
    folder.mkdir(parents=True, exist_ok=True)
    train, held = write_data(source, folder)
    if train < args.questions:
        raise UserError(f"{source.name} has {train} training questions, fewer than the {args.questions} of a step")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given]
    text = " \\\n  ".join([shlex.join(command[:3]), *map(shlex.quote, given)])
    write_lines(folder / "launch.sh", ["#!/bin/sh", "exec " + text])
    print(text)
    print(
        f"{train} questions to train on, {held} to validate on; {folder / 'launch.sh'} holds this command",
        file=sys.stderr,
    )
    if args.dry_run:
        return 0
    return 1 if subprocess.run(command, check=False).returncode else 0


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("questions", "samples", "gpus", "nodes", "turns", "prompt_tokens", "response_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.minibatch is not None and (args.minibatch < 1 or args.questions % args.minibatch):
        raise UserError(f"--minibatch {args.minibatch} does not divide the {args.questions} questions of a step")
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps must be at least 1, not {args.steps}")
    if not args.lr > 0:
        raise UserError(f"--lr must be above 0, not {args.lr}")
