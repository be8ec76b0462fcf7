"""`agentropy eval`: how good an agent is, on benchmarks by name, a world, or a file of questions."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from agentropy.errors import UserError

# Name, type, help; options whose name is a key of the configuration.
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("model", str, "directory or hub id of a causal LM, smollm2, or the server's name for its model (default: the "
     "world's embedded agent)"),
    ("server", str, "URL of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, transformers serve, …)"),
    ("api", str, "auto (default), completions (token ids) or chat"),
    ("api-key-env", str, "environment variable with the server's key"),
    ("concurrency", int, "requests at once to a server (default 32)"),
    ("request-timeout", float, "seconds a request to a server may take"),
    ("tries", int, "attempts at a request, with growing pauses, before its trajectory counts as lost"),
    ("tokenizer", str, "for completions: directory or hub id (default: the model's name)"),
    ("tasks", str, "a file, hf:NAME:SPLIT or reasoning-gym:TASK instead of a benchmark"),
    ("world", str, "a generated world instead of a benchmark: arithmetic or facts"),
    ("split", str, "of --tasks or --world: test, validation or all"),
    ("limit", int, "the first so many questions of each benchmark"),
    ("samples", int, "attempts a question: K of Avg@K (default 1)"),
    ("seed", int, "default 0"),
    ("tools", str, "comma-separated, as for train; none for none (default: each benchmark's own)"),
    ("sandbox", str, "strict (default), namespaces, unsafe, or a server's URL"),
    ("protocol", str, "hermes, fence or tags; native for a server's own tool calling"),
    ("system", str, "system prompt (default: each benchmark's own)"),
    ("temperature", float, "default 1; 0 is greedy"),
    ("top-p", float, "default 1"),
    ("top-k", int, "default 0: all"),
    ("max-turns", int, "turns a trajectory (default 5)"),
    ("max-new-tokens", int, "sampled tokens a trajectory, over all turns (default 1024)"),
    ("max-result-tokens", int, "longer tool results are cut in the middle (default 512)"),
    ("max-context", int, "tokens a trajectory (default: what the model allows, at most 4096 in the local engine)"),
    ("tool-timeout", float, "seconds a tool call may take (default 5)"),
    ("max-slots", int, "sequences that the local engine decodes at once (default 64; 32 on a CPU)"),
    ("device", str, "auto (default), cpu, cuda, cuda:1 or mps"),
    ("dtype", str, "float32 (default) or bfloat16"),
    ("threads", int, "CPU threads of torch"),
)  # fmt: skip


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "eval",
        help="evaluate an agent on benchmarks, a world or a file of questions",
        description="Ask an agent questions and print a table of how it did. Finished trajectories are on the disk at "
        "once; an evaluation that was interrupted goes on with --resume.",
        epilog="Benchmarks: aime24, aime25, math500, amc23, olympiadbench, minerva, gsm8k, hotpotqa, 2wiki, musique, "
        "bamboogle, gaia, webwalker, livecodebench. docs/evaluation.md explains the numbers.",
    )
    parser.add_argument("--benchmark", metavar="NAMES", help="benchmarks by name, comma-separated")
    parser.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        help="file with the questions, in the publisher's schema or ours; BENCHMARK=FILE with several benchmarks",
    )
    parser.add_argument("--world-option", metavar="KEY=VALUE", action="append", help="a setting of the world")
    parser.add_argument("--protocol-option", metavar="KEY=VALUE", action="append", help="a setting of the protocol")
    parser.add_argument(
        "--lenient", action="store_true", help="take what follows 'the answer is' where an answer has no box"
    )
    parser.add_argument("--out", metavar="DIR", help="evaluation directory (default runs/eval-…)")
    parser.add_argument("--resume", metavar="DIR", help="go on with an evaluation")
    for name, kind, text in OPTIONS:
        parser.add_argument(f"--{name}", type=kind, metavar=name.upper().replace("-", "_"), help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a table. Returns 1 where nothing could be scored."""
    # Idle OpenMP threads that spin starve everything else on a small machine; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    values = given(args)
    if args.resume is not None:
        if args.out is not None:
            raise UserError("--resume goes on in its own directory; leave out --out")
        from agentropy.evaluation.run import resume

        return resume(args.resume, values, _page)
    from agentropy.evaluation.config import make_config
    from agentropy.evaluation.run import start

    return start(make_config(values), args.out, _page)


def _page(directory: Path) -> None:
    """Write report.html. What goes wrong with it is said, and ends nothing."""
    from agentropy.analysis.report import write_report

    try:
        write_report(directory / "report.html", directory)
    except (UserError, OSError) as error:
        print(f"No report.html: {error}", file=sys.stderr)
    else:
        print(f"Report: {directory / 'report.html'}")


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the configuration that the command line sets."""
    from agentropy.config import split_list

    values: dict[str, Any] = {}
    for name, _, _ in OPTIONS:
        key = name.replace("-", "_")
        value = getattr(args, key)
        if value is not None:
            values[key] = value
    if args.lenient:
        values["lenient"] = True
    if "tools" in values:
        names = split_list(values["tools"])
        values["tools"] = [] if names in ([], ["none"]) else names
    if args.benchmark is not None:
        values["benchmarks"] = split_list(args.benchmark)
        if not values["benchmarks"]:
            raise UserError("--benchmark names none")
    if args.data is not None:
        values["data"] = _data(args.data)
    for option in ("world_option", "protocol_option"):
        if getattr(args, option) is not None:
            values[f"{option}s"] = dict(_pair(option, text) for text in getattr(args, option))
    return values


def _data(items: list[str]) -> dict[str, str]:
    """Files by benchmark; one without a name stands under the empty name."""
    from agentropy.evaluation.benchmarks.table import BENCHMARKS

    out: dict[str, str] = {}
    for item in items:
        name, equals, file = item.partition("=")
        if not equals or name.partition(":")[0] not in BENCHMARKS:
            name, file = "", item
        if name in out:
            raise UserError(f"--data gives {name or 'a file'} twice")
        out[name] = file
    return out


def _pair(option: str, text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--{option.replace('_', '-')} {text!r}: write KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value
