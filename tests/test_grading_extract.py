r"""Which answer a text gives: the last balanced box, an answer tag, a marked final answer; never a tool's output."""

from __future__ import annotations

import asyncio

import pytest

from agentropy.evaluation.grading import make_grader
from agentropy.evaluation.grading.extract import extract, unbox
from agentropy.evaluation.grading.graders import MathGrader

STRICT = [
    ("so \\boxed{4}", "4"),
    ("first \\boxed{3}, no, \\boxed{4}", "4"),
    ("the answer is \\boxed{2}. wait, actually \\boxed{3}", "3"),
    ("\\boxed{2}\n\n\\boxed{3}", "3"),
    ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}"),
    ("\\boxed {4}", "4"),
    ("\\fbox{4}", "4"),
    ("$\\boxed{\\boxed{4}}$", "4"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{a \\} b}", "a \\} b"),
    ("I was told to \\boxed the result$. Final: \\boxed{7}", "7"),
    ("\\boxed{4", None),
    ("\\boxed{}", None),
    ("\\boxed{ }", None),
    ("\\boxed{3} then \\boxed{}", None),
    ("\\boxed{3} then \\boxed{4", "3"),
    ("\\boxed{4} or \\boxed{5}", "4, 5"),
    ("the primes are \\boxed{3}, \\boxed{5}, \\boxed{7}", "3, 5, 7"),
    ("\\boxed{3} and \\boxed{5}", "3, 5"),
    ("So, \\boxed{004} is it. **Final Answer** \\boxed{004}", "004"),
    ("\\boxed{4}, \\boxed{4}", "4"),
    ("<answer>4</answer>", "4"),
    ("<answer>\\boxed{4}</answer>", "4"),
    ("\\boxed{3} <answer>4</answer>", "4"),
    ("<answer>3</answer> hm, \\boxed{4}", "4"),
    ("<answer>4", None),
    ("<tool_response>\\boxed{4}</tool_response>", None),
    ("\\boxed{3} <result>\\boxed{4}</result>", "3"),
    ("```output\n\\boxed{4}\n```", None),
    ("<result>\\boxed{4}", None),
    ("I think it is 1, or 2, or 3", None),
    ("the answer is 3", None),
    ("", None),
]

LENIENT = [
    ("the answer is 3", "3"),
    ("The final answer is: **73**", "73"),
    ("so the number is **73**. ✅ Final Answer: **73**", "73"),
    ("reasoning 5\n#### 12", "12"),
    ("Answer: $\\frac{1}{2}$", "$\\frac{1}{2}$"),
    ("the answer is 3. I am sure.", "3"),
    ("the answer is 3.5 because of that", "3.5"),
    ("first, the answer is 2. No, the answer is 3.", "3"),
    ("<think>the answer is 2</think> hm", None),
    ("I think it is 1, or 2, or 3", None),
    ("the answer is 3 but \\boxed{4", None),
    ("the answer is 3, boxed: \\boxed{4}", "4"),
]


@pytest.mark.parametrize(("text", "answer"), STRICT)
def test_strict(text: str, answer: str | None) -> None:
    assert extract(text).answer == answer


@pytest.mark.parametrize(("text", "answer"), LENIENT)
def test_lenient(text: str, answer: str | None) -> None:
    assert extract(text, "lenient").answer == answer


def test_unbox() -> None:
    assert unbox("\\boxed{\\boxed{\\fbox{4}}}") == "4"
    assert unbox("$\\boxed{4}$") == "4"
    assert unbox("4") == "4"
    assert unbox("\\boxed{3} \\boxed{4}") == "\\boxed{3} \\boxed{4}"


def test_a_reward_needs_a_marked_answer() -> None:
    async def run() -> None:
        grader = MathGrader(workers=1)
        try:
            assert (await grader.grade_text("I think it is 1, or 2, or 3", ["3"])).reason == "no_answer"
            assert (await grader.grade_text("the answer is 3", ["3"])).reason == "no_answer"
            assert (await grader.grade_text("3", ["3"])).correct is False
            assert (await grader.grade_answer("3", ["3"])).correct is True
            assert (await grader.grade_answer("\\boxed{3}", ["3"])).correct is True
            assert (await grader.grade_answer(None, ["3"])).reason == "no_answer"
            assert (await grader.grade_answer("3", [])).correct is None
            assert (await grader.grade("3", ["3"])).correct is True
            assert (await grader.grade("I think it is 1, or 2, or 3", ["3"])).correct is False
            assert (await grader.grade("\\boxed{3", ["3"])).reason == "no_answer"
        finally:
            await grader.aclose()

    asyncio.run(run())


def test_a_gold_that_cannot_be_read_leaves_the_answer_out() -> None:
    grader = make_grader("math", workers=1)
    assert grader.grade_now("\\boxed{3}", [""]).correct is None
    assert grader.grade_now("\\boxed{3}", ["\\frac{1}{"]).correct is None
    assert grader.grade_now("\\boxed{3}", ["\\frac{1}{", "3"]).correct is True
    assert grader.grade_now("", ["3"]).reason == "no_answer"
    grader.close()


def test_maths_is_not_graded_by_words() -> None:
    grader = make_grader("math", workers=1)
    for gold, answer, same in [
        ("-6", "6", False),
        ("1/2", "12", False),
        ("x+1", "x-1", False),
        ("3\\sqrt3-6", "3\\sqrt3+6", False),
        ("1e-3", "1e3", False),
        ("5", "5.0", True),
        ("A", "A", True),
    ]:
        assert grader.grade_now(answer, [gold]).correct is same, (gold, answer)
    grader.close()
