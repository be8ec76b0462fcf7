"""What a report is made of: reading, choosing, tokens, size; the live server; the commands."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentropy.analysis.report as report_module
from agentropy.analysis.report import CallPoint, Table, write_report
from agentropy.analysis.report.build import page_of_files
from agentropy.analysis.report.choose import QuestionSample, deal
from agentropy.analysis.report.encode import round_logprob
from agentropy.analysis.report.serve import LivePage
from agentropy.analysis.report.sources import parts_of, read_part, read_run
from agentropy.analysis.report.tokens import TokenBytes
from agentropy.cli import main
from agentropy.errors import UserError
from agentropy.trajectory import Trajectory, dumps, write_jsonl
from report_pages import make_run, make_tokenizer, make_trajectory


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def data_of(path: Path) -> dict[str, Any]:
    """The data that is in a page."""
    packed = re.search(r'id="data">([^<]*)<', path.read_text())
    assert packed
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return data


def test_the_file_is_self_contained_and_the_same_twice(run_directory: Path, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, run_directory)
    text = (tmp_path / "a.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)
    a, b = data_of(tmp_path / "a.html"), data_of(tmp_path / "b.html")
    assert a | {"made": ""} == b | {"made": ""}
    assert len(a["trajectories"]) == 104
    assert a["sampling"] == ""
    assert not (tmp_path / "a.html.partial").exists()


def test_a_big_run_is_sampled_by_whole_questions_and_says_so(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path / "r.html", run_directory)
    limit = (tmp_path / "r.html").stat().st_size - 10_000
    monkeypatch.setattr(report_module, "LARGEST", limit)
    data = write_report(tmp_path / "r.html", run_directory)
    assert (tmp_path / "r.html").stat().st_size <= limit + 1
    shown = len(data["trajectories"])
    assert 0 < shown < 104
    assert f"shows {shown} of 104 trajectories" in data["sampling"]
    groups: dict[tuple[int, int], int] = {}
    for t in data["trajectories"]:
        groups[t["f"], t["q"]] = groups.get((t["f"], t["q"]), 0) + 1
    assert set(groups.values()) == {4}
    assert [f["total"] for f in data["files"]] == [12, 20, 20, 20, 20, 12]
    assert sum(f["shown"] for f in data["files"]) == shown
    full = page_of_files(run_directory)
    assert data["distributions"] == full["distributions"], "the overview covers all"


def test_a_budget_goes_to_evaluations_first_and_pairs_their_questions(run_directory: Path) -> None:
    data = page_of_files(run_directory, budget=12_000)
    shown = {f["name"]: f["shown"] for f in data["files"]}
    assert shown["test-before"] >= 4
    assert shown["test-after"] >= 4
    assert all(n % 4 == 0 for n in shown.values())
    asked = [
        {t["q"] for t in data["trajectories"] if data["files"][t["f"]]["name"] == name}
        for name in ("test-before", "test-after")
    ]
    assert asked[0] <= asked[1] or asked[1] <= asked[0]


def test_dealing() -> None:
    assert deal({"a": 10, "b": 10}, [["a"]], 100) == {"a": 10, "b": 10}
    assert deal({"a": 100, "b": 100, "c": 2}, [["a"]], 60) == {"a": 30, "b": 28, "c": 2}
    assert deal({"a": 100}, [["a"], []], 60) == {"a": 60}


def test_a_stream_of_any_length_keeps_whole_questions_in_bounded_memory() -> None:
    tokenizer = make_tokenizer()
    some = [make_trajectory(tokenizer, k, f"Q {i}?", f"{i}/{k}", ("ok",), 1.0) for i in range(60) for k in range(3)]
    random.Random(1).shuffle(some)
    sample = QuestionSample(20_000)
    for t in some:
        sample.add(t)
        assert sample._cost <= 20_000
    held = sample.trajectories
    counts = {q: sum(t.question_id == q for t in held) for q in {t.question_id for t in held}}
    assert set(counts.values()) == {3}
    assert 5 < len(counts) < 60
    assert sample.total == 180
    places = [some.index(t) for t in held]
    assert places == sorted(places)


def test_trajectories_from_anywhere_with_calls_and_tables_of_the_caller(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    some = (make_trajectory(tokenizer, k, "Q 1?", str(k), ("ok",), 1.0) for k in range(3))
    points = [CallPoint("python", "timeout", None, 1, -0.5), CallPoint("", "ok", True, 7, float("nan"))]
    table = Table("My table", ("name", "n"), (("<i>", 3), ("b", None), ("c", float("nan"))), "a note")
    data = write_report(tmp_path / "r.html", some, tables=[table], calls=points, total=900, title="mine")
    assert data["title"] == "mine"
    assert "3 of 900" in data["sampling"]
    by = data["distributions"]["by"]
    assert {g["name"] for g in by["status"]} == {"timeout", "ok"}
    assert {g["name"]: g["undefined"] for g in by["tool"]} == {"python": 0, "(no name)": 1}
    assert {g["name"] for g in by["position"]} == {"call 1", "call 5 and later"}
    assert data_of(tmp_path / "r.html")["tables"][0]["rows"] == [["<i>", 3], ["b", None], ["c", None]]


def test_half_a_line_at_the_end_is_a_run_under_way(run_directory: Path, tmp_path: Path) -> None:
    whole = (run_directory / "trajectories" / "step-000001.jsonl").read_text()
    path = tmp_path / "t.jsonl"
    path.write_text(whole[:-300])
    assert len(list(read_part(path))) == 19
    path.write_text(whole[:500] + "\n" + whole)
    with pytest.raises(UserError, match="line 1"):
        list(read_part(path))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1.0}\n{"step": 1, "validation/avg": 0.5}\n{"step": 2, "a": N'
    )
    assert read_run(tmp_path).metrics == [{"step": 1, "a": 1.0, "validation/avg": 0.5}]
    (tmp_path / "metrics.jsonl").write_text('[]\n{"step": "x"}\n{"step": 3, "a": true, "b": 1e999}\n')
    assert read_run(tmp_path).metrics == [{"step": 3}]


def test_files_of_a_run_come_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    names = (
        "test-after",
        "step-000010",
        "step-000002",
        "validation-000002",
        "test-before-greedy",
        "test-before",
        "odd",
    )
    for name in names:
        (tmp_path / "trajectories" / f"{name}.jsonl").touch()
    assert [p.name for p in parts_of(tmp_path)] == [
        "test-before", "test-before-greedy", "step-000002", "validation-000002", "step-000010", "test-after", "odd"
    ]  # fmt: skip
    with pytest.raises(UserError, match="no such file"):
        parts_of([tmp_path / "missing.jsonl"])


def test_log_probabilities_keep_what_is_shown() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        value = -(10 ** rng.uniform(-6, 1.5))
        short = round_logprob(value)
        assert f"{short:.4g}" == f"{value:.4g}"
        assert len(repr(short)) <= len(repr(value))


@pytest.mark.parametrize("text", ["plain words", "é中文 👩‍👩‍👧", "\x00\t\n  end "])
def test_token_bytes_join_to_the_text(text: str) -> None:
    tokenizer = make_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    assert b"".join(map(token_bytes, ids)) == text.encode()
    assert token_bytes.text((4,)) == "<think>"
    assert token_bytes.text((10**6,)) == "⟨no token 1000000⟩"


def test_pieces_of_sentencepiece() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "\u2581the": 1, "<0xE2>": 2, "re": 3}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [token_bytes(i) for i in (1, 2, 3)] == [b" the", b"\xe2", b"re"]


def test_the_command(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(run_directory / "trajectories" / "step-000001.jsonl")
    assert (
        main(["report", file, "--out", str(tmp_path / "r.html"), "--method", "tepo-dense", "--option", "alpha=0.3"])
        == 0
    )
    assert "20 trajectories" in capsys.readouterr().out
    assert data_of(tmp_path / "r.html")["method"] == "tepo-dense"
    assert main(["report", str(run_directory)]) == 0
    assert data_of(run_directory / "report.html")["method"] == "tao-rl"
    for arguments, words in (
        ([str(tmp_path / "no")], "no such file"),
        ([file, str(run_directory)], "of one directory, or of files"),
        ([str(run_directory.parent)], "no run or evaluation directory"),
        ([file, "--option", "alpha=1"], "--option needs --method"),
        ([file, "--method", "tao", "--option", "x"], "KEY=VALUE"),
        ([file, "--method", "tao"], "did you mean"),
        ([file, "--out", str(tmp_path / "no" / "r.html")], "cannot write"),
        ([file, "--model", str(tmp_path)], "does not load"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_damaged_files_are_named(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert main(["report", str(bad)]) == 2
    assert "bad.jsonl, line 1" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").unlink()
    for name in ("config.yaml", "environment.json", "evaluation-before.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\x00{[")
    data = page_of_files(tmp_path)
    assert data["config"] == {}
    (tmp_path / "config.yaml").write_text("method: 7\nrollout: []\nmethod_options: {nope: 1}\nsteps: x\n")
    data = page_of_files(tmp_path)
    assert any("the run's method cannot be made again" in note for note in data["notes"])


# The live page.


def get(port: int, path: str, host: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def start_view(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "agentropy.cli", "view", "--no-open", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if match := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
            return process, int(match[1])
    raise AssertionError(process.stderr.read() if process.stderr else "")


def test_the_live_server(tmp_path: Path) -> None:
    run = tmp_path / "later"
    process, port = start_view(str(run))
    try:
        status, headers, body = get(port, "/")
        assert status == 200
        assert "connect-src 'self'" in body.decode()
        assert headers["x-frame-options"] == "DENY"
        first = json.loads(get(port, "/data")[2])
        assert first["waiting"] == f"Waiting for {run}: there is no such run yet."
        assert get(port, f"/data?have={first['stamp']}")[0] == 204
        assert get(port, "/data", host="evil.example")[0] == 421
        assert get(port, "/data", host=f"evil.example:{port}")[0] == 421
        assert get(port, "/data", host=f"localhost:{port}")[0] == 200
        assert get(port, "/data", host="127.0.0.1.evil.example")[0] == 421
        assert get(port, "/data", host="localhost:9000")[0] == 200, "the port of a tunnel"
        assert get(port, "/../../etc/passwd")[0] == 404
        make_run(run, steps=1)
        deadline = time.monotonic() + 30
        while "waiting" in (data := json.loads(get(port, "/data")[2])):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(data["trajectories"]) > 0
        packed = get(port, "/data", accept_encoding="gzip")
        assert packed[1]["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(packed[2])).keys() == data.keys()
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert error == ""


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["view", str(tmp_path), "--port", port, "--no-open"]) == 2
    assert "choose another --port" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--port", "70000"]) == 2


def test_a_live_page_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, steps=3)
    from agentropy.analysis.report import build

    read: list[str] = []

    def counted(path: Path) -> Any:
        read.append(path.stem)
        return read_part(path)

    monkeypatch.setattr(build, "read_part", counted)
    monkeypatch.setattr("agentropy.analysis.report.serve.PATIENCE", 0.0)
    live = LivePage(tmp_path)
    body = live.answer("")
    assert body
    stamp = json.loads(gzip.decompress(body))["stamp"]
    assert live.answer(stamp) is None
    assert len(read) == 5
    read.clear()
    write_jsonl(
        tmp_path / "trajectories" / "step-000004.jsonl", read_part(tmp_path / "trajectories" / "step-000003.jsonl")
    )
    again = live.answer(stamp)
    assert again
    data = json.loads(gzip.decompress(again))
    assert "step-000004" in {f["name"] for f in data["files"]}
    assert "step-000001" not in read
    with (tmp_path / "trajectories" / "step-000004.jsonl").open("a") as file:
        file.write('{"schema": "agentropy.traj')
    half = live.answer(data["stamp"])
    assert half
    assert "waiting" not in json.loads(gzip.decompress(half))


def test_a_damaged_run_is_said_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("nonsense\n")
    body = LivePage(tmp_path / "t.jsonl").answer("")
    assert body
    assert "This cannot be shown" in json.loads(gzip.decompress(body))["waiting"]


def test_forks_without_their_parents(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    root = make_trajectory(tokenizer, 1, "Q 1?", "root", ("ok",), 1.0)
    fork = json.loads(dumps(root)) | {
        "trajectory_id": "fork",
        "parent_id": "root",
        "fork_at": len(root.segments[0].ids),
    }
    (tmp_path / "t.jsonl").write_text(dumps(root) + "\n" + json.dumps(fork) + "\n")
    data = page_of_files([tmp_path / "t.jsonl"])
    assert [t.get("pa") for t in data["trajectories"]] == [None, "root"]
    (tmp_path / "t.jsonl").write_text(json.dumps(fork) + "\n")
    assert len(page_of_files([tmp_path / "t.jsonl"])["trajectories"]) == 1


def test_an_empty_trajectory(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", [Trajectory("q", "q", "", (), None, None, "error")])
    data = write_report(tmp_path / "r.html", [tmp_path / "t.jsonl"])
    assert len(data["trajectories"]) == 1
    assert data["distributions"] is None
