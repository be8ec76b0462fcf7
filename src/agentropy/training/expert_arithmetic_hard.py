"""The flawed expert of the `arithmetic` world's hard level: it explores `d`, stumbles, and sometimes gets there."""

from __future__ import annotations

import random
import re

from agentropy.tasks.arithmetic import UNAVAILABLE, Problem, draw
from agentropy.tasks.arithmetic_hard import ALIAS, HARD_KINDS, ITEMS, look
from agentropy.tasks.worlds import MAX_RESULT_CHARS
from agentropy.tools.faults import shift_number
from agentropy.training.expert import IDLE_WORDS, Part, Trace, call, chance, final, run_program, trace
from agentropy.training.expert_arithmetic import broken_program, slip, wrong_program

MAX_CALLS = 7
# Easier than the world: shorter ways, more plain calculations.
WEIGHTS = {
    "add": 0.05,
    "larger": 0.05,
    "parity": 0.05,
    "word": 0.05,
    "mul": 0.05,
    "addsub": 0.05,
    "look": 0.10,
    "look 2": 0.10,
    "look 3": 0.06,
    "price": 0.16,
    "price 3": 0.14,
    "price 4": 0.06,
    "both": 0.08,
}
# As often as in the world itself: a tool that is down, and one that lies.
FLAKY, LIES = 0.2, 0.05
# Questions that need no tool: answering at once, and slipping then.
EASY_DIRECT, EASY_SLIP = 0.5, 0.15
# Others: a guess instead of a call, a broken and a wrong program, a guess before the call.
GUESS, BROKEN, WRONG, THINKS_GUESS = 0.15, 0.1, 0.1, 0.65
# Calculating with an entry before its form is known; ending the chain too soon.
BLIND, STOPS_EARLY = 0.2, 0.2
# After a success: a needless second call, a result that is ignored; after a failure: giving up.
VERIFY, IGNORE, GIVE_UP = 0.2, 0.1, 0.25

_VALUE = re.compile(r"(-?\d+)(?: coins)?|\{'coins': (\d+)\}")
_ALIAS = re.compile(rf"{ALIAS}(\w+)")


def arithmetic_hard_trace(rng: random.Random) -> Trace:
    """One trace on a freshly drawn question."""
    p = draw(rng, WEIGHTS, HARD_KINDS)
    return _easy(rng, p) if p.need == 0 else _hard(rng, p)


def _easy(rng: random.Random, p: Problem) -> Trace:
    if chance(rng, EASY_DIRECT):
        answer = slip(rng, p) if chance(rng, EASY_SLIP) else p.answer
        return trace(p.question, [final("easy", answer)], answer == p.answer)
    code = p.programs[0]
    code = broken_program(rng, code) if chance(rng, BROKEN) else code
    _, output = _run(rng, p, code)
    turns = [call("python", "easy, check", code), ("result", output), final(rng.choice(IDLE_WORDS), p.answer)]
    return trace(p.question, turns, True)


def _hard(rng: random.Random, p: Problem) -> Trace:
    """Look entries up until there is a number, then calculate with it if that is asked for."""
    guess = _guess(rng, p)
    # Whether a guess comes to mind says nothing about whether a call follows, so learning to call leaves it alone.
    thought = f"maybe {guess}" if chance(rng, THINKS_GUESS) else "compute" if not p.setup else "look"
    if chance(rng, GUESS):
        return trace(p.question, [final(thought, guess)], guess == p.answer)
    turns: list[tuple[Part, str]] = []
    program, sign, n = p.programs[0], *_operation(p)
    calculates = not p.setup
    before, calls = "", 0
    while True:
        code = _flawed(rng, program, sign, n)
        ok, output = _run(rng, p, code)
        calls += 1
        turns += [call("python", thought, code), ("result", output)]
        values = _values(output) if ok else []
        if ok and (alias := _ALIAS.fullmatch(output)):
            if calls == MAX_CALLS or chance(rng, STOPS_EARLY):
                return _give_up(rng, p, turns, output)
            program, before = look(alias.group(1)), ""
            thought = _maybe(rng, p, output)
            continue
        if not values:
            if calls == MAX_CALLS or chance(rng, GIVE_UP):
                return _give_up(rng, p, turns, "failed")
            thought = _maybe(rng, p, "failed")
            continue
        if before and before != output and calls < MAX_CALLS:  # a check that says something else: once more
            before, thought = output, _maybe(rng, p, f"{_said(values)}, not {_said(_values(before))}")
            continue
        if not before and calls < MAX_CALLS and chance(rng, VERIFY):
            before, thought = output, f"got {_said(values)}, check"
            continue
        before = ""
        if not calculates and sign and calls < MAX_CALLS and code == program and not chance(rng, STOPS_EARLY):
            calculates = True
            left, right = (values[0], n) if len(values) == 1 else values[:2]
            program, thought = f"print({left}{sign}{right})", f"got {_said(values)}"
            if chance(rng, THINKS_GUESS):
                thought += f", maybe {_guess(rng, p)}"
            continue
        answer = guess if chance(rng, IGNORE) else values[-1]
        turns.append(final(f"got {values[-1]}", answer))
        return trace(p.question, turns, answer == p.answer)


def _give_up(rng: random.Random, p: Problem, turns: list[tuple[Part, str]], thought: str) -> Trace:
    guess = _guess(rng, p)
    turns.append(final(f"{thought}, maybe {guess}", guess))
    return trace(p.question, turns, guess == p.answer)


def _maybe(rng: random.Random, p: Problem, thought: str) -> str:
    """The thought, mostly with a guess after it."""
    return f"{thought}, maybe {_guess(rng, p)}" if chance(rng, THINKS_GUESS) else thought


def _operation(p: Problem) -> tuple[str, str]:
    """What is to be done with the entry: the sign and the second number; the sign alone where both are entries."""
    if not p.setup or p.kind.startswith("look"):
        return "", ""
    m = re.search(r"\d([-+*])(\d+)\)$", p.programs[-1])
    assert m is not None
    return m.group(1), m.group(2)


def _values(output: str) -> list[str]:
    """The numbers of a result that holds one or several prices; none where it holds anything else."""
    return [] if _VALUE.sub("", output).strip() else [a or b for a, b in _VALUE.findall(output)]


def _said(values: list[str]) -> str:
    return " and ".join(values)


def _run(rng: random.Random, p: Problem, code: str) -> tuple[bool, str]:
    if chance(rng, FLAKY):
        return False, UNAVAILABLE
    ok, output = run_program(f"{p.setup}\n{code}")
    output = output[:MAX_RESULT_CHARS]
    return ok, shift_number(output, rng) if ok and chance(rng, LIES) else output


def _guess(rng: random.Random, p: Problem) -> str:
    """A number of about the right size."""
    return str(round(int(p.answer) * rng.uniform(0.6, 1.4)) + rng.choice((-1, 0, 1)))


def _flawed(rng: random.Random, code: str, sign: str, n: str) -> str:
    """The program as the expert writes it: right, calculating blindly, broken or wrong."""
    looks_up = "d[" in code
    if looks_up and sign and "," not in code and chance(rng, BLIND):
        return f"{code[:-1]}{sign}{n})"
    if chance(rng, BROKEN):
        return broken_program(rng, code)
    if chance(rng, WRONG):
        if not looks_up:
            return wrong_program(rng, code)
        return look(rng.choice(ITEMS))
    return code
