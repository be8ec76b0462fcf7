"""`agentropy report`: the HTML report of a run, an evaluation, or files of trajectories."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentropy.errors import UserError

# One of these is in every directory of a run or an evaluation.
HOLDS = ("metrics.jsonl", "trajectories", "trajectories.jsonl", "config.yaml")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `report` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="one HTML file with curves, distributions and the trajectories, token by token",
        description="Write a self-contained HTML file about a run directory, an evaluation directory or files of "
        "trajectories. Training writes one by itself. docs/report.md says how to read it.",
    )
    parser.add_argument(
        "source", nargs="+", type=Path, metavar="RUN|FILE", help="a directory, or files of trajectories"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: report.html in the directory, or in the current one for files",
    )
    parser.add_argument(
        "--method", metavar="METHOD", help="whose advantages and filters are shown (default: the run's, or tao-rl)"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of --method; may be repeated"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with the tokenizer (default: the run's own)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    sources: list[Path] = args.source
    if len(sources) > 1 and any(p.is_dir() for p in sources):
        raise UserError("a report is of one directory, or of files; `agentropy study` compares runs")
    for path in sources:
        if not path.exists():
            raise UserError(f"cannot read {path}: there is no such file or directory")
        if path.is_dir() and not any((path / name).exists() for name in HOLDS):
            raise UserError(
                f"{path} is no run or evaluation directory: it has none of {', '.join(HOLDS)}; a study has its own page"
            )
    from agentropy.analysis.report import write_report

    method = chosen_method(args.method, args.option)
    out = args.out or (sources[0] if sources[0].is_dir() else Path()) / "report.html"
    data = write_report(out, sources[0] if len(sources) == 1 else sources, method=method, model=args.model)
    if sources[0].is_dir() and not (data["trajectories"] or data["curves"]["steps"] or data["outcome"]):
        print(f"{sources[0]} holds no trajectories and no metrics yet; the report says so.")
    print(f"{out}: {len(data['trajectories']):,} trajectories, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def chosen_method(name: str | None, options: list[str]) -> Any:
    """The method that was asked for, or None. Raises UserError for options without a method or of a wrong form."""
    from agentropy.methods import make_method

    pairs = dict(text.partition("=")[::2] for text in options)
    if "" in pairs or any("=" not in text for text in options):
        raise UserError(f"--option {options!r} is not of the form KEY=VALUE")
    if name is None:
        if options:
            raise UserError("--option needs --method")
        return None
    return make_method(name, **pairs)
