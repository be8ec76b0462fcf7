"""Benchmarks by name: each declaration on a small file in its publisher's schema, and on the real files beside us."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.evaluation.benchmarks import livecodebench, load
from agentropy.evaluation.benchmarks.base import CODE, MATHS, Source
from agentropy.evaluation.benchmarks.load import find_benchmark, load_benchmark
from agentropy.evaluation.benchmarks.table import BENCHMARKS
from agentropy.evaluation.config import filled, make_config
from agentropy.evaluation.grading.qa import grade_qa
from agentropy.evaluation.score import Scorer, problem
from agentropy.evaluation.suites import Suite, make_suites
from agentropy.tasks.base import Task
from agentropy.trajectory import ToolCall

HOTPOT_HUB = {
    "id": "5a7",
    "question": "Were Scott and Ed of the same nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": {"title": ["Scott", "Ed"], "sent_id": [0, 0]},
    "context": {"title": ["Scott", "Ed"], "sentences": [["Scott is American.", " He films."], ["Ed was American."]]},
}
# What the publisher ships, then: the answers we accept, the kind, and the number of paragraphs.
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...], str, int]] = {
    "aime24": (
        {"id": 60, "problem": "P?", "solution": "s", "answer": "025", "url": "u", "year": "2024"},
        ("25",),
        "aime24",
        0,
    ),
    "aime25": ({"problem": "P?", "answer": "070", "id": "0"}, ("70",), "aime25", 0),
    "math500": (
        {
            "problem": "P?",
            "solution": "so \\boxed{3}",
            "answer": "\\frac{1}{2}",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/a/1.json",
        },
        ("\\frac{1}{2}",),
        "math500/2",
        0,
    ),
    "amc23": ({"id": 0, "question": "Q?", "answer": "27.0", "url": "u"}, ("27",), "amc23", 0),
    "olympiadbench": (
        {
            "id": 1606,
            "question": "Find all $x$.",
            "solution": ["…"],
            "final_answer": ["$2$,$-1$"],
            "context": None,
            "image_1": None,
            "modality": "Text-only",
            "difficulty": "Competition",
            "is_multiple_answer": True,
            "unit": "cm",
            "answer_type": "Numerical",
            "error": None,
            "question_type": "Open-ended",
            "subfield": "Algebra",
            "subject": "Math",
            "language": "English",
        },
        ("2,-1",),
        "olympiadbench/Algebra",
        0,
    ),
    "minerva": ({"question": "How bright?", "answer": "1.6e-3"}, ("1.6e-3",), "minerva", 0),
    "gsm8k": ({"question": "Q?", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"}, ("1,024",), "gsm8k", 0),
    "hotpotqa": (HOTPOT_HUB, ("yes",), "hotpotqa/comparison", 2),
    "2wiki": (
        {
            "_id": "13f5",
            "type": "bridge",
            "question": "Q?",
            "context": [["T", ["One.", "Two."]]],
            "supporting_facts": [["T", 0]],
            "evidences": [["a", "b", "c"]],
            "answer": "London",
            "answer_aliases": ["Londinium", "London"],
        },
        ("London", "Londinium"),
        "2wiki/bridge",
        1,
    ),
    "musique": (
        {
            "id": "2hop__1_2",
            "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "Text.", "is_supporting": True}],
            "question": "Q?",
            "question_decomposition": [],
            "answer": "Li Ye",
            "answer_aliases": ["Li Jie"],
            "answerable": True,
        },
        ("Li Ye", "Li Jie"),
        "musique",
        1,
    ),
    "bamboogle": ({"Question": "Who?", "Answer": "James Madison"}, ("James Madison",), "bamboogle", 0),
    "gaia": (
        {
            "task_id": "c61d",
            "Question": "How many?",
            "Level": "1",
            "Final answer": "17",
            "file_name": "",
            "file_path": "",
            "Annotator Metadata": {"Steps": "1."},
        },
        ("17",),
        "gaia/1",
        0,
    ),
    "webwalker": (
        {
            "question": "When?",
            "answer": "In May.",
            "root_url": "https://x",
            "info": {"hop": "multi", "lang": "en", "difficulty_level": "medium"},
        },
        ("In May.",),
        "webwalker/medium",
        0,
    ),
}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.mark.parametrize("name", [n for n in BENCHMARKS if n != "livecodebench"])
def test_a_row_in_its_publishers_schema(name: str, tmp_path: Path) -> None:
    row, answers, kind, paragraphs = ROWS[name]
    (task,) = load_benchmark(name, write(tmp_path / "rows.jsonl", [row])).tasks
    assert task.answers == answers
    assert task.kind == kind
    assert task.grader == BENCHMARKS[name].grader
    assert task.id.startswith(name)
    assert len(task.row.get("context", ())) == paragraphs


@pytest.mark.parametrize("name", [n for n in BENCHMARKS if n != "livecodebench"])
def test_a_row_in_our_schema(name: str, tmp_path: Path) -> None:
    row = {"id": "x", "question": "Q?", "answers": ["7"], "level": "2"}
    (task,) = load_benchmark(name, write(tmp_path / "rows.jsonl", [row])).tasks
    assert (task.id, task.question, task.answers) == (f"{name}-x", "Q?", ("7",))


def test_publishers_files_of_one_array(tmp_path: Path) -> None:
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    row = {"_id": "5a8", "answer": "no", "question": "Q?", "context": [["T", ["A ", "b."]]], "type": "bridge"}
    path.write_text(json.dumps([row, {**row, "_id": "5a9", "question": "R?"}], indent=1))
    tasks = load_benchmark("hotpotqa", str(path)).tasks
    assert [t.id for t in tasks] == ["hotpotqa-5a8", "hotpotqa-5a9"]
    assert tasks[0].row["context"] == [{"title": "T", "text": "A b."}]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist([HOTPOT_HUB]), tmp_path / "v.parquet")
    (task,) = load_benchmark("hotpotqa", str(tmp_path / "v.parquet")).tasks
    assert task.row["context"][0] == {"title": "Scott", "text": "Scott is American. He films."}


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    gaia = ROWS["gaia"][0]
    rows = [gaia, {**gaia, "file_name": "a.xlsx"}, {**gaia, "Question": "R?", "Final answer": "?"}]
    found = load_benchmark("gaia", write(tmp_path / "g.jsonl", rows))
    assert len(found.tasks) == 1
    assert dict(found.notes) == {
        "question with an attachment left out": 1,
        "question without a published answer left out": 1,
    }
    musique = ROWS["musique"][0]
    found = load_benchmark(
        "musique", write(tmp_path / "m.jsonl", [musique, {**musique, "question": "?", "answerable": False}])
    )
    assert dict(found.notes) == {"unanswerable question left out": 1}
    olympiad = ROWS["olympiadbench"][0]
    found = load_benchmark("olympiadbench", write(tmp_path / "o.jsonl", [olympiad, {**olympiad, "image_1": "data"}]))
    assert dict(found.notes) == {"question with an image left out": 1}
    assert found.tasks[0].question == "Find all $x$.\n\nGive the answer in cm."


def test_limit_stops_reading(tmp_path: Path) -> None:
    rows = [{"question": f"Q{i}?", "answers": ["1"]} for i in range(5)]
    path = tmp_path / "g.jsonl"
    write(path, rows)
    with path.open("a") as file:
        file.write("no JSON\n")
    assert [t.question for t in load_benchmark("gsm8k", str(path), limit=2).tasks] == ["Q0?", "Q1?"]
    with pytest.raises(UserError, match=r"line 6: not JSON"):
        load_benchmark("gsm8k", str(path))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("aime24", {"problem": "P?", "answer": "1000"}, "no integer from 0 to 999"),
        ("aime24", {"problem": "P?", "answer": "-5"}, "no integer from 0 to 999"),
        ("aime25", {"problem": "P?", "answer": "\\frac12"}, "no integer from 0 to 999"),
        ("gsm8k", {"question": "Q?", "answer": "They have 5 apples."}, "neither in '#### NUMBER'"),
        ("gsm8k", {"question": "Q?"}, "no answer; gsm8k needs a column 'answers' or 'answer'"),
        ("hotpotqa", {"answer": "yes"}, "no question; hotpotqa needs a column"),
        ("math500", {"problem": "P?", "answer": {"a": 1}}, "an answer is a text"),
    ],
)
def test_rows_that_cannot_be_are_named(name: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1") as caught:
        load_benchmark(name, write(tmp_path / "rows.jsonl", [row]))
    assert message in str(caught.value)


def test_boxed_solutions_of_aime(tmp_path: Path) -> None:
    row = {"id": 0, "problem": "P?", "solution": "\\boxed{204}", "url": "u"}
    assert load_benchmark("aime24", write(tmp_path / "a.jsonl", [row])).tasks[0].answers == ("204",)


def test_names_that_are_none() -> None:
    with pytest.raises(UserError, match="did you mean gsm8k"):
        find_benchmark("gsm9k")
    with pytest.raises(UserError, match="no variant 'v9'; its variants: release_v1"):
        find_benchmark("livecodebench:v9")
    with pytest.raises(UserError, match="no variant 'x'; its variants: none"):
        find_benchmark("gsm8k:x")
    with pytest.raises(UserError, match=r"no file 'nowhere\.jsonl'"):
        load_benchmark("gsm8k", "nowhere.jsonl")


def test_without_a_hub_the_way_out_is_named() -> None:
    with pytest.raises(
        UserError, match=r"out of reach here; get the file elsewhere and name it with --data gsm8k=FILE"
    ):
        load_benchmark("gsm8k")  # HF_HUB_OFFLINE is set for the tests


def test_releases_of_livecodebench() -> None:
    files = {name: len(source.files) for name, source in BENCHMARKS["livecodebench"].variants.items()}
    assert files["release_v1"] == 1
    assert files["release_v6"] == len(BENCHMARKS["livecodebench"].source.files) == 6
    assert BENCHMARKS["livecodebench"].variants["v5"].files == ("test5.jsonl",)


FILES = {
    "aime24": "aime24",
    "aime25": "aime25",
    "math500": "math500",
    "amc23": "amc23",
    "olympiadbench": "olympiadbench",
    "minerva": "minerva_math",
    "gsm8k": "gsm8k_test",
    "hotpotqa": "hotpotqa_ctx",
    "2wiki": "2wiki_ctx",
    "musique": "musique_qa",
    "bamboogle": "bamboogle",
    "webwalker": "webwalkerqa",
    "livecodebench": "code_contests_stdio",
}


@pytest.mark.parametrize("name", FILES)
def test_real_files(name: str, shared_dir: Path) -> None:
    path = shared_dir / "data" / f"{FILES[name]}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    found = load_benchmark(name, str(path))
    lines = len(path.read_bytes().splitlines())
    assert len(found.tasks) == lines
    assert not found.notes
    assert len({t.id for t in found.tasks}) == lines


# LiveCodeBench


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def lcb_row(public: Any, private: str, name: str | None = None, starter: str = "") -> dict[str, Any]:
    return {
        "question_title": "T",
        "question_content": "Add.",
        "platform": "leetcode",
        "question_id": "3000",
        "contest_id": "c",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": name} if name else {}),
    }


STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
MORE = [{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]
CALLS = [{"input": '[1, 2]\n"x"', "output": '[[1, "x"], [2, "x"]]', "testtype": "functional"}]
STARTER = "class Solution:\n    def pair(self, nums: List[int], s: str) -> List[List]:\n        "


def lcb_task(row: dict[str, Any], tmp_path: Path) -> Task:
    (task,) = load_benchmark("livecodebench", write(tmp_path / "lcb.jsonl", [row])).tasks
    return task


def scores(task: Task, programs: Sequence[str]) -> list[float | None]:
    async def all_of_them() -> list[float | None]:
        scorer = Scorer()
        try:
            return [await scorer(task, p) for p in programs]
        finally:
            await scorer.close()

    return asyncio.run(all_of_them())


def test_livecodebench_stdin(tmp_path: Path) -> None:
    task = lcb_task(lcb_row(STDIN, packed(MORE)), tmp_path)
    assert (task.id, task.kind, task.grader) == ("livecodebench-3000", "livecodebench/easy", "code")
    assert task.question.endswith("Read the input from stdin and print the answer to stdout.")
    assert len(json.loads(problem(task))["tests"]) == 2
    right = "from __future__ import annotations\nprint(sum(map(int, input().split())))"
    assert scores(task, [f"Here:\n```python\n{right}\n```", "print(3)"]) == [1.0, 0.0]


def test_livecodebench_functions(tmp_path: Path) -> None:
    task = lcb_task(lcb_row([], packed(CALLS), "pair", STARTER), tmp_path)
    assert "```python\nclass Solution:" in task.question
    right = STARTER + "return [(n, s) for n in nums]"
    wrong = STARTER + "return [[n, 'y'] for n in nums]"
    plain = "def pair(nums, s):\n    return [[n, s] for n in nums]"
    assert scores(task, [right, wrong, plain, "import os; os._exit(0)"]) == [1.0, 0.0, 1.0, 0.0]


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode(), "which is no string; it was not loaded"),
        (base64.b64encode(zlib.compress(pickle.dumps(["a", "b"]))).decode(), "which is no string"),
        (base64.b64encode(zlib.compress(pickle.dumps("no JSON"))).decode(), "not JSON"),
        (base64.b64encode(zlib.compress(b"\x80\x04X")).decode(), "a broken pickle"),
        (base64.b64encode(zlib.compress(pickle.dumps("x" * 100))[:-8]).decode(), "cut off"),
        (base64.b64encode(b"not zlib").decode(), "neither JSON nor packed JSON"),
        ("%%%", "neither JSON nor packed JSON"),
        ("", "there are none"),
    ],
)
def test_tests_that_are_no_tests_are_refused(
    private: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="line 1: the tests cannot be read") as caught:
        lcb_task(lcb_row([], private), tmp_path)
    assert message in str(caught.value)
    assert "unpickled" not in capsys.readouterr().out


def test_a_bomb_of_tests_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(livecodebench, "MAX_BYTES", 1 << 16)
    bomb = base64.b64encode(
        zlib.compress(pickle.dumps(json.dumps([{"input": "0" * (1 << 20), "output": ""}])))
    ).decode()
    with pytest.raises(UserError, match="more than 0 MiB"):
        lcb_task(lcb_row([], bomb), tmp_path)


def test_a_functional_test_without_its_function(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the function's name is None"):
        lcb_task(lcb_row([], packed(CALLS)), tmp_path)
    with pytest.raises(UserError, match="the function's name is 'f\\(\\)'"):
        lcb_task(lcb_row([], packed(CALLS), "f()"), tmp_path)


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("17", "17.0", True),
        ("17", "$17", True),
        ("17", "17 books", False),
        ("1000", "1,000", True),
        ("0.5", "50%", False),
        ("a, b", "A,B", True),
        ("a, b", "b, a", False),
        ("a, b", "a", False),
        ("3; 4.0", "3, 4", True),
        ("St. Petersburg", "st petersburg", True),
        ("Saint Petersburg", "St. Petersburg", False),
        ("nan", "NaN.", True),
    ],
)
def test_quasi_exact_match(gold: str, answer: str, same: bool) -> None:
    assert grade_qa(answer, [gold], "gaia").correct is same


def test_the_hubs_rows_go_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    from agentropy.policies import loading

    monkeypatch.setattr(loading, "hub_reachable", lambda: True)
    folder = tmp_path / "copy"
    folder.mkdir()
    write(folder / "test.jsonl", [{"question": "Q?", "answer": "so\n#### 5"}, {"question": "R?", "answer": "#### 6"}])
    copy = replace(BENCHMARKS["gsm8k"], source=Source(str(folder), "test"))
    monkeypatch.setattr(load, "BENCHMARKS", {"gsm8k": copy})
    assert [t.answers for t in load_benchmark("gsm8k", limit=1).tasks] == [("5",)]
    gone = replace(copy, source=Source(str(tmp_path / "gone"), "test"))
    monkeypatch.setattr(load, "BENCHMARKS", {"gsm8k": gone})
    with pytest.raises(UserError, match=r"cannot load .*gone from the Hugging Face hub: .*--data gsm8k=FILE"):
        load_benchmark("gsm8k")


# How they are asked


def suites(**values: Any) -> list[Suite]:
    return make_suites(filled(make_config({"model": "m", **values})))


def test_search_takes_the_questions_own_paragraphs(tmp_path: Path) -> None:
    (suite,) = suites(benchmarks=["hotpotqa"], data={"": write(tmp_path / "h.jsonl", [HOTPOT_HUB])})
    assert [s["function"]["name"] for s in suite.toolbox.specs] == ["search"]

    async def search() -> str:
        session, _ = await suite.toolbox.open({}, 0)
        (result,) = await session.call([ToolCall("search", {"query": "Ed"})])
        return result.content

    assert "Ed was American." in asyncio.run(search())
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Ed", "text": "From the corpus."}) + "\n")
    (suite,) = suites(benchmarks=["hotpotqa"], data={"hotpotqa": str(tmp_path / "h.jsonl")})
    assert "From the corpus." in asyncio.run(search())


def test_prompts_and_tools_are_the_benchmarks_unless_told_otherwise(tmp_path: Path) -> None:
    file = write(
        tmp_path / "g.jsonl",
        [{"id": 1, "question": "Q?", "answers": ["1"]}, {"id": 1, "question": "R?", "answers": ["2"]}],
    )
    maths, code = suites(benchmarks=["gsm8k", "livecodebench"], data={"gsm8k": file, "livecodebench": file}, tools=[])
    assert [t.id for t in maths.tasks] == ["gsm8k-1", "gsm8k-1#2"]  # ids that are none
    assert (maths.system, maths.hint, maths.exact, maths.vote) == (MATHS, True, False, True)
    assert (code.system, code.hint, code.vote) == (CODE, False, False)
    assert maths.toolbox.specs == []
    (own,) = suites(benchmarks=["gsm8k"], data={"": file}, system="Think.")
    assert own.system == "Think."
    assert [s["function"]["name"] for s in own.toolbox.specs] == ["python"]


def test_all_questions_of_a_file_or_those_for_the_test(tmp_path: Path) -> None:
    file = write(tmp_path / "g.jsonl", [{"question": f"Q{i}?", "answers": ["1"]} for i in range(40)])
    (whole,) = suites(tasks=file)
    (test,) = suites(tasks=file, split="test")
    assert len(whole.tasks) == 40
    assert 0 < len(test.tasks) < 20
    assert whole.fingerprint != test.fingerprint
    assert suites(tasks=file)[0].fingerprint == whole.fingerprint
