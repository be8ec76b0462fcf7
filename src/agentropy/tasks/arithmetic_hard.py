"""The `arithmetic` world's hard level: prices in a dict `d` that only the Python tool sees, and that must be explored.

An entry holds a price in one of three forms, or says whose price it shares (`as pens`). So the next program cannot be
written before the last one's output was read: how many steps there are, and in which form the number comes, shows
only then. A few questions need no tool, or one plain calculation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

from agentropy.tasks.arithmetic import KINDS, Problem

ITEMS = (
    *("apples", "bags", "bells", "books", "boots", "cards", "cups", "eggs"),
    *("hats", "keys", "lamps", "maps", "nuts", "pens", "pies", "ropes"),
)
ENTRIES = 8
"""Items with an entry in `d`."""
ALIAS = "as "
TIMES = range(3, 20)


def _price(rng: random.Random, value: int) -> object:
    """A price as it may stand in `d`."""
    return rng.choice((value, f"{value} coins", {"coins": value}))


def _shop(rng: random.Random, ends: list[int], aliases: int) -> tuple[list[str], str]:
    """Hidden entries: (the items on the way, the code). The last `len(ends)` items of the way hold these prices."""
    items = rng.sample(ITEMS, ENTRIES)
    way = items[: aliases + len(ends)]
    entries: dict[str, object] = {a: f"{ALIAS}{b}" for a, b in pairwise(way)}
    entries |= {item: _price(rng, value) for item, value in zip(way[aliases:], ends, strict=True)}
    for item in items[len(way) :]:
        shares = rng.random() < 0.4
        other = rng.choice([i for i in items if i != item])
        entries[item] = f"{ALIAS}{other}" if shares else _price(rng, rng.randint(12, 199))
    rng.shuffle(items)
    return way, f"d = { ({item: entries[item] for item in items})!r}"


def look(item: str) -> str:
    """The program that looks an item up."""
    return f"print(d['{item}'])"


def _look(rng: random.Random, kind: str, aliases: int) -> Problem:
    value = rng.randint(12, 199)
    way, setup = _shop(rng, [value], aliases)
    question = rng.choice((f"Price of {way[0]}?", f"What is the price of {way[0]}?"))
    return Problem(kind, question, str(value), tuple(map(look, way)), need=aliases + 1, setup=setup)


def _price_of(rng: random.Random, kind: str, aliases: int) -> Problem:
    value, n = rng.randint(12, 199), rng.choice(TIMES)
    way, setup = _shop(rng, [value], aliases)
    if rng.random() < 0.6:
        question = rng.choice((f"Price of {n} {way[0]}?", f"What do {n} {way[0]} cost?"))
        sign, answer = "*", value * n
    else:
        n = rng.randint(12, 99)
        word, sign, answer = rng.choice((("plus", "+", value + n), ("minus", "-", value - n)))
        question = f"Price of {way[0]} {word} {n}?"
    programs = (*map(look, way), f"print({value}{sign}{n})")
    return Problem(kind, question, str(answer), programs, need=len(programs), setup=setup)


def _both(rng: random.Random) -> Problem:
    a, b = rng.randint(12, 199), rng.randint(12, 199)
    (first, second), setup = _shop(rng, [a, b], 0)
    question = rng.choice((f"Price of {first} and {second}?", f"What do {first} and {second} cost?"))
    programs = (f"print(d['{first}'],d['{second}'])", f"print({a}+{b})")
    return Problem("both", question, str(a + b), programs, need=2, setup=setup)


_NEW: Mapping[str, Callable[[random.Random], Problem]] = {
    "look": partial(_look, kind="look", aliases=0),
    "look 2": partial(_look, kind="look 2", aliases=1),
    "look 3": partial(_look, kind="look 3", aliases=2),
    "price": partial(_price_of, kind="price", aliases=0),
    "price 3": partial(_price_of, kind="price 3", aliases=1),
    "price 4": partial(_price_of, kind="price 4", aliases=2),
    "both": _both,
}
HARD_WEIGHTS: Mapping[str, float] = {
    "add": 0.05,
    "larger": 0.05,
    "parity": 0.05,
    "word": 0.05,
    "mul": 0.04,
    "addsub": 0.03,
    "look": 0.07,
    "look 2": 0.08,
    "look 3": 0.06,
    "price": 0.16,
    "price 3": 0.16,
    "price 4": 0.12,
    "both": 0.08,
}
"""Share of each kind at the hard level: 20 % need no tool, 14 % one call, 32 % two, 22 % three, 12 % four."""
HARD_KINDS: Mapping[str, Callable[[random.Random], Problem]] = {k: (dict(KINDS) | dict(_NEW))[k] for k in HARD_WEIGHTS}
