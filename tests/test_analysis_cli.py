"""`agentropy analyze`: one pass over any mix of sources, what it prints and writes, long files in several processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentropy.analysis.analyse import analyse
from agentropy.analysis.imports import FORMATS, Options, sources
from agentropy.analysis.methods import DEFAULT, verdicts
from agentropy.analysis.pages import write_page
from agentropy.analysis.stream import Sample, cuts, read_pieces
from agentropy.batch import make_batch
from agentropy.cli import main
from agentropy.commands import analyze as commands
from agentropy.methods import make_method
from agentropy.trajectory import Trajectory, dumps, write_jsonl
from make_trajectories import EXAMPLE, trajectory
from test_analysis_imports import CONVERSATION, SURER

QUESTIONS, SAMPLES = 12, 4


def trajectories() -> list[Trajectory]:
    """Groups that lie apart in the file: all first samples, then all second ones."""
    out = []
    for k in range(SAMPLES):
        for q in range(QUESTIONS):
            status = "error" if (q + k) % 5 == 0 else "ok"
            before, after = 0.2 + 0.05 * q, 0.9 - 0.06 * (q + k) + 2.0 * (q == 7)
            turns = [([before, 1.5], [0.1], [status]), ([max(after, 0.0), 0.3], [], [])]
            score = float((q * k) % 3 == 0)
            out.append(trajectory(turns, score, question=f"q{q}", name=f"q{q}-{k}"))
    return out


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    write_jsonl(path, trajectories())
    return path


def test_what_is_printed_and_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps(CONVERSATION) + "\n")
    out = tmp_path / "out"
    assert (
        main(["analyze", str(file), str(chat), "--out", str(out), "--method", "tepo-sparse", "--method", "grpo"]) == 0
    )
    printed = capsys.readouterr().out
    for words in (
        "49 in 13 groups",
        "Effective calls",
        "tepo-sparse",
        "Least useful calls",
        "Note: The entropies of 1 of 49",
    ):
        assert words in printed
    assert sorted(p.name for p in out.iterdir()) == ["analysis.json", "calls.parquet", "report.html"]
    report = json.loads((out / "analysis.json").read_text())
    assert [(s["name"], s["format"], s["trajectories"]) for s in report["sources"]] == [
        ("some.jsonl", "agentropy", 48),
        ("chat.jsonl", "chat", 1),
    ]
    assert report["entropies"] == {"exact": 48, "estimated": 1, "missing": 0}
    assert set(report["methods"]) == {"tepo-sparse", "grpo"}
    table = pandas.read_parquet(out / "calls.parquet")
    assert len(table) == report["calls"] == 49
    assert table["entropy_change"].mean() == pytest.approx(report["all"]["mean"])
    assert (table["entropy_change"] < 0).mean() == pytest.approx(report["effective"]["ratio"])
    assert list(table["estimated"]) == [False] * 48 + [True]
    lowest = table.sort_values("entropy_change").iloc[0]
    assert report["most_useful"][0]["trajectory_id"] == lowest["trajectory_id"]
    by_tool = {row["tool"]: row["calls"] for row in report["by_tool"]}
    assert by_tool == dict(table["tool"].value_counts())
    assert sum(row["calls"] for row in report["by_position"]) == 49
    assert len((out / "report.html").read_text()) > 10_000


def test_methods_see_whole_groups_wherever_they_lie(file: Path) -> None:
    found = analyse(sources([file]), Options(), DEFAULT).report["methods"]
    batch = make_batch(trajectories())
    for name in DEFAULT:
        shaped = make_method(name).shape(batch)
        assert found[name]["kept"] == int(shaped.kept.sum())
        assert found[name]["dropped"] == {w: shaped.why.count(w) for w in dict.fromkeys(shaped.why) if w is not None}
        assert found[name]["reward_mean"] == pytest.approx(shaped.metrics["reward/mean"])
        bonus = shaped.metrics["entropy/bonus_share"] if name == "tao-rl" else None
        assert found[name]["bonus_share"] == (None if bonus is None else pytest.approx(bonus, rel=1e-4))
    assert found["tao-rl"]["bonus_share"] > 0


def test_processes_and_pieces_change_nothing(file: Path) -> None:
    found = {}
    for workers, size in ((0, 1), (1, 5_000)):
        sample = Sample()
        pieces = list(read_pieces(sources([file]), Options(), sample, workers=workers, piece_bytes=size))
        assert (len(pieces) > 3) == bool(workers)
        rows = [list(row) for p in pieces for row in zip(*p.rows.values(), strict=True)]
        numbers = [p.calls["entropy_change"].tolist() for p in pieces]
        found[workers] = (
            repr(rows),
            repr([v for part in numbers for v in part]),
            [dumps(t) for _, t in sample.trajectories],
        )
    assert len(rows) == QUESTIONS * SAMPLES
    assert found[0] == found[1]


def test_a_sample_holds_whole_questions_within_its_budget(file: Path) -> None:
    sample = Sample(budget=1_000)
    list(read_pieces(sources([file]), Options(), sample, workers=0))
    assert not sample.complete
    held = [t for _, t in sample.trajectories]
    assert 0 < len(held) < QUESTIONS * SAMPLES
    assert {sum(t.question_id == q for t in held) for q in {t.question_id for t in held}} == {SAMPLES}
    report = analyse(sources([file]), Options(), DEFAULT, sample=Sample(budget=1_000)).report
    assert (
        report["methods"]["tao-rl"]["kept"]
        == analyse(sources([file]), Options(), DEFAULT).report["methods"]["tao-rl"]["kept"]
    )
    assert any("a sample of whole questions" in note for note in report["notes"])


def test_pieces_end_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    data = b"\n".join(bytes([97 + i]) * (i * 7 % 40) for i in range(26))
    path.write_bytes(data)
    for size in (1, 10, 50, 10_000):
        spans = list(cuts(path, size))
        assert b"".join(data[a:b] for a, b in spans) == data
        assert all(b == len(data) or data[b - 1 : b] == b"\n" for _, b in spans)


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_errors_name_the_line_in_every_process(
    workers: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = file.read_text().splitlines()
    lines[30] = lines[30].replace('"kind":"reasoning"', '"kind":"thought"', 1)
    file.write_text("\n".join(lines))
    out = tmp_path / "out"
    assert main(["analyze", str(file), "--workers", workers, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert f"{file}, line 31: segment 1: segment kind 'thought'" in message
    assert message.count("\n") == 1
    assert list(out.iterdir()) == []


def test_clumsy_use(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "taken").write_text("")
    for arguments, message in (
        ([str(file), "--method", "taorl"], "unknown method 'taorl'"),
        ([str(file), "--workers", "-1"], "--workers -1 is below 0"),
        ([str(file), "--out", str(tmp_path / "taken")], "cannot make the directory"),
        ([str(tmp_path / "empty.jsonl")], "is empty"),
        ([str(tmp_path / "nothing")], "there is no such file"),
    ):
        assert main(["analyze", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_texts_without_scores_or_entropies_are_still_worth_a_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {
        "input": "?",
        "output": "<search>\x1b[31mwho\u202e</search><result>Ann</result>Ann",
        "step": 1,
    }
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    assert main(["analyze", str(tmp_path / "1.jsonl"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 trajectories have no entropies" in printed
    assert "No trajectory has a score" in printed
    assert "tepo-sparse cannot be applied" in printed
    assert "\x1b[31m" not in printed
    assert "\u202e" not in printed
    report = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert (report["effective"]["ratio"], report["accuracy"]) == (None, None)
    assert report["unused"]["judged"] == 2


def test_without_pandas_and_pyarrow_what_is_missing_is_named(file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('pandas', 'pyarrow', 'orjson')))\n"
        "from agentropy.cli import main\n"
        f"assert main(['analyze', {str(file)!r}]) == 0\n"
        f"sys.exit(main(['analyze', {str(file)!r}, '--out', {out!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "48 in 12 groups" in done.stdout
    assert done.returncode == 2
    assert "pyarrow is not installed: pip install 'agentropy[analysis]'" in done.stderr


def test_the_page_says_that_numbers_are_estimates(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps(SURER) + "\n")
    found = sources([chat])
    data = write_page(tmp_path / "report.html", [str(chat)], found, analyse(found, Options(), ["tao-rl"]))
    assert "are estimates" in json.dumps(data["tables"])
    assert data["estimates"] is True
    useful = next(t for t in data["tables"] if t["title"] in ("Most useful calls", "Least useful calls"))
    assert useful["rows"][0][0].startswith("≈")
    assert len(data["trajectories"]) == 1


def test_the_page_lists_what_was_wasted_and_where(file: Path, tmp_path: Path) -> None:
    again = {**EXAMPLE, "segments": [*EXAMPLE["segments"][:4], *EXAMPLE["segments"][1:]]}
    (tmp_path / "again.jsonl").write_text(json.dumps(again) + "\n")
    paths = [str(file), str(tmp_path / "again.jsonl")]
    found = sources(paths)
    data = write_page(tmp_path / "report.html", paths, found, analyse(found, Options(), ["tao-rl"]))
    table = next(t for t in data["tables"] if t["title"] == "Repeated calls")
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert (row["source"], row["trajectory"], row["call"]) == ("again.jsonl", EXAMPLE["trajectory_id"], "2 of 2")
    assert re.fullmatch(r"[+\u2212]\d\.\d{3}", row["dH"])


def test_the_formats_of_the_help_are_those_of_the_imports() -> None:
    assert tuple(FORMATS) == commands.FORMATS


def test_a_file_that_is_named_twice_counts_once(file: Path) -> None:
    assert len(sources([file, file.parent, file])) == 1


def test_one_group_gives_no_interval_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(EXAMPLE) + "\n")
    assert main(["analyze", str(tmp_path / "one.jsonl")]) == 0
    assert "interval" not in capsys.readouterr().out
    assert verdicts(["grpo"], make_batch([trajectory([])]), [])["grpo"]["kept"] == 1
