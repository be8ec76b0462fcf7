"""Everything that a page shows, as one JSON object: the overview over all trajectories, and those that fit in full."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agentropy import __version__
from agentropy.analysis.report.choose import QuestionSample, choose, deal, groups_of
from agentropy.analysis.report.encode import (
    CallPoint,
    call_points,
    extra_of,
    records,
    shape_for_page,
)
from agentropy.analysis.report.overview import Table, curves, distributions, outcome_rows, results_table
from agentropy.analysis.report.page import compress
from agentropy.analysis.report.sources import LAST, Part, RunFiles, parts_of, read_part, read_run
from agentropy.analysis.report.tokens import TokenBytes, Vocabulary, find_tokenizer, tokenizer_places
from agentropy.batch import make_batch
from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.methods.base import Method, Shaped
from agentropy.trajectory import Trajectory

BUDGET = 3_000_000
"""Bytes of trajectories in a page, compressed."""
READ_LIMIT = 128 << 20
"""Bytes of training steps that a page is made from; of a longer run, steps at even distances."""
CHUNK = 512
# What a byte of a file takes in a page at most, for dealing out the budget before the files are read.
RATIO = 0.2
EMPTY = RunFiles({}, {}, [], {}, {}, {})


@dataclass(frozen=True)
class PartData:
    """What a page takes from one file."""

    total: int
    calls: list[CallPoint]
    records: list[tuple[str, dict[str, Any]]]
    """(question id, record), in the order of the file."""
    questions: dict[str, dict[str, Any]]
    scores: dict[str, list[float]] = field(default_factory=dict)
    estimates: bool = False
    trouble: str = ""


@dataclass
class Cache:
    """What a live page need not make again: `parts` by file, with the file's time and size, its share of the budget and
    whether its tokens had texts; `texts` by the tokenizer's folder."""

    parts: dict[Path, tuple[tuple[int, int, int, bool], PartData]] = field(default_factory=dict)
    texts: dict[Path, TokenBytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How trajectories are read: the method that shapes them, and the texts of tokens (None: no tokenizer)."""

    method: Method
    texts: TokenBytes | None
    questions: int = 0
    samples: int = 0
    """Of a training step: groups in an update and trajectories a group; 0 where the run's configuration is unknown."""


def page_of_files(
    source: Path | Sequence[Path],
    *,
    method: Method | None = None,
    model: Path | None = None,
    title: str | None = None,
    tables: Sequence[Table] = (),
    budget: int = BUDGET,
    cache: Cache | None = None,
) -> dict[str, Any]:
    """The page of a directory (a run, an evaluation) or of files of trajectories.

    method: shapes advantages; None takes the run's own, or TAO-RL. model: folder of the tokenizer; None looks in the
    directory. cache: kept between calls while a run goes on. Raises UserError for files that cannot be read.
    """
    directory = source if isinstance(source, Path) and source.is_dir() else None
    run = read_run(directory) if directory else EMPTY
    parts = parts_of(source)
    notes: list[str] = []
    settings = _settings(run, method, _texts(source, run, model, notes, cache), notes)
    parts, thinned = _thin(parts)
    shares = _shares(parts, budget)
    found: list[tuple[Part, PartData]] = []
    for part in parts:
        found.append((part, _cached(part, settings, shares[part.name], cache)))
    notes += thinned
    results = results_table(run.results)
    tables = [*([results] if results else []), *tables]
    name = title or (directory.resolve().name if directory else ", ".join(p.name for p in parts[:3]))
    return _page(name, str(source) if isinstance(source, Path) else "", run, found, settings, tables, notes)


def page_of_trajectories(
    trajectories: Iterable[Trajectory],
    *,
    title: str,
    method: Method | None = None,
    model: Path | None = None,
    tables: Sequence[Table] = (),
    calls: Iterable[CallPoint] | None = None,
    total: int | None = None,
    budget: int = BUDGET,
) -> dict[str, Any]:
    """The page of trajectories from anywhere; a stream of any length is read once, in bounded memory.

    calls: points of all calls where the caller has them; otherwise they are found here. total: how many trajectories
    there were where the caller has sampled already.
    """
    notes: list[str] = []
    settings = _settings(EMPTY, method, TokenBytes(find_tokenizer(model)) if model else None, notes)
    data = _stream(trajectories, settings, budget, with_calls=calls is None)
    data = PartData(
        data.total if total is None else total,
        data.calls if calls is None else list(calls),
        data.records,
        data.questions,
        estimates=data.estimates,
        trouble=data.trouble,
    )
    part = Part(Path(title), "trajectories", "file", LAST)
    return _page(title, "", EMPTY, [(part, data)], settings, tables, notes)


def _settings(run: RunFiles, method: Method | None, texts: TokenBytes | None, notes: list[str]) -> Settings:
    rollout = run.config.get("rollout")
    rollout = rollout if isinstance(rollout, dict) else {}
    sizes = [rollout.get(key) for key in ("questions", "samples")]
    questions, samples = (v if isinstance(v, int) and not isinstance(v, bool) and v > 0 else 0 for v in sizes)
    if method is None:
        options = run.config.get("method_options")
        try:
            name, given = str(run.config.get("method", "tao-rl")), options if isinstance(options, dict) else {}
            method = make_method(name, **given)
        except UserError as error:
            notes.append(f"Advantages are those of TAO-RL: the run's method cannot be made again ({error}).")
            method = make_method("tao-rl")
    else:
        questions = samples = 0
    return Settings(method, texts, questions, samples)


def _texts(
    source: Path | Sequence[Path], run: RunFiles, model: Path | None, notes: list[str], cache: Cache | None
) -> TokenBytes | None:
    known = cache.texts if cache is not None else {}
    paths = [source] if isinstance(source, Path) else list(source)
    folders = [f for p in paths for f in ([p] if p.is_dir() else [p.resolve().parent, p.resolve().parent.parent])]
    places = [p for folder in folders for p in tokenizer_places(folder)]
    named = run.config.get("model")
    if isinstance(named, str) and (Path(named) / "tokenizer_config.json").is_file():
        places.append(Path(named))
    for place in places if model is None else [model]:
        try:
            if place not in known:
                known[place] = TokenBytes(find_tokenizer(place))
            return known[place]
        except UserError as error:
            if model is not None:
                raise
            notes.append(f"{str(error)[0].upper()}{str(error)[1:]}.")
    return None


def _thin(parts: list[Part]) -> tuple[list[Part], list[str]]:
    """Leave out steps at even distances where all of them are too much to read."""
    steps = [p for p in parts if p.kind == "train"]
    size = sum(_size(p.path) for p in steps)
    if size <= READ_LIMIT:
        return parts, []
    keep = max(2, int(len(steps) * READ_LIMIT / size))
    kept = {steps[round(i * (len(steps) - 1) / (keep - 1))].name for i in range(keep)}
    note = (
        f"The run is long: distributions and trajectories cover {len(kept)} of its {len(steps)} steps, evenly spaced."
    )
    return [p for p in parts if p.kind != "train" or p.name in kept], [note]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shares(parts: Sequence[Part], budget: int) -> dict[str, int]:
    """Bytes of each file: evaluations come first, then the first and the last step, then all others."""
    sizes = {p.name: int(_size(p.path) * RATIO) + 1000 for p in parts}
    steps = [p.name for p in parts if p.kind == "train"]
    evaluations = [p.name for p in parts if p.kind in ("before", "after")]
    return deal(sizes, [evaluations, [*steps[:1], *steps[-1:]]], budget)


def _cached(part: Part, settings: Settings, share: int, cache: Cache | None) -> PartData:
    stat = part.path.stat()
    if cache is not None and share:
        share = 1 << share.bit_length() - 1  # a power of 2: a run that grows has few files read again for a new share
    stamp = (stat.st_mtime_ns, stat.st_size, share, settings.texts is not None)
    if cache is not None and part.path in cache.parts and cache.parts[part.path][0] == stamp:
        return cache.parts[part.path][1]
    data = _train_step(part, settings, share) if part.kind == "train" else _evaluation(part, settings, share)
    if cache is not None:
        cache.parts[part.path] = (stamp, data)
    return data


def _train_step(part: Part, settings: Settings, share: int) -> PartData:
    """A step's file is read whole: what went into its update hangs on all of it."""
    trajectories = list(read_part(part.path))
    if not trajectories:
        return PartData(0, [], [], {})
    batch = make_batch(trajectories)
    shaped, trouble = shape_for_page(batch, settings.method)
    used = _used(trajectories, shaped, settings)
    groups = choose(groups_of(trajectories, shaped.entropy_change.tolist()), share)
    places = {i for g in groups for i in g.places}
    made = records(trajectories, batch, shaped, settings.method, settings.texts, places, used)
    return PartData(
        total=len(trajectories),
        calls=call_points(batch, shaped),
        records=[(trajectories[i].question_id, r) for i, r in zip(sorted(places), made, strict=True)],
        questions=_questions(t for i, t in enumerate(trajectories) if i in places),
        estimates=not batch.entropies_exact,
        trouble=trouble,
    )


def _used(trajectories: Sequence[Trajectory], shaped: Shaped, settings: Settings) -> list[bool] | None:
    """True for the groups that went into the update: dynamic sampling draws more, and takes the first it can use."""
    size, want = settings.samples, settings.questions
    if not size or not settings.method.filters or len(trajectories) % size:
        return None
    kept = shaped.kept.tolist()
    used: list[bool] = []
    for start in range(0, len(trajectories), size):
        takes = any(kept[start : start + size]) and sum(used) < want * size
        used += [takes] * size
    return used


def _evaluation(part: Part, settings: Settings, share: int) -> PartData:
    scores: dict[str, list[float]] = defaultdict(list)

    def watched() -> Iterator[Trajectory]:
        for t in read_part(part.path):
            if t.score is not None:
                scores[t.question_id].append(t.score)
            yield t

    data = _stream(watched(), settings, share, with_calls=True)
    return PartData(data.total, data.calls, data.records, data.questions, dict(scores), data.estimates, data.trouble)


def _stream(trajectories: Iterable[Trajectory], settings: Settings, share: int, with_calls: bool) -> PartData:
    held = QuestionSample(share)
    calls: list[CallPoint] = []
    source = iter(trajectories)
    while chunk := list(islice(source, CHUNK)):
        for t in chunk:
            held.add(t)
        if with_calls:
            batch = make_batch([_unparented(t) for t in chunk])
            calls += call_points(batch, make_method("grpo").shape(batch))
    sample = held.trajectories
    trouble, estimates = "", False
    made: list[dict[str, Any]] = []
    if sample:
        batch = make_batch(sample)
        shaped, trouble = shape_for_page(batch, settings.method)
        estimates = not batch.entropies_exact
        made = records(sample, batch, shaped, settings.method, settings.texts, range(len(sample)))
    pairs = [(t.question_id, r) for t, r in zip(sample, made, strict=True)]
    return PartData(held.total, calls, pairs, _questions(sample), estimates=estimates, trouble=trouble)


def _unparented(t: Trajectory) -> Trajectory:
    """A chunk may hold a fork without its parent; changes of entropy do not need it."""
    return t if t.parent_id is None else dataclasses.replace(t, parent_id=None, fork_at=None)


def _questions(trajectories: Iterable[Trajectory]) -> dict[str, dict[str, Any]]:
    return {t.question_id: {"text": t.question} | dict(extra_of(t)) for t in trajectories}


def _page(
    title: str,
    source: str,
    run: RunFiles,
    found: Sequence[tuple[Part, PartData]],
    settings: Settings,
    tables: Sequence[Table],
    notes: list[str],
) -> dict[str, Any]:
    vocabulary = Vocabulary(settings.texts)
    questions: dict[str, int] = {}
    about: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    for number, (part, data) in enumerate(found):
        files.append(
            {"name": part.name, "kind": part.kind, "step": part.step, "total": data.total, "shown": len(data.records)}
        )
        for question_id, record in data.records:
            if question_id not in questions:
                questions[question_id] = len(about)
                about.append({"id": question_id} | data.questions[question_id])
            segments = [_numbered(s, vocabulary) for s in record["s"]]
            rows.append(record | {"f": number, "q": questions[question_id], "s": segments})
    if any(d.estimates for _, d in found):
        notes.append(
            "Entropies marked with ≈ are estimates from the k likeliest tokens; dH and effects follow from them."
        )
    notes += [f"No advantages: {t}." for t in dict.fromkeys(d.trouble for _, d in found if d.trouble)]
    if (
        rows
        and settings.texts is None
        and any(isinstance(e[0], int) and e[1].startswith("⟨") for e in vocabulary.entries)
    ):
        notes.append("No tokenizer was found beside the files, so tokens show their ids; name one with --model.")
    return {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "title": title,
        "source": source,
        "method": settings.method.name,
        "unfinished": _unfinished(run),
        "config": run.config,
        "environment": run.environment,
        "outcome": outcome_rows(run, {p.kind: d.scores for p, d in found if p.kind in ("before", "after")}),
        "curves": curves(run.metrics),
        "distributions": distributions(_with_phase(found, run)),
        "tables": [t.to_page() for t in tables],
        "estimates": any(d.estimates for _, d in found),
        "notes": notes,
        "sampling": _sampling(files),
        "files": files,
        "vocabulary": vocabulary.entries,
        "questions": about,
        "trajectories": rows,
    }


def _sampling(files: Sequence[Mapping[str, Any]]) -> str:
    """What to say where not all trajectories are in the page."""
    total, shown = sum(f["total"] for f in files), sum(f["shown"] for f in files)
    if shown == total:
        return ""
    return (
        f"This page shows {shown:,} of {total:,} trajectories, of a question always all or none: most from the "
        "evaluations, the first and the last step; within a step those with the largest |dH|, and others. The overview "
        "covers all."
    )


def shrink(data: Mapping[str, Any], share: float) -> dict[str, Any]:
    """The page with only about this share of its trajectories, by size; questions of a file stay whole."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in data["trajectories"]:
        groups[row["f"], row["q"]].append(row)
    sizes = {key: len(compress(rows)) for key, rows in groups.items()}
    left = share * sum(sizes.values())
    kept = set()
    for key in sorted(groups, key=lambda k: hashlib.blake2b(str(k[1]).encode()).digest()):
        if sizes[key] <= left:
            kept.add(key)
            left -= sizes[key]
    rows = [row for row in data["trajectories"] if (row["f"], row["q"]) in kept]
    files = [f | {"shown": sum(row["f"] == i for row in rows)} for i, f in enumerate(data["files"])]
    return dict(data) | {"trajectories": rows, "files": files, "sampling": _sampling(files)}


def _unfinished(run: RunFiles) -> bool:
    steps, done = run.config.get("steps"), run.metrics[-1]["step"] if run.metrics else 0
    return isinstance(steps, int) and (done < steps or ("eval/avg" in run.before and not run.after))


def _numbered(segment: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The segment with places in the vocabulary instead of ids and texts."""
    if "t" not in segment:
        return dict(segment)
    texts = segment.get("tx") or [None] * len(segment["t"])
    out = {k: v for k, v in segment.items() if k != "tx"}
    out["t"] = [vocabulary.index(i, text) for i, text in zip(segment["t"], texts, strict=True)]
    return out


def _with_phase(found: Sequence[tuple[Part, PartData]], run: RunFiles) -> Iterator[tuple[str, bool, CallPoint]]:
    """Each call with the phase of the run it belongs to. Where there are training steps, the calls of evaluations count
    in the comparison of phases only."""
    steps = [p.step for p, _ in found if p.kind == "train"]
    fifth = max(1, len(steps) // 5)
    first, last = set(steps[:fifth]), set(steps[-fifth:] if len(steps) > 1 else [])
    names = {"before": "before training", "after": "after training"}
    for part, data in found:
        phase = names.get(part.kind, "")
        if part.kind == "train":
            phase = "first fifth of the steps" if part.step in first else ""
            phase = "last fifth of the steps" if part.step in last else phase
        if part.kind.endswith("greedy"):
            continue
        for c in data.calls:
            yield phase, part.kind == "train" or not steps, c
