"""Which trajectories are removed, and the order in which that is decided."""

from __future__ import annotations

import pytest
import torch

from agentropy.algorithms import filters as f
from agentropy.batch import make_batch
from agentropy.methods import make_method
from agentropy.trajectory import Segment, ToolCall, Trajectory
from make_trajectories import trajectory

CALL = ([1.0], [1.0], ["ok"])
FAILED = ([1.0], [1.0], ["error"])
ANSWER = ([1.0], [], [])


def why(trajectories: list[Trajectory], method: str = "tao-rl", **options: object) -> list[str | None]:
    return list(make_method(method, **options).shape(make_batch(trajectories)).why)


@pytest.mark.parametrize(
    ("turns", "valid"),
    [
        ([ANSWER], True),
        ([CALL, ANSWER], True),
        ([FAILED, ANSWER], False),
        ([FAILED, CALL, ANSWER], True),
        ([FAILED, FAILED, ANSWER], False),
        ([([1.0], [1.0], ["timeout", "invalid"]), ANSWER], False),
        ([([1.0], [1.0], ["timeout", "ok"]), ANSWER], True),
        ([([1.0], [1.0], [])], True),  # a call that never ran is none that failed
    ],
)
def test_execution_validity(turns: list, valid: bool) -> None:  # type: ignore[type-arg]
    batch = make_batch([trajectory(turns)])
    selection = f.execution_validity(batch, f.select_found(batch))
    assert selection.kept.tolist() == [valid]
    assert selection.why == ((None,) if valid else ("all-calls-failed",))


def test_a_warning_or_silence_is_no_failure() -> None:
    batch = make_batch([trajectory([CALL, ANSWER])])  # `ok` whatever was printed: only the status counts
    assert f.execution_validity(batch, f.select_found(batch)).kept.tolist() == [True]


def test_the_pass_rate_is_that_of_the_survivors_or_of_the_whole_group() -> None:
    group = [trajectory([FAILED, ANSWER], 1.0), *(trajectory([CALL, ANSWER], 0.0) for _ in range(3))]
    assert why(group) == ["all-calls-failed"] + ["not-discriminative"] * 3
    assert why(group, discriminability="all") == ["all-calls-failed", None, None, None]
    shaped = make_method("tao-rl", discriminability="all", normalize_std=False, bonus=False).shape(make_batch(group))
    # the released code's baseline, 0.25, holds the reward of the trajectory that is not learned from
    assert shaped.advantages[shaped.loss_mask].unique().tolist() == [-0.25]


def test_a_single_survivor_is_removed_and_named() -> None:
    group = [trajectory([CALL, ANSWER], 1.0), *(trajectory([FAILED, ANSWER], 0.0) for _ in range(2))]
    assert why(group) == ["single-survivor", "all-calls-failed", "all-calls-failed"]
    assert why(group, discriminability="all") == ["single-survivor", "all-calls-failed", "all-calls-failed"]
    assert why([trajectory([CALL, ANSWER], 1.0)]) == ["single-survivor"]


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.4, 0.4], False),
        ([0.4, 0.4009], False),
        ([0.4, 0.402], True),
        ([0.5, 0.501], True),  # in float32 their difference is less than 1e-3
        ([0.5, 0.7], True),
    ],
)
def test_discriminability_of_graded_rewards(scores: list[float], kept: bool) -> None:
    assert why([trajectory([ANSWER], s) for s in scores]) == [None if kept else "not-discriminative"] * 2


def test_void_turns() -> None:
    cut = {"stop": "max_tokens"}
    assert why([trajectory([ANSWER])], "simpletir") == [None]
    assert why([trajectory([CALL, ANSWER])], "simpletir") == [None]
    assert why([trajectory([ANSWER], 0.0, stop="void")], "simpletir") == ["void-turn"]
    assert why([trajectory([CALL, ANSWER], 0.0, **cut)], "simpletir") == ["void-turn"]  # type: ignore[arg-type]
    # cut off after a complete call, or before the policy could go on
    assert why([trajectory([([1.0], [1.0], ["ok"])], 0.0, **cut)], "simpletir") == [None]  # type: ignore[arg-type]
    assert why([trajectory([CALL, ANSWER], 0.0, stop="max_turns")], "simpletir") == ["void-turn"]
    assert why([trajectory([CALL, ([1.0], [1.0], ["ok"])], 0.0, stop="max_turns")], "simpletir") == [None]


def test_a_turn_cut_within_its_call_is_void_but_not_one_with_an_answer() -> None:
    prompt = Segment("prompt", (1,))
    open_fence = (prompt, Segment("reasoning", (2,)), Segment("call", (3, 4)))
    closed = (prompt, Segment("reasoning", (2,)), Segment("call", (3, 4), calls=(ToolCall("python"),)))
    boxed = (prompt, Segment("reasoning", (2, 3)))
    rows = [
        Trajectory("q", "a", "", open_fence, None, 0.0, "max_tokens"),
        Trajectory("q", "b", "", closed, None, 0.0, "max_tokens"),
        Trajectory("q", "c", "", boxed, "3", 1.0, "max_tokens"),
    ]
    assert make_batch(rows).void.tolist() == [True, False, False]


def test_truncation_comes_from_the_stop_reason_not_from_the_longest_row() -> None:
    rows = [trajectory([([1.0] * 50, [], [])], 1.0), trajectory([ANSWER], 0.0)]
    assert why(rows, "grpo", mask_truncated=True) == [None, None]
    rows[1] = trajectory([ANSWER], 0.0, stop="context_full")
    assert why(rows, "grpo", mask_truncated=True) == [None, "truncated"]
    assert why(rows, "grpo") == [None, None]


def test_lost_trajectories_are_in_no_statistic() -> None:
    good, bad = trajectory([CALL, ANSWER], 1.0), trajectory([CALL, ANSWER], 0.0)
    broken = [
        trajectory([CALL, ANSWER], None),
        trajectory([CALL, ([1.0], [1.0], ["lost"])], 0.0),
        trajectory([CALL], 0.0, stop="error"),
    ]
    for method in ("grpo", "simpletir", "tepo-sparse", "tepo-dense"):
        alone = make_method(method).shape(make_batch([good, bad]))
        mixed = make_method(method).shape(make_batch([broken[0], good, broken[1], bad, broken[2]]))
        assert mixed.why == ("lost", None, "lost", None, "lost")
        assert mixed.metrics["filter/lost"] == 3
        assert mixed.advantages[mixed.loss_mask].tolist() == alone.advantages[alone.loss_mask].tolist()
        assert mixed.metrics["reward/accuracy"] == 0.5
    # the whole-group pass rate of the released code does not see them either
    assert why([good, good, broken[1]], discriminability="all") == ["not-discriminative"] * 2 + ["lost"]


def test_the_first_reason_stays() -> None:
    both = trajectory([FAILED, ANSWER], 0.0, stop="void")
    assert why([both], void_filter=True) == ["all-calls-failed"]
    assert why([both], void_filter=True, execution_filter=False) == ["void-turn"]


def test_void_filter_combines_with_tao_rl() -> None:
    group = [
        trajectory([CALL, ANSWER], 1.0),
        trajectory([CALL, ANSWER], 0.0),
        trajectory([CALL, ANSWER], 0.0, stop="void"),
    ]
    plain = make_method("tao-rl", bonus=False).shape(make_batch(group))
    combined = make_method("tao-rl", bonus=False, void_filter=True).shape(make_batch(group))
    assert plain.why == (None, None, None)
    assert combined.why == (None, None, "void-turn")
    torch.testing.assert_close(combined.advantages[combined.loss_mask].abs().unique(), torch.tensor([0.70710578]))


def test_void_rewards_stay_in_simpletirs_statistics_unless_told_otherwise() -> None:
    group = [
        trajectory([ANSWER], 1.0),
        trajectory([ANSWER], 0.0),
        trajectory([ANSWER], 0.0, stop="void"),
        trajectory([ANSWER], 0.0, stop="void"),
    ]
    batch = make_batch(group)
    released = make_method("simpletir").shape(batch)
    assert released.advantages[released.loss_mask].tolist() == pytest.approx([1.5, -0.5], abs=1e-4)
    ours = make_method("simpletir", statistics="survivors").shape(batch)
    assert ours.advantages[ours.loss_mask].tolist() == pytest.approx([0.70711, -0.70711], abs=1e-4)


def test_statistics_of_survivors_have_mean_zero_over_what_is_learned() -> None:
    group = [trajectory([FAILED, ANSWER], 1.0), *(trajectory([CALL, ANSWER], float(i % 2)) for i in range(5))]
    batch = make_batch(group)
    shaped = make_method("tao-rl", bonus=False).shape(batch)
    firsts = [shaped.advantages[batch.trajectory_of == i][2].item() for i in range(6)]
    assert sum(a for a, kept in zip(firsts, shaped.kept.tolist(), strict=True) if kept) == pytest.approx(0.0, abs=1e-6)
