"""The benchmarks, one declaration each. docs/evaluation.md says where each copy comes from."""

from __future__ import annotations

from collections.abc import Mapping

from agentropy.evaluation.benchmarks import rows
from agentropy.evaluation.benchmarks.base import CODE, SHORT, Benchmark, Source

_AIME = ("answers", "answer", "Answer", "solution")
_LCB = "livecodebench/code_generation_lite"
_LCB_FILES = ("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl")


def _lcb(first: int, last: int) -> Source:
    return Source(_LCB, "test", files=_LCB_FILES[first - 1 : last])


def _gaia(config: str) -> Source:
    return Source("gaia-benchmark/GAIA", "validation", config)


_ALL = (
    Benchmark(
        "aime24",
        "AIME 2024",
        Source("HuggingFaceH4/aime_2024", "train"),
        answers=_AIME,
        ids=("id", "ID"),
        adapt=rows.aime,
    ),
    Benchmark("aime25", "AIME 2025", Source("math-ai/aime25", "test"), answers=_AIME, adapt=rows.aime),
    Benchmark(
        "math500",
        "MATH-500",
        Source("HuggingFaceH4/MATH-500", "test"),
        ids=("id", "unique_id"),
        group=("level",),
    ),
    Benchmark("amc23", "AMC 2023", Source("math-ai/amc23", "test"), adapt=rows.amc),
    Benchmark(
        "olympiadbench",
        "OlympiadBench",
        Source("Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP"),
        answers=("answers", "final_answer", "answer"),
        group=("subfield", "subject"),
        adapt=rows.olympiadbench,
        note="text-only mathematics in English",
    ),
    Benchmark(
        "minerva",
        "Minerva Math",
        Source("math-ai/minervamath", "test"),
        ids=("id", "idx"),
        group=("subject", "type"),
    ),
    Benchmark("gsm8k", "GSM8K", Source("openai/gsm8k", "test", "main"), adapt=rows.gsm8k),
    Benchmark(
        "hotpotqa",
        "HotpotQA",
        Source("hotpotqa/hotpot_qa", "validation", "distractor"),
        grader="f1",
        ids=("id", "_id"),
        group=("type",),
        system=SHORT,
        tools=("search",),
    ),
    Benchmark(
        "2wiki",
        "2WikiMultihopQA",
        Source("framolfese/2WikiMultihopQA", "validation"),
        grader="f1",
        aliases=("answer_aliases", "aliases"),
        ids=("id", "_id"),
        group=("type",),
        system=SHORT,
        tools=("search",),
        note="a copy in plain Parquet; the publisher's own on the hub is a script, which the library no longer runs",
    ),
    Benchmark(
        "musique",
        "MuSiQue",
        Source("dgslibisey/MuSiQue", "validation"),
        grader="f1",
        aliases=("answer_aliases",),
        adapt=rows.musique,
        system=SHORT,
        tools=("search",),
        note="a copy of the publisher's answerable part, which is on no hub of theirs",
    ),
    Benchmark(
        "bamboogle",
        "Bamboogle",
        Source("chiayewken/bamboogle", "test"),
        grader="f1",
        system=SHORT,
        tools=("search",),
        note="a copy of the publisher's table, which is on no hub of theirs",
    ),
    Benchmark(
        "gaia",
        "GAIA",
        _gaia("2023_all"),
        grader="gaia",
        answers=("answers", "Final answer", "answer"),
        ids=("id", "task_id"),
        group=("Level", "level"),
        adapt=rows.gaia,
        variants={f"level{n}": _gaia(f"2023_level{n}") for n in (1, 2, 3)},
        system=SHORT + " Write numbers in digits, without units unless they are asked for.",
        tools=("web-search", "read-page", "python"),
        note="gated: accept its terms on the hub; questions with attachments are left out and counted",
    ),
    Benchmark(
        "webwalker",
        "WebWalkerQA",
        Source("callanwu/WebWalkerQA", "main"),
        grader="f1",
        group=("info.difficulty_level", "Info.Difficulty_Level", "lang"),
        system="Answer the question, in its language, in one short sentence.",
        tools=("web-search", "read-page"),
        note="its authors grade with a language model; F1 is stricter",
    ),
    Benchmark(
        "livecodebench",
        "LiveCodeBench",
        _lcb(1, 6),
        grader="code",
        question=("question_content", "question"),
        ids=("id", "question_id"),
        group=("difficulty",),
        adapt=rows.lcb,
        variants={f"release_v{n}": _lcb(1, n) for n in range(1, 7)} | {f"v{n}": _lcb(n, n) for n in range(1, 7)},
        system=CODE,
        hint=False,
        note="release_v6; `livecodebench:release_v5` is an older release, `livecodebench:v6` what a release added",
    ),
)

BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for b in _ALL}
