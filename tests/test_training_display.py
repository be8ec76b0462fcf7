"""What a run shows of a step that went wrong."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentropy.training.display import LiveDisplay, PlainDisplay, trouble

EMPTY = {"batch/empty": 1.0, "optim/updates": 0.0, "tool/lost_trajectories": 3.0}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"batch/empty": 0.0, "optim/updates": 2.0, "tool/lost_trajectories": 0.0}, ""),
        (EMPTY, "no update: every group was filtered, 3 trajectories lost to faults of tools, graders or servers"),
        ({"batch/empty": 0.0, "optim/updates": 0.0}, "no update: all advantages are 0"),
        ({"optim/updates": 0.0, "optim/skipped_not_finite": 2.0}, "2 updates skipped: gradient not finite"),
    ],
)
def test_trouble_is_named(metrics: dict[str, float], words: str) -> None:
    assert trouble(metrics) == words


def test_both_displays_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    plain = PlainDisplay()
    plain.step(1, 3, EMPTY)
    plain.step(2, 3, {"optim/updates": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert "(no update: every group was filtered, 3 trajectories lost" in lines[0]
    assert "(" not in lines[1]
    out = io.StringIO()
    live = LiveDisplay(Console(file=out, force_terminal=True, width=200))
    live.step(1, 3, EMPTY)
    live.close()
    assert "step 1: no update: every group was filtered" in out.getvalue()


def test_the_time_left_leaves_out_what_came_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentropy.training import display

    now = [1000.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    left = display.TimeLeft()
    now[0] += 500  # an evaluation
    assert left.after(11, 20, {"time/step": 2.0}) == pytest.approx(18.0)
    now[0] += 4
    assert left.after(12, 20, {"time/step": 4.0}) == pytest.approx(24.0)
    assert display.duration(3725) == "1h02m"
    assert display.duration(185) == "3m05s"
