r"""Whether two answers of any shape are the same, guided by the shape of the gold.

The result is how they are equal (exact, numeric, symbolic) or None. Unreadable is raised where a part can't be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal

from agentropy.evaluation.grading.evaluate import EQUAL, POINTS, exact_value, mp, value_at
from agentropy.evaluation.grading.expression import Expression
from agentropy.evaluation.grading.names import is_name, name_of
from agentropy.evaluation.grading.number import Number, same_number
from agentropy.evaluation.grading.structure import (
    Answer,
    Interval,
    Items,
    Matrix,
    Ratio,
    Relation,
    Scalar,
    Union,
    Words,
    normal_words,
)

Equality = Literal["equal_exact", "equal_numeric", "equal_symbolic"]
_RANK: dict[Equality, int] = {"equal_exact": 0, "equal_numeric": 1, "equal_symbolic": 2}


def weakest(found: Iterable[Equality | None]) -> Equality | None:
    """None if any is None, else the weakest kind of equality."""
    result: Equality = "equal_exact"
    for item in found:
        if item is None:
            return None
        if _RANK[item] > _RANK[result]:
            result = item
    return result


def same(gold: Answer, answer: Answer) -> Equality | None:
    """How `answer` equals `gold`, or None. Raises Unreadable, TooLarge."""
    if isinstance(gold, Relation):
        return _same_as_relation(gold, answer)
    if isinstance(answer, Relation):
        return _relation_for(gold, answer)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _same_words(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer)
    if isinstance(gold, Ratio) or isinstance(answer, Ratio):
        return _same_ratio(gold, answer)
    if isinstance(gold, Union) or isinstance(answer, Union):
        return _same_reals(gold, answer)
    if isinstance(gold, Interval) or isinstance(answer, Interval):
        return _same_interval(gold, answer)
    if isinstance(gold, Items) or isinstance(answer, Items):
        return _same_items(gold, answer)
    return same_scalar(gold, answer)


def _same_words(gold: Answer, answer: Answer) -> Equality | None:
    g, a = (x.words if isinstance(x, Words) else _letters(x) for x in (gold, answer))
    for clock, other in ((gold, a), (answer, g)):  # 6:30 where the other says p.m.
        if (
            isinstance(clock, Ratio)
            and _CLOCK.fullmatch(clock.text)
            and other in (f"{clock.text} am", f"{clock.text} pm")
        ):
            return "equal_exact"
    return "equal_exact" if g is not None and g == a else None


def _letters(answer: Answer) -> str | None:
    if isinstance(answer, Scalar):
        words = normal_words(answer.text)
        return words.words if words else None
    if isinstance(answer, Items) and all(isinstance(i, Scalar | Words) for i in answer.items):
        return ", ".join(
            _letters(i) or "" if isinstance(i, Scalar) else str(getattr(i, "words", "")) for i in answer.items
        )
    return None


# Scalars


def number_of(expression: Expression) -> Number | None:
    """The expression as an exact number, or None if it is none."""
    if expression.number is not None:
        return expression.number
    value = exact_value(expression)
    if value is None:
        return None
    return Number(value, expression.decimals, expression.digits, expression.percent)


def same_scalar(gold: Scalar, answer: Scalar) -> Equality | None:
    """Scalars: exact rationals exactly; else 30 digits at every test point, or the tolerance for decimals."""
    if gold.text == answer.text:
        return "equal_exact"
    g, a = gold.expression(), answer.expression()
    g_number, a_number = number_of(g), number_of(a)
    if g_number is not None and a_number is not None:
        found = same_number(g_number, a_number)
        plain = g.number is not None and a.number is not None
        return (
            None
            if found is False
            else "equal_numeric"
            if found is None
            else "equal_exact"
            if plain
            else "equal_symbolic"
        )
    if bool(g.variables) != bool(a.variables) and (g_number or a_number) and not _constant(g if g.variables else a):
        return None
    return _same_values(g, a, g_number, a_number)


def _constant(expression: Expression) -> bool:
    first = value_at(expression, 0)
    return all(_near(first, value_at(expression, i)) for i in range(1, POINTS))


def _near(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return False
    if a == b:
        return True
    largest = max(abs(a), abs(b))
    return bool(mp.isfinite(largest)) and bool(abs(a - b) <= EQUAL * largest)


def _same_values(g: Expression, a: Expression, g_number: Number | None, a_number: Number | None) -> Equality | None:
    whole = integral(g, a)
    compared = 0
    for index in range(POINTS + 2 * whole):
        x, y = value_at(g, index, whole), value_at(a, index, whole)
        if index % 2 and (x is None or y is None or mp.im(x) != 0 or mp.im(y) != 0) and compared:
            continue  # roots and logarithms of negative numbers: identities hold only for positive ones
        if x is None and y is None:
            continue
        if not _near(x, y) and not _near_percent(g, a, x, y):
            return _as_decimals(g, a, g_number, a_number)
        compared += 1
    return "equal_symbolic" if compared else None


def integral(g: Expression, a: Expression) -> bool:
    """Whether the variables stand for integers: a floor or ceiling is there, and none is called x, y, z, t, …"""
    return (g.integral or a.integral) and not any(name[0] in "xyztuvwXYZ" for name in g.variables | a.variables)


def _near_percent(g: Expression, a: Expression, x: Any, y: Any) -> bool:
    """`50\\pi\\%` against its value, with the rule for percent signs in numbers."""
    if g.percent == a.percent or x is None or y is None:
        return False
    return (_near(x / 100, y)) if g.percent else _near(x, y / 100)


def _as_decimals(g: Expression, a: Expression, g_number: Number | None, a_number: Number | None) -> Equality | None:
    """A decimal on either side that stands for the other value."""
    if not (g.decimals or a.decimals):
        return None
    if not g.variables and not a.variables:
        x, y = _approximate(g, g_number), _approximate(a, a_number)
        if x is not None and y is not None:
            found = same_number(x, y)
            return None if found is False else "equal_numeric"
    whole = integral(g, a)
    for index in range(POINTS):
        x, y = value_at(g, index, whole), value_at(a, index, whole)
        if x is None or y is None or not abs(x - y) <= mp.mpf(10) ** -6 * max(abs(x), abs(y)):
            return None
    return "equal_numeric"


def _approximate(expression: Expression, exact: Number | None) -> Number | None:
    if exact is not None:
        return exact
    value = value_at(expression, 0)
    if value is None or mp.im(value) != 0 or not mp.isfinite(value) or not 1e-300 < abs(value) < 1e300:
        return None
    sign, mantissa, exponent, _ = mp.mpf(mp.re(value))._mpf_
    fraction = Fraction(int(mantissa)) * Fraction(2) ** int(exponent) * (-1 if sign else 1)
    return Number(fraction, expression.decimals, expression.digits, expression.percent, irrational=True)


# Lists, sets, tuples


def flat(items: Sequence[Answer]) -> list[Answer]:
    """Items with the two values of a ± and lists in lists put in their place."""
    out: list[Answer] = []
    for item in items:
        if isinstance(item, Items) and item.kind == "list":
            out.extend(flat(item.items))
        elif isinstance(item, Relation) and item.ops == ("=",) and isinstance(item.sides[1], Items):
            if item.sides[1].kind == "tuple":
                out.append(item)
            else:
                out.extend(flat(item.sides[1].items))
        else:
            out.append(item)
    return out


def _members(answer: Answer) -> list[Answer]:
    if isinstance(answer, Items):
        return flat(answer.items)
    if isinstance(answer, Interval) and answer.left_open == answer.right_open:
        return [answer.left, answer.right]
    return [answer]


def _same_items(gold: Answer, answer: Answer) -> Equality | None:
    ordered = isinstance(gold, Items) and gold.kind == "tuple"
    if isinstance(answer, Items) and answer.kind == "set" and ordered:
        return None
    wanted, given = _members(gold), _members(answer)
    if not isinstance(answer, Items) and isinstance(gold, Items) and len(wanted) != 1:
        return None
    if ordered and len(given) == 1 == len(wanted):
        return same(wanted[0], given[0])
    if ordered:
        if len(wanted) != len(given):
            return None
        return weakest(same(g, _value_of(a)) for g, a in zip(wanted, given, strict=True))
    names = _assignments(wanted)
    if names is not None and len(set(names)) > 1:
        return _same_assignments(wanted, names, given)
    some, other = _names(wanted), _names(given)
    if some and other and some != other:
        return None
    return unordered([_value_of(g) for g in wanted] if some else wanted, [_value_of(a) for a in given])


def _value_of(answer: Answer) -> Answer:
    """The right side of `x = 5` inside a list; anything else as it is."""
    if isinstance(answer, Relation) and answer.ops == ("=",) and is_name(answer.sides[0]):
        return answer.sides[1]
    return answer


def _names(items: Sequence[Answer]) -> set[str]:
    return {name_of(i.sides[0]) for i in items if isinstance(i, Relation) and i.ops == ("=",) and is_name(i.sides[0])}


def _assignments(items: Sequence[Answer]) -> list[str] | None:
    names = [name_of(i.sides[0]) for i in items if isinstance(i, Relation) and i.ops == ("=",) and is_name(i.sides[0])]
    return names if items and len(names) == len(items) else None


def _same_assignments(wanted: Sequence[Answer], names: list[str], given: Sequence[Answer]) -> Equality | None:
    """`x = 2, y = 1`: by name where the answer has the names, else in order."""
    if len(given) != len(wanted):
        return None
    given_names = _assignments(given)
    order = list(range(len(wanted)))
    if given_names is not None:
        if sorted(given_names) != sorted(names) or len(set(names)) != len(names):
            return None
        order = [given_names.index(name) for name in names]
    return weakest(same(_value_of(w), _value_of(given[order[i]])) for i, w in enumerate(wanted))


def unordered(wanted: Sequence[Answer], given: Sequence[Answer]) -> Equality | None:
    """Every wanted item is given and nothing else; repeats count only where the gold repeats."""
    if len(given) > 4 * len(wanted) + 4:
        return None
    unique = _distinct(wanted)
    if len(unique) == len(wanted):
        given = _distinct(given)
    if len(given) != len(wanted):
        return None
    left = list(given)
    found: list[Equality | None] = []
    for item in wanted:
        for i, candidate in enumerate(left):
            equal = same(item, candidate)
            if equal is not None:
                found.append(equal)
                del left[i]
                break
        else:
            return None
    return weakest(found)


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    out: list[Answer] = []
    for item in items:
        if not any(item == kept or same(kept, item) for kept in out):
            out.append(item)
    return out


# Matrices and ratios


def _same_matrix(gold: Answer, answer: Answer) -> Equality | None:
    g, a = _rows(gold), _rows(answer)
    if g is None or a is None:
        return None
    if len(g) != len(a) or len(g[0]) != len(a[0]):
        # A vector is the same as a column, a row or a tuple, as long as one side is no matrix.
        vector = isinstance(gold, Matrix) != isinstance(answer, Matrix) and 1 in (len(g), len(g[0]))
        if not vector or 1 not in (len(a), len(a[0])):
            return None
        g, a = [[x for row in g for x in row]], [[x for row in a for x in row]]
        if len(g[0]) != len(a[0]):
            return None
    return weakest(same(x, y) for g_row, a_row in zip(g, a, strict=True) for x, y in zip(g_row, a_row, strict=True))


def _rows(answer: Answer) -> list[list[Answer]] | None:
    if isinstance(answer, Matrix):
        return [list(row) for row in answer.rows]
    if isinstance(answer, Interval) and not (answer.left_open and answer.right_open):
        rows = [_row(answer.left), _row(answer.right)] if not answer.left_open and not answer.right_open else []
        return [r for r in rows if r] if rows and all(rows) else None
    if isinstance(answer, Items) and answer.kind == "tuple" and answer.items:
        rows = [_row(item) for item in answer.items]
        if all(rows) and len({len(r) for r in rows if r}) == 1:
            return [r for r in rows if r]
    return [_members(answer)] if isinstance(answer, Interval | Items) and _members(answer) else None


def _row(answer: Answer) -> list[Answer] | None:
    nested = isinstance(answer, Items) and answer.kind == "tuple"
    pair = isinstance(answer, Interval) and answer.left_open == answer.right_open
    return _members(answer) if nested or pair else None


_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")


def _same_ratio(gold: Answer, answer: Answer) -> Equality | None:
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        if len(gold.parts) != len(answer.parts):
            return None
        plain = weakest(same(g, a) for g, a in zip(gold.parts, answer.parts, strict=True))
        if plain or _CLOCK.fullmatch(gold.text):
            return plain
        quotients = [_quotient(g, a) for g, a in zip(gold.parts, answer.parts, strict=True)]
        return "equal_symbolic" if quotients[0] and all(q == quotients[0] for q in quotients) else None
    ratio, other = (gold, answer) if isinstance(gold, Ratio) else (answer, gold)
    if (
        not isinstance(ratio, Ratio)
        or not isinstance(other, Scalar)
        or len(ratio.parts) != 2
        or _CLOCK.fullmatch(ratio.text)
    ):
        return None
    above, below = ratio.parts
    if not isinstance(above, Scalar) or not isinstance(below, Scalar):
        return None
    return same_scalar(other, Scalar(f"\\frac{{{above.text}}}{{{below.text}}}"))


def _quotient(a: Answer, b: Answer) -> Fraction | None:
    if not isinstance(a, Scalar) or not isinstance(b, Scalar):
        return None
    x, y = exact_value(a.expression()), exact_value(b.expression())
    return x / y if x is not None and y else None


def _relation_for(gold: Answer, answer: Relation) -> Equality | None:
    from agentropy.evaluation.grading.relations import relation_for

    return relation_for(gold, answer)


def _same_as_relation(gold: Relation, answer: Answer) -> Equality | None:
    from agentropy.evaluation.grading.relations import same_as_relation

    return same_as_relation(gold, answer)


def _same_reals(gold: Answer, answer: Answer) -> Equality | None:
    from agentropy.evaluation.grading.relations import same_reals

    return same_reals(gold, answer)


def _same_interval(gold: Answer, answer: Answer) -> Equality | None:
    """Intervals keep their brackets; two open ends may also be a pair, and a pair may stand without its brackets."""
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        if (gold.left_open, gold.right_open) != (answer.left_open, answer.right_open):
            return None
        return weakest((same(gold.left, answer.left), same(gold.right, answer.right)))
    interval, other = (gold, answer) if isinstance(gold, Interval) else (answer, gold)
    assert isinstance(interval, Interval)
    if isinstance(gold, Items) and gold.kind == "list" and not interval.left_open and not interval.right_open:
        return unordered(flat(gold.items), (interval.left, interval.right))  # a list as a program prints it
    if isinstance(other, Items) and interval.left_open and interval.right_open:
        if other.kind == "set":
            return None
        members = flat(other.items)
        if len(members) != 2:
            return None
        pair = Items("tuple", (interval.left, interval.right))
        if isinstance(gold, Interval):
            return _same_items(pair, other)
        return unordered(members, pair.items) if other.kind == "list" else _same_items(gold, pair)
    return None
