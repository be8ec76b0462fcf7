r"""Equations, inequalities and sets of real numbers: `x = 5`, `0 \leq x < 1`, `[0,1)`, `\mathbb{R} \setminus \{2\}`.

An inequality in one variable is the interval it describes. Two equations are the same when the difference of their
sides has a constant quotient at every test point, so `y = 2x` is `2x - y = 0` and not `x = 2y`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentropy.evaluation.grading.compare import Equality, integral, same, weakest
from agentropy.evaluation.grading.evaluate import EQUAL, POINTS, mp, value_at
from agentropy.evaluation.grading.expression import Expression, Node
from agentropy.evaluation.grading.names import is_name, name_of
from agentropy.evaluation.grading.structure import Answer, Interval, Items, Matrix, Relation, Scalar, Union, Words
from agentropy.evaluation.grading.tokens import Unreadable

_ORDER = frozenset({"<", ">", "<=", ">=", "!="})
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_INFINITY = Scalar(r"\infty")
_MINUS_INFINITY = Scalar(r"-\infty")
# Two sides joined by ≈ may differ by this part.
_ROUGHLY = mp.mpf(10) ** -2


@dataclass(frozen=True)
class Piece:
    """A part of the real line; a point has equal ends."""

    left: Scalar
    right: Scalar
    left_open: bool
    right_open: bool


def relation_for(gold: Answer, answer: Relation) -> Equality | None:
    """A relation given where the gold is none: `x = 5` for 5, `0 < x < 1` for (0,1), `1/2 = 0.5` for 0.5."""
    if set(answer.ops) & _ORDER:
        return same_reals(gold, answer)
    sides = values_of(answer)
    if sides is None:
        return None
    found = [same(gold, side) for side in sides]
    return next((equal for equal in found if equal), None)


def values_of(relation: Relation) -> list[Answer] | None:
    """What a chain of equalities says the answer is: its sides without the names in front or behind.

    None if the sides contradict each other, as in 1 = 2 = 3, or if nothing is named and the sides differ.
    """
    sides = list(relation.sides)
    while len(sides) > 1 and is_name(sides[0]):
        sides.pop(0)
    while len(sides) > 1 and is_name(sides[-1]):
        sides.pop()
    roughly = "~" in relation.ops
    for side in sides[1:]:
        if same(sides[0], side) is None and not (roughly and _roughly(sides[0], side)):
            return None
    return sides


def _roughly(a: Answer, b: Answer) -> bool:
    if not isinstance(a, Scalar) or not isinstance(b, Scalar):
        return False
    x, y = value_at(a.expression(), 0), value_at(b.expression(), 0)
    return x is not None and y is not None and bool(abs(x - y) <= _ROUGHLY * max(abs(x), abs(y)))


def same_as_relation(gold: Relation, answer: Answer) -> Equality | None:
    """An answer against a gold that is a relation."""
    if set(gold.ops) & _ORDER:
        return _same_as_inequality(gold, answer)
    named = is_name(gold.sides[0]) or gold.ops[0] == "in"
    if not isinstance(answer, Relation):
        values = values_of(gold) if named or "~" in gold.ops or _constant(gold) else None
        if values is None:
            return None
        return next((equal for value in values if (equal := same(value, answer))), None)
    if set(answer.ops) & _ORDER:
        return same_reals(gold.sides[-1], answer) if named else None
    if (named and (is_name(answer.sides[0]) or answer.ops[0] == "in")) or (_constant(gold) and _constant(answer)):
        equal = _same_named(gold, answer)
        if equal:
            return equal
    return _same_equation(gold, answer)


def _constant(relation: Relation) -> bool:
    """Whether a relation only says something about numbers, as `63 + 200 = 263` does."""
    return all(isinstance(side, Scalar) and not side.expression().variables for side in relation.sides)


def _same_named(gold: Relation, answer: Relation) -> Equality | None:
    g_name, a_name = name_of(gold.sides[0]), name_of(answer.sides[0])
    wanted, given = values_of(gold), values_of(answer)
    if wanted is None or given is None:
        return None
    if g_name != a_name and not _graphs(g_name, a_name) and not _constant(gold):
        return None
    return next((equal for g in wanted for a in given if (equal := same(g, a))), None)


_VALUE = re.compile(r"[a-zA-Z]\([a-zA-Z]\)")


def _graphs(a: str, b: str) -> bool:
    """Whether both names are those of a function's value: y, f(x), g(x)."""
    return all(name == "y" or _VALUE.fullmatch(name) for name in (a, b))


def _same_as_inequality(gold: Relation, answer: Answer) -> Equality | None:
    if isinstance(answer, Relation):
        if len(gold.ops) == 1 and len(answer.ops) == 1:
            equal = _same_equation(gold, answer)
            if equal:
                return equal
        names = [_variable(relation) for relation in (gold, answer) if set(relation.ops) & _ORDER]
        if None in names or len(set(names)) > 1:
            return None
    return same_reals(gold, answer)


# Equations


def _difference(relation: Relation) -> Expression | None:
    """Left side minus right side of an equation between two scalars; None for any other relation."""
    left, right = relation.sides[0], relation.sides[-1]
    if len(relation.sides) != 2 or not isinstance(left, Scalar) or not isinstance(right, Scalar):
        return None
    a, b = left.expression(), right.expression()
    root = Node("add", (a.root, Node("neg", (b.root,))))
    return Expression(
        f"{a.text} - ({b.text})",
        root,
        None,
        a.variables | b.variables,
        a.decimals or b.decimals,
        max(a.digits, b.digits),
        False,
        a.integral or b.integral,
    )


def _same_equation(gold: Relation, answer: Relation) -> Equality | None:
    """Equal up to a constant factor; for inequalities a positive one, or a negative one with the sign turned."""
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None or not left.variables or not right.variables:
        return None
    quotient = _constant_quotient(left, right)
    if quotient is None:
        return None
    op = answer.ops[0] if mp.im(quotient) != 0 or quotient > 0 else _FLIP.get(answer.ops[0], answer.ops[0])
    return "equal_symbolic" if op == gold.ops[0] else None


def _constant_quotient(g: Expression, a: Expression) -> Any:
    whole = integral(g, a)
    quotient: Any = None
    compared = 0
    for index in range(POINTS):
        x, y = value_at(g, index, whole), value_at(a, index, whole)
        if x is None or y is None:
            continue
        if x == 0 or y == 0:
            return None
        here = y / x
        if quotient is not None and not abs(here - quotient) <= EQUAL * abs(quotient):
            return None
        quotient = here
        compared += 1
    return quotient if compared >= 3 else None


# Sets of real numbers


def same_reals(gold: Answer, answer: Answer) -> Equality | None:
    """Two sets of real numbers, however they are written, piece by piece."""
    g, a = reals(gold), reals(answer)
    if g is None or a is None or len(g) != len(a):
        return None
    if any((x.left_open, x.right_open) != (y.left_open, y.right_open) for x, y in zip(g, a, strict=True)):
        return None
    return weakest(equal for x, y in zip(g, a, strict=True) for equal in (same(x.left, y.left), same(x.right, y.right)))


def reals(answer: Answer) -> list[Piece] | None:
    """The pieces of a set of reals from left to right, touching pieces joined; None if the answer is no such set."""
    pieces = _pieces(answer)
    return None if pieces is None else _joined(pieces)


def _pieces(answer: Answer) -> list[Piece] | None:
    if isinstance(answer, Interval):
        if not isinstance(answer.left, Scalar) or not isinstance(answer.right, Scalar):
            return None
        return [Piece(answer.left, answer.right, answer.left_open, answer.right_open)]
    if isinstance(answer, Items):
        if answer.kind == "tuple":
            return None
        if answer.items and all(isinstance(item, Relation | Interval) for item in answer.items):
            return _concatenated(answer.items)  # x < 2 or x > 3
        if not all(isinstance(item, Scalar) for item in answer.items):
            return None
        return [Piece(item, item, False, False) for item in answer.items if isinstance(item, Scalar)]
    if isinstance(answer, Union):
        pieces = _concatenated(answer.parts)
        return _without(pieces, answer.minus) if pieces is not None else None
    if isinstance(answer, Relation):
        return _solved(answer)
    return None


def _concatenated(parts: Sequence[Answer]) -> list[Piece] | None:
    out: list[Piece] = []
    for part in parts:
        pieces = _pieces(part)
        if pieces is None:
            return None
        out.extend(pieces)
    return out


def _variable(relation: Relation) -> str | None:
    named = [name_of(side) for side in relation.sides if is_name(side)]
    return named[0] if len(named) == 1 else None


def _solved(relation: Relation) -> list[Piece] | None:
    """`x > 2`, `1 < x \\leq 3`, `3 \\geq x`, `x \\neq 2`, `x \\in [0,1)` as pieces."""
    sides, ops = relation.sides, relation.ops
    if ops == ("in",) and is_name(sides[0]):
        return _pieces(sides[1])
    places = [i for i, side in enumerate(sides) if is_name(side)]
    if len(places) != 1 or len(sides) > 3 or any(isinstance(s, Words | Matrix) for s in sides):
        return None
    at = places[0]
    left, right, left_open, right_open = _MINUS_INFINITY, _INFINITY, True, True
    if len(sides) == 3 and (at != 1 or {ops[0][0], ops[1][0]} not in ({"<"}, {">"})):
        return None
    for i, side in enumerate(sides):
        if i == at:
            continue
        op = ops[min(i, at)]
        if i < at:
            op = _FLIP.get(op, "")  # the name comes first: a < x is x > a
        if not isinstance(side, Scalar) or op not in _ORDER:
            return None
        if op == "!=":
            return [Piece(left, side, True, True), Piece(side, right, True, True)] if len(sides) == 2 else None
        if op[0] == ">":
            left, left_open = side, op == ">"
        else:
            right, right_open = side, op == "<"
    return [Piece(left, right, left_open, right_open)]


def _end(scalar: Scalar) -> Any:
    value = value_at(scalar.expression(), 0)
    if value is None or mp.im(value) != 0:
        raise Unreadable("an end is no real number")
    return mp.re(value)


def _without(pieces: list[Piece], minus: Sequence[Answer]) -> list[Piece] | None:
    holes: list[Scalar] = []
    for part in minus:
        members = part.items if isinstance(part, Items) else (part,)
        if not all(isinstance(m, Scalar) for m in members):
            return None
        holes.extend(m for m in members if isinstance(m, Scalar))
    for hole in holes:
        at = _end(hole)
        cut: list[Piece] = []
        for piece in pieces:
            if _end(piece.left) < at < _end(piece.right):
                cut += [
                    Piece(piece.left, hole, piece.left_open, True),
                    Piece(hole, piece.right, True, piece.right_open),
                ]
            elif at == _end(piece.left):
                cut.append(Piece(piece.left, piece.right, True, piece.right_open))
            elif at == _end(piece.right):
                cut.append(Piece(piece.left, piece.right, piece.left_open, True))
            else:
                cut.append(piece)
        pieces = cut
    return pieces


def _joined(pieces: list[Piece]) -> list[Piece]:
    ordered = sorted(pieces, key=lambda p: (_end(p.left), p.left_open))
    out: list[Piece] = []
    for piece in ordered:
        if _end(piece.left) > _end(piece.right):
            continue
        if out:
            last = out[-1]
            gap = _end(piece.left) - _end(last.right)
            touches = abs(gap) <= EQUAL * (1 + abs(_end(piece.left))) if mp.isfinite(gap) else gap == 0
            if touches and piece.left_open and last.right_open:
                out.append(piece)
                continue
            if gap < 0 or touches:
                if _end(piece.right) > _end(last.right) or (
                    _end(piece.right) == _end(last.right) and not piece.right_open
                ):
                    out[-1] = Piece(last.left, piece.right, last.left_open, piece.right_open)
                continue
        out.append(piece)
    return out
