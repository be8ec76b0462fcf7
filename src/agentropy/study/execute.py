"""Runs of a study, several at once, each `agentropy train` in a process of its own.

One thread polls. Whatever ends this process, the runs get SIGTERM (study/child.py), save and leave, and the next start
goes on from their checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentropy.config import save_config
from agentropy.errors import UserError
from agentropy.study.plan import Run
from agentropy.study.progress import Display, Status, TimeLeft
from agentropy.study.spec import StudySpec
from agentropy.study.state import beside, find, last_step, locked, log_tail, write_status

POLL = 0.2
PATIENCE = 120.0
"""Seconds that a stopped run has to save before it is killed."""
RUN_MEMORY = 2 << 30
"""Bytes that a run of an embedded agent is given, with its graders and sandboxes beside it."""


def jobs_for(runs: Sequence[Run], wanted: int | None) -> int:
    """How many runs at once. Without `wanted` as many as cores and free memory allow; one where a run has a model of
    its own, whose size is not known, or where runs share a server.

    Raises: UserError where several are wanted that would push their weights to the same server.
    """
    servers = [r.config.rollout.server for r in runs if r.config.rollout.server is not None]
    shared = next((server for server in servers if servers.count(server) > 1), None)
    if shared is not None and wanted is not None and wanted > 1:
        raise UserError(
            f"{wanted} runs at once would push their weights to the same server (rollout.server {shared}): set "
            "jobs to 1"
        )
    if wanted is not None:
        return wanted
    if shared is not None or any(r.config.model is not None for r in runs):
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), _free_memory() // RUN_MEMORY))


def _free_memory() -> int:
    """Bytes that the machine and the container still have."""
    free = 1 << 62
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" is no number and no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


@dataclass
class _Stop:
    """How often the user asked to stop."""

    count: int = 0


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        stop.count += 1

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@dataclass
class _Work:
    """What is queued, running, and over."""

    out: Path
    spec: StudySpec
    runs: Sequence[Run]
    queue: list[Run] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    """Steps that a queued run had made before."""
    running: dict[str, tuple[Run, subprocess.Popen[bytes]]] = field(default_factory=dict)
    complete: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def clear_changed(runs: Sequence[Run], out: Path, *, rerun: bool) -> int:
    """Deal with runs that were made with another configuration: remove them (`rerun`) or refuse. Returns how many."""
    changed = [(r, found.message) for r in runs if (found := find(r, out)).state == "changed"]
    if changed and not rerun:
        run, message = changed[0]
        raise UserError(
            f"{len(changed)} of {len(runs)} runs in {out} were made with another configuration, such as {run.name}: "
            f"{message}; choose another --out, or make them again with --rerun-changed"
        )
    for run, _ in changed:
        if locked(run.directory(out)):
            raise UserError(f"another process is training in {run.directory(out)}; wait for it")
        _forget(run.directory(out))
    return len(changed)


def _forget(directory: Path) -> None:
    """Remove a run with what lies beside it."""
    beside(directory, ".json").unlink(missing_ok=True)
    beside(directory, ".log").unlink(missing_ok=True)
    if directory.exists():
        shutil.rmtree(directory)


def execute(spec: StudySpec, runs: Sequence[Run], out: Path, jobs: int, display: Display) -> int:
    """Make all runs that are not complete. Returns 0, 1 where one failed, or 130 where the user stopped it."""
    work = _Work(out, spec, runs)
    for run in runs:
        found = find(run, out)
        if found.state == "complete":
            work.complete += 1
            _tidy(spec, run.directory(out))
        else:
            work.queue.append(run)
            work.begun[run.name] = found.step
    if work.complete:
        display.say(f"{work.complete} of {len(runs)} runs are complete already.")
    left = TimeLeft()
    waiting = ""
    with _stop_signals() as stop:
        try:
            while (work.queue or work.running) and not stop.count:
                while work.queue and len(work.running) < jobs:
                    ready = next((r for r in work.queue if not locked(r.directory(out))), None)
                    if ready is None:
                        if not work.running and (name := work.queue[0].name) != waiting:
                            display.say(f"Waiting for a process that still trains in {work.queue[0].directory(out)}.")
                            waiting = name
                        break
                    work.queue.remove(ready)
                    _launch(work, ready, display)
                display.show(_status(work, left))
                time.sleep(POLL)
                _reap(work, display)
        finally:  # also where something of ours fails: no run is left behind
            if work.running:
                _stop(work, stop, display)
    if stop.count:
        return 130
    return 1 if work.failed else 0


def _launch(work: _Work, run: Run, display: Display) -> None:
    directory = run.directory(work.out)
    arguments = ["train", "--resume", str(directory)]
    if not (directory / "config.yaml").is_file():
        if directory.exists():  # killed before it had written its configuration
            shutil.rmtree(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        save_config(run.config, beside(directory, ".yaml"))
        arguments = ["train", "--config", str(beside(directory, ".yaml")), f"--out={directory}"]
    beside(directory, ".json").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with beside(directory, ".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentropy.study.child", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal reaches only us, and the runs get one signal, not two
        )
    work.running[run.name] = (run, process)
    step = last_step(directory)
    display.say(f"{run.name}: " + (f"goes on after step {step}" if step else "starts"))


def _reap(work: _Work, display: Display) -> None:
    for name, (run, process) in list(work.running.items()):
        code = process.poll()
        if code is None:
            continue
        del work.running[name]
        directory = run.directory(work.out)
        if code == 0:
            write_status(directory, "complete")
            _tidy(work.spec, directory)
            work.complete += 1
            display.say(f"{name}: done, {work.complete} of {len(work.runs)}")
        else:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
            tail = log_tail(directory)
            work.failed[name] = f"{how}: {tail}"
            write_status(directory, "failed", work.failed[name])
            display.say(f"{name}: FAILED, {how}; {beside(directory, '.log')} ends with\n" + _indented(tail))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _stop(work: _Work, stop: _Stop, display: Display) -> None:
    display.say(f"Stopping; {len(work.running)} runs save what they have. Once more kills them.")
    asked = stop.count
    for _, process in work.running.values():
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for _, process in work.running.values()):
        if stop.count > asked or time.monotonic() > deadline:
            for _, process in work.running.values():
                process.kill()
            break
        time.sleep(0.05)
    for run, process in work.running.values():
        if process.wait() == 0:  # it had just ended by itself
            write_status(run.directory(work.out), "complete")
            work.complete += 1
    work.running.clear()


def _tidy(spec: StudySpec, directory: Path) -> None:
    """Remove what the study does not keep of a complete run."""
    if not spec.keep_checkpoints:
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    if not spec.keep_models:
        shutil.rmtree(directory / "model", ignore_errors=True)
    if not spec.keep_trajectories:
        for path in directory.glob("trajectories/step-*.jsonl"):
            path.unlink(missing_ok=True)


def _status(work: _Work, left: TimeLeft) -> Status:
    steps = {name: (last_step(run.directory(work.out)), run.config.steps) for name, (run, _) in work.running.items()}
    over = {r.name for r in work.queue} | work.failed.keys() | steps.keys()
    # A step is counted for each run besides its own, so that runs without steps count too.
    done = sum(r.config.steps + 1 for r in work.runs if r.name not in over) + sum(step for step, _ in steps.values())
    done += sum(work.begun[r.name] for r in work.queue)
    total = sum(r.config.steps + 1 for r in work.runs if r.name not in work.failed)
    seconds = left.after(done, total)
    running = [(name, step, n) for name, (step, n) in steps.items()]
    return Status(len(work.runs), work.complete, len(work.failed), running, done / total if total else 1.0, seconds)
