"""Multiple choice: the letter of an option, or the text of the option where the options are known."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentropy.evaluation.grading.number import plain_text
from agentropy.evaluation.grading.qa import normalize_strict
from agentropy.evaluation.grading.tidy import tidy
from agentropy.evaluation.grading.verdict import Verdict, right, unscorable, wrong

_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*(?:is)?\s*:?\s*)?[(\[]?\s*([A-Za-z])\s*(?:[)\].:](?:\s.*)?|\s*)", re.S | re.I
)


def choice_letter(text: str) -> str | None:
    r"""The option letter of an answer such as `B`, `\text{(B)}`, `B. 42`, `option b`, in upper case; else None."""
    plain = plain_text(tidy(text)).replace("$", " ").strip().strip("*").strip()
    match = _LETTER.fullmatch(plain)
    return match.group(1).upper() if match else None


def grade_choice(answer: str | None, golds: Sequence[str], options: Sequence[str] = ()) -> Verdict:
    """Grade a choice against the gold letters, or gold texts when `options` lists them in the order A, B, …"""
    if not golds or not all(gold.strip() for gold in golds):
        return unscorable("ungradable", answer, "the gold choice is empty")
    if answer is None or not answer.strip():
        return wrong("no_answer", answer, "the answer is empty")
    texts = {normalize_strict(text): chr(ord("A") + i) for i, text in enumerate(options)}

    def letter_of(text: str) -> str | None:
        return texts.get(normalize_strict(text)) or choice_letter(text)

    given = letter_of(answer)
    wanted = {letter for gold in golds if (letter := letter_of(gold))}
    if not wanted:
        return unscorable("ungradable", answer, f"no gold is an option letter: {list(golds)}")
    if given is None:
        return wrong("parse_error", answer, "the answer names no option")
    detail = f"option {given}, wanted {' or '.join(sorted(wanted))}"
    return right("equal_exact", answer, detail) if given in wanted else wrong("different", answer, detail)
