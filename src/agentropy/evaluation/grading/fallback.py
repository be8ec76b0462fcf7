r"""Answers that our own reader doesn't know, compared by math-verify: integrals, sums, set builders and the like.

Only called inside a worker process. What would make a symbolic library run without end is refused beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 2000
# Its grammar backtracks: 30 brackets within each other, many bars or signs of relation in a row, take it minutes.
MAX_NESTED = 12
MAX_RELATIONS = 8
MAX_BARS = 8
MAX_DIGITS = 256
MAX_ALL_DIGITS = 2048
MAX_EXPONENT = 10_000

_DIGITS = re.compile(r"\d+")
_EXPONENT = re.compile(r"\^\s*\{?\s*-?\s*(\d+)")
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|in|approx|equiv|sim)(?![a-zA-Z])")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+\s*(?:\{[a-z]+\})?")
_PROSE = re.compile(r"(?:[a-zA-Z]+[ ,.]+){3}|[a-z]{5}")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\w+\s*\^|\([^()]*\^)")
_FACTORIAL = re.compile(r"(\d+)\s*[)}]?\s*!|!\s*!")


def refusal(text: str) -> str | None:
    """Why a text must not be given to the library, or None: it is no formula, or may take it without end."""
    if len(text) > MAX_LENGTH:
        return "it is too long"
    depth = deepest = 0
    for c in text:
        depth += (c in "({[") - (c in ")}]")
        deepest = max(deepest, depth)
    runs = _DIGITS.findall(text)
    if deepest > MAX_NESTED:
        return "it is nested too deeply"
    if text.count("|") > MAX_BARS:
        return "it has too many bars"
    if len(_RELATION.findall(text)) > MAX_RELATIONS:
        return "it has too many relations"
    if any(len(run) > MAX_DIGITS for run in runs) or sum(map(len, runs)) > MAX_ALL_DIGITS:
        return "it has too many digits"
    if _PROSE.search(_TEXT.sub(" ", text)):
        return "it is prose"
    if len(_EQUALS.findall(text)) > 1:
        return "it is a chain of equations"
    if _TOWER.search(text):
        return "it has powers of powers"
    if any(int(exponent) > MAX_EXPONENT for exponent in _EXPONENT.findall(text)):
        return "an exponent is too large"
    if any(int(argument or 0) > MAX_EXPONENT or not argument for argument in _FACTORIAL.findall(text)):
        return "a factorial is too large"
    return None


def load() -> bool:
    """Imports math-verify; False where it isn't installed."""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        return False
    return True


def _read(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # Boxed, because bare LaTeX isn't recognised as such. LaTeX only: the reader of plain expressions takes the last
    # number of any text, and evaluates what it reads as Python.
    found = parse(
        "\\boxed{" + text + "}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
        raise_on_error=False,
    )
    return [item for item in found if not isinstance(item, str)]


def compare_by_library(gold: str, answer: str, load: Callable[[], bool] = load) -> tuple[str, str]:
    """(reason, detail) as `symbolic.compare`, or ("no_library", …) where math-verify is missing.

    load: imports the library and says whether it is there; a worker's tells its parent that this takes time.
    """
    for text, reason in ((gold, "ungradable"), (answer, "parse_error")):
        refused = refusal(text)
        if refused:
            return reason, f"{'the gold' if reason == 'ungradable' else 'the answer'} can't be read: {refused}"
    if not load():
        return "no_library", "math-verify is not installed"
    from math_verify import verify

    golds = _read(gold)
    if not golds:
        return "ungradable", f"the gold can't be read: {gold}"
    answers = _read(answer)
    if not answers:
        return "parse_error", f"the answer can't be read: {answer}"
    if verify(golds, answers, float_rounding=12, numeric_precision=30, timeout_seconds=None, raise_on_error=False):
        return "equal_symbolic", "equal by math-verify"
    return "different", "different by math-verify"
