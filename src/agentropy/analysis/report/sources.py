"""What a run directory, an evaluation directory or files of trajectories hold, read while they may still be written."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from agentropy.errors import UserError
from agentropy.trajectory import Trajectory, read_numbered

PartKind = Literal["before", "before-greedy", "train", "validation", "after-greedy", "after", "file"]
NAMES: tuple[tuple[str, PartKind], ...] = (
    (r"step-(\d+)", "train"),
    (r"validation-(\d+)", "validation"),
    (r"(?:test|validation)-before", "before"),
    (r"(?:test|validation)-before-greedy", "before-greedy"),
    (r"(?:test|validation)-after", "after"),
    (r"(?:test|validation)-after-greedy", "after-greedy"),
)
LAST = 10**9


@dataclass(frozen=True)
class Part:
    """One file of trajectories. `step` places it in the run: 0 before training, after every step for `after`."""

    path: Path
    name: str
    kind: PartKind
    step: int


@dataclass(frozen=True)
class RunFiles:
    """What a directory says about itself; empty where it says nothing."""

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    results: Mapping[str, Any]


def parts_of(source: Path | Sequence[Path]) -> list[Part]:
    """The files of trajectories of a directory, in the order of the run, or the given files. Directories may still be
    empty. Raises UserError for a file that is not there."""
    if isinstance(source, Path) and source.is_dir():
        found = [_part(p) for p in sorted(source.glob("trajectories/*.jsonl"))]
        found += [Part(p, p.stem, "file", LAST) for p in sorted(source.glob("trajectories.jsonl"))]
        return sorted(found, key=lambda p: (p.step, get_args(PartKind).index(p.kind), p.name))
    paths = [source] if isinstance(source, Path) else list(source)
    for path in paths:
        if not path.is_file():
            raise UserError(f"cannot read {path}: {'it is a directory' if path.is_dir() else 'there is no such file'}")
    names = [p.stem for p in paths]
    unique = [n if names.count(n) == 1 else str(p) for n, p in zip(names, paths, strict=True)]
    return [Part(p, name, _part(p).kind, i) for i, (p, name) in enumerate(zip(paths, unique, strict=True))]


def _part(path: Path) -> Part:
    for pattern, kind in NAMES:
        if match := re.fullmatch(pattern, path.stem):
            step = int(match[1]) if match.groups() else 0 if kind.startswith("before") else LAST
            return Part(path, path.stem, kind, step)
    return Part(path, path.stem, "file", LAST)


def read_part(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file. The last line may be half written: the file may belong to a run under way."""
    try:
        for _, trajectory in read_numbered(path):
            yield trajectory
    except UserError as error:
        last = _half_line(path)
        if last is None or f"{path}, line {last}:" not in str(error):
            raise


def _half_line(path: Path) -> int | None:
    """The number of a file's last line if it has no end."""
    with path.open("rb") as file:
        lines, rest = 0, b""
        while block := file.read(1 << 20):
            lines, rest = lines + block.count(b"\n"), block
    return None if rest.endswith(b"\n") else lines + 1


def read_run(directory: Path) -> RunFiles:
    """Everything but the trajectories. What is missing, or cannot be read yet, is empty."""
    rows: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        for line in (directory / "metrics.jsonl").read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                row = json.loads(line)
                step = int(row["step"])
                rows[step] = rows.get(step, {"step": step}) | {k: v for k, v in row.items() if _is_number(v)}
    config: Any = {}
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        config = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8-sig"))
    return RunFiles(
        config=config if isinstance(config, dict) else {},
        environment=_object(directory / "environment.json"),
        metrics=[rows[step] for step in sorted(rows)],
        before=_object(directory / "evaluation-before.json"),
        after=_object(directory / "evaluation-after.json"),
        results=_object(directory / "results.json"),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _object(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        data = json.loads(path.read_bytes())
        if isinstance(data, dict):
            return data
    return {}
