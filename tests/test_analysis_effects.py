"""The table of calls: equal to the definitions of training, and what counts as repeated and as used."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from agentropy.algorithms.entropy import entropy_change
from agentropy.analysis import call_effects
from agentropy.analysis.effects import COLUMNS, call_rows, outline_batch
from agentropy.analysis.methods import verdict
from agentropy.analysis.outlines import join, pack
from agentropy.analysis.summary import effective
from agentropy.analysis.used import all_words, pieces, result_used
from agentropy.batch import make_batch
from agentropy.methods import METHODS, make_method
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory, from_json
from make_trajectories import EXAMPLE, drawn_batch


def said(*turns: tuple[str, str, str], answer: str = "", question: str = "?", last: str = "") -> Trajectory:
    """A trajectory of turns (reasoning, call, result) with one token a text."""
    segments = [Segment("prompt", (0,), tokens=(question,))]
    for reasoning, call, result in turns:
        segments.append(Segment("reasoning", (0,), None, (0.5,), tokens=(reasoning,)))
        segments.append(Segment("call", (0,), None, (0.1,), calls=(ToolCall("f", {"x": call}),), tokens=(call,)))
        segments.append(Segment("result", (0,), results=(ToolResult(result),)))
    segments.append(Segment("reasoning", (0,), None, (0.2,), tokens=(last,)))
    return Trajectory("q", "t", question, tuple(segments), answer, 1.0, "answer", ids_kind="none")


def test_one_row_a_call() -> None:
    pandas = pytest.importorskip("pandas")
    table = call_effects([from_json(EXAMPLE)])
    assert list(table.columns) == list(COLUMNS)
    (row,) = table.to_dict("records")
    assert (row["question_id"], row["trajectory_id"], row["tool"]) == ("q7", "q7-3", "python")
    assert (row["call"], row["calls"], row["turn"], row["status"], row["seconds"]) == (1, 1, 1, "ok", 0.004)
    assert (row["arguments"], row["result"]) == ('{"code": "print(6*7)"}', "42\n")
    assert (row["entropy_before"], row["entropy_after"]) == pytest.approx((0.7, 0.075))
    assert (row["entropy_change"], row["relative_change"]) == pytest.approx((-0.625, -0.625 / 0.7))
    assert (row["reducing"], row["score"], row["correct"], row["result_used"]) == (True, 1.0, True, True)
    assert [name for name in ("parallel", "repeated", "estimated", "inherited", "lost") if row[name]] == []
    assert call_effects([]).empty
    assert table["correct"].dtype == pandas.BooleanDtype()


@given(drawn_batch())
def test_rows_agree_with_the_whole_trajectories(trajectories: list[Trajectory]) -> None:
    exact = entropy_change(make_batch(trajectories))
    rows = list(call_rows(trajectories))
    assert len(rows) == len(exact.change)
    for name, values in (
        ("entropy_change", exact.change),
        ("entropy_before", exact.before),
        ("relative_change", exact.relative),
    ):
        assert [r[name] for r in rows] == pytest.approx(values.tolist(), nan_ok=True, abs=1e-9)
    assert [r["reducing"] for r in rows] == exact.reducing.tolist()
    assert [r["status"] for r in rows] == [r.status for t in trajectories for r in t.results]


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"arpo", "aepo"}))
@given(trajectories=drawn_batch().filter(bool))
@settings(max_examples=40)
def test_outlines_are_shaped_as_the_whole_trajectories_are(name: str, trajectories: list[Trajectory]) -> None:
    method = replace(make_method(name), bonus=None)
    whole = method.shape(make_batch(trajectories))
    keys = {t.question_id: i for i, t in enumerate(trajectories)}
    parts = [trajectories[i : i + 2] for i in range(0, len(trajectories), 2)]  # groups lie across parts
    joined = join([pack(outline_batch(p), [keys[t.question_id] for t in p]) for p in parts])
    assert joined.n_groups == len(keys)
    drawn = method.shape(joined)
    assert drawn.why == whole.why
    assert drawn.reward.tolist() == pytest.approx(whole.reward.tolist(), nan_ok=True)
    assert drawn.turn_reward.tolist() == pytest.approx(whole.turn_reward.tolist(), nan_ok=True)
    assert drawn.entropy_change.tolist() == pytest.approx(whole.entropy_change.tolist(), nan_ok=True, abs=1e-6)
    found = verdict(name, joined)
    assert found["kept"] == int(whole.kept.sum())
    assert sum(found["dropped"].values()) == len(trajectories) - found["kept"]


def test_repeated_calls_have_the_same_tool_and_arguments_in_one_trajectory() -> None:
    t = said(("a", "one", "r1"), ("b", "two", "r2"), ("c", "one", "r3"))
    assert [r["repeated"] for r in call_rows([t, t])] == [False, False, True] * 2


USED: list[tuple[str, dict[str, Any], list[bool | None]]] = [
    ("named in the answer", {"turns": [("look", "who", "It is Ann Lee.")], "answer": "Ann Lee"}, [True]),
    ("ignored", {"turns": [("look", "who", "It is Ann Lee.")], "answer": "Bob"}, [False]),
    ("known before", {"turns": [("Ann?", "who", "Ann")], "answer": "Ann"}, [None]),
    (
        "known from the question",
        {"turns": [("look", "who", "Ann")], "answer": "Ann", "question": "Ann or Bob?"},
        [None],
    ),
    (
        "in the next call",
        {"turns": [("a", "who", "Ann"), ("b", "boss of Ann", "Carl")], "answer": "Dora"},
        [True, False],
    ),
    ("a short number", {"turns": [("a", "6*7", "42\n")], "last": "so it is 42"}, [True]),
    ("a number is no part of another", {"turns": [("a", "6*7", "42\n")], "last": "so it is 420"}, [False]),
    ("numbers in another form", {"turns": [("a", "f", "1234567.50")], "last": "1,234,567.5"}, [True]),
    ("a rounded number", {"turns": [("a", "f", "3.14159265")], "last": "about 3.142"}, [True]),
    ("two digits are no rounding", {"turns": [("a", "f", "3.14159265")], "last": "about 3.1"}, [False]),
    ("nothing to use", {"turns": [("a", "f", "")], "last": "well"}, [None]),
    ("small words do not count", {"turns": [("a", "f", "it is on the map")], "last": "is it on?"}, [None]),
    ("other scripts", {"turns": [("a", "f", "首都は東京です")], "last": "東京"}, [True]),
    ("said again by a later result", {"turns": [("a", "f", "Ann"), ("b", "g", "Ann")], "answer": "Ann"}, [True, None]),
]


@pytest.mark.parametrize(("name", "case", "expected"), USED, ids=[n for n, _, _ in USED])
def test_whether_a_result_was_used(name: str, case: dict[str, Any], expected: list[bool | None]) -> None:
    turns = case.pop("turns")
    assert [r["result_used"] for r in call_rows([said(*turns, **case)])] == expected


def test_what_is_not_known_as_text_cannot_tell_that_a_result_was_ignored() -> None:
    t = said(("look", "who", "Ann"), answer="Bob")
    hidden = replace(t, segments=tuple(replace(s, tokens=None) for s in t.segments))
    assert [r["result_used"] for r in call_rows([hidden])] == [None]
    assert [r["result_used"] for r in call_rows([hidden], decode=lambda ids: "nothing")] == [False]
    assert [r["result_used"] for r in call_rows([hidden], decode=lambda ids: "Ann")] == [None]  # it said so before


def test_failed_calls_are_not_judged_and_long_results_are_looked_at_from_both_ends() -> None:
    t = said(("look", "who", "Ann"), answer="Ann")
    results = tuple(replace(s, results=(ToolResult("Ann", "error"),)) if s.results else s for s in t.segments)
    assert [r["result_used"] for r in call_rows([replace(t, segments=results)])] == [None]
    assert result_used("word " * 400_000 + "Zanzibar", set(), ["zanzibar"], True) is True
    assert pieces("A cat sat") == {"a"} | set()
    assert all_words("1,000.50 cats") == {"1000.5", "cats"}


def test_the_effective_ratio_and_its_interval_over_questions() -> None:
    import numpy as np

    reducing = np.array([1, 1, 0, 0, 0, 1, 1, 1], dtype=np.float32)
    calls = {
        "reducing": reducing,
        "group": np.array([1, 1, 2, 2, 2, 3, 3, 4]),
        "measured": np.array([True] * 7 + [False]),
        "faulty": np.zeros(8, dtype=bool),
    }
    found = effective(calls, seed=0)
    assert (found["ratio"], found["calls"], found["groups"]) == (pytest.approx(4 / 7), 7, 3)
    assert found["low"] == 0.0
    assert found["high"] == 1.0
    assert effective(calls, seed=0) == found
    nothing = effective({k: v[:0] for k, v in calls.items()}, seed=0)
    assert nothing["ratio"] is None
    alone = effective(calls | {"measured": np.array([True] * 2 + [False] * 6)}, seed=0)
    assert (alone["ratio"], alone["low"]) == (1.0, None)


def test_unknown_numbers_stay_unknown() -> None:
    t = said(("a", "b", "c"))
    blind = replace(t, score=None, segments=tuple(replace(s, entropies=None) for s in t.segments))
    (row,) = call_rows([blind])
    assert math.isnan(row["entropy_change"])
    assert math.isnan(row["score"])
    assert row["correct"] is None
    assert row["reducing"] is False
    assert row["lost"] is True
