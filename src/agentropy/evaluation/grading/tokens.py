r"""The words and signs of an answer: what the reader knows, and the cut of a text into tokens."""

from __future__ import annotations

import re

from agentropy.evaluation.grading.vocabulary import FUNCTIONS, GREEK, WORD_SYMBOLS

MAX_TOKENS = 1500

_TOKEN = re.compile(
    r"\s+"
    r"|(?P<num>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:\s\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,5}(?![\d.]))?"
    r"|\.\d+(?:[eE][+-]?\d{1,5}(?![\d.]))?)"
    r"|(?P<word>[a-zA-Z]+)|(?P<cmd>\\[a-zA-Z]+\*?|\\.)|(?P<sym>.)"
)


class Unreadable(Exception):
    """The text is no expression that this reader knows."""


def tokenize(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token; kinds: num, letter, cmd, sym. Raises Unreadable for prose and for very long texts."""
    tokens: list[tuple[str, str]] = []
    for match in _TOKEN.finditer(re.sub(r"\b(?:np|numpy|math|sympy|sp)\.(?=[a-z])", "", text)):
        kind = match.lastgroup
        if kind == "word":
            tokens.extend(_split_word(match.group()))
        elif kind is not None:
            tokens.append((kind, match.group()))
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("too long")
    return tokens


def _split_word(word: str) -> list[tuple[str, str]]:
    if word in FUNCTIONS or word in WORD_SYMBOLS or word in GREEK:
        return [("cmd", "\\" + word)]
    for name in sorted(FUNCTIONS | {"pi"}, key=len, reverse=True):
        if len(name) > 1 and word.endswith(name) and len(word) - len(name) <= 2:
            return [("letter", c) for c in word[: -len(name)]] + [("cmd", "\\" + name)]
    if len(word) > 3 and not word.isupper():
        raise Unreadable(f"words: {word}")
    return [("letter", c) for c in word]
