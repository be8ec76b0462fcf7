"""The sandbox against fresh interpreters, by CPU a call, which holds on a busy machine too."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from agentropy.sandbox import LocalSandbox


def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "sandbox.py"
    spec = importlib.util.spec_from_file_location("sandbox_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_cpu_a_call_is_a_fraction_of_a_fresh_interpreter() -> None:
    bench = benchmark()

    async def ours(programs: list[str]) -> float:
        async with LocalSandbox(workers=2) as sandbox:
            await sandbox.execute(programs * 2, timeout=60)

            async def call(code: str) -> object:
                return await sandbox.call(code, timeout=60)

            row = await bench.measure(sandbox, programs, 2, 4.0, call)
            return float(row["cpu ms"])

    for programs, times in ((bench.TRIVIAL, 1.3), (bench.CORPUS, 5.0), (bench.WITH_SYMPY, 10.0)):
        theirs = bench.measure_fresh(programs, 2, 4.0)["cpu ms"]
        assert asyncio.run(ours(programs)) * times < theirs
