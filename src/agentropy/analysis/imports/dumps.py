"""What trainers dump: TRL (`log_completions`) and verl (`trainer.rollout_data_dir`). Text, without entropies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentropy.analysis.imports.chat import conversation_segments, prompt_text
from agentropy.analysis.imports.parts import Options, json_lines, key_of, number, score_in, text_segment
from agentropy.analysis.imports.text import answer_of, segments_of
from agentropy.errors import UserError
from agentropy.trajectory import Segment, Trajectory

TRL_COLUMNS = ("step", "prompt", "completion", "advantage")
VERL_KEYS = ("input", "output", "gts", "score", "step")
BATCH = 64


def read_trl(path: Path, options: Options) -> Iterator[Trajectory]:
    """TRL's `completions_NNNNN.parquet` (or the same rows as JSON Lines).

    Reads `prompt` and `completion` (a text, or a list of chat messages), `step`, and the outcome: the column that the
    user named, else `score`, else the only column of numbers besides `step` and `advantage`. Raises UserError where
    there are several such columns, or where a column is missing.
    """
    outcome: str | None = None
    for place, (where, row) in enumerate(_rows(path)):
        for column in ("prompt", "completion"):
            if row.get(column) is None:
                raise UserError(f"{where}: no {column!r}, which TRL's table of completions has")
        if place == 0:
            outcome = options.score or _trl_outcome(row, where)
        prompt, completion = row["prompt"], row["completion"]
        step = row.get("step")
        if isinstance(completion, str):
            segments = segments_of(completion)
        else:
            segments = conversation_segments(_messages(completion, where, "completion"))
        asked = prompt if isinstance(prompt, str) else prompt_text(_messages(prompt, where, "prompt"))
        yield _trajectory(
            asked,
            segments,
            f"{path.stem}/{place}",
            number(row.get(outcome)) if outcome else None,
            {"step": step} if step is not None else {},
        )


def _trl_outcome(row: Mapping[str, Any], where: str) -> str | None:
    if "score" in row:
        return "score"
    numbers = [k for k, v in row.items() if k not in TRL_COLUMNS and isinstance(v, int | float | bool)]
    if len(numbers) > 1:
        raise UserError(f"{where}: several columns could be the outcome ({', '.join(numbers)}); name it with --score")
    return numbers[0] if numbers else None


def read_verl(path: Path, options: Options) -> Iterator[Trajectory]:
    """verl's `STEP.jsonl`: reads `input`, `output`, `score`, `gts`, `step`, and `uid` or `request_id` if there."""
    for line, row in json_lines(path):
        where = f"{path}, line {line}"
        if not isinstance(row, dict) or not isinstance(row.get("input"), str) or not isinstance(row.get("output"), str):
            raise UserError(f"{where}: needs the texts 'input' and 'output', as verl's rollout_data_dir has them")
        try:
            score = score_in(row, options, ("score",))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        name = row.get("uid") or row.get("request_id") or f"{path.stem}/{line}"
        extra = {key: row[source] for key, source in (("step", "step"), ("gold", "gts")) if row.get(source) is not None}
        yield _trajectory(row["input"], segments_of(row["output"]), str(name), score, extra)


def _trajectory(
    prompt: str, segments: list[Segment], name: str, score: float | None, extra: dict[str, Any]
) -> Trajectory:
    last = segments[-1] if segments else None
    answer = answer_of("".join(last.tokens or ())) if last is not None and last.kind == "reasoning" else None
    unfinished = last is not None and last.kind in ("call", "result")
    return Trajectory(
        question_id=key_of(prompt),
        trajectory_id=name,
        question=prompt,
        segments=(text_segment("prompt", prompt), *segments),
        answer=answer,
        score=score,
        stop="max_turns" if unfinished else "answer" if answer is not None else "void",
        extra=extra,
        ids_kind="none",
    )


def _messages(value: Any, where: str, column: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
        raise UserError(f"{where}: {column!r} is neither a text nor a list of messages")
    return [_without_nulls(dict(m)) for m in value]


def _without_nulls(value: Any) -> Any:
    """Parquet fills the keys that a message or a call's arguments do not have with null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix != ".parquet":
        for line, row in json_lines(path):
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {line}: no JSON object")
            yield f"{path}, line {line}", row
        return
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path} is a Parquet file, and pyarrow is not installed: pip install 'agentropy[analysis]'"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    with file:
        missing = [c for c in ("prompt", "completion") if c not in file.schema_arrow.names]
        if missing:
            names = ", ".join(file.schema_arrow.names)
            raise UserError(
                f"{path}: no column {missing[0]!r}, which TRL's table of completions has; there are {names}"
            )
        place = 0
        for batch in file.iter_batches(BATCH):
            for row in batch.to_pylist():
                place += 1
                yield f"{path}, row {place}", row
