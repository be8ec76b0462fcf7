"""`agentropy study`: one YAML file, many training runs, and a report that compares them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentropy.errors import UserError

if TYPE_CHECKING:
    from agentropy.study.plan import Run, Study
    from agentropy.study.results import Results


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "study",
        help="compare methods: many runs from one file, with tables, curves and a page",
        description="Make all runs that a study asks for, several at once, then write tables, figures and a page. "
        "Started again it goes on where it was.",
        epilog="docs/study.md explains the file; the least is 'variants: [grpo, tao-rl]'.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the study, in YAML")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the study's directory (default runs/<name>)")
    parser.add_argument("--jobs", metavar="N", type=int, help="runs at once (default: what cores and memory allow)")
    parser.add_argument(
        "--only", metavar="GLOB", help="make only some runs, such as tao-rl, 'facts/*' or 'facts/grpo/seed-0'"
    )
    parser.add_argument(
        "--rerun-changed", action="store_true", help="remove and make again runs of another configuration"
    )
    parser.add_argument("--report-only", action="store_true", help="write the report from the runs that are there")
    parser.add_argument("--dry-run", action="store_true", help="check the file, say what would be run, and leave")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 where a run failed, 130 where the user stopped it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from agentropy.study.figures import need_matplotlib
    from agentropy.study.plan import read_study, select

    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {args.jobs}")
    study = read_study(args.file)
    out = args.out or study.out
    runs = select(study.runs, args.only)
    if args.dry_run:
        return _describe(study, runs, out, args.jobs)
    need_matplotlib(study.spec.curves)
    if args.report_only:
        if not (out / "runs").is_dir():
            raise UserError(f"there are no runs in {out}; leave out --report-only to make them")
        _say(_report(study, out), out)
        return 0
    return _make(study, runs, out, args.jobs, args.rerun_changed)


def _make(study: Study, runs: list[Run], out: Path, jobs: int | None, rerun: bool) -> int:
    from agentropy.study.execute import clear_changed, execute, jobs_for
    from agentropy.study.progress import make_display
    from agentropy.study.state import alone
    from agentropy.tasks.worlds import make_world

    jobs = jobs_for(runs, jobs or study.spec.jobs)
    _make_directory(out)
    with alone(out):
        removed = clear_changed(runs, out, rerun=rerun)
        for run in {(r.setting, r.variant): r for r in runs if r.config.world and r.config.model is None}.values():
            make_world(run.config.world or "", **run.config.world_options).warm_start()  # made once, where missing
        display = make_display()
        try:
            if removed:
                display.say(f"Removed {removed} runs of another configuration.")
            display.say(f"{study.spec.name}: {len(runs)} runs, {jobs} at once, in {out}")
            code = execute(study.spec, runs, out, jobs, display)
        finally:
            display.close()
        results = _report(study, out)
    _say(results, out)
    if code == 130:
        print("Stopped. To go on, give the same command again.")
    return code


def _make_directory(out: Path) -> None:
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot make the study's directory at {str(out)!r} ({why}); choose another --out") from None


def _report(study: Study, out: Path) -> Results:
    from agentropy.study.report import write_report

    return write_report(study, out)


def _say(results: Results, out: Path) -> None:
    """The end of the command: what is complete, what is not and why, and where the report is."""
    from agentropy.study.markdown import state_of

    total = len(results.study.runs)
    print(f"{len(results.data)} of {total} runs are complete.")
    failed = [r for r in results.unfinished if results.found[r.name].state in ("failed", "changed")]
    for r in failed:
        print(f"  {r.name}: {state_of(results, r)}")
    for warning in results.warnings:
        print(f"Note: {warning}.")
    for name in ("results.md", "index.html"):
        print(f"Report: {out / name}")


def _describe(study: Study, runs: list[Run], out: Path, jobs: int | None) -> int:
    from agentropy.study.execute import jobs_for
    from agentropy.study.plan import dotted, overrides_of
    from agentropy.study.state import find

    print(f"{study.spec.name}: {len(runs)} runs, {jobs_for(runs, jobs or study.spec.jobs)} at once, in {out}")
    seen = set()
    for r in runs:
        if (r.setting, r.variant) not in seen:
            seen.add((r.setting, r.variant))
            keys = overrides_of(study.spec, r.setting, r.variant)
            print(f"{r.setting}/{r.variant}: " + ", ".join(f"{k} {v}" for k, v in dotted(keys).items()))
    states = [find(r, out).state for r in runs]
    for state in dict.fromkeys(states):
        print(f"{states.count(state)} {state}")
    return 0
