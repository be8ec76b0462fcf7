"""The numbers of an evaluation and of a comparison, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentropy.cli import main
from agentropy.errors import UserError
from agentropy.evaluation.compare import compare, compare_files, most_different
from agentropy.evaluation.records import Record, records_of, same_answer
from agentropy.evaluation.results import pass_levels, summarize
from agentropy.evaluation.summary import evaluation_metrics
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory, write_jsonl
from make_trajectories import trajectory

PLAIN = Record(
    benchmark="b",
    group="g",
    question_id="q",
    trajectory_id="t",
    question="Q?",
    answer="1",
    score=1.0,
    exact=None,
    lost=False,
    stop="answer",
    tokens=10,
    all_tokens=20,
    calls=0,
    valid=0,
    programs=0,
    programs_valid=0,
    lines=0,
    reducing=0,
    estimated=False,
)


def row(question: str, score: float | None, **more: Any) -> Record:
    return replace(PLAIN, question_id=question, question=f"{question}?", score=score, **more)


def test_averages_pass_and_vote() -> None:
    records = [
        row("a", 1.0, answer="7"),
        row("a", 0.0, answer="8"),
        row("a", 1.0, answer="7.0"),
        row("a", 1.0, answer="\\boxed{7}"),
        row("b", 0.0, answer="x"),
        row("b", 1.0, answer="yes"),
        row("b", 0.0, answer="X."),
        row("b", 0.0, answer=None),
    ]
    out = summarize(records, 4)
    assert (out["questions"], out["trajectories"], out["lost"], out["ungraded"]) == (2, 8, 0, 0)
    assert out["avg"]["mean"] == pytest.approx((0.75 + 0.25) / 2)
    assert out["avg"]["low"] == pytest.approx(0.25)
    assert out["avg"]["high"] == pytest.approx(0.75)
    assert out["pass"]["1"]["mean"] == pytest.approx(0.5)
    assert out["pass"]["2"]["mean"] == pytest.approx((1.0 + (1 - 3 / 6)) / 2)  # C(3, 2) / C(4, 2) of b fail
    assert out["pass"]["4"]["mean"] == 1.0
    assert out["majority"]["mean"] == 0.5  # a by 7 three times; b by x twice
    assert out["scores"] == {"a": [1.0, 0.0, 1.0, 1.0], "b": [0.0, 1.0, 0.0, 0.0]}


def test_a_lost_sample_lowers_k_for_its_question_only() -> None:
    records = [
        *(row("a", s) for s in (1.0, 0.0, 0.0, 0.0)),
        row("b", 1.0),
        row("b", 0.0),
        row("b", None, lost=True, stop="error"),
        row("b", None),
        row("c", None, lost=True, stop="error"),
    ]
    out = summarize(records, 4)
    assert (out["questions"], out["lost"], out["ungraded"]) == (3, 2, 1)
    assert (out["questions_without_score"], out["questions_with_fewer_samples"]) == (1, 1)
    assert out["avg"]["mean"] == pytest.approx((0.25 + 0.5) / 2)
    assert out["pass"]["2"]["mean"] == pytest.approx((0.5 + 1.0) / 2)
    assert out["pass"]["4"]["mean"] == 1.0  # b has two samples, one of them right
    assert out["stops"] == {"answer": 7, "error": 2}


def test_training_evaluations_keep_k_too() -> None:
    rows = [trajectory([([1.0], [], [])], s, question=q) for q, s in (("a", 1.0), ("a", 0.0), ("b", 1.0))]
    m = evaluation_metrics([*rows, trajectory([([1.0], [], [])], None, question="b")])
    assert (m["eval/k"], m["eval/pass"]) == (2, 1.0)
    assert m["eval/avg"] == pytest.approx(0.75)


def test_nothing_scored() -> None:
    out = summarize([row("a", None, lost=True)], 2)
    assert out["avg"] is None
    assert out["majority"] is None
    assert out["effective_ratio"] is None


def test_tools_and_lengths() -> None:
    records = [
        row("a", 1.0, tokens=10, calls=2, valid=1, programs=2, programs_valid=1, lines=6, reducing=1),
        row("b", 0.0, tokens=30, calls=0),
        row("c", 1.0, tokens=50, calls=2, valid=2, programs=0, reducing=None),
    ]
    out = summarize(records, 1, vote=False)
    assert out["tokens"]["mean"] == 30
    assert out["calls"]["mean"] == pytest.approx(4 / 3)
    assert out["valid_call_rate"] == 0.75
    assert out["valid_code_rate"] == 0.5
    assert out["code_lines"] == 3.0
    assert out["effective_ratio"] == 0.5  # where entropies are known
    assert out["usage_rate"] == pytest.approx(2 / 3)
    assert out["majority"] is None


def test_exact_match_and_groups() -> None:
    records = [
        row("a", 0.8, exact=0.0, group="x"),
        row("b", 1.0, exact=1.0, group="y"),
        row("c", 0.2, exact=0.0, group="y"),
    ]
    out = summarize(records, 1, exact=True)
    assert out["exact"]["mean"] == pytest.approx(1 / 3)
    assert out["groups"] == {"x": {"questions": 1, "avg": 0.8}, "y": {"questions": 2, "avg": 0.6}}


def test_levels_of_pass() -> None:
    assert pass_levels(1) == [1]
    assert pass_levels(6) == [1, 2, 4, 6]
    assert pass_levels(8) == [1, 2, 4, 8]


def test_what_votes_take_for_the_same() -> None:
    assert same_answer("1,000") == same_answer("1000.0") == same_answer("\\boxed{1000}")
    assert same_answer("0.5") == same_answer("1/2")
    assert same_answer("50%") != same_answer("50")
    assert same_answer("The Cat.") == same_answer("cat")
    assert same_answer("-3") != same_answer("3")


def test_records_of_trajectories() -> None:
    code = Segment("call", (1,), (-0.1,), (0.5,), calls=(ToolCall("python", {"code": "# c\nprint(1)\n\nx = 2"}),))
    result = Segment("result", (2,), results=(ToolResult("1"),))
    last = Segment("reasoning", (3, 4), (-0.1, -0.1), (0.1, 0.1))
    extra = {"benchmark": "gsm8k", "kind": "k", "gold": ["The Beatles", "Beatles"]}
    first = Segment("reasoning", (5,), (-0.1,), (0.9,))
    t = Trajectory("q", "t", "Q?", (first, code, result, last), "\\boxed{beatles}", 1.0, "answer", extra=extra)
    lost = replace(t, score=None, stop="error")
    (a, b) = records_of([t, lost])
    assert (a.benchmark, a.group, a.exact, a.tokens, a.all_tokens) == ("gsm8k", "k", 1.0, 4, 5)
    assert (a.calls, a.valid, a.programs, a.programs_valid, a.lines, a.reducing) == (1, 1, 1, 1, 2, 1)
    assert (b.lost, b.score, b.exact) == (True, None, None)
    unmeasured = replace(t, segments=(replace(first, entropies=None), code, result, last))
    assert next(records_of([unmeasured])).reducing is None


# Comparing


def sided(scores: dict[str, list[float]], **more: Any) -> list[Record]:
    return [row(q, s, **more) for q, row_ in scores.items() for s in row_]


def test_a_difference_by_hand() -> None:
    a = sided({f"q{i}": [0.0, 0.0] for i in range(20)} | {"only": [1.0]})
    b = sided(
        {f"q{i}": [1.0] if i < 15 else [0.0] for i in range(20)} | {"other": [1.0], "more": [0.0]}, calls=1, tokens=30
    )
    (found,) = compare(a, b)
    assert len(found.questions) == 20
    assert (found.only_a, found.only_b, found.text_differs) == (1, 2, 0)
    assert found.differences["score"].mean == pytest.approx(0.75)
    assert found.differences["calls"].mean == 1.0
    assert found.differences["tokens"].mean == 20
    assert found.verdict == "B is better"
    assert compare(b, a)[0].verdict == "B is worse"
    best = most_different(found)[0]
    assert (best.id, best.a, best.b, best.samples_a, best.samples_b) == ("q0", 0.0, 1.0, 2, 1)


def test_no_difference() -> None:
    a = sided({f"q{i}": [float(i % 2)] for i in range(40)})
    b = sided({f"q{i}": [float((i + (i % 4 == 0)) % 2)] for i in range(40)})
    assert compare(a, a)[0].verdict == "no difference can be told"
    assert compare(a, b)[0].differences["score"].mean == pytest.approx(0.25)
    assert compare(sided({"q": [1.0]}), sided({"q": [0.0]}))[0].verdict == "too few questions (1) to tell"


def test_what_cannot_be_compared() -> None:
    a = sided({"q": [1.0], "r": [1.0]})
    other = [replace(r, question="another") if r.question_id == "q" else r for r in a]
    assert compare(a, other)[0].text_differs == 1
    ungraded = [replace(r, score=None) if r.question_id == "q" else r for r in a]
    (found,) = compare(a, ungraded)
    assert (len(found.questions), found.only_a) == (1, 1)
    with pytest.raises(UserError, match="share no question of b"):
        compare(a, sided({"z": [1.0]}))
    two = [*a, *(replace(r, benchmark="c") for r in a)]
    assert [c.benchmark for c in compare(two, a)] == ["b"]
    lost = [replace(r, score=None) if r.benchmark == "b" else r for r in two]
    assert [c.benchmark for c in compare(lost, two)] == ["c"]
    with pytest.raises(UserError, match="share no benchmark: b, c; d"):
        compare(two, [replace(r, benchmark="d") for r in a])


def test_one_benchmark_each_is_compared_under_two_names() -> None:
    a = sided({f"q{i}": [1.0] for i in range(3)})
    assert compare(a, [replace(r, benchmark="all") for r in a])[0].benchmark == "b and all"


def files(tmp_path: Path) -> tuple[Path, Path]:
    def made(names: str, right: str) -> list[Trajectory]:
        return [trajectory([([1.0], [], [])], float(n in right), question=n, name=n) for n in names]

    one = tmp_path / "one"
    one.mkdir()
    write_jsonl(one / "trajectories.jsonl", made("abcdefghijkl", "ab"))
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    write_jsonl(run / "trajectories" / "test-after.jsonl", made("abcdefghijk", "abcdefghijk"))
    write_jsonl(run / "trajectories" / "test-before.jsonl", made("abcdefghijk", "a"))
    (run / "evaluation-before.json").write_text("{}")
    return one, run


def test_sources(tmp_path: Path) -> None:
    one, run = files(tmp_path)
    (found,) = compare_files(str(one), str(run))
    assert (len(found.questions), found.mean_a["score"], found.mean_b["score"]) == (11, pytest.approx(2 / 11), 1.0)
    (found,) = compare_files(str(run / "evaluation-before.json"), str(run / "trajectories" / "test-after.jsonl"))
    assert found.mean_a["score"] == pytest.approx(1 / 11)
    (one / "results.json").write_text("{}")
    assert compare_files(str(one / "results.json"), str(run))[0].mean_a["score"] == pytest.approx(2 / 11)
    with pytest.raises(UserError, match="there is no"):
        compare_files(str(one), str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="name a file of trajectories"):
        compare_files(str(one), str(tmp_path))
    with pytest.raises(UserError, match="the same file"):
        compare_files(str(one), str(one / "trajectories.jsonl"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, run = files(tmp_path)
    assert main(["compare", str(one), str(run), "--questions", "2"]) == 0
    out = capsys.readouterr().out
    assert "11 questions: B is better" in out
    assert "not compared: 1 questions asked of A only" in out
    assert "0.00 of 1" in out
    assert main(["compare", str(one), str(run), "--json", "--questions", "2"]) == 0
    (b,) = json.loads(capsys.readouterr().out)["benchmarks"]
    assert b["differences"]["score"]["excludes_zero"] is True
    assert [q["id"] for q in b["questions"]] == ["c", "d"]
    assert main(["compare", str(one), str(run), "--questions", "0"]) == 2
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert main(["compare", str(one), str(bad)]) == 2
    assert "line 1: key 'question_id' is missing" in capsys.readouterr().err
