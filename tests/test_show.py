"""`agentropy show`: what is printed is what the file says, and hostile text stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentropy.cli import main
from agentropy.training.tokenizer import train_tokenizer
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory, write_jsonl
from test_analysis_imports import CONVERSATION


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(["print(6*7) what is it"] * 3, vocab_size=300, numbers=True)
    tokenizer.save_pretrained(root / "model")

    def segment(kind: Any, text: str, entropy: float = 0.0, **rest: Any) -> Segment:
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        mine = kind in ("reasoning", "call")
        logprobs, entropies = (((-0.5,) * len(ids), (entropy,) * len(ids))) if mine else (None, None)
        return Segment(kind, ids, logprobs, entropies, **rest)

    t = Trajectory(
        "q1",
        "q1-0",
        "?",
        (
            segment("prompt", "<|user|>6*7?<|assistant|>"),
            segment("reasoning", "<think>é\u2028 maybe 41</think>", 1.5),
            segment("call", "<python>print(6*7)</python>", 0.2, calls=(ToolCall("python", {"code": "print(6*7)"}),)),
            segment("result", "<result>\x1b[31m42\r\x07</result>", results=(ToolResult("42", "ok", seconds=0.004),)),
            segment("reasoning", "<answer>42</answer>", 0.25),
        ),
        "42",
        1.0,
        "answer",
    )
    (root / "trajectories").mkdir()
    write_jsonl(root / "trajectories" / "t.jsonl", [t])
    return root


def test_plain(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run_directory / "trajectories" / "t.jsonl"), "--id", "q1-0"]) == 0
    out = capsys.readouterr().out
    assert "q1-0: answer, score 1" in out
    assert re.search(r"reasoning +H 1\.500 +<think>é.* maybe 41</think>", out)
    assert "[ok, 4 ms, dH -1.250: effective]" in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u2028]", out)


def test_colours_change_no_text(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run_directory / "trajectories" / "t.jsonl")
    main(["show", path])
    plain = capsys.readouterr().out
    main(["show", path, "--color", "always"])
    shaded = capsys.readouterr().out
    assert "\x1b[38;5;16;48;5;209m" in shaded
    shaded = shaded[: shaded.rindex("\n\n") + 1]  # without the key to the shades
    assert re.sub(r"\x1b\[[0-9;]*m", "", shaded) == plain


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--id", "q9"], "no trajectory 'q9'"), (["--model", "/no/such"], "no tokenizer")],
)
def test_what_is_missing_is_said(
    run_directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["show", str(run_directory / "trajectories" / "t.jsonl"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_damaged_tokenizer_is_named(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["show", str(run_directory / "trajectories" / "t.jsonl"), "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert error.count("\n") == 1


def test_a_source_without_ids_is_shown_by_the_text_of_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def segment(kind: Any, *tokens: str, entropies: tuple[float, ...] | None = None) -> Segment:
        return Segment(kind, (0,) * len(tokens), entropies=entropies, tokens=tokens)

    segments = (segment("prompt", "6*7?"), segment("reasoning", "may", "be\x1b", entropies=(0.0, 1.5)))
    t = Trajectory("q", "q", "?", segments, None, None, "void", "top-k", ids_kind="none")
    write_jsonl(tmp_path / "t.jsonl", [t])
    assert main(["show", str(tmp_path / "t.jsonl"), "--color", "always"]) == 0
    out = capsys.readouterr().out
    assert "prompt            6*7?" in out
    assert "H\u22480.750   may\x1b[38;5;16;48;5;209mbe\\x1b\x1b[0m" in out


def test_on_a_terminal_lines_are_wrapped_and_nothing_is_lost(
    run_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(run_directory / "trajectories" / "t.jsonl")
    monkeypatch.setenv("COLUMNS", "56")
    main(["show", path])
    plain = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(["show", path, "--color", "never"])
    wrapped = capsys.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 56
    assert len(wrapped.splitlines()) > len(plain.splitlines())
    assert re.sub(r"\s", "", wrapped) == re.sub(r"\s", "", plain)


def test_a_wrong_name_gets_the_nearest(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run_directory / "trajectories" / "t.jsonl"), "--id", "q1-1"]) == 2
    assert "which has 1; the nearest is 'q1-0'" in capsys.readouterr().err


def test_a_directory_shows_the_trajectory_of_every_file_that_has_it(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_directory / "trajectories" / "t.jsonl"
    (first.parent / "u.jsonl").write_bytes(first.read_bytes())
    assert main(["show", str(run_directory), "--id", "q1-0"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.endswith(".jsonl:")] == [
        f"{first}:",
        f"{first.parent / 'u.jsonl'}:",
    ]
    assert out.count("q1-0: answer, score 1") == 2
    assert main(["show", str(run_directory)]) == 0
    assert capsys.readouterr().out.count("q1-0: answer, score 1") == 1


def test_a_chat_log_shows_calls_whose_tokens_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    assert main(["show", str(tmp_path / "chat.jsonl"), "--id", "chat-1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r'call +python \{"code": "print\(6\*7\)"\}', out)
    assert re.search(r"dH\u2248[+-]\d", out)
