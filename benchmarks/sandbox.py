"""Sandbox against fresh interpreters, in one run on the same machine: calls a second, CPU a call, latency.

    python benchmarks/sandbox.py [--seconds 5] [--workers N] [--json FILE]

CPU a call counts supervisor, fork servers and children (fresh interpreters: the child); it holds on a busy machine.
The corpus is 24 programs such as a maths model writes: 10 use numpy or sympy, 2 fail on purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentropy.sandbox import ExecutionResult, LocalSandbox

TRIVIAL = ["print(6 * 7)"]
WITH_SYMPY = ["from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))"]
CORPUS = [
    "print(17 * 23 + 4)",
    "total = 0\nfor i in range(1, 101):\n    if i % 3 == 0 or i % 5 == 0:\n        total += i\nprint(total)",
    "from math import comb\nprint(comb(10, 3) * comb(7, 2))",
    "from fractions import Fraction\nprint(sum(Fraction(1, k * (k + 1)) for k in range(1, 50)))",
    "def prime(n):\n    return n > 1 and all(n % d for d in range(2, n))\nprint(list(filter(prime, range(100))))",
    "from itertools import permutations\nprint(sum(1 for p in permutations(range(6)) if p[0] < p[-1]))",
    "a, b = 0, 1\nfor _ in range(90):\n    a, b = b, a + b\nprint(a)",
    "import math\nr = 5\nprint(round(math.pi * r**2, 4))",
    "from collections import Counter\nprint(Counter('mississippi').most_common(2))",
    "best = max((x * y, x, y) for x in range(1, 100) for y in range(1, 100) if x + y == 100)\nprint(best)",
    "from datetime import date\nprint((date(2024, 12, 25) - date(2024, 7, 4)).days)",
    "d = [1] + [0] * 200\nfor c in (1, 5, 10):\n    for s in range(c, 201):\n        d[s] += d[s - c]\nprint(d[200])",
    "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 7*x + 12, x))",
    "from sympy import *\nx, y = symbols('x y')\nprint(solve([x + y - 10, x - y - 2], [x, y]))",
    "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(x**2 * sp.exp(-x), (x, 0, sp.oo)))",
    "from sympy import factorint, divisors\nprint(factorint(5040), len(divisors(5040)))",
    "from sympy import *\nx = symbols('x')\nprint(simplify(sin(x)**2 + cos(x)**2), diff(x**3 * sin(x), x))",
    "from sympy import Matrix\nM = Matrix([[2, 1], [1, 3]])\nprint(M.det(), M.inv())",
    "from sympy import symbols, expand, factor\nx = symbols('x')\nprint(expand((x + 2)**5), factor(x**4 - 1))",
    "import numpy as np\na = np.arange(1, 101)\nprint(a.sum(), (a**2).mean())",
    "import numpy as np\nA = np.array([[3., 2.], [1., 4.]])\nprint(np.linalg.solve(A, np.array([5., 6.])))",
    "import numpy as np\nprint(np.roots([1, -6, 11, -6]).round(6))",
    "value = int('12x')\nprint(value)",
    "from math import sqrt\nprint(sqrt(16)\n",
]  # fmt: skip


def fresh(code: str) -> None:
    """One program in an interpreter of its own, as most training code runs it: no isolation at all."""
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)


def cpu_of_children() -> float:
    """CPU seconds of all children that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_of_sandbox(sandbox: LocalSandbox) -> float:
    """CPU seconds of the supervisor, its fork servers and all their dead children."""
    assert sandbox._process is not None
    supervisor, total = sandbox._process.pid, 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(name) == supervisor or int(fields[1]) == supervisor:
                total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def measure_fresh(programs: list[str], workers: int, seconds: float) -> dict[str, float]:
    """Fresh interpreters, `workers` at a time."""
    cpu, began, waits = cpu_of_children(), time.perf_counter(), []

    def work(offset: int) -> None:
        i = offset
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            fresh(programs[i % len(programs)])
            waits.append(time.perf_counter() - started)
            i += workers

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    return summary(waits, time.perf_counter() - began, cpu_of_children() - cpu)


async def measure(
    sandbox: LocalSandbox,
    programs: list[str],
    workers: int,
    seconds: float,
    run: Callable[[str], Awaitable[ExecutionResult]],
) -> dict[str, float]:
    """The sandbox, `workers` calls at a time."""
    cpu, began, waits = cpu_of_sandbox(sandbox), time.perf_counter(), []

    async def work(offset: int) -> None:
        i = offset
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            result = await run(programs[i % len(programs)])
            assert result.status in ("ok", "error"), result
            waits.append(time.perf_counter() - started)
            i += workers

    await asyncio.gather(*(work(i) for i in range(workers)))
    return summary(waits, time.perf_counter() - began, cpu_of_sandbox(sandbox) - cpu)


def summary(waits: list[float], elapsed: float, cpu: float) -> dict[str, float]:
    """Calls a second, CPU a call, and latencies in milliseconds."""
    waits = sorted(waits)
    return {
        "calls/s": len(waits) / elapsed,
        "cpu ms": 1000 * cpu / len(waits),
        "p50 ms": 1000 * statistics.median(waits),
        "p95 ms": 1000 * waits[math.ceil(0.95 * (len(waits) - 1))],
    }


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isolation", default="strict")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    workers, seconds = args.workers, args.seconds
    rows: dict[str, dict[str, float]] = {}
    async with LocalSandbox(workers=workers, isolation=args.isolation) as sandbox:
        print(f"{sandbox.capabilities().level}, {workers} workers, load {os.getloadavg()[0]:.1f}")
        await sandbox.execute(CORPUS * 4, timeout=60)

        async def call(code: str) -> ExecutionResult:
            return await sandbox.call(code, timeout=60)

        for name, programs in (("trivial", TRIVIAL), ("corpus", CORPUS), ("sympy", WITH_SYMPY)):
            rows[f"fresh {name}"] = measure_fresh(programs, workers, seconds)
            rows[f"sandbox {name}"] = await measure(sandbox, programs, workers, seconds, call)
        rows["sandbox sympy, one at a time"] = await measure(sandbox, WITH_SYMPY, 1, seconds, call)
        async with sandbox.session() as session:
            await session.run("x = 0")
            rows["session cell"] = await measure(sandbox, ["x += 1\nx"], 1, seconds, session.run)
    print(f"{'':30}{'calls/s':>10}{'cpu ms':>10}{'p50 ms':>10}{'p95 ms':>10}")
    for name, row in rows.items():
        print(f"{name:30}{row['calls/s']:10.1f}{row['cpu ms']:10.2f}{row['p50 ms']:10.2f}{row['p95 ms']:10.2f}")
    for name in ("trivial", "corpus", "sympy"):
        ours, theirs = rows[f"sandbox {name}"], rows[f"fresh {name}"]
        calls, cpu = ours["calls/s"] / theirs["calls/s"], theirs["cpu ms"] / ours["cpu ms"]
        print(f"{name}: {calls:.1f}x the calls, {cpu:.1f}x less CPU")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        asyncio.run(main())
