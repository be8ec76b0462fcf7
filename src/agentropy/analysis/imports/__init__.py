"""Trajectories from other sources: one small function a source, chosen by what a file holds.

`read` takes any mix of run directories, files of trajectories, chat logs, and what TRL and verl dump. docs/analysis.md
has the keys and columns that each importer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentropy.analysis.imports.chat import read_chat
from agentropy.analysis.imports.dumps import read_trl, read_verl
from agentropy.analysis.imports.parts import Options, json_lines, parse
from agentropy.errors import UserError
from agentropy.trajectory import Trajectory, from_json


def read_agentropy(path: Path, options: Options) -> Iterator[Trajectory]:
    """A file of trajectories in the project's own format (docs/trajectory.md). Its `score` is the outcome."""
    if options.score is not None:
        raise UserError(f"{path}: --score names a key of other formats; here the outcome is 'score'")
    for line, row in json_lines(path):
        try:
            yield from_json(row)
        except UserError as error:
            raise UserError(f"{path}, line {line}: {error}") from None


Reader = Callable[[Path, Options], Iterator[Trajectory]]
FORMATS: dict[str, Reader] = {"agentropy": read_agentropy, "chat": read_chat, "trl": read_trl, "verl": read_verl}
SUFFIXES = (".jsonl", ".json", ".parquet", ".ndjson")


@dataclass(frozen=True)
class Source:
    """One file to read. `name` is how tables call it; `part` is the same for all steps of a run."""

    path: Path
    format: str
    name: str
    part: str

    def read(self, options: Options = Options()) -> Iterator[Trajectory]:
        """Its trajectories, one by one. Raises UserError with file and line."""
        return FORMATS[self.format](self.path, options)


def read(*paths: Path | str, format: str | None = None, score: str | None = None) -> Iterator[Trajectory]:
    """The trajectories of files and directories, one by one, each with `extra["source"]`.

    Args:
        format: one of `FORMATS`; None finds out for each file.
        score: the key or column that holds the outcome, where a source has several.
    Raises: UserError where something cannot be read.
    """
    for source in sources(paths, format):
        for t in source.read(Options(score)):
            yield replace(t, extra={**t.extra, "source": source.name})


def sources(paths: Sequence[Path | str], format: str | None = None) -> list[Source]:
    """The files behind paths: of a directory those in `trajectories/` or `completions/`, else its own.

    Raises UserError for what is not there, or not recognised. Files of a directory that are none of ours are left out.
    """
    if format is not None and format not in FORMATS:
        raise UserError(f"--format {format!r} is none of {', '.join(FORMATS)}")
    found: list[Source] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += _in_directory(path, format)
        elif path.exists():
            found.append(Source(path, format or detect(path), path.name, path.stem))
        else:
            raise UserError(f"cannot read {path}: there is no such file")
    found = list({s.path.resolve(): s for s in found}.values())  # a file that is named twice counts once
    names = [s.name for s in found]
    return [s if names.count(s.name) == 1 else replace(s, name=str(s.path), part=str(s.path)) for s in found]


def _in_directory(path: Path, format: str | None) -> list[Source]:
    folder = next((path / n for n in ("trajectories", "completions") if (path / n).is_dir()), path)
    files = sorted((p for p in folder.iterdir() if p.suffix in SUFFIXES and p.is_file()), key=_order)
    out = []
    for file in files:
        try:
            kind = format or detect(file)
        except UserError:
            continue
        stem = file.stem
        numbered = stem.rstrip("0123456789").rstrip("-_")
        part = numbered if stem[-1:].isdigit() else stem
        prefix = path.resolve().name
        out.append(Source(file, kind, f"{prefix}/{stem}", f"{prefix}/{part}" if part else prefix))
    if not out:
        raise UserError(
            f"{path} holds no trajectories: no file of a known format in it, nor in trajectories/ or completions/"
        )
    return out


def _order(path: Path) -> tuple[int, str, int]:
    """Before training, its steps, after it; numbers as numbers."""
    stem = path.stem
    place = 0 if "-before" in stem else 2 if "-after" in stem else 1
    digits = stem[len(stem.rstrip("0123456789")) :]
    return place, stem.rstrip("0123456789"), int(digits or 0)


def detect(path: Path) -> str:
    """The format of a file by its name and its first object. Raises UserError where it is none of `FORMATS`."""
    if path.suffix == ".parquet":
        return "trl"
    first = _first(path)
    keys = set(first) if isinstance(first, dict) else set()
    if "segments" in keys:
        return "agentropy"
    if "messages" in keys or {"request", "response"} <= keys:
        return "chat"
    if {"input", "output"} <= keys:
        return "verl"
    if {"prompt", "completion"} <= keys:
        return "trl"
    if "choices" in keys:
        raise UserError(f"{path}: a response without its request; log both, as {{'request': …, 'response': …}}")
    named = f"the keys {', '.join(sorted(map(str, keys))[:8])}" if keys else "no JSON object"
    raise UserError(f"{path}: no known format, its first line has {named}; --format names it ({', '.join(FORMATS)})")


def _first(path: Path) -> Any:
    if path.suffix == ".json":
        return next((row for _, row in json_lines(path)), None)
    try:
        with path.open("rb") as file:
            raw = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not raw:
        raise UserError(f"{path} is empty")
    if raw.startswith(b"\x1f\x8b"):
        raise UserError(f"{path} is compressed; unpack it first (gunzip)")
    return parse(raw, f"{path}, line 1")


__all__ = ["FORMATS", "Options", "Source", "detect", "read", "sources"]
