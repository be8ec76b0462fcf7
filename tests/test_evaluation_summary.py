"""Metrics over trajectories before any filter: populations, by hand."""

from __future__ import annotations

import math

import pytest

from agentropy.evaluation.summary import evaluation_metrics, rollout_metrics
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory
from make_trajectories import trajectory

GOOD = [
    trajectory([([1.0], [0.5], ["ok"]), ([0.4], [], [])], 1.0, name="a"),
    trajectory([([1.0], [0.5], ["error"]), ([2.0], [0.5], ["timeout"]), ([1.0], [], [])], 0.0, name="b"),
    trajectory([([0.1], [], [])], 0.4, name="c", stop="max_tokens"),
]
LOST = trajectory([([9.0], [9.0], ["ok"]), ([9.0], [9.0], ["lost"])], None, name="d", stop="error")


def test_numbers_of_a_small_set() -> None:
    m = rollout_metrics(GOOD)
    assert m["reward/accuracy"] == pytest.approx(1.4 / 3)
    assert m["reward/solved"] == pytest.approx(1 / 3)
    assert m["tool/calls_per_question"] == 1.0
    assert (m["tool/valid_rate"], m["tool/timeout_rate"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (m["tool/usage_rate"], m["tool/all_failed_rate"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert m["tool/effective_ratio"] == pytest.approx(2 / 3)
    assert m["tool/entropy_change"] == pytest.approx((-0.6 + 1.0 - 1.0) / 3)
    assert m["entropy/post_tool"] == pytest.approx(0.4)
    assert m["entropy/model"] == pytest.approx((1 + 0.5 + 0.4 + 1 + 0.5 + 2 + 0.5 + 1 + 0.1) / 9)
    assert m["length/turns"] == 2.0
    assert m["stop/max_tokens"] == pytest.approx(1 / 3)


def test_what_the_machinery_lost_is_counted_and_in_no_other_number() -> None:
    clean, mixed = rollout_metrics(GOOD), rollout_metrics([GOOD[0], LOST, *GOOD[1:]])
    assert mixed["tool/lost_trajectories"] == 1
    for name, value in clean.items():
        if name != "tool/lost_trajectories" and not name.startswith("stop/"):
            assert mixed[name] == pytest.approx(value, nan_ok=True), name
    assert mixed["stop/error"] == 0.25


def test_code_lines_are_those_of_programs_that_ran() -> None:
    def call(code: str) -> ToolCall:
        return ToolCall("python", {"code": code})

    segments = (
        Segment("call", (1,), calls=(call("a = 1\n# no\n\nprint(a)"), call("1/0"), call("never = 'run'\n" * 9))),
        Segment("result", (2,), results=(ToolResult("1"), ToolResult("", "error"))),
        Segment("call", (3,), calls=(call("x = 1\ny = 2\nz = 3\nprint(x)"),)),
        Segment("result", (4,), results=(ToolResult("1"),)),
    )
    m = rollout_metrics([Trajectory("q", "t", "", segments, "1", 1.0, "answer")])
    assert m["tool/code_lines"] == pytest.approx((2 + 1 + 4) / 3)
    assert m["tool/code_lines_ok"] == 3.0


def test_calls_that_were_not_recorded_are_no_error() -> None:
    segments = (Segment("call", (1,)), Segment("result", (2,), results=(ToolResult("1"),)))
    m = rollout_metrics([Trajectory("q", "t", "", segments, "1", 1.0, "answer")])
    assert m["tool/calls_per_question"] == 1.0
    assert math.isnan(m["tool/code_lines"])


def test_averages_are_over_questions() -> None:
    rows = [trajectory([([1.0], [], [])], s, question=q) for q, s in (("a", 1.0), ("a", 0.0), ("b", 0.6), ("b", 0.6))]
    m = evaluation_metrics([*rows, trajectory([([1.0], [], [])], None, question="b", stop="error")])
    assert m["eval/avg"] == pytest.approx(0.55)
    assert m["eval/pass"] == 1.0
    assert (m["eval/k"], m["eval/questions"]) == (2, 2)
    nothing = evaluation_metrics([])
    assert math.isnan(nothing["eval/avg"])
    assert nothing["eval/k"] == 0
