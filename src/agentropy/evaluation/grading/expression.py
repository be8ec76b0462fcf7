r"""A small parser for the closed forms that answers are written in: LaTeX and plain text to an expression tree.

It covers arithmetic, powers, roots, fractions, factorials, binomials, elementary functions, symbols with subscripts.
What it doesn't know it refuses (`Unreadable`), so that another reader can try; it never guesses. Size and depth are
bounded, so hostile input costs microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from agentropy.evaluation.grading.number import Number, drop_units, parse_number
from agentropy.evaluation.grading.tokens import Unreadable, tokenize
from agentropy.evaluation.grading.vocabulary import DECORATIONS, FUNCTIONS, GREEK, IGNORED, TEXTS, WORD_SYMBOLS

MAX_DEPTH = 48

_MULTI = frozenset({"max", "min", "gcd", "lcm"})
# Marks above letters; above digits they mean something else.
_OVER_LETTERS = frozenset({"bar", "overline", "hat", "widehat", "vec", "overrightarrow", "tilde", "dot", "ddot"})
_TIMES = frozenset({"*", r"\cdot", r"\times", r"\ast"})
_OVER = frozenset({"/", r"\div"})
_CLOSERS = frozenset({")", "]", "}", r"\}", r"\rfloor", r"\rceil", r"\rvert", r"\rangle"})


@dataclass(frozen=True, slots=True)
class Node:
    """One node: `op` is num, sym, const, add, mul, div, neg, pow, fact, fact2, root, call, binom, percent."""

    op: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


@dataclass(frozen=True)
class Expression:
    """A parsed scalar.

    number: set where the text is a plain number. decimals: whether a decimal is in it. digits: the most significant
    digits of one. integral: whether its variables stand for integers (it holds a floor or ceiling).
    """

    text: str
    root: Node
    number: Number | None
    variables: frozenset[str]
    decimals: bool
    digits: int
    percent: bool
    integral: bool
    cache: dict[str, object] = field(default_factory=dict, compare=False, repr=False)


def parse_expression(text: str) -> Expression:
    """The expression that a tidied text stands for, units dropped. Raises Unreadable."""
    number = parse_number(text)
    if number is not None and not number.percent:
        node = Node("num", value=number.value)
        return Expression(text, node, number, frozenset(), number.decimal, number.digits, False, False)
    body = drop_units(text)
    percent = body.endswith("%")
    if percent:
        body = body[:-1].rstrip()
    parser = _Parser(tokenize(body))
    root = parser.whole()
    return Expression(
        text, root, number, frozenset(parser.variables), parser.decimals, parser.digits, percent, parser.integral
    )


class _Parser:
    """Recursive descent over the tokens; one use."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.variables: set[str] = set()
        self.decimals = False
        self.digits = 0
        self.integral = False

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        position = self.at + ahead
        return self.tokens[position] if position < len(self.tokens) else ("end", "")

    def take(self) -> tuple[str, str]:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, value: str) -> None:
        if self.take()[1] != value:
            raise Unreadable(f"expected {value}")

    def whole(self) -> Node:
        if not self.tokens:
            raise Unreadable("empty")
        node = self.sum()
        if self.peek()[0] != "end":
            raise Unreadable(f"unexpected {self.peek()[1]}")
        return node

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        terms = [self.signed()]
        while self.peek()[1] in ("+", "-"):
            minus = self.take()[1] == "-"
            term = self.signed()
            terms.append(Node("neg", (term,)) if minus else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed(self) -> Node:
        negative = False
        while self.peek()[1] in ("+", "-"):
            negative ^= self.take()[1] == "-"
        product = self.product()
        return Node("neg", (product,)) if negative else product

    def product(self) -> Node:
        result = self.power()
        while True:
            kind, value = self.peek()
            if value in _TIMES or value in _OVER:
                self.take()
                sign = 1
                while self.peek()[1] in ("-", "+"):
                    sign = -sign if self.take()[1] == "-" else sign
                factor = self.power()
                if sign < 0:
                    factor = Node("neg", (factor,))
                result = Node("div" if value in _OVER else "mul", (result, factor))
            elif self.starts_factor(kind, value):
                if kind == "num" and self.tokens[self.at - 1][0] in ("num", "letter"):
                    raise Unreadable("two numbers side by side")
                result = Node("mul", (result, self.power()))
            else:
                return result

    def starts_factor(self, kind: str, value: str) -> bool:
        if kind in ("num", "letter"):
            return True
        if value in ("(", "[", "{", r"\{"):
            return value != r"\{"
        if value in ("|", r"\lvert"):
            return value == r"\lvert" or self.bars == 0
        return kind == "cmd" and value not in _TIMES | _OVER | _CLOSERS and value[1:].isalpha() and value != r"\choose"

    def power(self) -> Node:
        base = self.postfix(self.primary())
        if self.peek()[1] == "^":
            self.take()
            if self.primes():
                return base
            base = self.postfix(Node("pow", (base, self.exponent())))
        return base

    def primes(self) -> bool:
        """Whether the exponent ahead is only a prime mark, which it then consumes."""
        if self.peek()[1] == r"\prime":
            self.take()
            return True
        return False

    def postfix(self, node: Node) -> Node:
        while True:
            value = self.peek()[1]
            if value == "!":
                self.take()
                if self.peek()[1] == "!":
                    self.take()
                    node = Node("fact2", (node,))
                else:
                    node = Node("fact", (node,))
            elif value == "%":
                self.take()
                node = Node("percent", (node,))
            else:
                return node

    def exponent(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        negative = False
        while self.peek()[1] in ("-", "+"):
            negative ^= self.take()[1] == "-"
        node = self.primary()
        if self.peek()[1] == "^":
            self.take()
            node = Node("pow", (node, self.exponent()))
        self.depth -= 1
        return Node("neg", (node,)) if negative else node

    def group(self, opener: str) -> Node:
        closer = {"(": ")", "[": "]", "{": "}"}[opener]
        bars, self.bars = self.bars, 0
        node = self.sum()
        if opener == "{" and self.peek()[1] == r"\choose":
            self.take()
            node = Node("binom", (node, self.sum()))
        self.expect(closer)
        self.bars = bars
        return node

    def braced(self) -> Node:
        r"""An argument of a command: a group, or one digit or letter or command, as in `\frac12`."""
        kind, value = self.take()
        if value == "{":
            return self.group("{")
        if kind == "num":
            if len(value) > 1 and value.isdigit():  # \frac12: the first digit is the argument, the rest comes next
                self.at -= 1
                self.tokens[self.at] = ("num", value[1:])
                return Node("num", value=Fraction(int(value[0])))
            return self.number(value)
        if kind in ("letter", "cmd"):
            self.at -= 1
            return self.primary()
        raise Unreadable("missing argument")

    def number(self, value: str) -> Node:
        parsed = parse_number(value)
        if parsed is None:
            raise Unreadable(f"number {value[:20]}")
        if parsed.decimal:
            self.decimals = True
            self.digits = max(self.digits, parsed.digits)
        return Node("num", value=parsed.value)

    def primary(self) -> Node:
        kind, value = self.take()
        if kind == "num":
            return self.numeral(value)
        if kind == "letter":
            return self.symbol(value)
        if value in ("(", "[", "{"):
            return self.group(value)
        if value in ("|", r"\lvert"):
            self.bars += 1
            node = self.sum()
            self.expect("|" if value == "|" else r"\rvert")
            self.bars -= 1
            return Node("call", (node,), "abs")
        if kind == "cmd":
            return self.command(value[1:].rstrip("*"))
        raise Unreadable(f"unexpected {value or 'end'}")

    def numeral(self, value: str) -> Node:
        following = self.peek()[1]
        if following in (r"\overline", r"\bar", r"\dot") and "." in value:
            self.take()
            digits = self.raw_argument()
            parsed = parse_number(f"{value}\\overline{{{digits}}}")
            if parsed is None:
                raise Unreadable("repeating decimal")
            return Node("num", value=parsed.value)
        if following == "_":  # a numeral in another base is compared as written
            self.take()
            base = self.raw_argument()
            self.variables.add(f"{value}_{base}")
            return Node("sym", name=f"{value}_{base}")
        node = self.number(value)
        if value.isdigit():
            start = self.at
            fraction = self.mixed_fraction()
            if fraction is not None:
                return Node("num", value=node.value + fraction)
            self.at = start
        return node

    def mixed_fraction(self) -> Fraction | None:
        r"""The `\frac{2}{3}` or `2/3` of a mixed number whose whole part was just read, else None."""
        kind, value = self.peek()
        if value == r"\frac":
            words = [self.peek(i) for i in range(1, 7)]
            values = [w[1] for w in words]
            if values[0] == "{" and values[2] == "}" and values[3] == "{" and values[5] == "}":
                above, below = words[1], words[4]
                if above[1].isdigit() and below[1].isdigit() and int(below[1]):
                    self.at += 7
                    return Fraction(int(above[1]), int(below[1]))
        elif kind == "num" and value.isdigit() and self.peek(1)[1] == "/" and self.peek(2)[1].isdigit():
            below_value = int(self.peek(2)[1])
            if below_value:
                self.at += 3
                return Fraction(int(value), below_value)
        return None

    def raw_argument(self) -> str:
        """The text of a group or of one token, for subscripts and the like."""
        kind, value = self.take()
        if value != "{":
            if kind == "end":
                raise Unreadable("missing argument")
            return value
        parts: list[str] = []
        depth = 1
        while depth:
            kind, value = self.take()
            if kind == "end":
                raise Unreadable("missing brace")
            depth += (value == "{") - (value == "}")
            if depth and not (kind == "cmd" and value[1:] in TEXTS) and value not in "{}":
                parts.append(value)
        return "".join(parts)

    def symbol(self, name: str) -> Node:
        if name in ("e", "i") and self.peek()[1] != "_":
            return Node("const", name=name)
        while True:
            value = self.peek()[1]
            if value == "_":
                self.take()
                name += "_" + self.raw_argument()
            elif value == "'":
                self.take()
                name += "'"
            elif value == "^" and self.is_prime_ahead():
                name += "'"
            else:
                break
        if self.peek()[1] == "(" and self.peek(1)[0] == "num" and self.peek(2)[1] == ")":
            name += f"({self.peek(1)[1]})"  # f(0) is a value of f, not f times 0
            self.at += 3
        self.variables.add(name)
        return Node("sym", name=name)

    def is_prime_ahead(self) -> bool:
        """Consumes `^\\prime` or `^{\\prime…}` if that is what stands ahead."""
        if self.peek(1)[1] == r"\prime":
            self.at += 2
            return True
        if self.peek(1)[1] == "{" and self.peek(2)[1] == r"\prime":
            end = 2
            while self.peek(end)[1] == r"\prime":
                end += 1
            if self.peek(end)[1] == "}":
                self.at += end + 1
                return True
        return False

    def command(self, name: str) -> Node:
        if name in WORD_SYMBOLS and self.peek()[1] != "_":
            return Node("const", name=WORD_SYMBOLS[name])
        if name in FUNCTIONS and name != "sqrt":
            return self.function(name)
        if name in GREEK or name in WORD_SYMBOLS:
            return self.symbol(name)
        if name in IGNORED:
            return self.primary()
        if name == "frac":
            above = self.braced()
            return Node("div", (above, self.braced()))
        if name in ("binom", "dbinom", "tbinom"):
            above = self.braced()
            return Node("binom", (above, self.braced()))
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil"):
            self.integral = True
            node = self.sum()
            self.expect(r"\rfloor" if name == "lfloor" else r"\rceil")
            return Node("call", (node,), "floor" if name == "lfloor" else "ceil")
        if name in DECORATIONS or name in TEXTS:
            inner = self.raw_argument().strip()
            if inner in FUNCTIONS:
                return self.function(inner)
            if name not in _OVER_LETTERS and inner[:1].isdigit():
                return self.number(inner)
            if name in ("mathrm", "text", "operatorname", "mathbf", "mathit") and inner in ("e", "i", "\\pi"):
                return Node("const", name=inner.removeprefix("\\"))
            if name in TEXTS and not re.fullmatch(r"[A-Za-z]{1,3}", inner):
                raise Unreadable(f"text {inner[:20]}")
            if name in _OVER_LETTERS and inner[:1].isdigit():
                raise Unreadable("a mark over digits")
            plain = name in TEXTS or name in ("mathbf", "mathit")
            return self.symbol(inner if plain else f"{name}:{inner}")
        raise Unreadable(f"command {name}")

    def root(self) -> Node:
        degree = Node("num", value=Fraction(2))
        if self.peek()[1] == "[":
            self.take()
            degree = self.group("[")
        if self.peek()[1] == "(":
            self.take()
            return Node("root", (self.group("("), degree))
        return Node("root", (self.braced(), degree))

    def function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self.peek()[1] == "^" and power is None:
                self.take()
                power = self.exponent()
            elif self.peek()[1] == "_" and name in ("log", "ln", "lg"):
                self.take()
                base = self.braced()
        args = self.arguments(name)
        if name in ("floor", "ceil"):
            self.integral = True
        if base is not None:
            args = (*args, base)
        inverse = power is not None and power == Node("neg", (Node("num", value=Fraction(1)),))
        if inverse and name in ("sin", "cos", "tan", "cot"):
            return Node("call", args, "arc" + name)
        call = Node("call", args, name)
        return call if power is None else Node("pow", (call, power))

    def arguments(self, name: str) -> tuple[Node, ...]:
        opener = self.peek()[1]
        if opener == r"\{" and name in _MULTI:
            opener = "{"
            self.tokens = [(kind, value[-1] if value in (r"\{", r"\}") else value) for kind, value in self.tokens]
        if opener in ("(", "{", "["):
            self.take()
            if name not in _MULTI:
                return (self.group(opener),)
            args = [self.sum()]
            while self.peek()[1] == ",":
                self.take()
                args.append(self.sum())
            self.expect({"(": ")", "{": "}", "[": "]"}[opener])
            return tuple(args)
        negative = False
        while self.peek()[1] == "-":
            self.take()
            negative = not negative
        node = self.power()
        while True:
            kind, value = self.peek()
            if not self.starts_factor(kind, value) or value[1:] in FUNCTIONS - {"sqrt"} or value == "(":
                return (Node("neg", (node,)) if negative else node,)
            if kind == "num":
                raise Unreadable("two numbers side by side")
            node = Node("mul", (node, self.power()))
