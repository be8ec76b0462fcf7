"""Verdicts a second of the graders: `python benchmarks/grading.py [--workers 2]`.

Each line grades different answers, all at once in one event loop, as the trainer does. Plain numbers and QA are graded
in this process; closed forms and math-verify's part in worker processes that are already running.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from agentropy.evaluation.grading.graders import Grader, MathGrader, make_grader

Pair = tuple[str, str]
MATHS: dict[str, tuple[int, Callable[[int], Pair]]] = {
    "integers": (4000, lambda i: (str(i), f"so \\boxed{{{i}}}")),
    "decimals": (4000, lambda i: (f"{i / 8}", f"so \\boxed{{{i}/8}}")),
    "fractions": (4000, lambda i: (f"\\frac{{{i}}}{{7}}", f"so \\boxed{{\\frac{{{2 * i}}}{{14}}}}")),
    "roots": (400, lambda i: (f"{i}\\sqrt{{{i + 1}}}", f"\\boxed{{\\sqrt{{{i * i * (i + 1)}}}}}")),
    "polynomials": (400, lambda i: (f"(x+{i})(x-{i})", f"\\boxed{{x^2-{i * i}}}")),
    "tuples": (400, lambda i: (f"({i},\\frac{{{i}}}{{3}})", f"\\boxed{{({i},{i}/3)}}")),
    "math-verify": (60, lambda i: (f"\\frac{{{i * i}}}{{2}}", f"\\boxed{{\\int_0^{{{i}}} x dx}}")),
}


async def rate(grader: Grader, pairs: list[Pair]) -> tuple[float, int]:
    """(verdicts a second, how many were right)."""
    started = time.perf_counter()
    verdicts = await asyncio.gather(*(grader.grade_text(text, [gold]) for gold, text in pairs))
    return len(pairs) / (time.perf_counter() - started), sum(bool(v.correct) for v in verdicts)


async def run(workers: int) -> None:
    """Print one line a kind."""
    maths = MathGrader(workers=workers)
    for warm in MATHS["math-verify"][1](1000), MATHS["roots"][1](1000):
        await asyncio.gather(*(maths.grade_text(warm[1] + " " * i, [warm[0]]) for i in range(2 * workers)))
    for name, (count, make) in MATHS.items():
        speed, right = await rate(maths, [make(i) for i in range(1, count + 1)])
        print(f"{name:12} {speed:8.0f} a second   {right} of {count} right")
    await maths.aclose()
    words = make_grader("qa")
    pairs = [(f"New York City {i}", f"<answer>New York {i}</answer>") for i in range(4000)]
    speed, _ = await rate(words, pairs)
    print(f"{'qa f1':12} {speed:8.0f} a second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    asyncio.run(run(parser.parse_args().workers))
