r"""Maths answers: what is equal and what is not, gold first, answer second. Every pair runs through a real worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentropy.errors import UserError
from agentropy.evaluation.grading import Grader, make_grader
from agentropy.evaluation.grading.fallback import refusal
from agentropy.evaluation.grading.math import verdict_of
from agentropy.evaluation.grading.symbolic import compare

EQUAL = [
    # numbers
    ("0.5", "1/2"),
    ("\\frac{1}{2}", "\\frac12"),
    ("\\frac{3}{4}", "\\dfrac{3}{4}"),
    ("\\frac{3}{4}", "\\tfrac34"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("-\\frac{1}{2}", "\\frac{1}{-2}"),
    ("-\\frac{1}{2}", "-1/2"),
    ("\\frac 59", "5/9"),
    ("\\frac9{19}", "\\frac{9}{19}"),
    ("10000", "10{,}000"),
    ("10000", "10,000"),
    ("10000", "10\\,000"),
    ("10000", "10 000"),
    ("64,\\!328", "64328"),
    ("1000", "1,000.0"),
    ("10^6", "1,000,000"),
    ("1000000", "10^{6}"),
    ("7", "7.0"),
    ("7", "+7"),
    ("7", "007"),
    ("7", "7."),
    ("-7", "−7"),
    (".5", "0.50"),
    ("0", "-0"),
    ("0", "0.0"),
    ("0", "\\frac{0}{5}"),
    ("\\frac{14}{3}", "4\\frac{2}{3}"),
    ("1.5", "1 1/2"),
    ("-\\frac{3}{2}", "-1\\frac{1}{2}"),
    ("33 \\frac{1}{3}", "\\frac{100}{3}"),
    ("1.5\\times10^{3}", "1500"),
    ("6.02\\times 10^{23}", "6.02e23"),
    ("3e8", "3 \\cdot 10^8"),
    ("0.\\overline{3}", "\\frac{1}{3}"),
    ("\\frac{1}{6}", "0.1\\overline{6}"),
    ("\\frac{41}{333}", "0.\\overline{123}"),
    ("½", "0.5"),
    ("\\frac{3}{2}", "1½"),
    ("1/3", "0.333333"),
    ("\\pi", "3.14159265"),
    ("\\sqrt{2}", "1.41421356"),
    ("12", "11.9999999999"),
    ("\\frac{1}{2}", "(1/2)"),
    ("2/3", "{2}/{3}"),
    ("5 million", "5,000,000"),
    # percent, currency, degrees, units
    ("28\\%", "28"),
    ("28\\%", "0.28"),
    ("28\\%", "28 \\text{ percent}"),
    ("28\\%", "28 percent"),
    ("28\\%", "\\frac{7}{25}"),
    ("0.28", "28\\%"),
    ("28", "28\\%"),
    ("62.5%", "62.5"),
    ("70000", "\\$70{,}000"),
    ("\\$32", "32.00"),
    ("32", "$32"),
    ("32", "32 dollars"),
    ("5.5", "£5.50"),
    ("5.5", "5.50 €"),
    ("90^\\circ", "90"),
    ("90", "90^{\\circ}"),
    ("90", "90°"),
    ("90", "90 degrees"),
    ("90", "90\\text{ degrees}"),
    ("7", "7\\text{ cm}"),
    ("16", "16\\,\\mathrm{m}^2"),
    ("864 \\mbox{ inches}^2", "864"),
    ("17 \\, \\mathrm{m/s}", "17"),
    ("5", "5 miles per hour"),
    ("5", "5 square meters"),
    ("5", "5 km/h"),
    ("5", "5 m"),
    ("35", "35cm"),
    ("3\\pi", "3\\pi\\text{ inches}"),
    ("18+2\\pi", "18+2\\pi square units"),
    ("13", "\\text{13}"),
    ("13", "\\mathrm{13}"),
    # spelling
    ("2\\pi", "2π"),
    ("2\\sqrt{3}", "2√3"),
    ("x^2", "x²"),
    ("\\frac{a}{b}", "\\frac{a}{\\,b}"),
    ("5", "$5$"),
    ("5", "\\(5\\)"),
    ("5", "**5**"),
    ("5", "\\left(5\\right)"),
    ("5", "\\boxed{5}"),
    ("5", "\\displaystyle 5"),
    ("5", "5,"),
    ("2^{10}", "2**10"),
    ("2\\pi", "2*pi"),
    ("2\\sqrt{3}", "2*sqrt(3)"),
    ("np.arcsin(10/13)", "\\arcsin\\left(\\frac{10}{13}\\right)"),
    # closed forms
    ("\\sqrt{8}", "2\\sqrt2"),
    ("\\frac{1}{\\sqrt2}", "\\frac{\\sqrt2}{2}"),
    ("3\\sqrt{3} - 6", "-6+3\\sqrt{3}"),
    ("e^{i\\pi}", "-1"),
    ("i", "\\sqrt{-1}"),
    ("6 - 5i", "-5i+6"),
    ("2\\ln 3", "\\ln 9"),
    ("3", "\\log_2 8"),
    ("2,-\\log _{10} 250", "-\\log_{10}(250), 2"),
    ("\\sqrt[3]{27}", "3"),
    ("\\frac{8}{\\sqrt[3]{7}}", "8\\cdot 7^{-1/3}"),
    ("10!", "3628800"),
    ("120", "\\binom{10}{3}"),
    ("\\frac{100!}{2^{50}}", "100!/2^{50}"),
    ("65536", "2^{2^{2^2}}"),
    ("2^{4950}", "4^{2475}"),
    ("2015^2\\div5^2", "403^2"),
    ("5", "\\lfloor 5.5 \\rfloor"),
    ("2 \\times 2 \\times 3", "12"),
    ("1-\\cos(\\pi/3)", "\\frac12"),
    ("\\sin^{-1}(1)", "\\frac{\\pi}{2}"),
    ("7-\\sqrt{41}", "\\frac{8}{7+\\sqrt{41}}"),
    # variables
    ("2x+2", "2(x+1)"),
    ("x^2-1", "(x-1)(x+1)"),
    ("ab", "ba"),
    ("4ab", "2a \\cdot 2b"),
    ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"),
    ("\\frac{n(n+1)}{2}", "\\binom{n+1}{2}"),
    ("1", "\\sin^2 x+\\cos^2 x"),
    ("\\tan x", "\\frac{\\sin x}{\\cos x}"),
    ("e^{x+y}", "e^x e^y"),
    ("\\sqrt{ab}", "\\sqrt a \\sqrt b"),
    ("\\lceil n / 2\\rceil+1", "\\lfloor \\frac{n+1}{2} \\rfloor + 1"),
    ("\\frac{1}{2a}(\\exp{a*t} - \\exp{-a*t})", "\\frac{\\sinh(at)}{a}"),
    ("\\omega_{n}^{2} e^{-\\zeta \\omega_{n} t}", "e^{-\\zeta\\omega_n t}\\omega_n^2"),
    ("x_1+x_2", "x_{2}+x_{1}"),
    # names in front
    ("7", "x=7"),
    ("x=5", "5"),
    ("x=5", "x = 5.0"),
    ("5", "f(3) = 5"),
    ("5", "\\text{Area} = 5"),
    ("5", "AB = 5"),
    ("5", "x = 2 + 3 = 5"),
    ("0.5", "\\frac12 = 0.5"),
    ("\\frac{1}{3}", "\\frac{1}{3} \\approx 0.333"),
    ("\\$\\dfrac23 \\approx \\$0.67", "2/3"),
    ("\\frac{a}{b} = \\frac{1}{2}", "1/2"),
    ("f(x) = x + 1", "f(x)=1+x"),
    ("f(x) = x + 1", "x+1"),
    ("y = -2x", "-2x"),
    ("y=2x-e", "y-2x+e=0"),
    ("x^2+y^2=1", "y^2+x^2=1"),
    ("2x^2 - 16x + 32 - y = 0", "y = 2(x-4)^2"),
    ("63 + 200 = 263", "263"),
    ("6", "\\binom{4}{2} = 6"),
    ("\\angle ABC = 60", "60^\\circ"),
    # lists, sets, tuples
    ("1,2,3", "3,2,1"),
    ("1,2,3", "3, 1 and 2"),
    ("12\\text{ and }13", "13, 12"),
    ("x=1, x=2", "1, 2"),
    ("1,-2", "x = 1 \\text{ or } x = -2"),
    ("\\{1,2,3\\}", "\\{3,1,2\\}"),
    ("\\{1,2\\}", "1,2"),
    ("5", "\\{5\\}"),
    ("1,2", "[1, 2]"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "-2, 1+\\sqrt5, 1-\\sqrt5"),
    ("\\pm 2", "-2, 2"),
    ("3 \\pm 2 \\sqrt{2}", "3+2\\sqrt2, 3-2\\sqrt2"),
    ("x = 3, -3", "x=\\pm 3"),
    ("3,-3", "x = \\pm 3"),
    ("\\emptyset", "\\{\\}"),
    ("\\emptyset", "\\varnothing"),
    ("(1,\\frac{9}{2})", "(1,4.5)"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)"),
    ("(3,2,1)", "\\langle 3, 2, 1\\rangle"),
    ("(3,2),(-3,2)", "(-3,2),(3,2)"),
    ("(2,1)", "(x,y) = (2,1)"),
    ("x = 2, y = 1", "y=1, x=2"),
    ("(1,000, 2)", "(1000, 2)"),
    ("100, 198", "100,198"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    (
        "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}",
        "\\begin{pmatrix} -\\frac{1}{3} \\\\[4pt] \\frac23 \\end{pmatrix}",
    ),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "[[1,2],[3,4]]"),
    # intervals and inequalities
    ("[0,1)", "0\\le x<1"),
    ("[0,1)", "x \\in [0,1)"),
    ("1<a<2", "(1,2)"),
    ("(2,4)", "2<x<4"),
    ("(1,2)\\cup(3,4)", "(3,4)\\cup(1,2)"),
    ("(2,12) \\cup (12,102)", "(12,102) U (2,12)"),
    ("k \\geqslant 2", "[2,\\infty)"),
    ("x\\leq 3", "3 \\geq x"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "x<2 \\text{ or } x>3"),
    ("(-\\infty,2)\\cup(2,\\infty)", "x \\neq 2"),
    ("(-\\infty,2)\\cup(2,\\infty)", "\\mathbb{R} \\setminus \\{2\\}"),
    ("(-\\infty,\\infty)", "\\mathbb{R}"),
    ("(-\\infty, 0) \\cup\\{1\\}", "\\{1\\}\\cup(-\\infty,0)"),
    ("[0,2]", "[0,1]\\cup[1,2]"),
    ("\\sin 2\\alpha < 2\\sin \\alpha", "2\\sin\\alpha > \\sin 2\\alpha"),
    ("\\left(\\frac{3}{5},\\frac{8}{3}\\right]", "(0.6, 8/3]"),
    ("x \\in [-2,7]", "-2 \\leq x \\leq 7"),
    ("x \\in [-2,7]", "[-2,7]"),
    ("\\{x \\mid x > 2\\}", "(2,\\infty)"),
    # ratios, bases, words
    ("3:5", "3 : 5"),
    ("3:5", "6:10"),
    ("2:1", "2"),
    ("3:5", "\\frac{3}{5}"),
    ("12:00", "12:00"),
    ("52_8", "52_{8}"),
    ("152A_{11}", "152A_{11}"),
    ("\\text{Tuesday}", "\\text{tuesday}"),
    ("\\text{Tuesday}", "Tuesday"),
    ("\\text{even}", "Even."),
    ("\\text{(B)}", "B"),
    ("B", "\\text{(B)}"),
    ("B", "(B)"),
    ("\\text{A, B}", "A, B"),
    ("C. 155^\\circ", "155"),
    ("C. 155^\\circ", "C"),
    ("\\text{no solution}", "\\emptyset"),
    ("8th", "8th"),
    ("p + \\max\\{p, q\\}", "\\max(p,q) + p"),
    ("B", "\\textbf{(B)}\\ 7"),
    ("7", "\\textbf{(B)}\\ 7"),
    ("7", "B. 7"),
    ("5", "\\text{The answer is } 5"),
    ("5", "5\\text{.}"),
    ("\\text{2:1}", "2:1"),
    ("6:30 \\text{ p.m.}", "6:30 PM"),
    ("6:30", "6:30 \\text{ p.m.}"),
    ("\\frac{1}{3}", "0.333\\ldots"),
    ("1/2", "{1 \\over 2}"),
    ("(1,2,3)", "\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}"),
    ("\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}", "\\left[\\begin{array}{cc}1&0\\\\0&1\\end{array}\\right]"),
    ("(-\\infty,-1)\\cup(1,\\infty)", "x<-1, x>1"),
    ("x=-3/5", "5x+3=0"),
]

DIFFERENT = [
    ("\\frac{1}{3}", "0.33"),
    ("\\frac{1}{3}", "0.333"),
    ("\\frac{100}{3}", "33.3"),
    ("\\pi", "3.14"),
    ("0.\\overline{3}", "0.3"),
    ("7", "-7"),
    ("7", "7.5"),
    ("7", "7.0001"),
    ("50000000000000000", "50000000000000001"),
    ("50000000000000000", "50000000000000001.0"),
    ("1000000", "1000000.5"),
    ("1.5", "15"),
    ("1.5", "1,5"),
    ("10^{-20}", "10^{-19}"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    ("100!", "9.33\\times 10^{157}"),
    ("2^{100}", "2^{101}"),
    ("e^{-100}", "e^{-101}"),
    ("\\frac{1}{2}", "12"),
    ("0.5", "0.5\\%"),
    ("28\\%", "2.8"),
    ("28", "0.28"),
    ("7 \\text{ m}", "700 \\text{ cm}"),
    ("\\frac{2\\pi}{3}", "120^\\circ"),
    ("2", "2ab"),
    ("2ab", "2"),
    ("3 m", "3"),
    ("2", "2x"),
    ("2x", "2"),
    ("x", "y"),
    ("|x|", "x"),
    ("x^2", "x^3"),
    ("x+1", "x-1"),
    ("3\\sqrt{3} - 6", "3\\sqrt{3} + 6"),
    ("10^{-3}", "10^{3}"),
    ("i", "-i"),
    ("2", "9^{9^{9^{9}}}"),
    ("9^{9^{9^{9}}}", "9^{9^{9^{8}}}"),
    ("3", "1=2=3"),
    ("3", "x = 1 = 3"),
    ("3", "x = 1, x = 3"),
    ("3", "1, 2, 3, 4, 5"),
    ("3", "1 or 3"),
    ("3", "3 or 4"),
    ("3", "2 \\text{ or } 3"),
    ("3", "\\pm 3"),
    ("3", "\\{3, 4\\}"),
    ("3", "(3, 4)"),
    ("3", "between 2 and 4"),
    ("3", "2 < x < 4"),
    ("3", "x \\geq 3"),
    ("3", "\\text{the answer is not } 3"),
    ("3", "not 3"),
    ("3", "three"),
    ("1331, 1728", "1728"),
    ("1,2,3", "1,2"),
    ("1,2", "1,2,3"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "\\{1,2\\}"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "[0,1]"),
    ("[0,1)", "(0,1)"),
    ("[0,1)", "0<x<1"),
    ("D = (0, 1)", "D = (0, 1.5)"),
    ("(1,2)\\cup(3,4)", "(1,2)"),
    ("(1,2)\\cup(3,4)", "(1,4)"),
    ("x>2", "x<2"),
    ("x>2", "x \\geq 2"),
    ("x>2", "y>2"),
    ("x=5", "y=5"),
    ("x^2+y^2=1", "1"),
    ("x^2+y^2=1", "x^2+y^2=2"),
    ("y=2x", "x=2y"),
    ("y = -2x", "y = 2x"),
    ("x = 2, y = 1", "x=1, y=2"),
    ("(3,2),(-3,2)", "(3,2)"),
    ("1,1,2", "1,2,2"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"),
    ("12:00", "1:00"),
    ("3:5", "5:3"),
    ("52_8", "52"),
    ("52_8", "42"),
    ("52_8", "52_9"),
    ("\\text{even}", "odd"),
    ("\\text{odd}", "\\text{even}"),
    ("B", "\\text{(C)}"),
    ("A", "AB"),
    ("\\emptyset", "0"),
    ("0", "\\emptyset"),
    ("\\infty", "-\\infty"),
    ("0", "\\infty"),
    ("\\mathbb{R}", "(0,\\infty)"),
    ("\\frac{n(n+1)}{2}", "\\frac{n(n-1)}{2}"),
    ("\\lfloor m/2 \\rfloor", "m/2"),
    ("5", "\\text{at most } 5"),
    ("5", "\\text{not } 5"),
    ("B", "\\textbf{(C)}\\ 7"),
    ("6:30 \\text{ a.m.}", "6:30 PM"),
    ("0", "I(0)"),
    ("\\frac{1}{3}", "0.3"),
    ("10001", "10001_2"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = make_grader("math", workers=1)
    yield made
    made.close()


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(grader: Grader, gold: str, answer: str) -> None:
    verdict = grader.grade_now(f"so it is \\boxed{{{answer}}}.", [gold])
    assert verdict.correct is True, verdict
    assert verdict.reason in ("equal_exact", "equal_numeric", "equal_symbolic")


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(grader: Grader, gold: str, answer: str) -> None:
    verdict = grader.grade_now(f"so it is \\boxed{{{answer}}}.", [gold])
    assert verdict.correct is False, verdict
    assert verdict.reason in ("different", "parse_error")


@pytest.mark.parametrize("text", sorted({side for pair in EQUAL + DIFFERENT for side in pair}))
def test_every_answer_equals_itself_with_other_blanks(grader: Grader, text: str) -> None:
    if text not in {gold for gold, _ in EQUAL + DIFFERENT}:
        return
    verdict = grader.grade_now(f"\\boxed{{ {text} }}", [text])
    assert verdict.correct is True, verdict


LIBRARY = [
    ("55", "\\sum_{k=1}^{10} k", True),
    ("\\frac{1}{2}", "\\int_0^1 x \\, dx", True),
    ("\\frac{1}{2}", "\\int_0^1 x^2 \\, dx", False),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "-2", True),
    ("3", "1 = 2 = \\sum_{k=1}^{2} k", False),
    ("3", "I would say that it is 3", False),
    ("3", "__import__('os').system('true') or 3", False),
]


@pytest.mark.parametrize(("gold", "answer", "same"), LIBRARY)
def test_what_our_reader_does_not_know_goes_to_math_verify(grader: Grader, gold: str, answer: str, same: bool) -> None:
    assert grader.grade_now(f"\\boxed{{{answer}}}", [gold]).correct is same


def test_without_math_verify_only_golds_that_need_it_are_refused() -> None:
    def missing() -> bool:
        return False

    assert compare("x+1", "1+x", missing)[0] == "equal_symbolic"
    assert compare("55", "\\sum_{k=1}^{10} k", missing)[0] == "parse_error"
    reason, detail = compare("\\sum_{k=1}^{n} k", "55", missing)
    assert reason == "no_library"
    with pytest.raises(UserError, match=r"pip install agentropy\[math\]"):
        verdict_of((reason, detail), "55")


@pytest.mark.parametrize(
    "text", ["\\int_0^1 x dx", "\\sum_{n=1}^{\\infty} \\frac{1}{n^2}", "\\lim_{x\\to 0} \\frac{\\sin x}{x}"]
)
def test_formulas_are_not_refused(text: str) -> None:
    assert refusal(text) is None
