"""The directory of an evaluation: finished trajectories, appended at once; what a resumed one finds there.

A unit is what is asked and written together. After a crash, units that are whole stay; what is left of others, and
units that the machinery lost, are dropped and asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from agentropy.errors import UserError
from agentropy.evaluation.config import EvaluationConfig
from agentropy.evaluation.records import Record, records_of
from agentropy.evaluation.suites import Suite
from agentropy.rollout.loop import Attempt
from agentropy.seeds import derive
from agentropy.trajectory import Trajectory, dumps, from_json, write_lines

TRAJECTORIES, QUESTIONS, PROGRESS = "trajectories.jsonl", "questions.json", "progress.json"
Unit = tuple[Attempt, ...]
Key = tuple[str, str]
"""A trajectory: its benchmark and its id."""


def units_of(suite: Suite, config: EvaluationConfig, size: int) -> list[Unit]:
    """All attempts of a suite, `size` a unit. Seeds hang on the benchmark, the question and the sample alone."""
    extra: dict[str, str | int | float] = {"benchmark": suite.name} | ({"lenient": True} if config.lenient else {})
    attempts = [
        Attempt(task, f"{task.id}/{k}", derive(config.seed, "eval", suite.name, task.id, k), extra)
        for task in suite.tasks
        for k in range(config.samples)
    ]
    return [tuple(attempts[i : i + size]) for i in range(0, len(attempts), size)]


def key_of(attempt: Attempt) -> Key:
    """The key of the trajectory that an attempt becomes."""
    return str(attempt.extra["benchmark"]), attempt.trajectory_id


@dataclass
class Journal:
    """What is known of an evaluation. `records` are of the trajectories on disk, in their order there."""

    directory: Path
    records: list[Record] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    asked_again: int = 0
    _file: BinaryIO | None = None

    def append(self, trajectories: Sequence[Trajectory]) -> list[Record]:
        """Write finished trajectories to the disk, and return their records."""
        if self._file is None:
            self._file = (self.directory / TRAJECTORIES).open("ab")
        self._file.write("".join(dumps(t) + "\n" for t in trajectories).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        new = list(records_of(trajectories))
        self.records += new
        return new

    def note(self, benchmark: str, seconds: float, usage: Mapping[str, Any] | None) -> None:
        """Count time that was spent, and write it down with a server's counts."""
        self.seconds[benchmark] = self.seconds.get(benchmark, 0.0) + seconds
        counts = {"seconds": self.seconds} | ({"usage": added(self.usage, usage)} if usage is not None else {})
        write_lines(self.directory / PROGRESS, [json.dumps(counts)])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Counts added up, key by key, also in nested ones."""
    out = dict(one)
    for key, value in other.items():
        if isinstance(value, Mapping):
            out[key] = added(out.get(key, {}), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[key] = out.get(key, 0) + value
        else:
            out[key] = value
    return out


def reopen(directory: Path, units: Sequence[Unit]) -> Journal:
    """The journal of an evaluation that was interrupted: whole units only, each trajectory once."""
    path = directory / TRAJECTORIES
    journal = Journal(directory)
    _read_progress(journal)
    if not path.is_file():
        return journal
    unit_of = {key_of(a): i for i, unit in enumerate(units) for a in unit}
    found: dict[Key, Record] = {}
    order: list[Key] = []
    whole_lines = True
    lines = _Lines(path)
    for record in records_of(lines):
        key = (record.benchmark, record.trajectory_id)
        order.append(key)
        if key not in unit_of:
            raise UserError(f"{path} holds {record.trajectory_id!r} of {record.benchmark}, which is not asked here")
        found.setdefault(key, record)
    whole_lines = lines.whole
    kept_units = {i for i, unit in enumerate(units) if all(_stays(found.get(key_of(a))) for a in unit)}
    keep, seen = [], set()
    for key in order:
        keep.append(unit_of[key] in kept_units and key not in seen)
        seen.add(key)
    journal.asked_again = sum(not k for k in keep)
    if not all(keep) or not whole_lines:
        _rewrite(path, keep)
    journal.records = [found[key] for key, stays in zip(order, keep, strict=True) if stays]
    return journal


def _stays(record: Record | None) -> bool:
    return record is not None and not record.lost


class _Lines:
    """The trajectories of a file whose last line may be cut off. `whole` is False after one that was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.whole = True

    def __iter__(self) -> Iterator[Trajectory]:
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    trajectory = from_json(json.loads(raw))
                except (ValueError, RecursionError, UserError) as error:
                    self.whole = False
                    if not file.read(1):  # the last line: cut off by the crash
                        return
                    raise UserError(f"{self._path}, line {number} cannot be read: {error}") from None
                self.whole = raw.endswith(b"\n")
                yield trajectory


def _rewrite(path: Path, keep: Sequence[bool]) -> None:
    partial = path.with_name(path.name + ".partial")
    with path.open("rb") as file, partial.open("wb") as out:
        for raw, stays in zip(file, keep, strict=False):
            if stays:
                out.write(raw)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


def _read_progress(journal: Journal) -> None:
    try:
        saved = json.loads((journal.directory / PROGRESS).read_bytes())
        journal.seconds = {str(k): float(v) for k, v in saved["seconds"].items()}
        journal.usage = dict(saved.get("usage", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # only time is lost with it
        pass


def check_questions(directory: Path, suites: Sequence[Suite]) -> None:
    """Raise UserError where a resumed evaluation would ask other questions than it began with."""
    path = directory / QUESTIONS
    try:
        saved = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        raise UserError(f"{path} cannot be read") from None
    for suite in suites:
        if saved.get(suite.name, {}).get("fingerprint", suite.fingerprint) != suite.fingerprint:
            raise UserError(
                f"the questions of {suite.name} have changed since {directory} began; start a new evaluation"
            )


def write_questions(directory: Path, suites: Sequence[Suite]) -> None:
    """Write down what is asked, so that `check_questions` can tell."""
    rows = {
        s.name: {"questions": len(s.tasks), "fingerprint": s.fingerprint, "left_out": dict(s.notes)} for s in suites
    }
    write_lines(directory / QUESTIONS, [json.dumps(rows, indent=2, ensure_ascii=False)])
