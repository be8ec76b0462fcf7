"""`agentropy compare`: does one evaluation differ from another?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentropy.evaluation.compare import Comparison
    from agentropy.evaluation.metrics import Difference

LABELS = {"score": ("score", "{:.3f}"), "calls": ("calls a question", "{:.2f}"), "tokens": ("tokens", "{:,.1f}")}
MAX_TEXT = 60


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "compare",
        help="tell whether evaluation B differs from A, paired over their questions",
        description="Differences B - A with 95 % bootstrap intervals, paired over the questions that both answered.",
    )
    sources = "an evaluation directory, a training run or its evaluation-….json, or a file of trajectories"
    parser.add_argument("a", metavar="A", help=sources)
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument(
        "--questions",
        metavar="N",
        type=int,
        nargs="?",
        const=20,
        help="also list the N questions where they differ most (default 20)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Exit code 2 where nothing can be compared."""
    from agentropy.errors import UserError
    from agentropy.evaluation.compare import compare_files

    if args.questions is not None and args.questions < 1:
        raise UserError(f"--questions must be at least 1, not {args.questions}")
    found = compare_files(args.a, args.b)
    if args.json:
        rows = [c.to_json(args.questions is not None) for c in found]
        for row in rows:
            if "questions" in row:
                row["questions"] = row["questions"][: args.questions]
        print(json.dumps({"a": args.a, "b": args.b, "benchmarks": rows}, indent=1, ensure_ascii=False))
        return 0
    for comparison in found:
        _print(comparison, args.questions or 0)
    return 0


def _print(c: Comparison, questions: int) -> None:
    from rich.table import Table

    from agentropy.evaluation.compare import excludes_zero, most_different
    from agentropy.evaluation.tables import console

    table = Table(title=_plain(f"{c.benchmark}, {len(c.questions)} questions: {c.verdict}"))
    for column in ("", "A", "B", "B - A", "95 % interval", "p", "beyond chance"):
        table.add_column(column, justify="left" if not column else "right")
    for name, difference in c.differences.items():
        label, form = LABELS[name]
        table.add_row(
            label,
            form.format(c.mean_a[name]),
            form.format(c.mean_b[name]),
            _signed(difference.mean, form),
            f"{_signed(difference.low, form)} to {_signed(difference.high, form)}",
            _p(difference),
            "yes" if excludes_zero(difference) else "no",
        )
    out = console()
    out.print(table)
    notes = [
        (c.only_a, "asked of A only, or without a graded answer of B"),
        (c.only_b, "asked of B only, or without a graded answer of A"),
        (c.text_differs, "with the same id but another text"),
    ]
    for count, what in notes:
        if count:
            out.print(f"  not compared: {count} questions {what}", highlight=False)
    different = [q for q in most_different(c) if q.a != q.b][:questions]
    if questions:
        if not different:
            out.print("  no question has another score")
            return
        listing = Table(title="where they differ most")
        for column in ("A", "B"):
            listing.add_column(column, justify="right")
        listing.add_column("id", no_wrap=True)
        listing.add_column("question")
        for q in different:
            text = " ".join(q.text.split())
            text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
            listing.add_row(_rate(q.a, q.samples_a), _rate(q.b, q.samples_b), _plain(q.id), _plain(text))
        out.print(listing)


def _plain(text: str) -> str:
    """No markup, and nothing that drives the terminal."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else " " for c in text))


def _signed(value: float, form: str) -> str:
    return ("+" if value >= 0 else "") + form.format(value)


def _rate(score: float, samples: int) -> str:
    return f"{score:.2f} of {samples}"


def _p(difference: Difference) -> str:
    return "<0.001" if difference.p_value < 0.001 else f"{difference.p_value:.3f}"
