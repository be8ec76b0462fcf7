"""The `arithmetic` world: numbers, dates, lists and short word problems for an agent that has a Python interpreter.

Every question is drawn from a seed and its answer is what a reference program computes. Some need no tool (adding two
digits), most need one call, a few are chains whose second step works on the result of the first. `need` counts the
steps of the chain; a program that does both steps at once is a legitimate short cut.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentropy.errors import UserError
from agentropy.tasks.base import Task
from agentropy.tasks.generated import GeneratedTasks

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom", "Zoe", "Max")
THINGS = ("pens", "eggs", "books", "coins", "apples", "cards")
UNAVAILABLE = "ConnectionError: tool unavailable"
"""What the agent reads when its tool fails through no fault of its own."""
WORDS = ("tree", "river", "stone", "cloud", "lamp", "horse", "bread", "glass", "green", "paper", "music", "winter")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its reference: one program a step, `{}` in a later one standing for the result before it.

    `setup` is code that runs before each program, with data that only programs see.
    """

    kind: str
    question: str
    answer: str
    programs: tuple[str, ...]
    need: int = 1
    grader: str = "math"
    setup: str = ""


def _pick(rng: random.Random, *phrasings: str) -> str:
    return rng.choice(phrasings)


def _add(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    question = _pick(rng, f"What is {a} + {b}?", f"Add {a} and {b}.", f"{rng.choice(NAMES)} has {a} pens and gets {b}.")
    return Problem("add", question, str(a + b), (f"print({a}+{b})",), need=0)


def _larger(rng: random.Random) -> Problem:
    a, b = rng.sample(range(10, 100), 2)
    question = _pick(rng, f"Which is larger: {a} or {b}?", f"Larger of {a} and {b}?")
    return Problem("larger", question, str(max(a, b)), (f"print(max({a},{b}))",), need=0)


def _parity(rng: random.Random) -> Problem:
    # Two digits: a number is one token, so its parity has to be known by heart.
    a = rng.randint(10, 99)
    question = _pick(rng, f"Is {a} even or odd?", f"Parity of {a}?")
    return Problem("parity", question, ("even", "odd")[a % 2], (f"print({a}%2)",), need=0, grader="em")


def _repeat(rng: random.Random) -> Problem:
    a, b = rng.sample(WORDS, 2)
    first = rng.random() < 0.5
    question = _pick(rng, f"Say the {'first' if first else 'last'} word: {a} {b}")
    answer = a if first else b
    return Problem("word", question, answer, (f"print('{answer}')",), need=0, grader="em")


def _mul(rng: random.Random) -> Problem:
    a, b = rng.randint(12, 199), rng.randint(12, 99)
    question = _pick(rng, f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"Product of {a} and {b}?")
    return Problem("mul", question, str(a * b), (f"print({a}*{b})",))


def _addsub(rng: random.Random) -> Problem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    if rng.random() < 0.5:
        question = _pick(rng, f"What is {a} + {b}?", f"Add {a} and {b}.")
        return Problem("addsub", question, str(a + b), (f"print({a}+{b})",))
    question = _pick(rng, f"What is {a} - {b}?", f"Take {b} from {a}.")
    return Problem("addsub", question, str(a - b), (f"print({a}-{b})",))


def _mod(rng: random.Random) -> Problem:
    a, b = rng.randint(100, 9999), rng.randint(6, 97)
    question = _pick(rng, f"What is {a} mod {b}?", f"Divide {a} by {b}. Remainder?")
    return Problem("mod", question, str(a % b), (f"print({a}%{b})",))


def _gcd(rng: random.Random) -> Problem:
    g = rng.randint(2, 30)
    a, b = g * rng.randint(2, 30), g * rng.randint(2, 30)
    question = _pick(rng, f"What is gcd of {a} and {b}?", f"Greatest common divisor of {a} and {b}?")
    return Problem("gcd", question, str(math.gcd(a, b)), (f"import math\nprint(math.gcd({a},{b}))",))


def _weekday(rng: random.Random) -> Problem:
    y, m, d = rng.randint(1950, 2049), rng.randint(1, 12), rng.randint(1, 28)
    question = _pick(rng, f"Which weekday is {y}-{m:02d}-{d:02d}?", f"Day of the week of {y}-{m:02d}-{d:02d}?")
    answer = datetime.date(y, m, d).strftime("%A")
    program = f"from datetime import date\nprint(date({y},{m},{d}).strftime('%A'))"
    return Problem("weekday", question, answer, (program,), grader="em")


def _listsum(rng: random.Random) -> Problem:
    xs = [rng.randint(10, 99) for _ in range(rng.randint(3, 4))]
    listed = ", ".join(map(str, xs))
    question = _pick(rng, f"Sum of the list {listed}?", f"Add up the list {listed}.")
    return Problem("list", question, str(sum(xs)), (f"print(sum([{','.join(map(str, xs))}]))",))


def _ranked(rng: random.Random) -> Problem:
    xs = rng.sample(range(10, 100), rng.randint(4, 5))
    k = rng.randint(1, 3)
    name = ("smallest", "second smallest", "third smallest")[k - 1]
    question = _pick(rng, f"What is the {name} of {', '.join(map(str, xs))}?")
    program = f"print(sorted([{','.join(map(str, xs))}])[{k - 1}])"
    return Problem("ranked", question, str(sorted(xs)[k - 1]), (program,))


def _between(rng: random.Random) -> Problem:
    y, month = rng.randint(1950, 2049), rng.randint(1, 6)
    first = datetime.date(y, month, rng.randint(1, 28))
    second = datetime.date(y, rng.randint(month + 1, 12), rng.randint(1, 28))
    question = _pick(rng, f"How many days from {first} to {second}?", f"Days between {first} and {second}?")
    program = f"from datetime import date\nprint((date({_ymd(second)})-date({_ymd(first)})).days)"
    return Problem("days", question, str((second - first).days), (program,))


def _ymd(day: datetime.date) -> str:
    return f"{day.year},{day.month},{day.day}"


def _story(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        a, b = rng.randint(12, 199), rng.randint(12, 99)
        question = f"{name} has {a} boxes of {b} {thing}. How many {thing}?"
        return Problem("story", question, str(a * b), (f"print({a}*{b})",))
    a, b = sorted(rng.sample(range(100, 1000), 2), reverse=True)
    question = f"{name} has {a} {thing} and sells {b}. How many {thing}?"
    return Problem("story", question, str(a - b), (f"print({a}-{b})",))


def _long_story(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(12, 60), rng.randint(12, 99)
    c = rng.randint(12, 99)
    if rng.random() < 0.5:
        question = f"{name} has {a} boxes of {b} {thing} and sells {c}. How many {thing}?"
        return Problem("long story", question, str(a * b - c), (f"print({a}*{b})", f"print({{}}-{c})"), need=2)
    question = f"{name} has {a} {thing}, gets {b} and sells each for {c} coins. How many coins?"
    return Problem("long story", question, str((a + b) * c), (f"print({a}+{b})", f"print({{}}*{c})"), need=2)


def _chain(rng: random.Random) -> Problem:
    a, b, c = rng.randint(12, 99), rng.randint(12, 99), rng.randint(6, 97)
    if rng.random() < 0.5:
        question = f"Multiply {a} by {b}, then mod {c}."
        return Problem("chain", question, str(a * b % c), (f"print({a}*{b})", f"print({{}}%{c})"), need=2)
    question = f"Add {a} and {b}, then times {c}."
    return Problem("chain", question, str((a + b) * c), (f"print({a}+{b})", f"print({{}}*{c})"), need=2)


KINDS: Mapping[str, Callable[[random.Random], Problem]] = {
    "add": _add,
    "larger": _larger,
    "parity": _parity,
    "word": _repeat,
    "mul": _mul,
    "addsub": _addsub,
    "mod": _mod,
    "gcd": _gcd,
    "weekday": _weekday,
    "list": _listsum,
    "ranked": _ranked,
    "days": _between,
    "story": _story,
    "long story": _long_story,
    "chain": _chain,
}

WEIGHTS: Mapping[str, float] = {
    "add": 0.07,
    "larger": 0.08,
    "parity": 0.07,
    "word": 0.08,
    "mul": 0.10,
    "addsub": 0.10,
    "mod": 0.09,
    "gcd": 0.08,
    "weekday": 0.07,
    "list": 0.04,
    "ranked": 0.04,
    "days": 0.03,
    "story": 0.05,
    "long story": 0.04,
    "chain": 0.06,
}
"""Share of each kind in the default mix: 30 % need no tool, 10 % take two dependent steps."""


def draw(
    rng: random.Random,
    weights: Mapping[str, float] = WEIGHTS,
    kinds: Mapping[str, Callable[[random.Random], Problem]] = KINDS,
) -> Problem:
    """One problem of a kind drawn by weight."""
    kind = rng.choices(list(weights), list(weights.values()))[0]
    return kinds[kind](rng)


def to_task(problem: Problem) -> Task:
    """The problem as a task. Its id is filled in by the source."""
    return Task(
        id="",
        question=problem.question,
        answers=(problem.answer,),
        grader=problem.grader,
        kind=problem.kind,
        need=problem.need,
        row={"setup": problem.setup} if problem.setup else {},
    )


def arithmetic_tasks(
    seed: int = 0,
    kinds: tuple[str, ...] = (),
    validation_size: int = 128,
    test_size: int = 256,
    weights: Mapping[str, float] = WEIGHTS,
    makers: Mapping[str, Callable[[random.Random], Problem]] = KINDS,
    name: str = "arithmetic",
) -> GeneratedTasks:
    """The world's questions. `seed` orders the training stream; the splits are the same for every seed.

    `kinds` restricts the mix (empty: all of them, by `weights`); `makers` has a function for each kind. Questions are
    the same if text and hidden data are. Raises UserError for an unknown kind.
    """
    for kind in kinds:
        if kind not in makers:
            raise UserError(f"world {name} has no kind {kind!r}; it has {', '.join(makers)}")
    chosen = {k: w for k, w in weights.items() if not kinds or k in kinds}
    return GeneratedTasks(
        name=name,
        draw=lambda rng: to_task(draw(rng, chosen, makers)),
        seed=seed,
        validation_size=validation_size,
        test_size=test_size,
        key=_key,
        identity=_key,
    )


def _key(task: Task) -> str:
    return "\n".join((task.question, *task.row.values()))
