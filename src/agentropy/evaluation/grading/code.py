r"""Grading programs: every test of a problem, each in a sandboxed process of its own, compared outside of it.

A problem's tests are either inputs with expected outputs or a function with assertions. As gold, a problem is one
string: the expected output alone, or `problem_gold(…)`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agentropy.evaluation.grading.verdict import Verdict, right, unscorable, wrong

if TYPE_CHECKING:
    from agentropy.sandbox.results import ExecutionResult

TOLERANCE = 1e-6
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.S | re.M)
_FUTURE = re.compile(r"^from __future__ import [\w, ]+$", re.M)
_INTEGER = re.compile(r"[+-]?\d+")
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")


class Executor(Protocol):
    """What runs programs: `sandbox.LocalSandbox` or anything with its `execute`."""

    async def execute(
        self,
        codes: Sequence[str],
        *,
        timeout: float = 5.0,
        stdin: str | None = None,
        seed: int = 0,
        echo: bool = True,
    ) -> list[ExecutionResult]: ...


@dataclass(frozen=True)
class IOTest:
    """One input and the output it must lead to."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class FunctionTest:
    """Assertions that follow the candidate's code and raise where it is wrong. entry_point: the function they call."""

    entry_point: str
    test: str


@dataclass(frozen=True)
class Problem:
    """Tests that must all pass. checker: compare line by line or token by token; floats within `tolerance`.

    prelude: code that goes before the program, such as imports that the benchmark's own checker provides.
    """

    tests: tuple[IOTest | FunctionTest, ...]
    checker: Literal["lines", "tokens"] = "lines"
    tolerance: float = TOLERANCE
    prelude: str = ""


def problem_gold(tests: Any, checker: str | None = None, prelude: str = "") -> str:
    """The tests of a task row as one gold string.

    tests: a list of {stdin, stdout} or {entry_point, test}, or one of them. checker: None, `tokens` or `float tolerance
    X`. prelude: code that goes before the program.
    """
    return json.dumps({"tests": tests, "checker": checker} | ({"prelude": prelude} if prelude else {}))


def read_problem(gold: str, stdin: str = "") -> Problem:
    """The problem of a gold string: a `problem_gold`, else the expected output for `stdin`. Raises ValueError."""
    if gold.lstrip().startswith("{"):
        try:
            row = json.loads(gold)
        except ValueError:
            row = None
        if isinstance(row, dict) and "tests" in row:
            problem = _problem(row["tests"], row.get("checker"))
            return replace(problem, prelude=str(row.get("prelude") or ""))
    return Problem((IOTest(stdin, gold),))


def _problem(tests: Any, checker: str | None) -> Problem:
    rows = [tests] if isinstance(tests, Mapping) else tests
    if not isinstance(rows, list) or not rows:
        raise ValueError("the tests must be a non-empty list, or one test")
    found: list[IOTest | FunctionTest] = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, Mapping) and isinstance(row.get("stdout"), str):
            found.append(IOTest(str(row.get("stdin") or ""), row["stdout"]))
        elif isinstance(row, Mapping) and isinstance(row.get("test"), str):
            found.append(FunctionTest(str(row.get("entry_point") or ""), row["test"]))
        else:
            raise ValueError(f"test {number} has neither 'stdout' nor 'test'")
    words = (checker or "lines").split()
    if words[:2] == ["float", "tolerance"] and len(words) == 3:
        return Problem(tuple(found), "tokens", float(words[2]))
    if words not in (["lines"], ["tokens"]):
        raise ValueError(f"unknown checker {checker!r}")
    return Problem(tuple(found), "tokens" if words == ["tokens"] else "lines")


def program_of(text: str) -> str:
    """The program in a model's text: the last fenced block that is Python or unnamed, else the whole text."""
    blocks = [m.group(3) for m in _FENCE.finditer(text) if m.group(2).lower() in ("", "python", "python3", "py")]
    return blocks[-1] if blocks else text


async def grade_code(program: str, problem: Problem, executor: Executor, *, timeout: float = 5.0) -> Verdict:
    """Run the tests in order, stopping at the first that fails. timeout: seconds a test.

    A failure of the sandbox itself makes the program unscorable; anything the program does is its own.
    """
    if not program.strip():
        return wrong("no_answer", program, "there is no program")
    code = after_prelude(problem.prelude, program)
    for number, test in enumerate(problem.tests):
        if isinstance(test, FunctionTest):
            verdict = await _run_function(code, test, executor, timeout)
        else:
            verdict = await _run_io(code, test, problem, executor, timeout)
        if not verdict.correct:
            where = f"test {number} of {len(problem.tests)}: " if len(problem.tests) > 1 else ""
            return Verdict(verdict.correct, verdict.score, verdict.reason, program, where + verdict.detail)
    return right("passed", program, f"{len(problem.tests)} of {len(problem.tests)} tests passed")


def after_prelude(prelude: str, program: str) -> str:
    """The program behind the prelude; its own `from __future__` lines, which may follow nothing, come first."""
    if not prelude:
        return program
    first = _FUTURE.findall(program)
    return "".join(f"{line}\n" for line in first) + f"{prelude}\n{_FUTURE.sub('', program)}"


def _failed(result: ExecutionResult, timeout: float) -> Verdict | None:
    """The verdict on a run that didn't end well, None for one that did."""
    if result.status == "ok":
        return None
    if result.status == "sandbox_error":
        return unscorable("infrastructure", detail=f"the sandbox failed: {result.stderr.strip()[-300:]}")
    if result.status == "timeout":
        return wrong("timeout", detail=f"over {timeout:g} s")
    last = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.exit_code}"]
    return wrong("runtime_error", detail=f"{result.status}: {last[0][:300]}")


async def _run_io(program: str, test: IOTest, problem: Problem, executor: Executor, timeout: float) -> Verdict:
    (result,) = await executor.execute([program], timeout=timeout, stdin=test.stdin, echo=False)
    failed = _failed(result, timeout)
    if failed is not None:
        return failed
    if result.truncated and len(result.stdout) < len(test.stdout):
        return unscorable("infrastructure", detail="the sandbox keeps less output than the test expects")
    if not result.stdout.strip() and test.stdout.strip():
        return wrong("no_output", detail="the program ended without output")
    difference = output_difference(test.stdout, result.stdout, problem.checker, problem.tolerance)
    return right("passed") if difference is None else wrong("wrong_output", detail=difference)


async def _run_function(program: str, test: FunctionTest, executor: Executor, timeout: float) -> Verdict:
    # Exit code 0 proves nothing: the candidate may end the process before the assertions. Behind them the program must
    # answer a challenge that comes on stdin. This stops accidents and cheap tricks; code and tests share one process,
    # so a candidate written against this very check could still pass it.
    challenge = secrets.token_hex(16)
    reply = _reply(challenge)
    script = (
        f"{program}\n\n{test.test}\n\n"
        "import hashlib as _h, os as _o\n"
        f"_o.write(1, (chr(10) + _h.sha256(('{_SALT}' + _o.read(0, 64).decode().strip()).encode()).hexdigest()"
        " + chr(10)).encode())\n"
    )
    (result,) = await executor.execute([script], timeout=timeout, stdin=challenge, echo=False)
    failed = _failed(result, timeout)
    if failed is not None:
        return wrong("wrong_output", detail=failed.detail) if "AssertionError" in failed.detail else failed
    if reply not in result.stdout.rsplit("\n", 6)[1:]:
        return wrong("no_output", detail="the program ended before its tests did")
    return right("passed")


_SALT = "agentropy tests passed "


def _reply(challenge: str) -> str:
    return hashlib.sha256((_SALT + challenge).encode()).hexdigest()


# Comparing outputs


def output_difference(
    expected: str, printed: str, checker: Literal["lines", "tokens"] = "lines", tolerance: float = TOLERANCE
) -> str | None:
    """The first difference in words, None if there is none.

    Blanks at line ends, blank lines and the amount of blanks between tokens don't count. Integers are compared exactly
    (by text or by value), a float within `tolerance`, absolute or relative; other tokens by text.
    """
    if expected == printed:
        return None
    if checker == "tokens":
        return _line_difference(expected.split(), printed.split(), tolerance, "")
    wanted = [line for line in expected.splitlines() if line.strip()]
    given = [line for line in printed.splitlines() if line.strip()]
    for number, (w, g) in enumerate(zip(wanted, given, strict=False), 1):
        difference = None if w == g else _line_difference(w.split(), g.split(), tolerance, f"line {number}: ")
        if difference:
            return difference
    if len(wanted) != len(given):
        return f"{len(given)} lines instead of {len(wanted)}"
    return None


def _line_difference(wanted: Sequence[str], given: Sequence[str], tolerance: float, where: str) -> str | None:
    for w, g in zip(wanted, given, strict=False):
        if not same_token(w, g, tolerance):
            return f"{where}{_short(g)} instead of {_short(w)}"
    if len(wanted) != len(given):
        return f"{where}{len(given)} words instead of {len(wanted)}"
    return None


def _short(token: str) -> str:
    return repr(token if len(token) <= 60 else token[:57] + "...")


def same_token(wanted: str, given: str, tolerance: float = TOLERANCE) -> bool:
    """Whether a printed token is the expected one."""
    if wanted == given:
        return True
    float_wanted, float_given = _FLOAT.fullmatch(wanted), _FLOAT.fullmatch(given)
    if not float_wanted and not float_given:
        return False
    if not (float_wanted or _INTEGER.fullmatch(wanted)) or not (float_given or _INTEGER.fullmatch(given)):
        return False
    try:
        w, g = Decimal(wanted), Decimal(given)
        if not float_wanted:
            return w == g  # an integer was asked for: 7.0 is 7, 7.0000001 is not
        return abs(w - g) <= Decimal(repr(tolerance)) * max(Decimal(1), abs(w))
    except ArithmeticError:  # an exponent beyond what Decimal can hold
        return False
