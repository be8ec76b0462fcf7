"""Values of expressions: exact rationals where possible, else 60 digits by mpmath, at fixed points for the variables.

Two expressions in variables are called equal when they agree to 30 digits at several points: for the closed forms of
answers that is as good as a proof, and it costs milliseconds where symbolic simplification may not end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

from agentropy.evaluation.grading.expression import Expression, Node

PRECISION = 60
mp = mpmath.mp.clone()
mp.dps = PRECISION
# Sums that cancel to this part of their largest term are zero.
_NOISE = mp.mpf(10) ** -45
EQUAL = mp.mpf(10) ** -30
MAX_BITS = 200_000
MAX_FACTORIAL = 10_000
POINTS = 4


class NotExact(Exception):
    """The value is no rational number of reasonable size."""


class TooLarge(Exception):
    """The value, or a step towards it, is beyond what is evaluated."""


class Undefined(Exception):
    """Division by zero, logarithm of zero and the like."""


def exact_value(expression: Expression) -> Fraction | None:
    """The exact rational value, or None where the expression has variables, is irrational or too large."""
    if "exact" not in expression.cache:
        try:
            expression.cache["exact"] = None if expression.variables else _exact(expression.root)
        except (NotExact, ZeroDivisionError, RecursionError):
            expression.cache["exact"] = None
    found = expression.cache["exact"]
    return found if isinstance(found, Fraction) else None


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise NotExact
    return value


def _exact(node: Node) -> Fraction:
    op = node.op
    if op == "num":
        return node.value
    if op in ("sym", "const"):
        raise NotExact
    args = [_exact(a) for a in node.args]
    if op == "add":
        total = Fraction(0)
        for a in args:
            total = _bounded(total + a)
        return total
    if op == "mul":
        return _bounded(args[0] * args[1])
    if op == "div":
        return _bounded(args[0] / args[1])
    if op == "neg":
        return -args[0]
    if op == "percent":
        return args[0] / 100
    if op == "pow":
        return _exact_power(args[0], args[1])
    if op == "root":
        if args[1].denominator != 1 or not 2 <= args[1] <= 64 or (args[0] < 0 and args[1] % 2 == 0):
            raise NotExact
        sign = -1 if args[0] < 0 else 1
        above = _integer_root(abs(args[0].numerator), int(args[1]))
        return Fraction(sign * above, _integer_root(args[0].denominator, int(args[1])))
    if op in ("fact", "fact2"):
        if args[0].denominator != 1 or not 0 <= args[0] <= MAX_FACTORIAL:
            raise NotExact
        n = int(args[0])
        return Fraction(math.factorial(n) if op == "fact" else math.prod(range(n, 0, -2)))
    if op == "binom":
        if args[0].denominator != 1 or args[1].denominator != 1 or not 0 <= args[1] <= args[0] <= MAX_FACTORIAL:
            raise NotExact
        return _bounded(Fraction(math.comb(int(args[0]), int(args[1]))))
    return _exact_call(node.name, args)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator > 64 or base < 0:
            raise NotExact
        degree = exponent.denominator
        base = Fraction(_integer_root(base.numerator, degree), _integer_root(base.denominator, degree))
        exponent = Fraction(exponent.numerator)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > MAX_BITS or bits * abs(exponent) > MAX_BITS:
        raise NotExact
    if base == 0 and exponent < 0:
        raise NotExact
    return base ** int(exponent)


def _integer_root(value: int, degree: int) -> int:
    if value.bit_length() > 8000:
        raise NotExact
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    if low**degree != value:
        raise NotExact
    return low


def _exact_call(name: str, args: list[Fraction]) -> Fraction:
    if name == "abs":
        return abs(args[0])
    if name == "floor":
        return Fraction(math.floor(args[0]))
    if name == "ceil":
        return Fraction(math.ceil(args[0]))
    if name in ("max", "min"):
        return max(args) if name == "max" else min(args)
    if name in ("gcd", "lcm") and all(a.denominator == 1 for a in args):
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*(int(a) for a in args)))
    raise NotExact


@lru_cache(maxsize=4096)
def point(name: str, index: int, integral: bool) -> Any:
    """The value of variable `name` at test point `index`: positive at the even ones, negative at 1."""
    source = random.Random(f"{name}/{index}/{integral}")
    if integral:
        return mp.mpf(source.randint(3, 400))
    value = mp.mpf(source.randint(600_000_000, 1_900_000_000)) / 1_000_000_007
    return -value if index == 1 or (index % 2 and source.random() < 0.5) else value


def values(expression: Expression, integral: bool = False) -> list[Any]:
    """The values at the test points (one for a constant): mpmath numbers, or None where undefined. Raises TooLarge."""
    key = f"values{integral}"
    if key not in expression.cache:
        indices = range(POINTS + 2 * integral) if expression.variables else range(1)
        found: list[Any] = []
        for index in indices:
            table = {name: point(name, index, integral) for name in expression.variables}
            try:
                found.append(_value(expression.root, table, bool(table) and index % 2 == 1))
            except (Undefined, ZeroDivisionError, ValueError, OverflowError):
                found.append(None)
            except RecursionError:
                raise TooLarge from None
        expression.cache[key] = found
    result = expression.cache[key]
    assert isinstance(result, list)
    return result


def value_at(expression: Expression, index: int, integral: bool = False) -> Any:
    """The value at one test point, or None where undefined; a constant has the same value at every point."""
    found = values(expression, integral)
    return found[index] if expression.variables else found[0]


def _value(node: Node, table: Mapping[str, Any], real: bool) -> Any:
    """The value at the point `table`. real: a root or power of real numbers that is not real counts as undefined."""
    value = _value_of(node, table, real)
    if real and node.op in ("pow", "root", "call") and isinstance(value, mp.mpc) and "i" not in _constants(node):
        raise Undefined
    return value


@lru_cache(maxsize=4096)
def _constants(node: Node) -> frozenset[str]:
    own = frozenset({node.name}) if node.op == "const" else frozenset()
    return own.union(*(_constants(a) for a in node.args))


def _value_of(node: Node, table: Mapping[str, Any], real: bool) -> Any:
    op = node.op
    if op == "num":
        if abs(node.value.numerator).bit_length() > MAX_BITS:
            raise TooLarge
        return mp.mpf(node.value.numerator) / node.value.denominator
    if op == "sym":
        return table[node.name]
    if op == "const":
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1), "inf": mp.inf}[node.name]
    args = [_value(a, table, real) for a in node.args]
    if op == "add":
        total = mp.fsum(args)
        largest = max(abs(a) for a in args)
        return mp.mpf(0) if largest != mp.inf and abs(total) < _NOISE * largest else total
    if op == "mul":
        return args[0] * args[1]
    if op == "div":
        return _divide(args[0], args[1])
    if op == "neg":
        return -args[0]
    if op == "percent":
        return args[0] / 100
    if op == "pow":
        return _power(args[0], args[1])
    if op == "root":
        return _root(args[0], args[1])
    if op in ("fact", "fact2"):
        _small(args[0], 10**7)
        return (mp.factorial if op == "fact" else mp.fac2)(args[0])
    if op == "binom":
        _small(args[0], 10**6)
        _small(args[1], 10**6)
        return mp.binomial(args[0], args[1])
    return _call(node.name, args)


def _small(value: Any, limit: float) -> None:
    if not abs(value) <= limit:
        raise TooLarge


def _divide(a: Any, b: Any) -> Any:
    if b == 0:
        raise Undefined
    return a / b


def _power(base: Any, exponent: Any) -> Any:
    if base == 0:
        if mp.re(exponent) < 0:
            raise Undefined
        return mp.mpf(1) if exponent == 0 else mp.mpf(0)
    _small(exponent, 10**12)
    if abs(base) != mp.inf and abs(base) > 0:
        _small(mp.log(abs(base)) * abs(exponent), 10**15)
    return _clean(mp.power(base, exponent))


def _root(value: Any, degree: Any) -> Any:
    if degree == 0:
        raise Undefined
    _small(degree, 10**6)
    if mp.im(value) == 0 and mp.re(value) < 0 and degree == int(mp.re(degree)) and int(mp.re(degree)) % 2:
        return -mp.power(-value, 1 / degree)  # the real root, as answers mean it
    return mp.power(value, 1 / degree)


def _clean(value: Any) -> Any:
    """A complex number without its rounding noise; real where the imaginary part is noise."""
    if isinstance(value, mp.mpc):
        size = abs(value)
        re, im = mp.re(value), mp.im(value)
        if abs(im) < _NOISE * size:
            return re
        if abs(re) < _NOISE * size:
            return mp.mpc(0, im)
    return value


def _call(name: str, args: list[Any]) -> Any:
    x = args[0]
    if name == "abs":
        return abs(x)
    if name in ("floor", "ceil"):
        nearest = mp.nint(mp.re(x))
        if abs(x - nearest) < _NOISE * (1 + abs(x)):
            return nearest
        return (mp.floor if name == "floor" else mp.ceil)(x)
    if name in ("max", "min"):
        return (max if name == "max" else min)(args)
    if name in ("ln", "log", "lg"):
        if x == 0:
            raise Undefined
        if len(args) == 2:
            return _divide(mp.log(x), mp.log(args[1]))
        # A bare log in answers is natural or decimal by the field; both sides mean the same, so one reading will do.
        return mp.log(x) / mp.log(10) if name == "lg" else mp.log(x)
    if name in ("gcd", "lcm"):
        raise Undefined
    if name == "exp":
        _small(x, 10**9)
        return mp.exp(x)
    if name == "sign":
        return mp.sign(x)
    _small(x, 10**9)
    return _trigonometric(name, x)


def _trigonometric(name: str, x: Any) -> Any:
    if name in ("sin", "cos", "tan", "cot", "sec", "csc"):
        sine, cosine = _zero(mp.sin(x)), _zero(mp.cos(x))
        if name == "sin":
            return sine
        if name == "cos":
            return cosine
        if name == "tan":
            return _divide(sine, cosine)
        if name == "cot":
            return _divide(cosine, sine)
        return _divide(mp.mpf(1), cosine if name == "sec" else sine)
    table = {
        "arcsin": mp.asin, "asin": mp.asin, "arccos": mp.acos, "acos": mp.acos, "arctan": mp.atan, "atan": mp.atan,
        "arccot": mp.acot, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth,
    }  # fmt: skip
    return _clean(table[name](x))


def _zero(value: Any) -> Any:
    return mp.mpf(0) if abs(value) < _NOISE else _clean(value)
