"""What is in a study's directory: which runs are complete, partial, failed, or were made with another configuration.

runs/<setting>/<variant>/seed-0/       the run directory
runs/<setting>/<variant>/seed-0.yaml   the configuration that it was started with
runs/<setting>/<variant>/seed-0.log    what it printed
runs/<setting>/<variant>/seed-0.json   how it ended
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentropy.config import RunConfig, load_config, resolved
from agentropy.errors import UserError
from agentropy.study.plan import Run, dotted
from agentropy.trajectory import write_lines

State = Literal["complete", "failed", "partial", "missing", "changed"]
# What does not decide a run's numbers.
NOT_COMPARED = ("out", "log", "checkpoint.")


@dataclass(frozen=True)
class Found:
    """A run as it lies on the disk. `message` says what failed or what changed; `step` is the last one written."""

    state: State
    message: str = ""
    step: int = 0


def beside(directory: Path, suffix: str) -> Path:
    """The file beside a run directory with its name."""
    return directory.with_name(f"{directory.name}{suffix}")


def find(run: Run, out: Path) -> Found:
    """How far a run is."""
    directory = run.directory(out)
    if not (directory / "config.yaml").is_file():
        status = read_status(directory)
        return Found("failed", status["message"]) if status.get("state") == "failed" else Found("missing")
    step = last_step(directory)
    if changed := differences(run.config, directory):
        return Found("changed", changed, step)
    status = read_status(directory)
    if status.get("state") == "complete" and _whole(run.config, directory):
        return Found("complete", step=step)
    if status.get("state") == "failed":
        return Found("failed", status["message"], step)
    return Found("partial", step=step)


def _whole(config: RunConfig, directory: Path) -> bool:
    files = ["metrics.jsonl"] * bool(config.steps) + ["evaluation-after.json"] * bool(config.evaluation.questions)
    return all((directory / name).is_file() for name in files)


def differences(wanted: RunConfig, directory: Path) -> str:
    """How the configuration of a run directory differs from the wanted one; empty where it does not."""
    try:
        saved = _compared(resolved(load_config(directory / "config.yaml")))
    except UserError as error:
        return str(error)
    mine = _compared(wanted)
    keys = [k for k in sorted(saved.keys() | mine.keys()) if saved.get(k) != mine.get(k)]
    return ", ".join(f"{k} was {saved.get(k)!r}, wanted {mine.get(k)!r}" for k in keys)


def _compared(config: RunConfig) -> dict[str, Any]:
    return {k: v for k, v in dotted(config.model_dump(mode="json")).items() if not k.startswith(NOT_COMPARED)}


def read_status(directory: Path) -> dict[str, Any]:
    """How a run ended, from the file beside it; empty where it did not end."""
    try:
        status = json.loads(beside(directory, ".json").read_bytes())
        return {"state": str(status["state"]), "message": str(status["message"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_status(directory: Path, state: Literal["complete", "failed"], message: str = "") -> None:
    """Write down how a run ended."""
    write_lines(beside(directory, ".json"), [json.dumps({"state": state, "message": message})])


def last_step(directory: Path) -> int:
    """The last step in `metrics.jsonl`, 0 where there is none. Reads only the end of the file."""
    try:
        with (directory / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines[:-1]):  # what follows the last newline is half a line
        if match := re.match(rb'\{"step": (\d+)', line):
            return int(match[1])
    return 0


def log_tail(directory: Path, lines: int = 5) -> str:
    """The last words of a run's log."""
    try:
        with beside(directory, ".log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line[:300] for line in text.splitlines() if line.strip()][-lines:])


def locked(directory: Path) -> bool:
    """Is a process training in the directory?"""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep a second study out of the directory. The lock is the kernel's, so it goes with the process."""
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"another study is running in {out}; wait for it, choose another --out, or look at it with --report-only"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)
