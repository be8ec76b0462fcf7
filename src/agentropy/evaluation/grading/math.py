r"""Grading maths answers: exact numbers at once, everything else in worker processes.

The order: find the answer (extract), spell it plainly (tidy), compare as numbers (number). What is no plain number goes
to the worker pool, where a hang costs its own time limit and nothing else.
"""

from __future__ import annotations

from agentropy.evaluation.grading.number import parse_number, same_number
from agentropy.evaluation.grading.tidy import MAX_CHARACTERS, tidy
from agentropy.evaluation.grading.verdict import Verdict, right, unscorable, wrong


def grade_fast(answer: str, gold: str) -> Verdict | None:
    """The verdict on one answer string against one gold where plain numbers or equal texts decide it, else None.

    No process, no symbolic library; never raises. Both strings may be LaTeX.
    """
    if not gold.strip():
        return unscorable("ungradable", answer, "the gold answer is empty")
    if not answer.strip():
        return wrong("no_answer", answer, "the answer is empty")
    if len(answer) > MAX_CHARACTERS and answer.strip() != gold.strip():
        return wrong("parse_error", answer[:200], f"the answer has over {MAX_CHARACTERS} characters")
    plain_gold, plain_answer = tidy(gold), tidy(answer)
    if not plain_answer:
        return wrong("no_answer", answer, "the answer is empty")
    if plain_gold == plain_answer:
        return right("equal_exact", answer, f"the same text: {plain_gold}")
    gold_number, answer_number = parse_number(plain_gold), parse_number(plain_answer)
    if gold_number is None or answer_number is None:
        return None
    same = same_number(gold_number, answer_number)
    if same:
        return right("equal_exact", answer, f"{plain_answer} = {plain_gold} exactly")
    if same is None:
        return right("equal_numeric", answer, f"{plain_answer} = {plain_gold} within the tolerance for decimals")
    return wrong("different", answer, f"{plain_answer} is not {plain_gold}")
