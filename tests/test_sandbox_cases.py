"""Hostile and ordinary programs with known outcomes, on this machine as it is and as other machines would be."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sandbox_harness as harness
from agentropy.sandbox import LocalSandbox

EMULATION = Path(__file__).with_name("sandbox_emulation.py")
SHARED = Path(os.environ.get("AGENTROPY_SHARED", Path(__file__).parents[2] / "shared"))
CASES = SHARED / "cases" / "sandbox.jsonl"
OWN = Path(__file__).with_name("sandbox_cases.jsonl")


def own_cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OWN.read_text().splitlines()]


def shared_cases() -> list[dict[str, Any]]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_text().splitlines()]


class Outcomes:
    """What is wrong with each case, found when the first of its kind is asked for; one sandbox runs them all."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, bool], dict[str, str]] = {}

    def of(self, path: Path, case: dict[str, Any]) -> str:
        core = harness.is_core(case)
        if (path, core) not in self._found:
            self._found[path, core] = asyncio.run(self._run(path, core))
        return self._found[path, core][case["name"]]

    async def _run(self, path: Path, core: bool) -> dict[str, str]:
        with harness.surroundings() as around:
            cases = [case for case in harness.load(path, around) if harness.is_core(case) == core]
            async with LocalSandbox() as sandbox:
                return {case["name"]: await harness.run_case(sandbox, case, around) for case in cases}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return Outcomes()


def named(cases: list[dict[str, Any]]) -> list[Any]:
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(case, id=case["name"], marks=marks[harness.is_core(case)]) for case in cases]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", named(own_cases()))
def test_own_case(case: dict[str, Any], outcomes: Outcomes) -> None:
    assert outcomes.of(OWN, case) == ""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not CASES.is_file(), reason=f"no cases at {CASES} (set AGENTROPY_SHARED)")
@pytest.mark.parametrize("case", named(shared_cases()))
def test_shared_case(case: dict[str, Any], outcomes: Outcomes) -> None:
    assert outcomes.of(CASES, case) == ""


def emulate(*options: str, cases: Path, core: bool, isolation: str = "strict") -> dict[str, Any]:
    """Run the harness on an emulated machine; returns its summary and fails with what it found wrong."""
    if os.geteuid() != 0:
        pytest.skip("only root can take another user's place or drop capabilities")
    command = [sys.executable, str(EMULATION), *options, "--", sys.executable, harness.__file__, str(cases)]
    command += ["--isolation", isolation, *(["--core"] if core else [])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), "TMPDIR": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, cwd="/")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr[-2000:]
    assert lines[:-1] == []
    assert done.returncode == 0
    summary: dict[str, Any] = lines[-1]
    return summary


MACHINES = {
    "nobody": (["--nobody"], "namespaces"),
    "docker": (["--docker"], "strict"),
    "docker-nobody": (["--docker", "--nobody"], "strict"),
    "capless-root": (["--no-capabilities"], "strict"),
    "mapped-root": (["--mapped-root"], "namespaces"),
    "mapped-nobody": (["--nobody", "--mapped-root"], "namespaces"),
    "no-landlock": (["--deny", "landlock_create_ruleset"], "namespaces"),
    "no-landlock-nobody": (["--nobody", "--deny", "landlock_create_ruleset"], "namespaces"),
}


def test_own_cases_as_nobody_in_docker() -> None:
    summary = emulate(*MACHINES["docker-nobody"][0], cases=OWN, core=True)
    assert summary["level"] == "strict"
    assert summary["user"] == 65534


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("cases", [OWN, CASES], ids=["own", "shared"])
def test_every_case_on_other_machines(machine: str, cases: Path) -> None:
    if not cases.is_file():
        pytest.skip(f"no cases at {cases} (set AGENTROPY_SHARED)")
    options, level = MACHINES[machine]
    core = machine in ("capless-root", "mapped-root", "mapped-nobody")  # they differ in who may do what, not in limits
    assert emulate(*options, cases=cases, core=core)["level"] == level


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_case_as_root_without_namespaces(shared_dir: Path) -> None:
    assert emulate(cases=shared_dir / "cases" / "sandbox.jsonl", core=False, isolation="landlock")["level"] == "strict"
