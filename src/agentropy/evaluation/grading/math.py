r"""Grading maths answers: exact numbers at once, everything else in worker processes.

The order: find the answer (extract), spell it plainly (tidy), compare as numbers (number). What is no plain number goes
to the worker pool, where a hang costs its own time limit and nothing else.
"""

from __future__ import annotations

from typing import get_args

from agentropy.errors import UserError
from agentropy.evaluation.grading.number import parse_number, same_number
from agentropy.evaluation.grading.tidy import MAX_CHARACTERS, tidy
from agentropy.evaluation.grading.verdict import Reason, Verdict, right, unscorable, wrong


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
    gold_number = parse_number(plain_gold)
    if gold_number is None:
        return None
    answer_number = parse_number(plain_answer, letter_units=True)
    if answer_number is None:
        return None
    same = same_number(gold_number, answer_number)
    if same:
        return right("equal_exact", answer, f"{plain_answer} = {plain_gold} exactly")
    if same is None:
        return right("equal_numeric", answer, f"{plain_answer} = {plain_gold} within the tolerance for decimals")
    return wrong("different", answer, f"{plain_answer} is not {plain_gold}")


def verdict_of(reply: tuple[str, str], answer: str) -> Verdict:
    """The verdict for a worker's reply. Raises UserError where the gold needs math-verify and it is missing."""
    reason, detail = reply
    if reason == "no_library":
        raise UserError(
            "this gold answer needs math-verify to be read, which is not installed; install it with "
            "`pip install agentropy[math]`"
        )
    if reason == "no_worker":
        return unscorable("infrastructure", answer, detail)
    if reason == "died":
        return wrong("parse_error", answer, detail)
    known: Reason = next((r for r in get_args(Reason) if r == reason), "parse_error")
    if known.startswith("equal"):
        return right(known, answer, detail)
    if known == "ungradable":
        return unscorable(known, answer, detail)
    return wrong(known, answer, detail)
