r"""The slow path: shapes and expressions compared, and what our reader doesn't know handed to math-verify.

Runs inside a worker process (see `pool`), because a hostile answer may make math-verify or sympy run without end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from agentropy.evaluation.grading.compare import Equality, same
from agentropy.evaluation.grading.evaluate import TooLarge
from agentropy.evaluation.grading.fallback import compare_by_library, load
from agentropy.evaluation.grading.structure import Answer, parse_answer, scalars
from agentropy.evaluation.grading.tidy import tidy
from agentropy.evaluation.grading.tokens import Unreadable


@lru_cache(maxsize=2048)
def _parsed(text: str, numbers: bool) -> Answer:
    return parse_answer(text, numbers=numbers)


# An answer given as an option with its text: either may be what is asked for.
_OPTION = re.compile(
    r"(?:\(?([A-F])[).:]\s+|\\(?:text\w*|mathrm|mathbf|mbox)\s*\{\s*\(?([A-F])[).:]*\s*\}[).:~]*\s*)(\S.*)", re.S
)


def equal(gold: str, answer: str) -> Equality | None:
    """How two tidied answers are equal, or None. Raises Unreadable or TooLarge where our reader can't tell."""
    options = [_option(text) for text in (gold, answer)]
    if not any(options):
        return _equal(gold, answer)
    if options[0] and options[1]:
        if options[0][0] != options[1][0]:
            return None
        try:
            return _equal(tidy(options[0][1]), tidy(options[1][1]))
        except Unreadable:
            return "equal_exact"  # the letters agree
    found = None
    for g in options[0] or (gold,):
        for a in options[1] or (answer,):
            try:
                found = found or _equal(tidy(g), tidy(a))
            except Unreadable:
                continue
    return found


def _option(text: str) -> tuple[str, str] | None:
    """(letter, text) of `B. 42` or `\\textbf{(B)} 42`, None of anything else."""
    match = _OPTION.fullmatch(text)
    return (match[1] or match[2], match[3]) if match else None


def _equal(gold: str, answer: str) -> Equality | None:
    try:
        found = same(_parsed(gold, True), _parsed(answer, True))
    except Unreadable:
        found = None
        if not _comma_in_digits(gold + answer):
            raise
    if found is None and _comma_in_digits(gold + answer):
        found = same(_parsed(gold, False), _parsed(answer, False))
    return found


def _comma_in_digits(text: str) -> bool:
    return any(c == "," and text[i - 1 : i].isdigit() and text[i + 1 : i + 2].isdigit() for i, c in enumerate(text))


def readable(text: str) -> bool:
    """Whether our own reader knows what this tidied text is, down to its scalars."""
    try:
        for scalar in scalars(_parsed(text, True)):
            scalar.expression()
    except Unreadable:
        return False
    return True


def compare(gold: str, answer: str, load: Callable[[], bool] = load) -> tuple[str, str]:
    """(reason, detail) of an answer against a gold; both as they were given.

    Reasons: equal_exact, equal_numeric, equal_symbolic, different, parse_error, ungradable, and no_library where the
    gold can be read by math-verify only and that isn't installed.
    """
    plain_gold, plain_answer = tidy(gold), tidy(answer)
    try:
        found = equal(plain_gold, plain_answer)
    except TooLarge:
        return "different", "a value is too large to be compared"
    except (Unreadable, RecursionError) as why:
        return _by_library(plain_gold, plain_answer, str(why) or "it is nested too deeply", load)
    if found is None:
        return "different", f"{plain_answer} is not {plain_gold}"
    return found, f"{plain_answer} is {plain_gold}"


def _by_library(gold: str, answer: str, why: str, load: Callable[[], bool]) -> tuple[str, str]:
    reason, detail = compare_by_library(gold, answer, load)
    if reason in ("different", "equal_symbolic"):
        return reason, detail
    if reason != "parse_error" and readable(gold):
        return "parse_error", f"the answer can't be read: {why}"
    return reason, detail
