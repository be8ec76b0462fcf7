"""The quasi-exact match of GAIA (arXiv 2311.12983): a number, a list or a string, as the accepted answer is written."""

from __future__ import annotations

import math
import re
import string

_BETWEEN = re.compile(r"[,;]")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def same_gaia(answer: str, gold: str) -> bool:
    """Whether an answer is the accepted one.

    A number is compared by value, without `$`, `%` and commas in the answer. A gold with `,` or `;` is a list: as many
    elements, each a number or a text, in the gold's order. Texts are compared without blanks and case, and outside of
    lists without punctuation.
    """
    wanted = _number(gold)
    if wanted is not None:
        return _stripped_number(answer) == wanted
    if _BETWEEN.search(gold):
        golds, given = _BETWEEN.split(gold), _BETWEEN.split(answer)
        return len(golds) == len(given) and all(map(_same_element, given, golds))
    return _text(answer).translate(_NO_PUNCTUATION) == _text(gold).translate(_NO_PUNCTUATION)


def _same_element(answer: str, gold: str) -> bool:
    wanted = _number(gold)
    return _text(answer) == _text(gold) if wanted is None else _stripped_number(answer) == wanted


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _stripped_number(text: str) -> float | None:
    return _number(re.sub(r"[$%,]", "", text))


def _text(text: str) -> str:
    return "".join(text.split()).lower()
