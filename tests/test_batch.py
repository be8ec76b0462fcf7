"""Flat batches: index maps, and the flags that filters read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from agentropy.batch import CALL, INVALID, OK, PROMPT, REASONING, RESULT, TIMEOUT, make_batch
from agentropy.errors import UserError
from agentropy.trajectory import KINDS, STATUSES, Segment, ToolResult, Trajectory, from_json
from make_trajectories import EXAMPLE, drawn_batch, trajectory


def test_the_documented_example() -> None:
    batch = make_batch([from_json(EXAMPLE)])
    assert batch.tokens.tolist() == [1, 5, 9, 4, 4, 8, 6, 7, 3, 2]
    assert batch.kind_of.tolist() == [PROMPT] * 3 + [REASONING] * 2 + [CALL] * 2 + [RESULT] + [REASONING] * 2
    assert batch.is_model.tolist() == [False] * 3 + [True] * 4 + [False] + [True] * 2
    assert batch.turn_of.tolist() == [-1, -1, -1, 0, 0, 0, 0, -1, 1, 1]
    assert batch.segment_of.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 4, 4]
    expected = torch.tensor([0, 0, 0, 0.3, 1.1, 0.2, 0.1, 0, 0.1, 0.05], dtype=torch.float64)
    torch.testing.assert_close(batch.entropies, expected)
    assert batch.call_status.tolist() == [OK]
    assert batch.call_turn.tolist() == [0]
    assert batch.turn_has_call.tolist() == [True, False]
    assert batch.has_logprobs
    assert batch.has_entropies
    assert batch.entropies_exact


@given(drawn_batch())
@settings(max_examples=25, deadline=None)
def test_index_maps_lead_back_to_the_trajectories(drawn: list[Trajectory]) -> None:
    batch = make_batch(drawn)
    questions = list(dict.fromkeys(t.question_id for t in drawn))
    assert batch.n_trajectories == len(drawn)
    assert batch.n_groups == len(questions)
    for i, t in enumerate(drawn):
        a, b = batch.token_start[i : i + 2].tolist()
        assert tuple(batch.tokens[a:b].tolist()) == t.ids
        assert batch.trajectory_of[a:b].tolist() == [i] * (b - a)
        assert [KINDS[k] for k in batch.kind_of[a:b].tolist()] == [s.kind for s in t.segments for _ in s.ids]
        assert int(batch.is_model[a:b].sum()) == t.model_tokens
        assert questions[int(batch.group_of[i])] == t.question_id
        first, last = batch.call_start[i : i + 2].tolist()
        assert [STATUSES[s] for s in batch.call_status[first:last].tolist()] == [r.status for r in t.results]
        turns = range(*batch.turn_start[i : i + 2].tolist())
        assert all(int(batch.turn_trajectory[u]) == i for u in turns)
        assert set(batch.call_turn[first:last].tolist()) <= set(turns)
        assert set(batch.turn_of[a:b].tolist()) <= {-1, *turns}
        assert [bool(batch.turn_has_call[u]) for u in turns] == [u in batch.call_turn[first:last] for u in turns]
    assert batch.turn_of[batch.is_model].ge(0).all()
    assert batch.turn_of[~batch.is_model].eq(-1).all()


def test_groups_are_numbered_by_first_appearance() -> None:
    rows = [trajectory([([1.0], [], [])], question=q) for q in ("b", "a", "b", "c", "a")]
    assert make_batch(rows).group_of.tolist() == [0, 1, 0, 2, 1]


def test_parallel_calls_share_a_turn() -> None:
    batch = make_batch([trajectory([([1.0], [1.0], ["ok", "timeout"]), ([1.0], [1.0], ["invalid"]), ([1.0], [], [])])])
    assert batch.call_turn.tolist() == [0, 0, 1]
    assert batch.call_status.tolist() == [OK, TIMEOUT, INVALID]
    assert batch.n_turns == 3


def test_a_call_that_never_ran_has_no_row() -> None:
    t = from_json(EXAMPLE | {"segments": EXAMPLE["segments"][:3], "stop": "max_turns"})
    batch = make_batch([t])
    assert batch.n_calls == 0
    assert batch.turn_has_call.tolist() == [False]


def test_results_must_answer_calls() -> None:
    prompt, extra = Segment("prompt", (1,)), Segment("result", (2,), results=(ToolResult("out"),))
    with pytest.raises(UserError, match="'t': 1 results where 0 calls wait for one"):
        make_batch([Trajectory("q", "t", "", (prompt, extra), None, 0.0, "error")])


def test_a_turn_without_a_call_that_others_follow_is_void() -> None:
    prompt, nudge = Segment("prompt", (1,)), Segment("result", (2,))
    text, end = Segment("reasoning", (3,)), Segment("reasoning", (4,))
    t = Trajectory("q", "t", "", (prompt, text, nudge, end), "4", 1.0, "answer")
    assert make_batch([t]).void.tolist() == [True]


def test_a_call_without_its_record_still_has_results() -> None:
    data = EXAMPLE | {"segments": [s | {"calls": []} if s["kind"] == "call" else s for s in EXAMPLE["segments"]]}
    batch = make_batch([from_json(data)])
    assert batch.call_status.tolist() == [OK]
    assert batch.void.tolist() == [False]


def test_lost_truncated_and_void() -> None:
    rows = [
        trajectory([([1.0], [], [])]),
        trajectory([([1.0], [], [])], None),
        trajectory([([1.0], [1.0], ["lost"]), ([1.0], [], [])]),
        trajectory([([1.0], [], [])], 0.0, stop="error"),
        trajectory([([1.0], [], [])], 0.0, stop="max_tokens"),
        trajectory([([1.0], [1.0], ["ok"])], 0.0, stop="context_full"),
        trajectory([([1.0], [], [])], 0.0, stop="void"),
        trajectory([([1.0], [1.0], ["ok"]), ([1.0], [], [])], 0.0, stop="max_turns"),
        trajectory([([1.0], [1.0], ["ok"]), ([1.0], [1.0], ["ok"])], 0.0, stop="max_turns"),
    ]
    batch = make_batch(rows)
    assert batch.lost.tolist() == [False, True, True, True, False, False, False, False, False]
    assert batch.truncated.tolist() == [False, False, False, False, True, True, False, False, False]
    assert batch.void.tolist() == [False, False, False, False, True, False, True, True, False]


def test_missing_logprobs_entropies_and_estimates_are_told() -> None:
    full, bare = trajectory([([1.0], [], [])]), trajectory([([1.0], [], [])], with_entropies=False)
    estimated = trajectory([([1.0], [], [])], entropy_kind="top-k")
    empty = trajectory([], with_entropies=False)
    assert make_batch([full, empty]).has_entropies
    assert not make_batch([full, bare]).has_entropies
    assert not make_batch([full, estimated]).entropies_exact


def test_nothing_at_all() -> None:
    batch = make_batch([])
    counts = (batch.n_tokens, batch.n_trajectories, batch.n_groups, batch.n_turns, batch.n_calls)
    assert counts == (0, 0, 0, 0, 0)
    assert batch.to("cpu").token_start.tolist() == [0]
