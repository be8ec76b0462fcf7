r"""Names in front of an answer: the `x` of `x = 5`, `f(x)`, `AB`, `\\angle A`, `\\text{Area}`."""

from __future__ import annotations

import re

from agentropy.evaluation.grading.structure import Answer, Interval, Items, Scalar, Words
from agentropy.evaluation.grading.vocabulary import GREEK

_LETTER = r"(?:[a-zA-Z]|\\(?:" + "|".join(sorted(GREEK, key=len, reverse=True)) + r")(?![a-zA-Z]))"
_INDEX = r"(?:\s*_\s*(?:\{[^{}]*\}|\w))?(?:\s*'|\s*\^\s*\{?\s*\\prime\s*\}?)*"
_NAME = re.compile(
    rf"{_LETTER}{_INDEX}(?:\s*\^\s*\{{?-1\}}?)?(?:\s*\([\w\s,\\]*\))?"  # x, x_1, f(x), f^{{-1}}(x), P(A)
    r"|\\(?:angle|triangle|overline|overrightarrow|vec|measuredangle|mathbf|mathrm|hat|bar)\s*\{?[\w\s]+(?:_\{?\w+\}?)?\}?"
    r"|m?\s*\\angle\s*[\w\s{}]+|[A-Z]{2,4}|\|[A-Z]{1,2}\||\\(?:sin|cos|tan)\s*(?:\\angle)?\s*[A-Z ]+"
    r"|[A-Z](?:\s*\\c[au]p\s*[A-Z])+"
    rf"|\\frac\s*\{{\s*{_LETTER}\s*\}}\s*\{{\s*{_LETTER}\s*\}}"
)


def is_name(answer: Answer) -> bool:
    """Whether a side of an equation only names what the other side is: `x`, `f(x)`, `AB`, `\\angle A`, words."""
    if isinstance(answer, Words):
        return True
    if isinstance(answer, Interval):
        return is_name(answer.left) and is_name(answer.right)
    if isinstance(answer, Items):
        return bool(answer.items) and all(is_name(m) for m in answer.items)
    return (
        isinstance(answer, Scalar)
        and _NAME.fullmatch(answer.text.strip()) is not None
        and answer.text not in ("e", "i")
    )


def name_of(answer: Answer) -> str:
    """A name as one spelling."""
    text = answer.words if isinstance(answer, Words) else answer.text if isinstance(answer, Scalar) else repr(answer)
    return re.sub(r"[\s{}]", "", text)
