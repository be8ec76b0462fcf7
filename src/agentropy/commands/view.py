"""`agentropy view`: the report of a run as a live page on loopback."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from agentropy.commands.report import chosen_method
from agentropy.errors import UserError
from agentropy.terminal import print_line


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `view` to the command line."""
    parser = subparsers.add_parser(
        "view",
        help="watch a run in the browser while it goes on",
        description="Serve the report of a run, an evaluation or a file of trajectories on 127.0.0.1. The page "
        "updates by itself. A run that has not begun is waited for. Ctrl-C ends it.",
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN", help="a run or evaluation directory, or a file of trajectories"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--method", metavar="METHOD", help="whose advantages are shown (default: the run's, or tao-rl)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of --method; may be repeated"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with the tokenizer (default: the run's own)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} is no port")
    from agentropy.analysis.report.serve import LivePage, make_server, serve

    method = chosen_method(args.method, args.option)
    server = make_server(LivePage(args.source, method, args.model), args.port)
    if not args.source.exists():
        print_line(f"There is no {args.source} yet; the page waits for it.")

    def ready(address: str) -> None:
        print_line(f"{args.source} is at {address} (Ctrl-C ends it)")
        if not args.no_open:
            webbrowser.open(address)

    serve(server, ready)
    return 0
