"""`agentropy sandbox run` and `serve`, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentropy.cli import main

SOURCE = Path(__file__).parents[1] / "src"


def results(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_run_prints_one_result_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, given = tmp_path / "p.py", tmp_path / "in.txt"
    program.write_text("print(input())\n2 + 3")
    given.write_text("é\n")
    assert main(["sandbox", "run", str(program), "--stdin", str(given), "--timeout", "3"]) == 0
    (result,) = results(capsys)
    assert set(result) == {"status", "stdout", "stderr", "seconds"}
    assert (result["status"], result["stdout"], result["stderr"]) == ("ok", "é\n5\n", "")
    assert 0 < result["seconds"] < 3


def test_no_echo_and_timeout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "p.py"
    program.write_text("1")
    assert main(["sandbox", "run", str(program), "--no-echo"]) == 0
    assert results(capsys)[0]["stdout"] == ""
    program.write_text("while True: pass")
    assert main(["sandbox", "run", str(program), "--timeout", "0.2"]) == 0
    assert results(capsys)[0]["status"] == "timeout"


def test_cases_come_back_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[dict[str, Any]] = [
        {"name": f"slow{i}", "code": f"import time; time.sleep({0.3 - i / 10}); {i}"} for i in range(3)
    ]
    cases += [
        {"name": "stdin", "code": "print(input())", "stdin": "x"},
        {"name": "late", "code": "while True: pass", "timeout": 0.2},
        {"name": "made", "code": "", "code_gen": "'print(' + '1+' * 10 + '1)'"},
        {"name": "after", "code": "import os; os.listdir('.')", "setup_code": "open('left', 'w')"},
        {"code": "1/0"},
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in cases) + "\n")
    assert main(["sandbox", "run", "--jsonl", str(file)]) == 0
    found = results(capsys)
    assert [r.get("name") for r in found] == ["slow0", "slow1", "slow2", "stdin", "late", "made", "after", None]
    assert [r["stdout"] for r in found] == ["0\n", "1\n", "2\n", "x\n", "", "11\n", "[]\n", ""]
    assert [r["status"] for r in found[3:]] == ["ok", "timeout", "ok", "ok", "error"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: not a JSON object"),
        ("{}", "line 2: code is missing"),
        ('{"code": 1}', "line 2: code is of the wrong type"),
        ('{"code": "1", "stdin": 1}', "line 2: stdin is of the wrong type"),
        ('{"code": "1", "timeout": 0}', "line 2: timeout must be a positive"),
        ('{"code": "1", "timeout": "x"}', "line 2: timeout is of the wrong type"),
        ('{"code": "1", "timeout": true}', "line 2: timeout is of the wrong type"),
        ('{"code": "1", "timeout": ' + "9" * 400 + "}", "line 2: timeout must be a positive"),
        ("[" * 100_000, "line 2: no JSON"),
        ('{"code_gen": "open(1)"}', "line 2: code_gen: NameError"),
        ('{"code_gen": "1"}', "line 2: code_gen makes no string"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text('{"code": "1"}\n' + line + "\n")
    assert main(["sandbox", "run", "--jsonl", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_byte_order_mark_and_carriage_returns_are_no_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"code": "1 + 1"}\r\n')
    assert main(["sandbox", "run", "--jsonl", str(file)]) == 0
    assert results(capsys)[0]["stdout"] == "2\n"


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "run", str(tmp_path / "absent.py")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["sandbox", "run"]) == 2
    assert main(["sandbox", "run", "x.py", "--jsonl", "y"]) == 2
    program = tmp_path / "p.py"
    program.write_text("1")
    assert main(["sandbox", "run", str(program), "--timeout", "-1"]) == 2
    assert main(["sandbox", "run", str(program), "--workers", "0"]) == 2
    assert main(["sandbox", "serve", "--port", "70000"]) == 2
    capsys.readouterr()


def test_serve_answers_and_stops(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentropy.cli", "sandbox", "serve", "--port", "0", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    try:
        url = server.stderr.readline().strip().rsplit(" ", 1)[1]
        answer = httpx.post(f"{url}/run_code", json={"code": "print(1)", "language": "python"}, timeout=30).json()
        assert answer["run_result"]["stdout"] == "1\n"
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
        server.stderr.close()
    assert code in (0, 130)


def test_serve_on_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["sandbox", "serve", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert "in use" in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_known_case_by_the_command(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared_dir / "cases" / "sandbox.jsonl"
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    assert main(["sandbox", "run", "--jsonl", str(path)]) == 0
    found = results(capsys)
    assert [r["name"] for r in found] == [case["name"] for case in cases]
    for case, result in zip(cases, found, strict=True):
        if "{HARNESS_PID}" not in case["code"]:  # nobody fills the placeholder in here
            assert result["status"] in case["expect"]["status"].split("|"), (case["name"], result)
