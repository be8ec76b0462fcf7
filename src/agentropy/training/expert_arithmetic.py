"""The flawed expert of the `arithmetic` world. Its programs are really run; what they print is what it sees."""

from __future__ import annotations

import random
import re

from agentropy.tasks.arithmetic import UNAVAILABLE, Problem, draw
from agentropy.training.expert import IDLE_WORDS, Part, Trace, call, chance, final, run_program, trace

MAX_CALLS = 4
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# Shares of the flaws. Questions that need no tool: answering at once, and slipping then.
EASY_DIRECT, EASY_SLIP = 0.5, 0.15
# Questions that need one: a guess instead of a call, a broken and a wrong program, a guess before the call.
GUESS, BROKEN, WRONG, THINKS_GUESS = 0.22, 0.32, 0.22, 0.65
# Kinds where wrong programs are more frequent.
WRONG_OF = {"list": 0.4, "ranked": 0.4, "story": 0.4}
# Of programs with an import, those that lack it; of chains, those that stop after the first step.
NO_IMPORT, STOPS_EARLY = 0.4, 0.4
# After a success: a needless second call, a result that is ignored; after a failure: giving up; a tool that is down.
VERIFY, IGNORE, GIVE_UP, FLAKY = 0.3, 0.18, 0.4, 0.02


def arithmetic_trace(rng: random.Random) -> Trace:
    """One trace on a freshly drawn question."""
    problem = draw(rng)
    return _easy(rng, problem) if problem.need == 0 else _hard(rng, problem)


def _easy(rng: random.Random, p: Problem) -> Trace:
    if chance(rng, EASY_DIRECT):
        answer = slip(rng, p) if chance(rng, EASY_SLIP) else p.answer
        return trace(p.question, [final("easy", answer)], answer == p.answer)
    code = _flawed(rng, p.programs[0], WRONG)
    ok, output = _run(rng, code)
    turns: list[tuple[Part, str]] = [call("python", "easy, check", code), ("result", output)]
    answer = _read(p, output) if ok else p.answer
    idle = rng.choice(IDLE_WORDS)
    turns.append(final(idle, answer))
    return trace(p.question, turns, answer == p.answer)


def _hard(rng: random.Random, p: Problem) -> Trace:
    guess = _guess(rng, p)
    # Whether a guess comes to mind says nothing about whether a call follows, so learning to call leaves it alone.
    thought = f"maybe {guess}" if chance(rng, THINKS_GUESS) else "compute"
    if chance(rng, GUESS):
        return trace(p.question, [final(thought, guess)], guess == p.answer)
    turns: list[tuple[Part, str]] = []
    step, last, calls = 0, "", 0
    while True:
        code = _flawed(rng, p.programs[step].format(last), WRONG_OF.get(p.kind, WRONG), careful=0.6 if calls else 1.0)
        ok, output = _run(rng, code)
        calls += 1
        turns += [call("python", thought, code), ("result", output)]
        if not ok:
            guess = _guess(rng, p)
            if calls == MAX_CALLS or chance(rng, GIVE_UP):
                turns.append(final(f"failed, maybe {guess}", guess))
                return trace(p.question, turns, guess == p.answer)
            thought = f"failed, maybe {guess}"
            continue
        last, step = output, step + 1
        if step < len(p.programs) and calls < MAX_CALLS:
            if chance(rng, STOPS_EARLY):
                break
            guess = _guess(rng, p)
            thought = f"got {last}, maybe {guess}" if chance(rng, THINKS_GUESS) else f"got {last}, next"
            continue
        if calls < MAX_CALLS and chance(rng, VERIFY):
            step, thought = step - 1, f"got {last}, check"
            if step:  # a chain is checked by its last step, which needs the result before it
                break
            continue
        break
    answer = guess if chance(rng, IGNORE) else _read(p, last)
    turns.append(final(f"got {last}", answer))
    return trace(p.question, turns, answer == p.answer)


def _run(rng: random.Random, code: str) -> tuple[bool, str]:
    return (False, UNAVAILABLE) if chance(rng, FLAKY) else run_program(code)


def _read(p: Problem, output: str) -> str:
    if p.kind == "parity" and output in ("0", "1"):
        return ("even", "odd")[int(output)]
    return output or "0"


def slip(rng: random.Random, p: Problem) -> str:
    """A wrong answer to a question that needs no tool."""
    if p.kind == "add":
        return str(max(0, int(p.answer) + rng.choice((-1, 1))))
    if p.kind == "parity":
        return "odd" if p.answer == "even" else "even"
    words: list[str] = re.findall(r"\d+" if p.kind == "larger" else r"\w+", p.question)
    return [w for w in words if w != p.answer][-1]


def _guess(rng: random.Random, p: Problem) -> str:
    """A number of about the right size, or some weekday."""
    if p.grader == "em":
        return rng.choice(WEEKDAYS)
    value = int(p.answer)
    return str(round(value * rng.uniform(0.8, 1.2)) + rng.choice((-1, 0, 1)))


def _flawed(rng: random.Random, code: str, wrong: float, careful: float = 1.0) -> str:
    """The program as the expert writes it: right, broken or wrong. `careful` < 1 lowers the share of faults."""
    if "import" in code and chance(rng, NO_IMPORT * careful):
        return code.split("\n")[1]
    roll = rng.random() / careful
    if roll < wrong:
        return wrong_program(rng, code)
    if roll < wrong + BROKEN * (1 - wrong):
        return broken_program(rng, code)
    return code


def broken_program(rng: random.Random, code: str) -> str:
    """A program that raises, in one of the ways in which a small model's programs do."""
    ways = [code[:-1], code + ")", code.replace("print", "pint")]
    if "\n" in code:
        ways += [re.sub(r",(\d)(?=[,)])", r",0\1", code)] * 2  # 05 is no integer in Python
    return rng.choice(ways)


def wrong_program(rng: random.Random, code: str) -> str:
    """A program that runs and answers another question: another operator, or an operand that is off."""
    if "sum(" in code and chance(rng, 0.8):
        return code.replace("sum(", rng.choice(("max(", "len(")))
    if "sorted(" in code and chance(rng, 0.8):
        return re.sub(r"\[(\d)\]\)$", lambda m: f"[{int(m.group(1)) + 1}])", code)
    numbers = list(re.finditer(r"\d+", code))
    operators = list(re.finditer(r"(?<=\d)[+\-*%](?=\d)", code))
    if operators and chance(rng, 0.5):
        m = rng.choice(operators)
        return code[: m.start()] + rng.choice([o for o in "+-*%" if o != m.group()]) + code[m.end() :]
    if not numbers:
        return code.replace("first", "last")
    m = rng.choice(numbers)
    return code[: m.start()] + str(int(m.group()) + rng.choice((-10, -2, -1, 1, 2, 10))) + code[m.end() :]
