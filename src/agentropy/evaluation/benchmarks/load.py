"""Questions of a benchmark: from a file, in its publisher's schema or in ours, or from the Hugging Face hub."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentropy.errors import UserError
from agentropy.evaluation.benchmarks import rows
from agentropy.evaluation.benchmarks.base import Benchmark, Source
from agentropy.evaluation.benchmarks.table import BENCHMARKS
from agentropy.tasks.base import Task
from agentropy.tasks.files import Row, collect, read_rows


@dataclass(frozen=True)
class Questions:
    """The questions of one benchmark. `notes` counts what was left out or repaired, by reason."""

    name: str
    tasks: tuple[Task, ...]
    notes: Mapping[str, int] = field(default_factory=dict)


def find_benchmark(name: str) -> tuple[Benchmark, Source]:
    """A benchmark and its source by name or name:variant. Raises UserError that names the nearest one."""
    base, _, variant = name.partition(":")
    benchmark = BENCHMARKS.get(base)
    if benchmark is None:
        near = difflib.get_close_matches(base, BENCHMARKS, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]}?" if near else ";"
        raise UserError(f"no benchmark {base!r}{guess} there are {', '.join(BENCHMARKS)}")
    if not variant:
        return benchmark, benchmark.source
    if variant not in benchmark.variants:
        known = ", ".join(benchmark.variants) or "none"
        raise UserError(f"benchmark {base} has no variant {variant!r}; its variants: {known}")
    return benchmark, benchmark.variants[variant]


def load_benchmark(name: str, data: str | None = None, limit: int | None = None) -> Questions:
    """The first `limit` questions of a benchmark, all without it.

    data: a file (.jsonl, .json, .parquet), instead of the hub. Raises UserError, with the place, for what cannot be
    read.
    """
    benchmark, source = find_benchmark(name)
    if data is None:
        given = _hub(benchmark, source)
    else:
        path = Path(data)
        if not path.is_file():
            raise UserError(f"no file {data!r} (--data for {name})")
        given = read_rows(path)
    left_out: Counter[str] = Counter()
    found = collect(_adapted(benchmark, given, left_out), name, limit=limit)
    return Questions(name, found.tasks, dict(left_out + Counter(found.notes)))


def _adapted(benchmark: Benchmark, given: Iterator[Row], left_out: Counter[str]) -> Iterator[Row]:
    adapt = benchmark.adapt or rows.plain
    for where, row in given:
        adapted = adapt(benchmark, where, row)
        if isinstance(adapted, str):
            left_out[adapted] += 1
        else:
            yield where, adapted


def _hub(benchmark: Benchmark, source: Source) -> Iterator[Row]:
    use = f"get the file elsewhere and name it with --data {benchmark.name}=FILE"
    from agentropy.policies.loading import hub_reachable

    if not hub_reachable():
        raise UserError(f"{benchmark.name} comes from the Hugging Face hub ({source.name}), out of reach here; {use}")
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{benchmark.name} comes from the Hugging Face hub, which needs the package datasets: "
            f"pip install 'agentropy[data]'; or {use}"
        ) from None
    try:
        if source.files:
            files = [f"hf://datasets/{source.name}/{file}" for file in source.files]
            table = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        else:
            table = datasets.load_dataset(source.name, source.config, split=source.split)
        for number, row in enumerate(table):
            yield f"{source.name}, row {number}", row
    except UserError:
        raise
    except Exception as error:  # the library raises what its many parts raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load {source.name} from the Hugging Face hub: {reason}; {use}") from None
