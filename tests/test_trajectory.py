"""The trajectory file: exact round trips, and errors that name the line and the key."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.batch import make_batch
from agentropy.errors import UserError
from agentropy.methods import make_method
from agentropy.trajectory import (
    STATUSES,
    STOPS,
    TOLERANCE,
    Segment,
    ToolCall,
    ToolResult,
    Trajectory,
    dumps,
    from_json,
    read_jsonl,
    read_numbered,
    to_json,
    write_jsonl,
)
from make_trajectories import EXAMPLE

text = st.text(max_size=8)  # lone surrogates included
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
extras = st.dictionaries(text.map(lambda key: "x-" + key), json_values, max_size=2)
calls = st.builds(ToolCall, tool=text, arguments=st.dictionaries(text, json_values, max_size=2), error=st.none() | text)
results = st.builds(
    ToolResult,
    content=text,
    status=st.sampled_from(STATUSES),
    reward=st.none() | st.floats(-1e6, 1e6),
    stop=st.booleans(),
    seconds=st.floats(0, 1e6),
)


@st.composite
def model_segment(draw: st.DrawFn, kind: Any, made: tuple[ToolCall, ...] = ()) -> Segment:
    ids = tuple(draw(st.lists(st.integers(0, 2**40), max_size=4)))
    n = len(ids)
    logprobs = draw(st.none() | st.lists(st.floats(-1e3, 0), min_size=n, max_size=n).map(tuple))
    entropies = draw(st.none() | st.lists(st.floats(0, 20), min_size=n, max_size=n).map(tuple))
    tokens = draw(st.none() | st.lists(text, min_size=n, max_size=n).map(tuple))
    likely = st.lists(st.tuples(text, st.floats(-1e4, 0)), max_size=2).map(tuple)
    alternatives = draw(st.none() | st.lists(likely, min_size=n, max_size=n).map(tuple))
    return Segment(kind, ids, logprobs, entropies, made, (), draw(extras), tokens, alternatives)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    segments = [Segment("prompt", tuple(draw(st.lists(st.integers(0, 9), max_size=3))))]
    for _ in range(draw(st.integers(0, 3))):
        segments.append(draw(model_segment("reasoning")))
        made = tuple(draw(st.lists(calls, max_size=2)))
        segments.append(draw(model_segment("call", made)))
        answered = tuple(draw(st.lists(results, max_size=len(made))))
        segments.append(Segment("result", (7, 7), results=answered, extra=draw(extras)))
    return Trajectory(
        question_id=draw(text),
        trajectory_id=draw(text),
        question=draw(text),
        segments=tuple(segments),
        answer=draw(st.none() | text),
        score=draw(st.none() | st.floats(0, 1)),
        stop=draw(st.sampled_from(STOPS)),  # type: ignore[arg-type]
        entropy_kind=draw(st.sampled_from(["exact", "top-k"])),  # type: ignore[arg-type]
        parent_id=draw(st.none() | text),
        fork_at=draw(st.none() | st.integers(0, 99)),
        extra=draw(extras),
    )


@given(trajectories())
@settings(max_examples=100, deadline=None)
def test_round_trip_is_exact(t: Trajectory) -> None:
    assert from_json(to_json(t)) == t
    line = dumps(t)
    assert "\n" not in line
    assert from_json(json.loads(line.encode())) == t


def test_files_round_trip_and_unknown_keys_survive(tmp_path: Path) -> None:
    foreign = json.loads(json.dumps(EXAMPLE))
    foreign["model"] = {"name": "mine"}
    foreign["segments"][3]["truncated"] = 12
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(foreign) + "\n\n" + json.dumps(EXAMPLE) + "\n")
    read = list(read_jsonl(path))
    assert read[0].extra == {"model": {"name": "mine"}}
    assert read[0].segments[3].extra == {"truncated": 12}
    assert [number for number, _ in read_numbered(path)] == [1, 3]
    write_jsonl(tmp_path / "again.jsonl", read)
    assert list(read_jsonl(tmp_path / "again.jsonl")) == read
    assert [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()] == [foreign, EXAMPLE]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.jsonl", "t.jsonl"]


def test_what_a_trajectory_says_of_itself() -> None:
    t = from_json(EXAMPLE)
    assert t.ids == (1, 5, 9, 4, 4, 8, 6, 7, 3, 2)
    assert t.prompt == (1, 5, 9)
    assert t.model_tokens == 6
    assert [c.arguments for c in t.calls] == [{"code": "print(6*7)"}]
    assert [r.content for r in t.results] == ["42\n"]
    assert (t.answer, t.score, t.stop, t.entropy_kind) == ("42", 1.0, "answer", "exact")


def test_calls_may_go_unrecorded_where_their_results_are_there() -> None:
    t = from_json(change("segments.2.calls", []))
    assert (len(t.calls), len(t.results)) == (0, 1)


def test_a_writer_may_leave_out_what_has_a_default() -> None:
    t = from_json({"question_id": 7, "segments": [{"kind": "reasoning", "ids": [1]}]})
    assert (t.question_id, t.trajectory_id, t.question) == ("7", "7", "")
    assert (t.answer, t.score, t.stop) == (None, None, "void")
    assert t.segments[0].entropies is None
    solved = {"question_id": 7, "segments": [], "score": 1}
    assert (from_json(solved).stop, from_json(solved | {"score": 0}).stop) == ("answer", "void")
    keys = ("trajectory_id", "question", "answer", "score", "stop", "entropy_kind", "parent_id", "fork_at")
    nulls = {"question_id": 7, "segments": [{"kind": "reasoning", "ids": [1], "entropies": None}]}
    assert from_json(nulls | dict.fromkeys(keys)) == t


def test_a_source_without_ids_gives_the_text_of_its_tokens(tmp_path: Path) -> None:
    data = json.loads(json.dumps(EXAMPLE)) | {"ids_kind": "none", "entropy_kind": "top-k"}
    for segment in data["segments"]:
        segment["ids"] = [0] * len(segment["ids"])
        segment["tokens"] = ["é"] * len(segment["ids"])
        if segment["kind"] == "reasoning":
            segment["alternatives"] = [[["é", -0.1], ["\udcc3", -9.5]]] * len(segment["ids"])
    t = from_json(data)
    assert (t.ids_kind, t.model_tokens) == ("none", 6)
    assert t.segments[1].tokens == ("é", "é")
    assert t.segments[1].alternatives == ((("é", -0.1), ("\udcc3", -9.5)),) * 2
    assert t.segments[2].alternatives is None
    write_jsonl(tmp_path / "t.jsonl", [t])
    assert list(read_jsonl(tmp_path / "t.jsonl")) == [t]
    assert not make_batch([t, from_json(EXAMPLE)]).has_ids
    assert make_batch([from_json(EXAMPLE)]).has_ids
    numbers = make_method("tepo-sparse", accept_estimates=True).shape(make_batch([t])).entropy_change
    exact = make_method("tepo-sparse").shape(make_batch([from_json(EXAMPLE)])).entropy_change
    assert numbers.tolist() == exact.tolist()  # ids play no part


@given(st.lists(st.floats() | st.integers(-(2**70), 2**70) | st.booleans() | st.none(), max_size=4))
def test_numbers_are_checked_one_by_one_or_all_at_once_with_the_same_outcome(values: list[Any]) -> None:
    for key, sign in (("entropies", 1), ("logprobs", -1)):
        good = all(type(v) in (int, float) and math.isfinite(v) and v * sign >= -TOLERANCE for v in values)
        segment = {"kind": "reasoning", "ids": [1] * len(values), key: values}
        if good:
            read = getattr(from_json({"question_id": "q", "segments": [segment]}).segments[0], key)
            assert read == tuple(float(v) for v in values)
        else:
            with pytest.raises(UserError, match=f"{key!r} holds"):
                from_json({"question_id": "q", "segments": [segment]})


def test_half_a_surrogate_pair_from_a_tool_can_be_written(tmp_path: Path) -> None:
    broken = json.loads(json.dumps(EXAMPLE))
    broken["segments"][3]["results"][0]["output"] = "caf\udce9 é"
    t = from_json(broken)
    write_jsonl(tmp_path / "t.jsonl", [t])
    assert list(read_jsonl(tmp_path / "t.jsonl")) == [t]
    assert "é" in dumps(from_json(EXAMPLE | {"question": "é"}))


def change(path: str, value: Any) -> dict[str, Any]:
    data: Any = json.loads(json.dumps(EXAMPLE))
    *outer, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    at = data
    for key in outer:
        at = at[key]
    at[last] = value
    return data  # type: ignore[no-any-return]


BROKEN = [
    (change("schema", "agentropy.trajectory/2"), "schema 'agentropy.trajectory/2' is not 'agentropy.trajectory/1'"),
    (change("question_id", None), "key 'question_id' is missing"),
    ({"messages": []}, "key 'question_id' is missing; chat messages are read by `agentropy analyze`"),
    (change("question_id", {"a": 1}), "question_id {'a': 1} is no text"),
    (change("segments", {}), "'segments' is no list"),
    (change("segments.1", 3), "segment 1: is no JSON object"),
    (change("segments.1.kind", "thought"), "segment 1: segment kind 'thought' is none of prompt"),
    (change("segments.1.ids", [1.5, 2]), "segment 1: 'ids' is no list of token ids"),
    (change("segments.1.ids", [-1, 2]), "segment 1: 'ids' is no list of token ids"),
    (change("segments.1.ids", [1]), "segment 1: reasoning segment has 1 ids but 2 logprobs"),
    (change("segments.1.entropies", [0.1]), "segment 1: reasoning segment has 2 ids but 1 entropies"),
    (change("segments.1.entropies", [0.1, None]), "segment 1: 'entropies' holds None"),
    (change("segments.1.entropies", [0.1, -0.5]), "segment 1: 'entropies' holds -0.5, but an entropy is 0 or above"),
    (change("segments.1.logprobs", [0.1, 0.5]), "segment 1: 'logprobs' holds 0.1, but a log-probability is 0 or below"),
    (change("segments.1.logprobs", [0, 10**400]), "segment 1: 'logprobs' holds 1"),
    (change("segments.1.calls", [{"tool": "python"}]), "segment 1: a reasoning segment cannot hold calls"),
    (change("segments.2.calls", ["python"]), "segment 2: 'calls' is no list of objects"),
    (change("segments.3.results.0.status", "fine"), "segment 3: result status 'fine' is none of ok, error, timeout"),
    (change("segments.3.results.0.seconds", "fast"), "segment 3: seconds 'fast' is no finite number"),
    (change("segments.3.results", [{"status": "ok"}] * 2), "2 results where 1 calls wait for one"),
    (change("segments.2", {"kind": "reasoning", "ids": [8]}), "1 results where 0 calls wait for one"),
    (change("score", "good"), "score 'good' is no finite number"),
    (change("score", True), "score True is no finite number"),
    (change("stop", "tired"), "stop reason 'tired' is none of answer"),
    (change("entropy_kind", "guess"), "entropy_kind 'guess' is none of exact, top-k"),
    (change("fork_at", "here"), "fork_at 'here' is no position"),
    (change("ids_kind", "some"), "ids_kind 'some' is none of sampled, none"),
    (change("ids_kind", "none"), "ids_kind is 'none', but an id is not 0"),
    (change("segments.1.tokens", ["a"]), "segment 1: reasoning segment has 2 ids but 1 tokens"),
    (change("segments.1.tokens", ["a", 3]), "segment 1: 'tokens' is no list of texts"),
    (change("segments.1.alternatives", [[]]), "segment 1: reasoning segment has 2 ids but 1 alternatives"),
    (change("segments.1.alternatives", [[], "a"]), "segment 1: 'alternatives' is no list with a list for each token"),
    (change("segments.1.alternatives", [[], [["a"]]]), "segment 1: 'alternatives' holds ['a'], which is no pair"),
    (change("segments.1.alternatives", [[], [["a", 0.5]]]), "holds 0.5, but a log-probability is 0 or below"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN, ids=[m[:50] for _, m in BROKEN])
def test_a_broken_object_is_named_with_its_line(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(EXAMPLE) + "\n" + json.dumps(data) + "\n")
    with pytest.raises(UserError, match=re.escape(f"{path}, line 2: ") + ".*" + re.escape(message)):
        list(read_jsonl(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question_id": "q", "segments": [', "line 1: not JSON"),
        (b"\xff\xfe{}", "line 1: not "),
        (b'{"question_id": "\xe9"}', "line 1: not UTF-8"),
        (b"[1, 2]", "line 1: a trajectory is a JSON object, not a list"),
        (b"[" * 100_000, "line 1: not JSON that can be read"),
        (b"1" * 5_000, "line 1: not JSON that can be read"),
        (
            b'{"question_id": "q", "segments": [{"kind": "prompt", "ids": [9223372036854775808]}]}',
            "line 1: segment 0: 'ids' is no list of token ids",
        ),
        (b'{"question_id": "q", "segments": [], "score": NaN}', "line 1: score nan is no finite number"),
    ],
)
def test_a_line_that_is_no_object(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(UserError, match=message):
        list(read_jsonl(path))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nothing\.jsonl: No such file"):
        list(read_jsonl(tmp_path / "nothing.jsonl"))
    with pytest.raises(UserError, match=r"cannot write .*: No such file"):
        write_jsonl(tmp_path / "no" / "t.jsonl", [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        write_jsonl(tmp_path / "t.jsonl", [from_json(EXAMPLE)])
    assert list(tmp_path.iterdir()) == []
