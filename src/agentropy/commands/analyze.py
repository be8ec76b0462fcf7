"""`agentropy analyze`: which tool calls helped, over trajectories of any source."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentropy.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

FORMATS = ("agentropy", "chat", "trl", "verl")
EXAMPLES = 5


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `analyze` to the command line."""
    parser = subparsers.add_parser(
        "analyze",
        help="which tool calls helped: run directories, chat logs, rollout dumps",
        description="Read trajectories of any source and say which calls lowered the entropy of the agent's reasoning, "
        "which were repeated, whose result was never used, and what methods would make of them. docs/analysis.md "
        "explains the numbers and what is read of each source.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="run or evaluation directories, files of trajectories, chat logs, dumps of TRL and verl",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write analysis.json, calls.parquet and report.html here"
    )
    parser.add_argument("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)} (default: found out for each file)")
    parser.add_argument("--score", metavar="NAME", help="key or column with the outcome, where a source has several")
    parser.add_argument(
        "--method", action="append", metavar="METHOD", help="may be repeated; default: TAO-RL, TEPO, SimpleTIR"
    )
    parser.add_argument("--model", metavar="DIR", help="folder with the tokenizer (default: that of the run)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes for long files (default: all cores)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers {args.workers} is below 0")
    from agentropy.analysis.analyse import analyse
    from agentropy.analysis.imports import Options, sources
    from agentropy.analysis.methods import DEFAULT, build

    methods = list(dict.fromkeys(args.method or DEFAULT))
    for name in methods:
        build(name)  # says at once what is wrong with a name
    found = sources(args.files, args.format)
    out: Path | None = args.out
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the directory {out}: {error.strerror}") from None
    analysis = analyse(
        found,
        Options(args.score),
        methods,
        table=None if out is None else out / "calls.parquet",
        model=args.model,
        workers=args.workers,
    )
    if out is not None:
        from agentropy.trajectory import write_lines

        write_lines(out / "analysis.json", [json.dumps(analysis.report, ensure_ascii=False, allow_nan=False, indent=1)])
    from rich.console import Console

    show(analysis.report, Console(file=sys.stdout, highlight=False, soft_wrap=False))
    if out is not None:
        from agentropy.analysis.pages import write_page

        write_page(out / "report.html", args.files, found, analysis, args.model)
        print(f"\nWritten to {out}: analysis.json, calls.parquet, report.html")
    return 0


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the summary."""
    _overview(report, console)
    for title, key, first in (
        ("Part", "by_part", "part"),
        ("Tool", "by_tool", "tool"),
        ("Status", "by_status", "status"),
        ("Answer", "by_correctness", "answer"),
        ("Call number", "by_position", "position"),
    ):
        rows = report[key]
        if report["calls"] and (key != "by_part" or len(rows) > 1):
            _cells(title, rows, first, console)
    several = len(report["sources"]) > 1
    for title, examples in (
        ("Most useful calls", report["most_useful"]),
        ("Least useful calls", report["least_useful"]),
        ("Repeated calls, the first: same tool, same arguments", report["repeated"]["examples"]),
        ("Results that were never used, the first", report["unused"]["examples"]),
    ):
        _examples(title, examples, console, several)
    _methods(report, console)
    for note in report["notes"]:
        console.print(f"Note: {note}", markup=False)


def _overview(report: Mapping[str, Any], console: Console) -> None:
    from rich.table import Table

    e = report["effective"]
    interval = "" if e["low"] is None else f"  ({e['level']:.0%} interval {e['low']:.1%} to {e['high']:.1%})"
    estimates = "  (estimates)" if report["entropies"]["estimated"] else ""
    judged = report["unused"]["judged"]
    status = ", ".join(f"{n} {name}" for name, n in report["statuses"].items())
    rows = [
        ("Trajectories", f"{report['trajectories']} in {_plural(report['groups'], 'group')}"),
        ("Score", f"{_number(report['accuracy'])} on average, {report['graded']} graded"),
        (
            "Calls",
            f"{report['calls']}, {_number(report['calls_per_trajectory'], 2)} a trajectory"
            + (f": {status}" if status else ""),
        ),
        ("Effective calls", f"{_share(e['ratio'])}{interval}{estimates}"),
        (
            "dH",
            f"{_signed(report['all']['mean'])} on average, median {_signed(report['all']['median'])} nats{estimates}",
        ),
        ("Repeated calls", f"{report['repeated']['calls']}  ({_share(report['repeated']['share'])})"),
        (
            "Results never used",
            f"{report['unused']['calls']} of {judged} that could be told  ({_share(report['unused']['share'])})",
        ),
    ]
    table = Table.grid(padding=(0, 3))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _cells(title: str, rows: Sequence[Mapping[str, Any]], first: str, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", title_justify="left", padding=(0, 2, 0, 0))
    table.add_column(title, min_width=12)
    for name in ("calls", "ok", "dH known", "mean dH", "median", "effective"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            Text(_plain(str(row[first]), 40) or "(no name)"),
            str(row["calls"]),
            _share(row["ok"]),
            str(row["defined"]),
            _signed(row["mean"]),
            _signed(row["median"]),
            _share(row["effective"]),
        )
    console.print()
    console.print(table)


def _examples(title: str, rows: Sequence[Mapping[str, Any]], console: Console, several: bool) -> None:
    from rich.text import Text

    if not rows:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for row in rows[:EXAMPLES]:
        source = f"{_plain(row['source'], 30)}: " if several else ""
        call = f", call {row['call']} of {row['calls']}"
        where = source + _plain(row["trajectory_id"], max(12, console.width - 20 - len(source + call))) + call
        console.print(Text(f"  {_signed(row['entropy_change']):>7}  {row['status']:7}  {where}"))
        call = f"{row['tool']} {row['arguments']} → {row['result']}"
        console.print(Text(f"{'':11}{_plain(call, 2 * console.width)}"), no_wrap=True, overflow="ellipsis")


def _methods(report: Mapping[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("Method", min_width=12)
    for name in ("keeps", "groups left", "no signal", "reward", "bonus"):
        table.add_column(name, justify="right")
    drops = []
    for name, m in report["methods"].items():
        if "why_not" in m:
            table.add_row(name, *["-"] * 5)
            drops.append(f"{name} cannot be applied: {m['why_not']}")
            continue
        if m["dropped"]:
            drops.append(f"{name} drops {', '.join(f'{n} {reason}' for reason, n in m['dropped'].items())}")
        kept = f"{m['kept']} ({_share(m['kept'] / m['trajectories'])})"
        questions = f"{m['groups_kept']} of {m['groups']}"
        bonus = "none" if m["bonus_share"] is None else f"{m['bonus_share']:.2%}"
        table.add_row(name, kept, questions, _share(m["no_signal_share"]), _number(m["reward_mean"]), bonus)
    console.print()
    console.print(table)
    for line in drops:
        console.print(line, markup=False)


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _plain(text: str, most: int) -> str:
    """One line without control characters, cut; what a tool printed must not drive the terminal."""
    line = "".join(c if c.isprintable() else " " if c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
    return line if len(line) <= most else line[: most - 1] + "…"
