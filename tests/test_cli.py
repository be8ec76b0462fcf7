"""What holds for every subcommand: one line for what is wrong, pipes, and text that is no UTF-8."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentropy.cli import main

# Half a surrogate pair: JSON can say it, UTF-8 cannot.
TRAJECTORY = (
    '{"question_id": "\\ud800", "trajectory_id": "t\\ud800", "score": 1, '
    '"segments": [{"kind": "prompt", "ids": [1]}, {"kind": "reasoning", "ids": [2], "entropies": [0.5]}]}'
)


def agentropy(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentropy.cli", *arguments]


def test_half_a_surrogate_pair_goes_through_as_an_escape(tmp_path: Path) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "shaped.jsonl"
    file.write_text(TRAJECTORY + "\n")
    done = subprocess.run(agentropy("shape", "--method", "grpo", str(file)), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["trajectory_id"] == "t\ud800"
    assert main(["shape", "--method", "grpo", str(file), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["trajectory_id"] == "t\ud800"


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text((TRAJECTORY + "\n") * 3000)
    process = subprocess.Popen(
        agentropy("shape", "--method", "grpo", str(file)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tasks", "show", "arithmetic", "--n", "-1"], "--n must be at least 0"),
        (["tasks", "check", "arithmetic", "--limit", "-1"], "--limit must be at least 1"),
        (["tasks", "check", "gsm9k=no.jsonl"], "no benchmark 'gsm9k'; there are"),
        (["tasks", "check", "arithmetic", "--list", "-1"], "--list must be at least 0"),
        (["warm-start", "--out", "/proc/here"], "choose another --out"),
        (["warm-start", "--steps", "-1"], "--steps must not be negative"),
    ],
)
def test_numbers_and_places_that_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_options_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list-options"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["--rollout.samples"].endswith("(default: 8)")
    assert lines["--rollout.deterministic"].endswith("(default: true)")
    assert "default:" not in lines["--rollout.max_new_tokens"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--resume", "{}"],
        ["train", "--out", "{}"],
        ["train", "--world", "arithmetic", "--model", "{}", "--out", "x"],
        ["tasks", "show", "{}.jsonl"],
        ["shape", "--method", "grpo", "{}"],
        ["warm-start", "--out", "{}"],
    ],
)
def test_names_that_no_file_can_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([a.format("n" * 300) for a in arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_torchrun_starts_training_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["grade", "--prediction", "1", "--gold", "1"]) == 2
    assert "torchrun starts `agentropy train` only" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["grade", "--prediction", "1", "--gold", "1"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [["train", "--steps"], ["trian"], ["train", "--help"], ["train", "--list-options"], ["grade", "--gold"]],
)
def test_of_torchruns_processes_the_first_says_what_the_arguments_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(arguments) == 0
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert "".join(capsys.readouterr())
