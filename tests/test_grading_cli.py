"""`agentropy grade`: one answer, files of rows, what it says about wrong input, and the known cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentropy.cli import build_parser
from agentropy.errors import UserError


def grade(*arguments: str) -> int:
    args = build_parser().parse_args(["grade", *arguments])
    return int(args.run(args))


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def verdicts(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert grade("--gold", "1/2", "--prediction", "so \\boxed{0.5}") == 0
    assert verdicts(capsys) == [{"correct": True, "score": 1.0, "reason": "equal_exact", "extracted": "0.5"}]
    assert (
        grade(
            "--kind", "qa", "--metric", "f1", "--gold", "Boston", "--gold", "New York City", "--prediction", "New York"
        )
        == 0
    )
    (verdict,) = verdicts(capsys)
    assert verdict["score"] == pytest.approx(0.8)
    assert verdict["correct"] is False


def test_explain_says_what_was_read_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert grade("--gold", "2x+2", "--prediction", "\\boxed{3} no, \\boxed{2(x+1)}", "--explain") == 0
    text = capsys.readouterr().out
    assert "correct, score 1 (equal_symbolic)" in text
    assert "answer read: 2(x+1)" in text
    assert "2x+2" in text


def test_strict_reads_boxes_only(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Let me see. So the answer is 7."
    assert grade("--gold", "7", "--prediction", text) == 0
    assert grade("--gold", "7", "--prediction", text, "--strict") == 0
    lenient, strict = verdicts(capsys)
    assert lenient["correct"] is True
    assert strict["correct"] is False


def test_rows_come_out_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = [
        {"id": "slow", "kind": "code", "gold": ["7"], "prediction": "import time; time.sleep(0.5); print(7)"},
        {"kind": "math", "gold": "x+1", "prediction": "\\boxed{1+x}"},
        "",
        {"kind": "qa", "gold": ["a"], "prediction": "b", "metric": "em"},
        {"kind": "choice", "gold": ["B"], "prediction": "(B)"},
        {"kind": "math", "gold": [7], "prediction": 7},
        {"kind": "code", "gold": ["3\n"], "prediction": "print(int(input())+1)", "stdin": "2\n"},
        {"kind": "math", "gold": ["\\frac{1}{"], "prediction": "\\boxed{1}"},
    ]
    assert grade("--jsonl", write_rows(tmp_path / "rows.jsonl", rows)) == 0
    found = verdicts(capsys)
    assert [v["correct"] for v in found] == [True, True, False, True, True, True, None]
    assert found[0]["id"] == "slow"
    assert [v["reason"] for v in found][-1] == "ungradable"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{bad", r"rows.jsonl, line 3: not JSON"),
        ("[" * 100_000, r"line 3: not JSON"),
        ("[1]", r"line 3: a row must be a JSON object"),
        ({"kind": "art", "gold": ["1"], "prediction": "1"}, r"line 3: unknown kind 'art'"),
        ({"kind": "qa", "gold": ["1"], "prediction": "1", "metric": "bleu"}, r"line 3: unknown metric 'bleu'"),
        ({"kind": "math", "gold": [], "prediction": "1"}, r"line 3: 'gold'"),
        ({"kind": "math", "gold": ["1"]}, r"line 3: 'prediction'"),
        ({"kind": "math", "gold": ["1"], "prediction": "1", "time_limit_s": -1}, r"line 3: 'time_limit_s'"),
        ({"kind": "code", "gold": ["1"], "prediction": "1", "stdin": 5}, r"line 3: 'stdin'"),
    ],
)
def test_a_broken_row_is_named_and_those_before_it_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, message: str
) -> None:
    good = {"kind": "math", "gold": ["1"], "prediction": "\\boxed{1.0}"}
    with pytest.raises(UserError, match=message):
        grade("--jsonl", write_rows(tmp_path / "rows.jsonl", [good, good, row, good]))
    assert [v["correct"] for v in verdicts(capsys)] == [True, True]


def test_a_byte_order_mark_is_no_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"gold": "1", "prediction": "1"}\r\n')
    grade("--jsonl", str(tmp_path / "rows.jsonl"))
    assert [v["correct"] for v in verdicts(capsys)] == [True]


def test_wrong_calls(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't read"):
        grade("--jsonl", str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="give --gold"):
        grade("--gold", "1")
    with pytest.raises(UserError, match="leave out"):
        grade("--jsonl", "x", "--gold", "1")
    with pytest.raises(UserError, match="workers"):
        grade("--gold", "1", "--prediction", "1", "--workers", "0")
    (tmp_path / "latin.jsonl").write_bytes(b'{"kind": "\xff"}\n')
    with pytest.raises(UserError, match="UTF-8"):
        grade("--jsonl", str(tmp_path / "latin.jsonl"))


def test_rows_from_a_pipe_are_answered_one_by_one() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "agentropy.cli", "grade", "--jsonl", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        for number in range(3):
            process.stdin.write(
                json.dumps({"kind": "math", "gold": [str(number)], "prediction": f"\\boxed{{{number}}}"}) + "\n"
            )
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["correct"] is True
        process.stdin.close()
        assert process.wait(timeout=30) == 0


def test_known_cases(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shared_dir / "cases" / "graders.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert grade("--jsonl", str(file)) == 0
    found = verdicts(capsys)
    assert len(found) == len(rows) > 100
    differing = [
        (row["id"], verdict)
        for row, verdict in zip(rows, found, strict=True)
        if (verdict["correct"] != row["correct"] if "correct" in row else abs(verdict["score"] - row["score"]) > 1e-6)
    ]
    assert differing == []


def test_every_gold_equals_itself(shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for name in ("math500", "olympiadbench", "amc23", "aime24", "minerva_math"):
        for line in (shared_dir / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            gold = json.loads(line)["answers"]
            rows.append({"kind": "math", "gold": gold, "prediction": f"So \\boxed{{ {gold[0]} }}."})
    assert len(rows) > 900
    assert grade("--jsonl", write_rows(tmp_path / "golds.jsonl", rows)) == 0
    wrong = [row["gold"] for row, verdict in zip(rows, verdicts(capsys), strict=True) if not verdict["correct"]]
    assert wrong == []
