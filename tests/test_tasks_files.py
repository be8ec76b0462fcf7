"""Questions from files: cleaning, splits, graders, and errors that name the line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentropy.cli import main
from agentropy.errors import UserError
from agentropy.tasks import load_tasks
from agentropy.tasks.files import FileTasks, repair


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def load(spec: str, seed: int = 0) -> FileTasks:
    source = load_tasks(spec, seed=seed)
    assert isinstance(source, FileTasks)
    return source


def test_rows_are_cleaned_and_counted(tmp_path: Path) -> None:
    source = load(
        write(
            tmp_path / "q.jsonl",
            {"id": "a", "question": "What is 6*7?", "answers": ["42", " 42 "]},
            {"question": "what is  6*7?", "answers": ["43"]},
            "",
            {"question": "Two?", "answer": 2},
            {"question": "Blank?", "answers": ["", "  "]},
            {"question": "   ", "answers": ["1"]},
            {"question": "Half?", "answers": ["\x0crac{1}{2}"]},
            {"question": "Box \x08oxed{3}?", "answers": ["3"]},
            {"question": "Bad \x01 char", "answers": ["3"]},
        )
    )
    assert [(t.question, t.answers) for t in source.tasks] == [
        ("What is 6*7?", ("42",)),
        ("Two?", ("2",)),
        ("Half?", ("\\frac{1}{2}",)),
        ("Box \\boxed{3}?", ("3",)),
    ]
    assert source.tasks[0].id == "a"
    assert source.notes == {
        "repeated question dropped": 1,
        "blank answer dropped": 1,
        "blank question dropped": 1,
        "lost backslash repaired": 2,
        "control characters: dropped": 1,
    }
    assert {t.grader for t in source.tasks} == {"math"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x", "answers": ["1"]', "line 2: not JSON"),
        ("[1]", "line 2: a list"),
        ('{"answers": ["1"]}', "line 2: no question"),
        ('{"question": 5, "answers": ["1"]}', "line 2: no text in key 'question', but 5"),
        ('{"question": "x"}', "line 2: no answer"),
        ('{"question": "x", "answers": ["1"], "grader": "vibes"}', "line 2: no grader 'vibes'"),
        ('{"question": "x", "answers": [{"a": 1}]}', "line 2: an answer is"),
        ('{"question": "x", "tests": 3}', "line 2: 'tests' is a list"),
        ('{"question": ' + "[" * 5000, "line 2: not JSON"),
        ('{"question": "x", "answer": ' + "9" * 6000 + "}", "line 2: not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    spec = write(tmp_path / "q.jsonl", {"question": "ok?", "answers": ["1"]}, line)
    with pytest.raises(UserError, match=message) as caught:
        load_tasks(spec)
    assert "q.jsonl" in str(caught.value)


def test_half_a_surrogate_pair_drops_the_row(tmp_path: Path) -> None:
    spec = write(tmp_path / "q.jsonl", {"question": "ok?", "answers": ["1"]}, '{"question": "\\ud800", "answer": "1"}')
    source = load_tasks(spec)
    assert [t.question for t in source.tasks] == ["ok?"]
    assert source.notes == {"control characters: dropped": 1}


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(b'{"question": "x", "answers": ["1"]}\n{"question": "\xff"}\n')
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        load_tasks(str(tmp_path / "q.jsonl"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing.jsonl", "no file 'nothing.jsonl'"),
        ("reasoning-gym:no_such_task", "no task 'no_such_task'"),
        ("x.jsonl?colour=red", "tasks option 'colour=red'"),
        ("x.jsonl?grader=vibes", "no grader 'vibes'"),
    ],
)
def test_wrong_specs_are_told(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tasks(spec)


def test_empty_files_and_odd_suffixes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no usable question \(1 times: blank answer dropped\)"):
        load_tasks(write(tmp_path / "q.jsonl", {"question": "x", "answers": []}))
    with pytest.raises(UserError, match="no usable question"):
        load_tasks(write(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="cannot tell"):
        load_tasks(write(tmp_path / "q.csv", "a,b"))
    with pytest.raises(UserError, match="not a Parquet file"):
        load_tasks(write(tmp_path / "q.parquet", "a,b"))


def test_splits_by_hash_are_disjoint_stable_and_whole(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}+1?", "answers": [str(i + 1)]} for i in range(400)]
    source = load(write(tmp_path / "q.jsonl", *rows))
    shuffled = load(write(tmp_path / "r.jsonl", *reversed(rows)), seed=5)
    counts = Counter(source.splits)
    assert sum(counts.values()) == 400
    assert 30 < counts["test"] < 90
    assert 5 < counts["validation"] < 40
    assert {t.question for t in source.split("test")} == {t.question for t in shuffled.split("test")}
    epoch = [source.train(i).question for i in range(counts["train"])]
    assert len(set(epoch)) == counts["train"]
    assert not set(epoch) & {t.question for t in source.split("test")}
    again = [source.train(counts["train"] + i).question for i in range(counts["train"])]
    assert set(again) == set(epoch)
    assert again != epoch


def test_named_splits_win_and_small_files_have_all_three(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{i}?", "answers": ["1"], "split": s} for i, s in enumerate(["train", "dev", "test", "test"])
    ]
    assert Counter(load(write(tmp_path / "q.jsonl", *rows)).splits) == {"train": 1, "validation": 1, "test": 2}
    rows = [{"question": f"q{i}?", "answers": ["1"]} for i in range(4)]
    assert Counter(load(write(tmp_path / "r.jsonl", *rows)).splits) == {"train": 2, "validation": 1, "test": 1}


def test_columns_and_grader_can_be_chosen(tmp_path: Path) -> None:
    spec = write(tmp_path / "q.jsonl", {"frage": "Hauptstadt?", "antwort": "Rom"}, {"frage": "Zahl?", "antwort": "3"})
    source = load(f"{spec}?question=frage&answer=antwort&grader=em")
    assert [(t.question, t.answers, t.grader) for t in source.tasks] == [
        ("Hauptstadt?", ("Rom",), "em"),
        ("Zahl?", ("3",), "em"),
    ]
    with pytest.raises(UserError, match="column 'fragen'"):
        load_tasks(f"{spec}?question=fragen")


def test_gsm8k_solutions_end_with_the_answer(tmp_path: Path) -> None:
    source = load(write(tmp_path / "q.jsonl", {"question": "How many?", "answer": "48/2 = 24\n48+24 = 72\n#### 72"}))
    assert source.tasks[0].answers == ("72",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x08oxed{1}", "\\boxed{1}"),
        ("\x0crac12", "\\frac12"),
        ("3\times 4", "3\\times 4"),
        ("a\tb", "a\tb"),
        ("line\nrow", "line\nrow"),
    ],
)
def test_repair(text: str, expected: str) -> None:
    assert repair(text) == expected


def test_verl_parquet(shared_dir: Path) -> None:
    source = load(str(shared_dir / "data" / "verl_schema_sample.parquet"))
    assert len(source.tasks) == 180
    first = source.tasks[0]
    assert (first.question, first.answers, first.grader) == (
        "Who is older, William Henry Rodes Green or Eleanor Of Lancaster?",
        ("Eleanor Of Lancaster",),
        "f1",
    )
    assert len(source.split("test")) > 5
    assert source.train(0).question not in {t.question for t in source.split("test")}


@pytest.mark.parametrize(
    ("name", "count", "grader"),
    [("math500", 345, "math"), ("gsm8k_test", 926, "math"), ("hotpotqa_qa", 497, "f1"), ("mbpp_test", 341, "code")],
)
def test_real_question_files(shared_dir: Path, name: str, count: int, grader: str) -> None:
    source = load(str(shared_dir / "data" / f"{name}.jsonl"))
    assert len(source.tasks) == count
    assert {t.grader for t in source.tasks} == {grader}
    assert all(t.answers or t.row["tests"] for t in source.tasks)


def test_reasoning_gym_is_endless_and_split() -> None:
    source = load_tasks("reasoning-gym:chain_sum")
    assert source.train(3) == load_tasks("reasoning-gym:chain_sum").train(3)
    assert source.train(3).grader == "math"
    assert not {source.train(i).question for i in range(50)} & {t.question for t in source.split("test")}


def test_hugging_face_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", *({"problem": f"{i}?", "answer": str(i)} for i in range(5)))
    source = load(f"hf:{folder}:train")
    assert [(t.question, t.answers) for t in source.tasks] == [(f"{i}?", (str(i),)) for i in range(5)]
    with pytest.raises(UserError, match="cannot load the data set"):
        load_tasks(f"hf:{tmp_path / 'absent'}:train")


def test_check_lists_golds_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(
        tmp_path / "good.jsonl", {"question": "6*7?", "answers": ["42"]}, {"question": "Half?", "answers": ["\\frac12"]}
    )
    assert main(["tasks", "check", good, "arithmetic", "facts", "--limit", "300"]) == 0
    out = capsys.readouterr().out
    assert "good.jsonl: 2 questions, 2 golds, 0 fail their own grader" in out
    assert "facts: 300 questions, 300 golds, 0 fail" in out
    bad = write(tmp_path / "bad.jsonl", {"id": "b1", "question": "6*7?", "answers": ["seven"], "grader": "choice"})
    assert main(["tasks", "check", bad]) == 1
    assert "b1 (choice)" in capsys.readouterr().out


def test_show_prints_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "show", "facts", "--n", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("facts:")
    assert out.count("->") == 3
