"""What a fork server imports before it forks, so that its children need not: the cheaper half of a program's start."""

from __future__ import annotations

import contextlib
import importlib
import sys

# numpy 2 imports its submodules on first use, so they are named.
SUBMODULES = {
    "numpy": ("numpy", "numpy.linalg", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ma"),
    "sympy": ("sympy", "sympy.abc", "sympy.stats", "sympy.ntheory.modular"),
}
STANDARD = (
    "bisect, collections, collections.abc, copy, dataclasses, datetime, decimal, enum, fractions, functools, heapq, "
    "itertools, json, math, operator, random, re, statistics, string, textwrap, time, typing, unicodedata"
)
# sympy fills its caches on first use: 12 ms a call if that is left to the children, and a tail four times as long.
WARM_SYMPY = """
from sympy import *
x, y, z = symbols('x y z'); n = symbols('n', integer=True, positive=True); f = Function('f')
solve(x**2 - 5*x + 6, x); solve([x + y - 3, x - y - 1], [x, y]); solve(x**3 - 2*x + 1, x)
solveset(x**2 - 2, x, S.Reals); solve(2**x - 8, x); solve(sqrt(x) - 3, x); solve(x**2 - 4 > 0, x)
linsolve([x + y - 2, x - y], x, y); nsolve(x**2 - 2, 1); nonlinsolve([x**2 + y - 2, x - y], [x, y])
simplify(sin(x)**2 + cos(x)**2); simplify((x**2 - 1)/(x - 1)); trigsimp(2*sin(x)*cos(x)); radsimp(1/(1 + sqrt(2)))
expand((x + y)**4); factor(x**3 - 1); apart(1/(x*(x + 1))); together(1/x + 1/y); cancel((x**2 - 1)/(x - 1))
collect(x*y + x, x); diff(sin(x)*exp(x), x); integrate(x**2*exp(-x), (x, 0, oo)); integrate(1/(1 + x**2), x)
limit(sin(x)/x, x, 0); series(exp(x), x, 0, 4); summation(1/n**2, (n, 1, oo)); summation(n, (n, 1, 10))
Sum(n, (n, 1, 3)).doit(); product(n, (n, 1, 4)); Matrix([[1, 2], [3, 4]]).det()
Matrix([[2, 1], [1, 2]]).eigenvals(); Matrix([[1, 2], [3, 4]]).inv(); Matrix([[1, 2], [2, 4]]).rref()
factorint(360); divisors(12); isprime(97); primerange(10); nextprime(10); totient(12); gcd(12, 18); lcm(4, 6)
binomial(5, 2); Rational(1, 3) + Rational(1, 6); N(pi, 20); sqrt(8); nsimplify(0.5); latex(x**2/2)
str(pretty(x**2)); sympify('x**2 + 1'); Poly(x**2 - 1, x).all_roots(); roots(x**2 - 1, x)
rsolve(f(n + 1) - 2*f(n), f(n)); dsolve(f(x).diff(x) - f(x), f(x)); Point(0, 0).distance(Point(3, 4))
Triangle(Point(0, 0), Point(4, 0), Point(0, 3)).area; Circle(Point(0, 0), 2).area; lambdify(x, x**2)(2)
(sin(x) + 1).subs(x, pi/6).evalf(); floor(2.5); ceiling(2.5); Abs(-3); im(I); re(1 + I); log(8, 2); cbrt(27)
Eq(x, 1); Piecewise((x, x > 0), (0, True)).subs(x, 2); Interval(0, 1).contains(0.5); factorial(5); fibonacci(10)
symbols('a:3')
"""


def load(names: list[str]) -> None:
    """Import and warm. What can't be imported here is left to the programs, which then see the ImportError."""
    for name in STANDARD.split(", "):
        importlib.import_module(name)
    for name in names:
        with contextlib.suppress(ImportError):
            for module in SUBMODULES.get(name, (name,)):
                importlib.import_module(module)
            if name == "sympy":
                exec(WARM_SYMPY, {})
    sys.stdout.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
