"""Questions from files (JSON Lines, Parquet), Hugging Face data sets and the reasoning-gym library.

A row needs a question, and answers or tests. Blank and repeated rows are dropped and counted, never silently; a line
that cannot be read stops the loading with its number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from agentropy.errors import UserError
from agentropy.tasks.base import Split, Task, TaskSource
from agentropy.tasks.generated import GeneratedTasks, split_of

QUESTION_KEYS = ("question", "problem", "query", "input")
ANSWER_KEYS = ("answers", "answer", "golden_answers", "solution", "target", "output")
SPLIT_NAMES: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
GRADERS = ("math", "f1", "em", "f1_squad", "em_squad", "gaia", "choice", "code")
OPTIONS = ("question", "answer", "grader", "config")
MATH_SHARE = 0.6
"""Share of mathematical golds from which a file is one of mathematics (where neither rows nor options say)."""

_MATH = re.compile(r"\\|^[-+]?[$£€]?[\d.,]*\d[%°]?$|^[^A-Za-z]*\d[^A-Za-z]*$|^(?!.*[A-Za-z]{3})(?!no$).*[\d^=+*/()x]")
_LOST_BACKSLASH = {"\x08": "\\b", "\x0c": "\\f", "\x0b": "\\v", "\x07": "\\a"}
_LOST = re.compile(r"([\x07\x08\x0b\x0c])(?=[A-Za-z])")
_LOST_TAB = re.compile(r"\t(?=(?:imes|ext|heta|frac|an|riangle)\b|ext\{|frac\{)")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class FileTasks:
    """The questions of a file or data set. `notes` counts what was dropped or repaired while reading."""

    name: str
    tasks: tuple[Task, ...]
    splits: tuple[Split, ...]
    seed: int = 0
    notes: Mapping[str, int] = field(default_factory=dict)

    def train(self, index: int) -> Task:
        """Pass after pass over the training questions, each in its own order."""
        pool = _members(self, "train")
        if not pool:
            raise UserError(f"{self.name} has no training question")
        epoch, place = divmod(index, len(pool))
        return pool[_order(len(pool), self.seed, epoch)[place]]

    def split(self, split: Literal["validation", "test"]) -> Sequence[Task]:
        """The questions of a split, in the file's order."""
        return _members(self, split)


def _members(source: FileTasks, split: Split) -> tuple[Task, ...]:
    return tuple(t for t, s in zip(source.tasks, source.splits, strict=True) if s == split)


@lru_cache(maxsize=8)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"file/{seed}/{epoch}").shuffle(order)
    return tuple(order)


def load_tasks(spec: str, seed: int = 0) -> TaskSource:
    """Questions by a short name:

    `questions.jsonl` or `questions.parquet` (also in verl's schema), `hf:OWNER/NAME:SPLIT`, `reasoning-gym:TASK`.
    Options follow a question mark: `?grader=f1`, `?question=COLUMN&answer=COLUMN`, `?config=NAME` (Hugging Face).
    Raises UserError that names the file and line at fault.
    """
    body, options = _options(spec)
    if body.startswith("reasoning-gym:"):
        return _reasoning_gym(body.removeprefix("reasoning-gym:"), seed, options.get("grader"))
    if body.startswith("hf:"):
        return collect(_huggingface(body.removeprefix("hf:"), options), body, seed, options)
    path = Path(body)
    if not path.is_file():
        raise UserError(
            f"no file {body!r}; tasks come from a .jsonl or .parquet file, hf:NAME:SPLIT or reasoning-gym:TASK"
        )
    return collect(read_rows(path), path.name, seed, options)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file: JSON Lines, one JSON array of objects (`.json`), or Parquet. Raises UserError."""
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".json" and _begins_with_bracket(path):
        return _json_array(path)
    if path.suffix in (".jsonl", ".json"):
        return _jsonl(path)
    raise UserError(f"{path}: cannot tell what {path.suffix or 'no suffix'} means; use .jsonl or .parquet")


def _options(spec: str) -> tuple[str, dict[str, str]]:
    body, _, tail = spec.partition("?")
    options: dict[str, str] = {}
    for pair in filter(None, tail.split("&")):
        key, equals, value = pair.partition("=")
        if key not in OPTIONS or not equals:
            raise UserError(f"tasks option {pair!r}: write KEY=VALUE with a key out of {', '.join(OPTIONS)}")
        options[key] = value
    if options.get("grader", "math") not in GRADERS:
        raise UserError(f"no grader {options['grader']!r}; there are {', '.join(GRADERS)}")
    return body, options


Row = tuple[str, Mapping[str, Any]]
"""Where a row stands (for messages), and the row."""


def collect(
    rows: Iterable[Row],
    name: str,
    seed: int = 0,
    options: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> FileTasks:
    """Rows as tasks: cleaned, without blank and repeated ones, split. Raises UserError where nothing is left.

    limit: usable rows after which no more are read.
    """
    options = options or {}
    notes: Counter[str] = Counter()
    seen: set[str] = set()
    drafts: list[tuple[Task, str | None]] = []
    for where, row in rows:
        task, split = _task(where, row, name, options, notes)
        if task is None:
            continue
        key = " ".join(task.question.casefold().split())
        if key in seen:
            notes["repeated question dropped"] += 1
            continue
        seen.add(key)
        drafts.append((task, split))
        if len(drafts) == limit:
            break
    if not drafts:
        dropped = "; ".join(f"{n} times: {what}" for what, n in notes.items())
        raise UserError(f"{name} holds no usable question" + (f" ({dropped})" if dropped else ""))
    tasks = _with_graders([t for t, _ in drafts], options.get("grader"))
    return FileTasks(name, tuple(tasks), _splits(tasks, [s for _, s in drafts]), seed, dict(notes))


def _task(
    where: str, row: Mapping[str, Any], name: str, options: Mapping[str, str], notes: Counter[str]
) -> tuple[Task | None, str | None]:
    question = _question(where, row, options.get("question"))
    tests = row.get("tests")
    if tests and not isinstance(tests, list | Mapping):
        raise UserError(f"{where}: 'tests' is a list of tests or one test, not {type(tests).__name__}")
    if not isinstance(row.get("setup"), str | None):
        raise UserError(f"{where}: 'setup' is Python code, a text, not {type(row['setup']).__name__}")
    golds = () if tests else _golds(where, row, options.get("answer"))
    texts = [repair(t) for t in (question, *golds)]
    if texts != [question, *golds]:
        notes["lost backslash repaired"] += 1
    if any(_CONTROL.search(t) for t in texts):
        notes["control characters: dropped"] += 1
        return None, None
    question, golds = texts[0].strip(), tuple(dict.fromkeys(g.strip() for g in texts[1:] if g.strip()))
    if not question:
        notes["blank question dropped"] += 1
        return None, None
    if not golds and not tests:
        notes["blank answer dropped"] += 1
        return None, None
    extra = row.get("extra_info") if isinstance(row.get("extra_info"), Mapping) else {}
    grader = "code" if tests else str(row.get("grader") or "")
    if grader and grader not in GRADERS:
        raise UserError(f"{where}: no grader {grader!r}; there are {', '.join(GRADERS)}")
    split = str(row.get("split") or (extra or {}).get("split") or "").lower()
    task = Task(
        id=str(row.get("id") or f"{Path(name).stem}-{hashlib.sha256(question.encode()).hexdigest()[:12]}"),
        question=question,
        answers=golds,
        grader=grader,
        kind=str(row.get("kind") or row.get("type") or row.get("data_source") or Path(name).stem),
        row={k: row[k] for k in ("tests", "checker", "context", "setup") if row.get(k) is not None},
    )
    return task, split if split in SPLIT_NAMES else None


def repair(text: str) -> str:
    """Put back backslashes that a string escape ate: a backspace before `oxed` was `\\boxed`, a form feed `\\frac`."""
    text = _LOST.sub(lambda m: _LOST_BACKSLASH[m.group(1)], text)
    return _LOST_TAB.sub(r"\\t", text)


def _question(where: str, row: Mapping[str, Any], column: str | None) -> str:
    if column is not None:
        if not isinstance(row.get(column), str):
            raise UserError(f"{where}: no text in column {column!r}; the row has {', '.join(row)}")
        return str(row[column])
    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and isinstance(extra.get("question"), str) and extra["question"].strip():
        return str(extra["question"])
    prompt = row.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        users = [
            m["content"] for m in prompt if isinstance(m, Mapping) and m.get("role") == "user" and m.get("content")
        ]
        if users:
            return str(users[-1])
    for key in (*QUESTION_KEYS, "prompt"):
        if isinstance(row.get(key), str):
            return str(row[key])
    for key in QUESTION_KEYS:
        if row.get(key) is not None:
            raise UserError(f"{where}: no text in key {key!r}, but {str(row[key])[:40]}")
    raise UserError(f"{where}: no question; a row needs the key 'question' (it has {', '.join(row) or 'none'})")


def _golds(where: str, row: Mapping[str, Any], column: str | None) -> tuple[str, ...]:
    if column is not None:
        if column not in row:
            raise UserError(f"{where}: no column {column!r}; the row has {', '.join(row)}")
        return _texts(where, row[column])
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return _texts(where, model["ground_truth"])
    for key in ANSWER_KEYS:
        if key in row:
            return _texts(where, row[key])
    raise UserError(f"{where}: no answer; a row needs 'answers', 'answer' or 'tests' (it has {', '.join(row)})")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping) and "target" in value:
        value = value["target"]
    if isinstance(value, str):
        # GSM8K's own files end the worked solution with the answer.
        return (value.rpartition("#### ")[2],)
    if isinstance(value, bool):
        return ("yes" if value else "no",)
    if isinstance(value, int | float):
        return (str(value),)
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return tuple(t for v in value for t in _texts(where, v))
    raise UserError(f"{where}: an answer is a text, a number or a list of them, not {type(value).__name__}")


def _with_graders(tasks: Sequence[Task], chosen: str | None) -> list[Task]:
    judged = [t for t in tasks if not t.grader]
    share = sum(all(_MATH.search(a) for a in t.answers) for t in judged) / max(1, len(judged))
    default = chosen or ("math" if share >= MATH_SHARE else "f1")
    return [
        t if t.grader == "code" or (t.grader and not chosen) else dataclasses.replace(t, grader=default) for t in tasks
    ]


def _splits(tasks: Sequence[Task], given: Sequence[str | None]) -> tuple[Split, ...]:
    """The splits that the rows name, where some are for training; else by the hash of the question."""
    named = [SPLIT_NAMES[s] if s else "train" for s in given]
    if "train" in named and len(set(named)) > 1:
        return tuple(named)
    hashed = [split_of(t.question) for t in tasks]
    if (
        len(tasks) >= 3 and len(set(hashed)) < 3
    ):  # a small file: the lowest hash is for the test, the next for validation
        order = sorted(range(len(tasks)), key=lambda i: hashlib.sha256(tasks[i].question.encode()).digest())
        hashed = ["train"] * len(tasks)
        hashed[order[0]], hashed[order[1]] = "test", "validation"
    return tuple(hashed)


def _begins_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _json_array(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
    except (RecursionError, ValueError):
        raise UserError(f"{path}: not JSON that can be read") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number}: a {type(row).__name__}, where an object is needed")
        yield f"{path}, row {number}", row


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(raw)
            except UnicodeDecodeError:
                raise UserError(f"{where}: not UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno})") from None
            except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
                raise UserError(f"{where}: not JSON that can be read") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: a {type(row).__name__}, where an object is needed")
            yield where, row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow: pip install 'agentropy[data]'") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({str(error).splitlines()[0]})") from None
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def _huggingface(name: str, options: Mapping[str, str]) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise UserError("Hugging Face data sets need the package datasets: pip install 'agentropy[data]'") from None
    name, _, split = name.partition(":")
    try:
        data = datasets.load_dataset(name, options.get("config"), split=split or "train")
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load the data set {name!r}, split {split or 'train'!r}: {reason}") from None
    for number, row in enumerate(data):
        yield f"hf:{name}, row {number}", row


def _reasoning_gym(name: str, seed: int, grader: str | None) -> GeneratedTasks:
    try:
        import reasoning_gym
    except ImportError:
        raise UserError("reasoning-gym tasks need the library: pip install 'agentropy[reasoning-gym]'") from None
    try:
        sample = reasoning_gym.create_dataset(name, size=20, seed=0)
        answers = [str(item["answer"]) for item in sample]
    except Exception as error:
        raise UserError(f"reasoning-gym has no task {name!r} that can be made: {error}") from None
    default = grader or ("math" if all(_MATH.search(a) for a in answers) else "em")

    def draw(rng: random.Random) -> Task:
        item = reasoning_gym.create_dataset(name, size=1, seed=rng.getrandbits(31))[0]
        return Task("", str(item["question"]).strip(), (str(item["answer"]),), default, kind=name)

    return GeneratedTasks(f"reasoning-gym:{name}", draw, seed)
