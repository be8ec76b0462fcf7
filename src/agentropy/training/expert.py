"""What the flawed experts of the worlds share: traces as text, and a run of their own small programs.

An expert writes what a mediocre agent would: it calls when it need not, breaks its code, takes wrong operands, skips
calls, ignores results, gives up. Warm-started on that, an agent knows the format and the tools and has everything
else to learn. One thing is put in on purpose, the premise of TEPO and TAO-RL, so that it can be studied in small:
before a call that is needed the expert is unsure (it thinks of a guess), after a successful one it is sure, after a
failed one unsure again; where no call is needed it is sure from the start, and a call only adds idle words.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["question", "model", "result"]

IDLE_WORDS = ("fine", "good", "right", "yes", "sure", "done", "great", "well", "true", "nice")
"""What the experts think after a call that they did not need."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One solved (or spoilt) question: parts of text in order, `model` parts being what the agent shall learn."""

    parts: tuple[tuple[Part, str], ...]
    correct: bool
    calls: int


def run_program(code: str) -> tuple[bool, str]:
    """Run one of the expert's own programs in this process: (did it end well, what the agent sees).

    Only for programs that the expert itself wrote; what a model writes goes to the sandbox.
    """
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<cell>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        return False, f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    return True, out.getvalue().strip()


def chance(rng: random.Random, p: float) -> bool:
    """True with probability `p`."""
    return rng.random() < p


def call(tool: str, thought: str, argument: str) -> tuple[Part, str]:
    """A turn that ends in a call."""
    return "model", f"<think>{thought}</think><{tool}>{argument}</{tool}>"


def final(thought: str, answer: str) -> tuple[Part, str]:
    """A turn that ends in the answer."""
    return "model", f"<think>{thought}</think><answer>{answer}</answer>"


def trace(question: str, turns: Sequence[tuple[Part, str]], correct: bool) -> Trace:
    """Put a trace together from the question and the turns after it."""
    return Trace(
        parts=(("question", question), *turns), correct=correct, calls=sum(part == "result" for part, _ in turns)
    )
