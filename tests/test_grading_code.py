"""Programs graded in the real sandbox: outputs compared outside of it, tests that must run to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentropy.evaluation.grading import Verdict
from agentropy.evaluation.grading.code import (
    Executor,
    output_difference,
    problem_gold,
    program_of,
    read_problem,
    same_token,
)
from agentropy.evaluation.grading.graders import CodeGrader
from agentropy.sandbox.results import ExecutionResult

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"

PROGRAMS = [
    # program, stdin, expected output, reason
    (ADD, "3 4\n", "7\n", "passed"),
    (ADD, "3 4", "7", "passed"),
    (ADD, "3 4\n", "8\n", "wrong_output"),
    ("import sys\nfor line in sys.stdin.buffer.readlines(): print(int(line))", "1\n2\n", "1\n2\n", "passed"),
    (
        "import sys\nprint(sys.stdin.buffer.readline().strip().decode(), sys.stdin.readline())",
        "a\nb\n",
        "a b\n",
        "passed",
    ),
    ("import sys\nprint(sys.stdin.read().split()[-1])", "a\nb c\n", "c\n", "passed"),
    ("print(0.333333)", "", "0.333333333333\n", "passed"),
    ("print(50000000000000001)", "", "50000000000000000\n", "wrong_output"),
    ("import sys\nprint('warn', file=sys.stderr)\nprint(7)", "", "7\n", "passed"),
    ("print(7)\nimport sys\nsys.exit(0)", "", "7\n", "passed"),
    ("print(7)\nimport sys\nsys.exit(3)", "", "7\n", "runtime_error"),
    ("print(7)\n1/0", "", "7\n", "runtime_error"),
    ("import os\nos._exit(0)", "", "7\n", "no_output"),
    ("while True: pass", "", "7\n", "timeout"),
    ("print('7' * 10**6)", "", "7\n", "wrong_output"),
    ("print(", "", "7\n", "runtime_error"),
    ("7", "", "7\n", "no_output"),  # a last expression is not printed: programs are no notebook cells
    ("if __name__ == '__main__':\n    print(7)", "", "7\n", "passed"),
    ("print(7, end='')", "", "7\n\n", "passed"),
    ("", "", "7\n", "no_answer"),
    ("pass", "", "", "passed"),
    ("Here it is:\n```python\nprint(7)\n```\nDone.", "", "7\n", "passed"),
]


async def _grade(rows: Sequence[tuple[str, str, str]], timeout: float = 2.0) -> list[Verdict]:
    grader = CodeGrader(timeout=timeout)
    try:
        return list(await asyncio.gather(*(grader.grade(p, [g], stdin=s) for p, s, g in rows)))
    finally:
        await grader.aclose()


def test_programs() -> None:
    verdicts = asyncio.run(_grade([(program, stdin, gold) for program, stdin, gold, _ in PROGRAMS]))
    found = {program: verdict.reason for (program, *_), verdict in zip(PROGRAMS, verdicts, strict=True)}
    assert [v.reason for v in verdicts] == [reason for *_, reason in PROGRAMS], found
    assert all(v.correct == (v.reason == "passed") for v in verdicts)


FUNCTION = problem_gold({"entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)\n"})
CHEATS = [
    ("def add(a, b): return a + b", "passed"),
    ("def add(a, b): return a - b", "wrong_output"),
    ("def sub(a, b): return a - b", "runtime_error"),
    ("import os\nos._exit(0)", "no_output"),
    ("import sys\nsys.exit(0)", "no_output"),
    ("raise SystemExit", "no_output"),
    ("def add(a, b):\n    import os\n    os._exit(0)", "no_output"),
    ("import sys\nprint(sys.stdin.read())\nimport os\nos._exit(0)", "no_output"),
    ("def add(a, b):\n    while True: pass", "timeout"),
    ("print('noise')\ndef add(a, b):\n    print('more')\n    return a + b", "passed"),
]


def test_function_tests_must_run_to_their_end() -> None:
    verdicts = asyncio.run(_grade([(program, "", FUNCTION) for program, _ in CHEATS]))
    assert [v.reason for v in verdicts] == [reason for _, reason in CHEATS]


def test_all_tests_must_pass_and_the_failing_one_is_named() -> None:
    tests = [{"stdin": "1 2", "stdout": "3"}, {"stdin": "2 2", "stdout": "5"}, {"stdin": "0 0", "stdout": "0"}]
    wrong, right = asyncio.run(_grade([(ADD, "", problem_gold(tests)), (ADD, "", problem_gold([tests[0], tests[2]]))]))
    assert wrong.reason == "wrong_output"
    assert wrong.detail.startswith("test 1 of 3: line 1: '4' instead of '5'")
    assert right.detail == "2 of 2 tests passed"


class _Broken:
    """A sandbox that fails for no fault of the program."""

    async def execute(
        self,
        codes: Sequence[str],
        *,
        timeout: float = 5.0,
        stdin: str | None = None,
        seed: int = 0,
        echo: bool = True,
    ) -> list[ExecutionResult]:
        return [ExecutionResult("sandbox_error", stderr="no more processes") for _ in codes]


def test_a_broken_sandbox_is_no_wrong_answer() -> None:
    executor: Executor = _Broken()
    verdict = CodeGrader(executor).grade_now("print(7)", ["7"])
    assert (verdict.correct, verdict.score, verdict.reason) == (None, None, "infrastructure")


def test_grade_now_starts_and_stops_its_own_sandbox() -> None:
    assert CodeGrader().grade_now("print(7)", ["8", "7"]).correct


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2\n3\n", "1  2 \n\n3\n", True),
        ("1 2\n3\n", "1\n2 3\n", False),
        ("1\n2\n", "1\n", False),
        ("1\n", "1\n2\n", False),
        ("YES", "yes", False),
        ("Case #1: 0.5", "Case #1: 0.5000001", True),
        ("Case #1: 0.5", "Case #1: 0.51", False),
        ("1e-7", "0.0000001", True),
        ("", "\n", True),
    ],
)
def test_outputs(expected: str, printed: str, same: bool) -> None:
    assert (output_difference(expected, printed) is None) is same


@pytest.mark.parametrize(
    ("wanted", "given", "same"),
    [
        ("7", "7.0", True), ("7", "7.0000001", False), ("7.0", "7", True), ("7.0", "7.0000001", True),
        ("1000000.0", "1000000.5", True), ("1000000.0", "1000002.5", False), ("007", "7", False), ("nan", "NaN", False),
        ("1_000", "1000", False), ("0x10", "16", False), ("-0.0", "0", True), ("1e400", "1e400", True),
        ("3.14", "abc", False),
        ("1e999999999", "1.0", False), ("9" * 5000, "9" * 4999 + "8", False),
    ],
)  # fmt: skip
def test_tokens(wanted: str, given: str, same: bool) -> None:
    assert same_token(wanted, given) is same


def test_tokens_checker_ignores_lines() -> None:
    assert output_difference("1 2\n3", "1\n2 3", "tokens") is None
    assert output_difference("1.0", "1.05", "tokens", 0.1) is None


def test_problems_are_read_or_refused() -> None:
    assert read_problem("7\n", "3").tests[0].stdin == "3"  # type: ignore[union-attr]
    assert read_problem('{"a": 1}').tests[0].stdout == '{"a": 1}'  # type: ignore[union-attr]
    assert read_problem(problem_gold([{"stdin": "", "stdout": "1"}], "float tolerance 0.01")).tolerance == 0.01
    for tests, checker in (([], None), ([{"input": "1"}], None), ([{"stdout": "1"}], "regex"), ("x", None)):
        verdict = CodeGrader(_Broken()).grade_now("print(1)", [problem_gold(tests, checker)])
        assert verdict.reason == "ungradable"


def test_program_of_a_text() -> None:
    assert program_of("x = 1") == "x = 1"
    assert program_of("```py\na\n```\n```bash\nls\n```\n~~~\nb\n~~~") == "b\n"
    assert program_of("```python\nprint('```')\n```") == "print('```')\n"
