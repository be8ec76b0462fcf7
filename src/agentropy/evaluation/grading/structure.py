r"""The shape of an answer: a scalar, a list, set or tuple, an interval or union, a matrix, a relation, a ratio, words.

`parse_answer` works on tidied text and splits only at delimiters outside every bracket. Scalars are kept as text and
parsed on demand, so a shape can be compared before anything is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from agentropy.evaluation.grading.expression import Expression, parse_expression
from agentropy.evaluation.grading.number import plain_text
from agentropy.evaluation.grading.tokens import Unreadable
from agentropy.evaluation.grading.vocabulary import MATH_WORDS, words

MAX_ITEMS = 200
MAX_NESTING = 24


@dataclass(frozen=True)
class Scalar:
    """One expression; `expression()` parses it and raises Unreadable."""

    text: str

    def expression(self) -> Expression:
        return parse_expression(self.text)


@dataclass(frozen=True)
class Items:
    """Several answers. list: without brackets, order free; set: braces, order free; tuple: brackets, ordered."""

    kind: Literal["list", "set", "tuple"]
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Interval:
    """Two ends and which of them are open. Both open is also how a pair is written."""

    left: Answer
    right: Answer
    left_open: bool
    right_open: bool


@dataclass(frozen=True)
class Union:
    """A union of intervals and sets, in any order; `minus` is what is taken out of it."""

    parts: tuple[Answer, ...]
    minus: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Relation:
    """Sides with the operators between them: =, !=, <, >, <=, >=, ~ (approximately) or in."""

    sides: tuple[Answer, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    """a:b or a:b:c; a time of day is written the same way."""

    parts: tuple[Answer, ...]
    text: str


@dataclass(frozen=True)
class Words:
    """Plain words, in lower case, without enclosing brackets."""

    words: str


Answer = Scalar | Items | Interval | Union | Matrix | Relation | Ratio | Words
_Sub = Callable[[str], Answer]

_OPENERS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
_CLOSERS = frozenset(_OPENERS.values())
_PIECES = re.compile(r"\\begin\s*\{[a-zA-Z]+\*?\}|\\end\s*\{[a-zA-Z]+\*?\}|\\[a-zA-Z]+|\\.|\w+|.", re.S)
_MATRIX = re.compile(
    r"\\begin\s*\{(?:[pbBs]?(?:small)?matrix|array)\}\s*(?:\{[lcr| ]*\})?(?P<body>.*)\\end\s*\{[a-zA-Z]+\}", re.S
)
_RELATIONS = {
    "=": "=", r"\neq": "!=", "<": "<", ">": ">", r"\leq": "<=", r"\geq": ">=", r"\approx": "~", r"\in": "in",
    r"\equiv": "=",     r"\simeq": "~",
}  # fmt: skip
_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R|\\Reals|(?:all )?real numbers|all reals", re.I)
_EMPTY = re.compile(
    r"\\emptyset|\\\{\s*\\\}|\\text\s*\{\s*(?:empty set|no solutions?|none)\s*\}|(?:the )?empty set|\{\s*\}", re.I
)
_SET_MINUS = frozenset({r"\setminus", r"\backslash"})
_TEXT_ONLY = re.compile(r"(?:\\(?:text\w*|mbox|mathrm|operatorname)\s*\{[^{}]*\}|[\s.()'\"-]|\d(?:st|nd|rd|th))+")
_TEXT_GROUP = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
_LEADING_WORDS = re.compile(
    r"\\(?:text\w*|mbox|mathrm)\s*\{([a-zA-Z][a-zA-Z ]{2,}):?\s*\}\s*([^\s=<>\\^_].*|\\(?!leq|geq|neq|in\b).*)", re.S
)
# Words that change what the answer after them says.
_HEDGES = words("not no never less more fewer least most than under over about nearly between either or and to")
_PLAIN_WORDS = re.compile(r"[^\W\d_][\w' -]*[.!]?", re.U)


def pieces(text: str) -> list[str]:
    r"""`text` cut into commands, words and single characters; environments as one piece each end."""
    return _PIECES.findall(text)


def split_top(parts: list[str], separators: frozenset[str], *, numbers: bool = False) -> tuple[list[str], list[str]]:
    """Cut at separators that stand outside every bracket: (the texts, the separators between them).

    numbers: a comma inside digits as in 1,000 doesn't separate.
    """
    out: list[str] = []
    seps: list[str] = []
    current: list[str] = []
    depth = 0
    for i, piece in enumerate(parts):
        if piece in _OPENERS or piece.startswith(r"\begin"):
            depth += 1
        elif piece in _CLOSERS or piece.startswith(r"\end"):
            depth -= 1
            if depth < 0:
                raise Unreadable("brackets don't match")
        elif depth == 0 and piece in separators and not (piece == "," and numbers and _inside_number(parts, i)):
            out.append("".join(current).strip())
            seps.append(piece)
            current = []
            continue
        current.append(piece)
    if depth:
        raise Unreadable("brackets don't match")
    out.append("".join(current).strip())
    return out, seps


def _inside_number(parts: list[str], i: int) -> bool:
    before = parts[i - 1] if i else ""
    after = parts[i + 1] if i + 1 < len(parts) else ""
    return bool(re.fullmatch(r"\d{1,3}", before)) and bool(re.fullmatch(r"\d{3}", after))


def _enclosed(parts: list[str]) -> bool:
    """Whether the first bracket is closed by the last piece."""
    depth = 0
    for i, piece in enumerate(parts):
        depth += piece in _OPENERS
        depth -= piece in _CLOSERS
        if depth == 0:
            return i == len(parts) - 1
    return False


def parse_answer(text: str, *, numbers: bool = True, depth: int = 0) -> Answer:
    """The shape of a tidied answer. numbers: read 1,000 as one number rather than as two. Raises Unreadable."""
    if depth > MAX_NESTING:
        raise Unreadable("nested too deeply")
    text = text.strip().rstrip(",;").strip()
    if not text:
        raise Unreadable("empty")

    def sub(part: str) -> Answer:
        return parse_answer(part, numbers=numbers, depth=depth + 1)

    if _EMPTY.fullmatch(text):
        return Items("set", ())
    if _REALS.fullmatch(text):
        return Interval(Scalar(r"-\infty"), Scalar(r"\infty"), True, True)
    if plain := _as_words(text):
        return plain
    if (group := _TEXT_GROUP.fullmatch(text)) and re.search(r",|\b(?:and|or)\b", group[1]):
        return sub(group[1])
    if group and not re.search(r"[^\W\d_]", group[1]) and group[1].strip():
        return sub(group[1])
    if depth == 0 and (match := _LEADING_WORDS.fullmatch(text)) and not _HEDGES & set(match[1].lower().split()):
        return sub(match[2])  # the answer in a sentence, whose words only name it
    parts = pieces(text)
    if parts[0] == "{" and _enclosed(parts):
        return sub("".join(parts[1:-1]))
    inner = text[1:-1].strip() if text[0] in "([" and text[-1] in ")]" else text
    if (match := _MATRIX.fullmatch(inner)) and (table := _matrix(match["body"], sub)):
        return table
    found, _ = split_top(parts, frozenset({",", ";", "and", "or"}), numbers=numbers)
    found = [part for part in found if part]
    if len(found) > MAX_ITEMS:
        raise Unreadable("too many items")
    if len(found) > 1:
        return Items("list", tuple(sub(part) for part in found))
    if found and found[0] != text:
        return sub(found[0])
    return _single(text, parts, sub, numbers)


def _single(text: str, parts: list[str], sub: _Sub, numbers: bool) -> Answer:
    """An answer without separators at the top."""
    sides, ops = split_top(parts, frozenset(_RELATIONS))
    if ops:
        if not all(sides):
            raise Unreadable("a relation lacks a side")
        return Relation(tuple(sub(side) for side in sides), tuple(_RELATIONS[op] for op in ops))
    minus, cuts = split_top(parts, _SET_MINUS)
    if cuts:
        return Union((sub(minus[0]),), tuple(sub(part) for part in minus[1:]))
    union, cups = split_top(parts, frozenset({r"\cup", "∪"}))
    if not cups and re.search(r"[\])}]\s*[uU]\s*[\[({\\]", text):
        union, cups = split_top(parts, frozenset({"U", "u"}))
        if not all("," in part or part.startswith(r"\{") for part in union):
            cups = []  # a factor of that name
    if cups:
        return Union(tuple(sub(part) for part in union))
    if parts[0] in _OPENERS and _enclosed(parts):
        return _bracketed(parts, sub, numbers)
    signs = [p for p in parts if p in (r"\pm", r"\mp")]
    if signs:
        if len(signs) > 4:
            raise Unreadable("too many signs")
        plus = "".join("+" if p == r"\pm" else "-" if p == r"\mp" else p for p in parts)
        other = "".join("-" if p == r"\pm" else "+" if p == r"\mp" else p for p in parts)
        return Items("list", (sub(plus.removeprefix("+")), sub(other.removeprefix("+"))))
    ratio, colons = split_top(parts, frozenset({":"}))
    if colons and all(ratio):
        return Ratio(tuple(sub(part) for part in ratio), re.sub(r"\s", "", text))
    return Scalar(text)


_PAIR = re.compile(r"\d{1,3}(?:,\d{3})+")


def _bracketed(parts: list[str], sub: _Sub, numbers: bool) -> Answer:
    opener, closer = parts[0], parts[-1]
    inner = "".join(parts[1:-1]).strip()
    if _PAIR.fullmatch(inner):  # (100,101) is a tuple rather than a number in brackets
        numbers = False
    if opener == r"\{":
        builder, bars = split_top(parts[1:-1], frozenset({"|", r"\mid", r"\vert", ":"}))
        if len(bars) == 1 and re.search(r"[=<>]|\\(?:in|leq|geq|neq)\b", builder[1]):
            return sub(builder[1])
        items, _ = split_top(parts[1:-1], frozenset({",", ";"}), numbers=numbers)
        return Items("set", tuple(sub(item) for item in items if item))
    items, _ = split_top(parts[1:-1], frozenset({",", ";"}), numbers=numbers)
    if len(items) == 1:
        if opener == "(" or closer == ")":
            return sub(inner)
        return Items("tuple", (sub(inner),))
    if not all(items):
        raise Unreadable("an item is empty")
    if len(items) == 2 and opener != r"\langle":
        return Interval(sub(items[0]), sub(items[1]), opener == "(", closer == ")")
    if len(items) > MAX_ITEMS:
        raise Unreadable("too many items")
    if closer != _OPENERS[opener]:
        raise Unreadable("brackets don't match")
    return Items("tuple", tuple(sub(item) for item in items))


def _matrix(body: str, sub: _Sub) -> Matrix | None:
    if r"\begin" in body:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body.replace(r"\hline", "")) if row.strip()]
    if not rows or len(rows) > MAX_ITEMS:
        return None
    table = tuple(tuple(sub(cell) for cell in re.split(r"(?<!\\)&", row)) for row in rows)
    return Matrix(table) if len({len(row) for row in table}) == 1 else None


def scalars(answer: Answer) -> Iterator[Scalar]:
    """Every scalar in an answer."""
    if isinstance(answer, Scalar):
        yield answer
        return
    children: tuple[Answer, ...] = ()
    match answer:
        case Items(items=children) | Union(parts=children) | Relation(sides=children) | Ratio(parts=children):
            pass
        case Interval(left=left, right=right):
            children = (left, right)
        case Matrix(rows=rows):
            children = tuple(cell for row in rows for cell in row)
    for child in children:
        yield from scalars(child)


_ONE_LETTER = re.compile(r"\(?\s*([A-Z])\s*\)?\.?")


_TIME_OF_DAY = re.compile(r"\d{1,2}(?::\d{2})?\s*[ap]\.?\s?m\.?", re.I)


def _as_words(text: str) -> Words | None:
    r"""Words if the text is nothing but `\text{}` or plain prose, else None. A number in `\text{}` is no word."""
    if _TIME_OF_DAY.fullmatch(plain_text(text)):
        return normal_words(plain_text(text))
    in_text = "\\" in text
    if in_text and not _TEXT_ONLY.fullmatch(text):
        return None
    plain = plain_text(text) if in_text else text
    if not in_text:
        letters = re.findall(r"[^\W\d_]+", plain)
        prose = _PLAIN_WORDS.fullmatch(plain) and any(len(word) > 3 for word in letters)
        if not prose or any(word in MATH_WORDS for word in letters) or re.search(r"\b(?:and|or)\b", plain):
            return None
    elif re.fullmatch(r"[\d\s.,:()+/-]*", plain) or re.search(r"\b(?:and|or)\b|,", plain):
        return None
    return normal_words(plain)


def normal_words(text: str) -> Words | None:
    """Words in lower case without enclosing brackets, quotes and a final point; `p.m.` is `pm`."""
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text.lower()) if ".m" in text.lower() else text
    plain = re.sub(r"[\s.,;:!?\"'“”]+$|^[\s\"'“”]+", "", text).strip()
    if match := _ONE_LETTER.fullmatch(plain):
        plain = match.group(1)
    elif plain.startswith("(") and plain.endswith(")"):
        plain = plain[1:-1]
    plain = " ".join(re.sub(r"[-']", " ", plain.lower()).split())
    return Words(plain) if plain else None
