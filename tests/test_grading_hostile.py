r"""Hostile and broken answers: no crash, no hang, no false credit, and no other answer pays for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentropy.evaluation.grading import symbolic
from agentropy.evaluation.grading.extract import boxes, extract
from agentropy.evaluation.grading.fallback import refusal
from agentropy.evaluation.grading.graders import MathGrader
from agentropy.evaluation.grading.math import grade_fast

HOSTILE = [
    "9^{9^{9^{9}}}",
    "9^9^9^9^9",
    "2^{2^{2^{2^{2^{2^{2}}}}}}",
    "\\sin(9^{9^{9^9}})",
    "\\cos(10^{10^{9}})",
    "e^{e^{e^{e^{e}}}}",
    "(9^{9^{9}})^{9^{9^{9}}}",
    "1/(9^{9^{9^9}})",
    "100000!",
    "99999999!",
    "(((((3!)!)!)!)!)!",
    "10!!!!!!!!!",
    "\\binom{10^{9}}{5\\cdot10^{8}}",
    "\\sqrt[10^{9}]{2}",
    "9" * 4000,
    "0." + "9" * 4000,
    "1e99999",
    "1e-99999",
    "\\frac{" * 300 + "1" + "}{2}" * 300,
    "{" * 2000 + "1" + "}" * 2000,
    "(" * 2000 + "1" + ")" * 2000,
    "(" * 2000,
    "\\{" * 500 + "1" + "\\}" * 500,
    "[" * 30 + "1" + "]" * 30,
    "-" * 3000 + "1",
    "1" + "+1" * 1500,
    "x" + "^x" * 500,
    "x" * 3000,
    "\\pm" * 200 + "1",
    "1,2," * 900,
    "\\cup".join(["(0,1)"] * 300),
    "=".join(["1"] * 800),
    "<".join(["x"] * 400),
    "|" * 500,
    "|x" * 400,
    "\\begin{pmatrix}" * 100,
    "\\begin{pmatrix}" + "1&" * 900 + "\\end{pmatrix}",
    "\\" * 999,
    "\\\\\\\\",
    "\\frac{}{}",
    "\\frac",
    "\\sqrt",
    "^",
    "_",
    "x_",
    "\\sum_{n=1}^{10^{9}} \\frac{1}{n}",
    "\\sum_{n=1}^{\\infty} \\frac{1}{n^{3}}",
    "\\prod_{k=1}^{999999} k",
    "\\lim_{x\\to 0} \\frac{\\sin x}{x}",
    "\\int e^{e^{x^2}} dx",
    "\\frac{1}{0}",
    "0^{-1}",
    "0^0",
    "\\log 0",
    "\\infty-\\infty",
    "\\tan(\\pi/2)",
    "\\gcd(10^{30}, x)",
    "__import__('os').system('true')",
    "eval(1)",
    "lambda: 0",
    "\x00\x01\x02",
    "\ud7ff\ufdd0\U0010ffff",
    "1" + "\u0301" * 500,
    "٣",
    "３",
    "<script>",
    "\\text{" * 200,
    "\\href{javascript:1}{2}",
    "{}" * 1000,
    "%" * 100,
    "!" * 100,
    "'" * 1000,
]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    made = MathGrader(workers=1, timeout=2.0)
    yield made
    made.close()


@pytest.mark.parametrize("gold", ["2\\pi+1", "(1,2)", "x^2+1=y"])
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_answers_are_wrong_and_quick(grader: MathGrader, gold: str, number: int) -> None:
    started = time.monotonic()
    verdict = grader.grade_now("\\boxed{" + HOSTILE[number] + "}", [gold])
    assert verdict.correct is False, verdict
    assert verdict.reason in ("different", "parse_error", "no_answer", "timeout")
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_golds_never_give_credit(grader: MathGrader, number: int) -> None:
    verdict = grader.grade_now("\\boxed{17}", [HOSTILE[number]])
    assert not verdict.correct, verdict


def test_the_reader_itself_is_bounded() -> None:
    """Without the worker's clock: our own reader must end by itself on all of these."""
    for answer in HOSTILE:
        started = time.monotonic()
        compare_without_library("2\\pi+1", answer)
        assert time.monotonic() - started < 3.0, answer[:60]


LATEX_PIECES = (
    "1 2 3.5 x y n e i \\pi + - * / ^ _ { } ( ) [ ] , = < \\leq ! % | "
    "\\frac \\sqrt \\sin \\ln \\pm \\cup \\{ \\} \\in : "
    "\\text{a} \\infty \\cdot \\binom \\overline \\lfloor \\rfloor \\\\ & $ ' \\begin{pmatrix} \\end{pmatrix} \\circ "
    "\\boxed \\approx \\mathbb{R} \\setminus 0 9999"
)
LATEX = st.lists(st.sampled_from([*LATEX_PIECES.split(" "), " "]), max_size=14).map("".join)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LATEX, LATEX)
def test_no_text_breaks_the_reader(gold: str, answer: str) -> None:
    grade_fast(answer, gold)
    refusal(answer)
    compare_without_library(gold, answer)


def compare_without_library(gold: str, answer: str) -> tuple[str, str]:
    """Our reader alone: what it can't read would go to math-verify, which needs a worker's clock."""
    try:
        return str(symbolic.equal(symbolic.tidy(gold), symbolic.tidy(answer))), ""
    except (symbolic.Unreadable, symbolic.TooLarge) as why:
        return "unread", str(why)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.text(max_size=30))
def test_no_text_breaks_extraction(before: str, content: str) -> None:
    assert extract(before, "lenient").source in ("box", "tag", "marker", "none")
    boxes("\\boxed{" + before)
    plain = content.replace("\\", "").replace("{", "").replace("}", "").replace("<", "").strip()
    if plain:
        assert extract(f"ok \\boxed{{{plain}}}").answer == plain


def test_extraction_is_linear() -> None:
    started = time.monotonic()
    for text in (
        "\\boxed{" * 50_000,
        "\\boxed{1}" * 20_000,
        "<answer>" * 20_000,
        "<result>" * 20_000,
        "```output\n" * 9_000,
    ):
        extract(text, "lenient")
    assert time.monotonic() - started < 5.0


@settings(max_examples=300, deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_integers_are_compared_exactly(a: int, b: int) -> None:
    verdict = grade_fast(str(b), str(a))
    assert verdict is not None
    assert verdict.correct is (a == b)
    spelled = grade_fast(f"\\${a:,}.00", str(a))
    assert spelled is not None
    assert spelled.correct


@settings(max_examples=300, deadline=None)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_compared_exactly(a: Fraction, b: Fraction) -> None:
    verdict = grade_fast(f"\\frac{{{b.numerator}}}{{{b.denominator}}}", f"{a.numerator}/{a.denominator}")
    assert verdict is not None
    assert verdict.correct is (a == b)
