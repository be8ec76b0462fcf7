"""Whether a tool's result was used, as far as the overlap of texts can tell (docs/analysis.md defines it).

A result is used if a *piece* of it turns up in what the policy wrote later. Pieces are its numbers and its words of
substance that were not already there before it: neither in the prompt, nor in what the policy had written (the call
included), nor in an earlier result. So a result cannot count as used because the policy repeats itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
WORD = re.compile(r"[^\W\d_]+")
UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff]+")
"""Scripts without spaces between words; a run of them is read as its pairs of characters."""
LEAST_LETTERS = 4
"""Shorter words count only where they are names (with a capital letter) or stand alone in the result."""
ROUNDED_DIGITS = 3
"""A number that has at least so many digits may stand for a longer one of which it is a rounding."""
MOST_TEXT = 20_000
"""Characters of one result that are looked at: the head and the tail, half each."""


def pieces(text: str) -> set[str]:
    """Numbers and words of substance of a text, numbers without thousands separators and trailing zeros."""
    numbers = {_plain(m) for m in NUMBER.findall(text)}
    found = set()
    words = WORD.findall(text)
    for word in words:
        if UNSPACED.search(word):
            found |= {run[i : i + 2] for run in UNSPACED.findall(word) for i in range(max(len(run) - 1, 1))}
        elif len(word) >= LEAST_LETTERS or not word[0].islower() or len(words) + len(numbers) == 1:
            found.add(word.casefold())
    return numbers | found


def _plain(number: str) -> str:
    whole, point, decimals = number.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (point + decimals if decimals else "")


def all_words(text: str) -> set[str]:
    """Every number and word of a text, short ones too, in the form of `pieces`."""
    found = {_plain(m) for m in NUMBER.findall(text)} | {w.casefold() for w in WORD.findall(text)}
    for run in UNSPACED.findall(text):
        found |= {run[i : i + 2] for i in range(max(len(run) - 1, 1))}
    return found


def result_used(result: str, known: set[str], later: Iterable[str], complete: bool) -> bool | None:
    """Whether the policy used a result.

    Args:
        result: the tool's output.
        known: `all_words` of everything before it.
        later: texts that the policy wrote afterwards: reasoning, calls, the answer.
        complete: False where some of what the policy wrote later is not known as text.
    Returns: True or False; None where it cannot be told: the result says nothing new, or nothing was found in a text
        of which parts are missing.
    """
    if len(result) > MOST_TEXT:
        result = result[: MOST_TEXT // 2] + "\n" + result[-MOST_TEXT // 2 :]
    new = pieces(result) - known
    if not new:
        return None
    written: set[str] = set()
    for text in later:
        written |= all_words(text)
    if new & written:
        return True
    precise = [n for n in new if "." in n]
    if precise and any(_is_rounding(w, n) for w in written - known if w[0].isdigit() for n in precise):
        return True
    return False if complete else None


def _is_rounding(short: str, long: str) -> bool:
    """True where `short` has fewer decimals than `long` and is it, rounded or cut off, to at least three digits."""
    whole, _, decimals = short.partition(".")
    if len(short) >= len(long) or len((whole + decimals).lstrip("0")) < ROUNDED_DIGITS or len(long) > 300:
        return False
    cut = long.partition(".")[0] + (f".{long.partition('.')[2][: len(decimals)]}" if decimals else "")
    return short in (_plain(cut), _plain(f"{float(long):.{len(decimals)}f}"))
