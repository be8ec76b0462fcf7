"""`agentropy grade`: the verdict on one answer, or on every row of a JSONL file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from agentropy.errors import UserError

if TYPE_CHECKING:
    from agentropy.evaluation.grading import Grader, Verdict

KINDS = ("math", "qa", "choice", "code")
METRICS = ("em", "f1", "em_squad", "f1_squad", "gaia")
# Rows graded at once; their verdicts are written in the order of the file.
AHEAD = 64
# A row's time limit is for the whole verdict: the program or the worker gets this part of it.
LIMIT_SHARE = 0.8


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `grade` to the command line."""
    p = subparsers.add_parser(
        "grade",
        help="grade answers: maths, QA, multiple choice, programs",
        description="Grade one answer (--gold, --prediction) or the rows of a JSONL file: a verdict a line, as JSON.",
    )
    p.add_argument("--kind", choices=KINDS, default=None, help="what is graded (default: math; rows name their own)")
    p.add_argument("--gold", action="append", metavar="ANSWER", help="an accepted answer; repeat for several")
    p.add_argument("--prediction", metavar="TEXT", help="the model's answer, or its text with a marked answer")
    p.add_argument("--metric", choices=METRICS, default=None, help="for --kind qa (default: f1)")
    p.add_argument("--stdin", default=None, metavar="TEXT", help="for --kind code: the program's input")
    p.add_argument("--strict", action="store_true", help="read only boxes and answer tags, not 'the answer is …'")
    p.add_argument("--explain", action="store_true", help="say in words what was read and compared")
    p.add_argument(
        "--jsonl", metavar="FILE", help="rows of kind, gold, prediction (metric, stdin, time_limit_s); - is stdin"
    )
    p.add_argument("--workers", type=int, default=2, help="processes for maths (default: 2)")
    p.set_defaults(run=run)


@dataclass(frozen=True)
class Row:
    """One thing to grade."""

    kind: str
    golds: tuple[str, ...]
    prediction: str
    metric: str
    stdin: str
    timeout: float | None
    id: Any = None


def run(args: argparse.Namespace) -> int:
    """Grade; 0 whatever the verdicts are."""
    if args.workers < 1:
        raise UserError(f"--workers must be at least 1, not {args.workers}")
    if args.jsonl is not None:
        if args.gold is not None or args.prediction is not None:
            raise UserError("--jsonl takes its answers from the file; leave out --gold and --prediction")
        asyncio.run(_grade_file(args))
        return 0
    if not args.gold or args.prediction is None:
        raise UserError("give --gold and --prediction, or --jsonl FILE")
    row = Row(args.kind or "math", tuple(args.gold), args.prediction, args.metric or "f1", args.stdin or "", None)
    verdict = asyncio.run(_grade_one(args, row))
    print(_explained(row, verdict) if args.explain else json.dumps(_record(row, verdict), ensure_ascii=False))
    return 0


class _Graders:
    """The graders of one call, made when first needed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._made: dict[tuple[str, str], Grader] = {}

    async def grade(self, row: Row) -> Verdict:
        from agentropy.evaluation.grading import make_grader
        from agentropy.evaluation.grading.graders import CodeGrader

        key = (row.kind, row.metric if row.kind == "qa" else "")
        if key not in self._made:
            self._made[key] = make_grader(
                row.kind,
                metric=row.metric,
                mode="strict" if self._args.strict else "lenient",
                workers=self._args.workers,
            )
        grader = self._made[key]
        if isinstance(grader, CodeGrader):
            return await grader.grade(row.prediction, row.golds, timeout=row.timeout, stdin=row.stdin)
        return await grader.grade(row.prediction, row.golds, timeout=row.timeout)

    async def aclose(self) -> None:
        for grader in self._made.values():
            await grader.aclose()


async def _grade_one(args: argparse.Namespace, row: Row) -> Verdict:
    graders = _Graders(args)
    try:
        return await graders.grade(row)
    finally:
        await graders.aclose()


async def _grade_file(args: argparse.Namespace) -> None:
    """Write a verdict a line, in order, as soon as it is there; a broken line ends it after those before it."""
    graders = _Graders(args)
    rows = _rows(args)
    ahead: asyncio.Queue[tuple[Row, asyncio.Task[Verdict]] | None] = asyncio.Queue(AHEAD)
    writer = asyncio.create_task(_write(ahead, args.explain))
    try:
        try:
            # A pipe may let us wait for its next line; verdicts that are ready must not wait with us.
            while (
                row := await asyncio.to_thread(next, rows, None) if args.jsonl == "-" else next(rows, None)
            ) is not None:
                entry = (row, asyncio.create_task(graders.grade(row)))
                put = asyncio.create_task(ahead.put(entry))
                await asyncio.wait({put, writer}, return_when=asyncio.FIRST_COMPLETED)
                if writer.done():
                    put.cancel()
                    break
        finally:
            if not writer.done():
                await asyncio.wait({asyncio.create_task(ahead.put(None)), writer}, return_when=asyncio.FIRST_COMPLETED)
            await writer
    finally:
        await graders.aclose()


async def _write(ahead: asyncio.Queue[tuple[Row, asyncio.Task[Verdict]] | None], explain: bool) -> None:
    while (entry := await ahead.get()) is not None:
        row, task = entry
        verdict = await task
        record = _record(row, verdict)
        if explain:
            record["detail"] = verdict.detail
        print(json.dumps(record, ensure_ascii=False), flush=True)


def _record(row: Row, verdict: Verdict) -> dict[str, Any]:
    named = {"id": row.id} if row.id is not None else {}
    extracted = verdict.extracted if row.kind != "code" else None
    return named | {
        "correct": verdict.correct,
        "score": verdict.score,
        "reason": verdict.reason,
        "extracted": extracted,
    }


def _explained(row: Row, verdict: Verdict) -> str:
    said = {True: "correct", False: "wrong", None: "can't be scored"}[verdict.correct]
    score = "" if verdict.score is None else f", score {verdict.score:g}"
    if row.kind == "qa" and verdict.score is not None:
        said, score = f"{row.metric} {verdict.score:.4g}, {'exact match' if verdict.correct else 'no exact match'}", ""
    lines = [f"{said}{score} ({verdict.reason})"]
    if row.kind != "code":
        lines.append(f"  answer read: {verdict.extracted if verdict.extracted is not None else 'none'}")
        lines.append(f"  gold:        {'  or  '.join(row.golds)}")
    if verdict.detail:
        lines.append(f"  because:     {verdict.detail}")
    return "\n".join(lines)


# Reading rows


def _lines(name: str) -> Iterator[tuple[int, str]]:
    if name == "-":
        yield from enumerate(sys.stdin, 1)
        return
    try:
        file: TextIO
        with Path(name).open(encoding="utf-8-sig") as file:
            yield from enumerate(file, 1)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(f"can't read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8 text") from None


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    for number, line in _lines(args.jsonl):
        if not line.strip():
            continue
        where = f"{args.jsonl}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON ({error})") from None
        except RecursionError:
            raise UserError(f"{where}: not JSON that can be read (nested too deep)") from None
        yield _row(row, where, args)


def _row(row: Any, where: str, args: argparse.Namespace) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object with kind, gold and prediction")
    kind = row.get("kind", args.kind or "math")
    if kind not in KINDS:
        raise UserError(f"{where}: unknown kind {kind!r}; one of {', '.join(KINDS)}")
    metric = row.get("metric") or args.metric or "f1"
    if metric not in METRICS:
        raise UserError(f"{where}: unknown metric {metric!r}; one of {', '.join(METRICS)}")
    golds = row.get("gold")
    golds = [golds] if isinstance(golds, str | int | float) else golds
    if not isinstance(golds, list) or not golds or not all(_plain(gold) for gold in golds):
        raise UserError(f"{where}: 'gold' must be a text or a non-empty list of texts")
    prediction = row.get("prediction")
    if not _plain(prediction):
        raise UserError(f"{where}: 'prediction' must be a text")
    stdin = row.get("stdin") or ""
    if not isinstance(stdin, str):
        raise UserError(f"{where}: 'stdin' must be a text")
    limit = row.get("time_limit_s")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
        raise UserError(f"{where}: 'time_limit_s' must be a positive number of seconds")
    timeout = None if limit is None else limit * LIMIT_SHARE
    if timeout is not None and kind != "code":
        timeout = min(timeout, 5.0)
    return Row(kind, tuple(map(str, golds)), str(prediction), metric, stdin, timeout, row.get("id"))


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
