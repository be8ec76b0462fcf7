"""verl's own client of SandboxFusion against `agentropy sandbox serve`: what a reward of verl makes of our sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from verl.utils.reward_score.sandbox_fusion import compute_score
from verl.utils.reward_score.sandbox_fusion.utils import check_correctness

DOUBLE = "print(2 * int(input()))"
CASES: dict[str, Any] = {"inputs": ["1\n", "20\n", "300\n"], "outputs": ["2\n", "40\n", "600\n"]}


@pytest.fixture(scope="module")
def run_code() -> Iterator[str]:
    """The address of /run_code of a server that runs for this module."""
    command = [sys.executable, "-m", "agentropy.cli", "sandbox", "serve", "--port", "0", "--workers", "2"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    try:
        yield server.stderr.readline().strip().rsplit(" ", 1)[1] + "/run_code"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        server.stderr.close()


def test_programs_are_told_right_from_wrong(run_code: str) -> None:
    results, metadata = check_correctness(run_code, CASES, DOUBLE, timeout=10)
    assert results == [True, True, True]
    assert [m["stdout"] for m in metadata] == ["2\n", "40\n", "600\n"]
    assert all(m["status"] == "success" and m["exit_code"] == 0 and m["duration"] >= 0 for m in metadata)
    results, metadata = check_correctness(run_code, CASES, "print(min(40, 2 * int(input())))", timeout=10)
    assert results == [True, True, False]
    assert metadata[2]["status"] == "wrong_answer"


@pytest.mark.parametrize(
    ("program", "code", "status"),
    [
        ("print(1 / (int(input()) - 1))", -2, "runtime_error"),
        ("def f(:", -2, "runtime_error"),  # there is no compiler: a syntax error is one of running
        ("import sys\nsys.exit(7)", -2, "runtime_error"),
        ("import os\nos.abort()", -2, "runtime_error"),
        ("while True: pass", -3, "timeout"),
        ("print(open('/etc/shadow').read())", -2, "runtime_error"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", -2, "runtime_error"),
    ],
)
def test_failures_are_the_program_s_own(run_code: str, program: str, code: int, status: str) -> None:
    case = {"inputs": ["1\n"], "outputs": ["2\n"]}
    results, [metadata] = check_correctness(run_code, case, program, timeout=2)
    assert (results, metadata["status"]) == ([code], status)


def test_a_function_of_the_solution_is_called(run_code: str) -> None:
    case = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
    for program in (
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ):
        results, [metadata] = check_correctness(run_code, case, program, timeout=10)
        assert results == [True], metadata


def test_the_score_of_a_completion(run_code: str) -> None:
    score, _ = compute_score(run_code, None, 1024, f"So:\n```python\n{DOUBLE}\n```", CASES)
    assert score == 1.0
    score, _ = compute_score(run_code, None, 1024, "```python\nprint(2)\n```", CASES)
    assert score == pytest.approx(1 / 3)


def test_what_the_server_cannot_do_counts_as_its_own_failure(run_code: str) -> None:
    """-1 is verl's code for a failing sandbox; such a sample must not look like a wrong program."""
    results, [metadata] = check_correctness(
        run_code, {"inputs": ["1\n"], "outputs": ["2\n"]}, "int main() {}", timeout=2, language="cpp"
    )
    assert (results, metadata["status"]) == ([-1], "sandbox_error")
    assert "only python" in metadata["api_response"]["message"]
