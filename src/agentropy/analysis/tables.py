"""The table of calls as a pandas frame, and as a Parquet file that is written piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentropy.analysis.effects import COLUMNS
from agentropy.errors import UserError

if TYPE_CHECKING:
    import pandas

EXTRA = "pip install 'agentropy[analysis]'"
MOST_CHARACTERS = 2_000
"""Texts in the Parquet file are cut there, with an ellipsis at the end."""


def frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """The rows of `call_effects` as a frame: text as objects, `maybe` as pandas' nullable boolean."""
    try:
        import pandas
    except ImportError:
        raise UserError(f"call_effects makes a pandas table, and pandas is not installed: {EXTRA}") from None
    kinds = {"text": "object", "int": "int64", "float": "float64", "flag": "bool", "maybe": "boolean"}
    listed = list(rows)
    return pandas.DataFrame(
        {name: pandas.Series([r[name] for r in listed], dtype=kinds[kind]) for name, kind in COLUMNS.items()}
    )


class CallWriter:
    """Writes `calls.parquet`, a row group at a time, under another name until it is closed; a context manager.

    Raises UserError where pyarrow is missing or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"the table of calls is a Parquet file, and pyarrow is not installed: {EXTRA}") from None
        kinds = {
            "text": pyarrow.string(),
            "int": pyarrow.int64(),
            "float": pyarrow.float64(),
            "flag": pyarrow.bool_(),
            "maybe": pyarrow.bool_(),
        }
        self._arrow = pyarrow
        self._schema = pyarrow.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._done = False
        try:
            self._writer = pyarrow.parquet.ParquetWriter(str(self._partial), self._schema, compression="zstd")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None

    def write(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add rows, given as columns; texts already cut by `cut`."""
        self._writer.write_table(self._arrow.Table.from_pydict(dict(columns), schema=self._schema))

    def close(self) -> None:
        """Finish the file and give it its name."""
        self._writer.close()
        self._partial.replace(self._path)
        self._done = True

    def __enter__(self) -> CallWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._done:
            self._writer.close()
            self._partial.unlink(missing_ok=True)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, with texts that fit a Parquet file: cut, and without half surrogate pairs."""
    return {
        name: [cut(r[name]) for r in rows] if kind == "text" else [r[name] for r in rows]
        for name, kind in COLUMNS.items()
    }


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, cut to `most` characters; what is no UTF-8 becomes U+FFFD."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return short if short.isascii() else short.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
