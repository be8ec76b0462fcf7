"""Rows of publishers as rows of task files, where copying columns is not enough."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentropy.errors import UserError
from agentropy.evaluation.benchmarks import livecodebench
from agentropy.evaluation.benchmarks.base import Benchmark
from agentropy.evaluation.grading.extract import boxes

_INTEGER = re.compile(r"\d{1,3}")
_WHOLE_FLOAT = re.compile(r"(-?\d+)\.0+")
_DOLLARS = re.compile(r"\$([^$]*)\$")


def plain(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """The columns as the benchmark names them. Raises UserError that names the row and what it lacks."""
    question = first(row, benchmark.question)
    if question is None:
        raise UserError(
            f"{where}: no question; {benchmark.name} needs a column {_names(benchmark.question)}{_has(row)}"
        )
    if row.get("tests"):
        return _kept(benchmark, row) | {"question": question, "tests": row["tests"], "checker": row.get("checker")}
    answers = first(row, benchmark.answers)
    if answers is None:
        raise UserError(f"{where}: no answer; {benchmark.name} needs a column {_names(benchmark.answers)}{_has(row)}")
    golds = [*listed(answers), *(a for column in benchmark.aliases for a in listed(row.get(column)))]
    return _kept(benchmark, row) | {"question": question, "answers": golds}


def _names(columns: Sequence[str]) -> str:
    return " or ".join(repr(c) for c in columns[:2])


def _has(row: Mapping[str, Any]) -> str:
    return f" (the row has {', '.join(row) or 'none'})"


def _kept(benchmark: Benchmark, row: Mapping[str, Any]) -> dict[str, Any]:
    """What every row has beside question and answers: an id with the benchmark's name, its group, its paragraphs."""
    out: dict[str, Any] = {"grader": benchmark.grader}
    ident = first(row, benchmark.ids)
    if ident is not None and str(ident).strip():
        ident = str(ident).strip()
        out["id"] = ident if ident.startswith(benchmark.name) else f"{benchmark.name}-{ident}"
    group = next((g for column in benchmark.group if (g := inside(row, column)) not in (None, "")), None)
    out["kind"] = benchmark.name if group is None else f"{benchmark.name}/{group}"
    context = paragraphs(row.get("context") or row.get("paragraphs"))
    return out | ({"context": context} if context else {})


def first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """The value of the first of the columns that the row has; null counts as missing."""
    return next((row[c] for c in columns if row.get(c) is not None), None)


def inside(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; `a.b` is b inside a."""
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def listed(value: Any) -> list[Any]:
    """One answer or several as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def paragraphs(context: Any) -> list[dict[str, str]]:
    """Paragraphs in any of the published forms as {title, text}: HotpotQA's own file ([title, sentences] pairs), its
    copy on the hub ({title: […], sentences: […]}), MuSiQue ({title, paragraph_text}), and {title, text}."""
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            return []
    if isinstance(context, Mapping) and "title" in context:
        texts = context.get("sentences", context.get("content", ()))
        context = list(zip(context["title"], texts, strict=False))
    out: list[dict[str, str]] = []
    for entry in context if isinstance(context, list) else ():
        if isinstance(entry, Mapping):
            title, text = entry.get("title"), entry.get("text", entry.get("paragraph_text"))
        elif isinstance(entry, Sequence) and len(entry) == 2:
            title, text = entry
        else:
            continue
        if isinstance(text, list | tuple):
            text = " ".join(str(s).strip() for s in text)
        if isinstance(text, str) and text.strip():
            out.append({"title": str(title or ""), "text": text.strip()})
    return out


def aime(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """An answer is an integer from 0 to 999, written with leading zeros in some copies, or boxed in a solution."""
    out = plain(benchmark, where, row)
    if isinstance(out, str) or "tests" in out:
        return out
    golds = []
    for gold in out["answers"]:
        text = str(gold).strip()
        found = boxes(text)
        text = (found[-1][2] if found else text).strip().strip("$")
        text = _WHOLE_FLOAT.sub(r"\1", text)
        if not _INTEGER.fullmatch(text):
            raise UserError(f"{where}: the answer {gold!r} is no integer from 0 to 999, as every answer of AIME is")
        golds.append(str(int(text)))
    return out | {"answers": golds}


def amc(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """Answers that the publisher's table holds as floats are integers: 27.0 is 27."""
    out = plain(benchmark, where, row)
    if isinstance(out, str) or "tests" in out:
        return out
    return out | {"answers": [_WHOLE_FLOAT.sub(r"\1", str(a).strip()) for a in out["answers"]]}


def gsm8k(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """The publisher's own `answer` is a worked solution that ends with `#### 42`."""
    if isinstance(row.get("answer"), str) and "answers" not in row and "####" not in row["answer"]:
        text = row["answer"].strip()
        if not re.fullmatch(r"-?[\d.,$]+", text):
            raise UserError(f"{where}: the answer ends neither in '#### NUMBER' nor is it a number: {text[-60:]!r}")
    return plain(benchmark, where, row)


def olympiadbench(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """`final_answer` is a list whose one text may hold several values, all of which are asked for."""
    if any(row.get(f"image_{n}") for n in range(1, 10)):
        return "question with an image left out"
    values = row.get("final_answer")
    if not isinstance(values, list | tuple):
        return plain(benchmark, where, row)
    joined = ", ".join(str(v).strip() for v in values)
    if joined.count("$") % 2 == 0:
        joined = _DOLLARS.sub(r"\1", joined)
    text = str(first(row, benchmark.question) or "")
    if row.get("context"):
        text = f"{str(row['context']).strip()}\n\n{text}"
    unit = str(row.get("unit") or "").strip()
    if unit and unit.strip("$") not in text:
        text += f"\n\nGive the answer in {unit}."
    return _kept(benchmark, {**row, "context": None}) | {"question": text, "answers": [joined]}


def musique(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """The publisher's full set has questions that its paragraphs cannot answer."""
    return "unanswerable question left out" if row.get("answerable") is False else plain(benchmark, where, row)


def gaia(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """Questions with an attachment need tools for files; the test split has no answers."""
    if str(row.get("file_name") or "").strip():
        return "question with an attachment left out"
    if str(first(row, benchmark.answers)).strip() == "?":
        return "question without a published answer left out"
    return plain(benchmark, where, row)


def lcb(benchmark: Benchmark, where: str, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """LiveCodeBench's own rows, or a file of ours with `tests`."""
    if "question_content" not in row:
        return plain(benchmark, where, row)
    if not str(row["question_content"] or "").strip():
        return "blank question left out"
    return _kept(benchmark, row) | {
        "question": livecodebench.question(row),
        "tests": livecodebench.packed_tests(where, row),
    }
