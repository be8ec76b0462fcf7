"""Runs a file of sandbox cases and judges each: a library for the tests, a script under other users and filters.

python tests/sandbox_harness.py CASES [--isolation strict] [--unlike NAME …] -> one JSON line a failed case, exit code
0 or 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentropy.sandbox import ExecutionResult, LocalSandbox

CANARY = "canary-7f3a91-secret"
LONGEST_OUTPUT = 100_000


@dataclass
class Surroundings:
    """What attacks aim at: files, listeners, a secret in the environment, this process."""

    outside: Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: str
    limits: Any = None
    priority: int = 0
    files: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)

    def fill(self, text: str) -> str:
        """Replace the placeholders of a case."""
        values = {
            "{OUTSIDE}": str(self.outside),
            "{CANARY}": CANARY,
            "{PORT}": str(self.tcp.getsockname()[1]),
            "{UPORT}": str(self.udp.getsockname()[1]),
            "{ABSTRACT}": self.abstract,
            "{HARNESS_PID}": str(os.getpid()),
        }
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    def state(self) -> dict[str, tuple[bytes, int, int]]:
        """Content, mode and time of every file outside."""
        return {
            name: (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
            for name in sorted(os.listdir(self.outside))
            if (path := self.outside / name).is_file()
        }

    def contacted(self) -> bool:
        """Whether anybody connected or sent anything."""
        for listener in (self.tcp, self.unix):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                return True
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(100)
            return True
        return False


@contextlib.contextmanager
def surroundings() -> Iterator[Surroundings]:
    """Set everything up and take it down again."""
    os.environ["AGENTROPY_TEST_CANARY"] = CANARY
    with tempfile.TemporaryDirectory(prefix="outside-") as directory, contextlib.ExitStack() as stack:
        outside = Path(directory)
        outside.chmod(0o755)
        for name in ("secret.txt", "victim.txt"):
            (outside / name).write_text(CANARY)
            (outside / name).chmod(0o644)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract = f"agentropy-test-{os.getpid()}"
        unix.bind("\0" + abstract)
        unix.listen()
        for listener in (tcp, udp, unix):
            listener.setblocking(False)
        around = Surroundings(outside, tcp, udp, unix, abstract)
        around.files = around.state()
        around.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        around.priority = os.getpriority(os.PRIO_PROCESS, 0)
        yield around
    os.environ.pop("AGENTROPY_TEST_CANARY")


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, by /proc."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text()
                parents.setdefault(int(text.rsplit(")", 1)[1].split()[1]), []).append(int(name))
    found, pending = [], [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def programs_alive(sandbox: LocalSandbox) -> list[int]:
    """Processes below the fork servers, which are children of the supervisor."""
    assert sandbox._process is not None
    supervisor = sandbox._process.pid
    servers = [pid for pid in descendants(supervisor) if parent(pid) == supervisor]
    return [pid for pid in descendants(supervisor) if pid not in servers]


def parent(pid: int) -> int:
    """The parent of a process, 0 when it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def load(path: Path, around: Surroundings) -> list[dict[str, Any]]:
    """The cases with their placeholders filled in."""
    cases = []
    for line in path.read_text().splitlines():
        case = json.loads(line)
        case["code"] = eval(case["code_gen"]) if case.get("code_gen") else around.fill(case["code"])
        cases.append(case)
    return cases


async def run_case(sandbox: LocalSandbox, case: dict[str, Any], around: Surroundings) -> str:
    """What is wrong with the outcome of a case; empty when nothing is."""
    options = {"timeout": float(case.get("timeout", 5)), "stdin": case.get("stdin")}
    if case.get("setup_code"):
        await sandbox.call(around.fill(case["setup_code"]), **options)
    result = await sandbox.call(case["code"], **options)
    wrong = judge(result, case, around)
    for check in case["expect"].get("checks", []):
        if check == "no_survivors" and (alive := programs_alive(sandbox)):
            wrong.append(f"still alive: {alive}")
        if check == "no_litter" and (litter := await litter_after_a_while()):
            wrong.append(f"left behind: {litter}")
        if check == "repeatable":
            again = await sandbox.call(case["code"], **options)
            if again.stdout != result.stdout:
                wrong.append(f"first {result.stdout!r}, then {again.stdout!r}")
    after = (await sandbox.call("print('alive')")).stdout
    if after != "alive\n":
        wrong.append("the sandbox no longer works")
    return "; ".join(wrong)


async def litter_after_a_while() -> list[Path]:
    """Scratch directories that are still there when cleaning had time to end."""
    for _ in range(100):
        pattern = f"agentropy-sandbox-{os.geteuid()}-*/*"
        if not (litter := [*Path(tempfile.gettempdir()).glob(pattern), *Path("/dev/shm").glob(pattern)]):
            break
        await asyncio.sleep(0.05)
    return litter


def judge(result: ExecutionResult, case: dict[str, Any], around: Surroundings) -> list[str]:
    """Compare a result with what the case expects, and look at what must not have changed."""
    expect, wrong = case["expect"], []
    if result.status not in expect["status"].split("|"):
        wrong.append(
            f"status {result.status}, not {expect['status']}: {result.stderr[-300:]!r} {result.stdout[-200:]!r}"
        )
    for stream in ("stdout", "stderr"):
        wanted = expect.get(f"{stream}_contains")
        if wanted and around.fill(wanted) not in getattr(result, stream):
            wrong.append(f"{stream} lacks {wanted!r}: {getattr(result, stream)[-300:]!r}")
    for text in expect.get("output_must_not_contain", []):
        if around.fill(text) in result.stdout + result.stderr:
            wrong.append(f"output has {text!r}: {(result.stdout + result.stderr)[-300:]!r}")
    if len(result.stdout) + len(result.stderr) > LONGEST_OUTPUT:
        wrong.append("output too long")
    if around.contacted():
        wrong.append("a listener was reached")
    if around.state() != around.files:
        wrong.append("files outside were changed")
    if around.limits != resource.getrlimit(resource.RLIMIT_NOFILE) or around.priority != os.getpriority(
        os.PRIO_PROCESS, 0
    ):
        wrong.append("limits of the harness were changed")
    return wrong


async def run_all(path: Path, isolation: str, core: bool) -> tuple[int, list[dict[str, str]], str]:
    """(cases run, failures, level of isolation)."""
    failures = []
    with surroundings() as around:
        cases = [case for case in load(path, around) if not core or is_core(case)]
        async with LocalSandbox(isolation=isolation) as sandbox:
            level = sandbox.capabilities().level
            for case in cases:
                started = time.monotonic()
                if wrong := await run_case(sandbox, case, around):
                    failures.append({"name": case["name"], "wrong": wrong})
                    print(json.dumps(failures[-1]), flush=True)
                if os.environ.get("SLOWEST"):
                    print(f"{time.monotonic() - started:.2f} {case['name']}", file=sys.stderr)
    return len(cases), failures, level


def is_core(case: dict[str, Any]) -> bool:
    """Whether a case is fast: those that end by the clock or by filling something up cost seconds each."""
    return "timeout" not in case["expect"]["status"] and case["category"] not in ("resource", "output")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--isolation", default="strict")
    parser.add_argument("--core", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the harness got SIGTERM"))
    count, failures, level = asyncio.run(run_all(args.cases, args.isolation, args.core))
    print(json.dumps({"cases": count, "failed": len(failures), "level": level, "user": os.geteuid()}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
