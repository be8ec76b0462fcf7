"""`agentropy sandbox`: run a program, run a file of cases, serve the pool over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentropy.errors import UserError

if TYPE_CHECKING:
    from agentropy.sandbox import ExecutionResult, LocalSandbox

DEFAULT_TIMEOUT = 5.0
MAX_TIMEOUT = 1e9
# What a `code_gen` expression may name; it is for long programs that are tedious to write out.
GENERATORS = {"range": range, "str": str, "chr": chr, "len": len, "repr": repr, "sum": sum, "list": list}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `sandbox run` and `sandbox serve`."""
    p = subparsers.add_parser("sandbox", help="run untrusted Python in the sandbox, or serve the sandbox over HTTP")
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    r = actions.add_parser("run", help="run a program and print the result as JSON")
    r.add_argument("file", nargs="?", metavar="FILE", help="the program; - reads it from standard input")
    r.add_argument("--jsonl", metavar="CASES", help="run a file of cases (name, code, stdin, timeout), a result a line")
    r.add_argument("--timeout", type=float, default=None, metavar="S", help=f"seconds (default: {DEFAULT_TIMEOUT:g})")
    r.add_argument("--stdin", metavar="F", help="a file that becomes the program's standard input")
    r.add_argument("--seed", type=int, default=0, help="for random and numpy.random (default: 0)")
    r.add_argument("--no-echo", action="store_true", help="don't show the value of a last bare expression")
    r.set_defaults(run=run)
    s = actions.add_parser("serve", help="offer the sandbox by SandboxFusion's protocol (/run_code, /run_jupyter)")
    s.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; there is no authentication (default: 127.0.0.1)"
    )
    s.add_argument("--port", type=int, default=8080, help="port, 0 for a free one (default: 8080)")
    s.set_defaults(run=serve)
    for parser in (r, s):
        parser.add_argument("--workers", type=int, default=None, metavar="N", help="programs at once (default: cores)")
        parser.add_argument(
            "--isolation",
            choices=("strict", "namespaces", "landlock"),
            default="strict",
            help="strict: Landlock and seccomp at least; namespaces: require them too; landlock: without namespaces",
        )
        parser.add_argument("--allow-unsafe", action="store_true", help="run even where isolation can't be had")


def run(args: argparse.Namespace) -> int:
    """Run FILE or the cases of --jsonl. Exit code 0; 1 when the sandbox itself failed on any of them."""
    if (args.file is None) == (args.jsonl is None):
        raise UserError("give either a program FILE or --jsonl CASES")
    if args.timeout is not None and not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise UserError(f"--timeout must be a positive number of seconds, not {args.timeout}")
    if args.jsonl is not None:
        cases = read_cases(Path(args.jsonl), args.timeout or DEFAULT_TIMEOUT)
    else:
        code = sys.stdin.read() if args.file == "-" else _read(Path(args.file))
        stdin = None if args.stdin is None else _read(Path(args.stdin))
        cases = [{"code": code, "stdin": stdin, "timeout": args.timeout or DEFAULT_TIMEOUT}]
    return asyncio.run(_run(cases, args))


async def _run(cases: list[dict[str, Any]], args: argparse.Namespace) -> int:
    from agentropy.sandbox import _preload

    preload = _preload("\n".join(case["code"] for case in cases))
    failed = 0
    async with _sandbox(args, preload) as sandbox:
        async for case, result in _in_order(sandbox, cases, args):
            line = {"name": case["name"]} if "name" in case else {}
            line |= {"status": result.status, "stdout": result.stdout, "stderr": result.stderr}
            print(json.dumps(line | {"seconds": round(result.duration, 4)}), flush=True)
            failed += result.status == "sandbox_error"
    return 1 if failed else 0


async def _in_order(
    sandbox: LocalSandbox, cases: list[dict[str, Any]], args: argparse.Namespace
) -> AsyncIterator[tuple[dict[str, Any], ExecutionResult]]:
    """Results in the order of the cases, with as many under way as there are workers."""

    async def one(case: dict[str, Any]) -> ExecutionResult:
        options: dict[str, Any] = {"timeout": case["timeout"], "seed": args.seed, "echo": not args.no_echo}
        if case.get("setup_code"):
            await sandbox.call(case["setup_code"], **options)
        return await sandbox.call(case["code"], stdin=case.get("stdin"), **options)

    tasks: list[asyncio.Task[ExecutionResult]] = []
    for i, case in enumerate(cases):
        while len(tasks) < min(len(cases), i + sandbox.workers):
            tasks.append(asyncio.create_task(one(cases[len(tasks)])))
        yield case, await tasks[i]


def read_cases(path: Path, timeout: float) -> list[dict[str, Any]]:
    """The cases of a JSONL file. Raises UserError with the number of a line that is none."""
    cases = []
    for number, line in enumerate(_read(path).removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            case = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: no JSON ({error})") from error
        if not isinstance(case, dict):
            raise UserError(f"{where}: not a JSON object")
        if case.get("code_gen"):
            case["code"] = _generate(case["code_gen"], where)
        for name, kinds, required in (
            ("code", str, True),
            ("stdin", (str, type(None)), False),
            ("setup_code", (str, type(None)), False),
            ("timeout", (int, float), False),
        ):
            value = case.get(name)
            if (required or name in case) and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise UserError(f"{where}: {name} is {'missing' if name not in case else 'of the wrong type'}")
        seconds = case.get("timeout", timeout)
        if not 0 < seconds <= MAX_TIMEOUT:
            raise UserError(f"{where}: timeout must be a positive number of seconds")
        case["timeout"] = float(seconds)
        cases.append(case)
    return cases


def _generate(expression: str, where: str) -> str:
    """The program that an expression like `'(' * 9999` makes. Evaluated here: the file is trusted, its programs not."""
    try:
        code = eval(expression, {"__builtins__": GENERATORS})
    except Exception as error:
        raise UserError(f"{where}: code_gen: {type(error).__name__}: {error}") from error
    if not isinstance(code, str):
        raise UserError(f"{where}: code_gen makes no string")
    return code


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from error


def _sandbox(args: argparse.Namespace, preload: tuple[str, ...]) -> LocalSandbox:
    from agentropy.sandbox import LocalSandbox

    return LocalSandbox(workers=args.workers, preload=preload, isolation=args.isolation, allow_unsafe=args.allow_unsafe)


def serve(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port must be between 0 and 65535, not {args.port}")

    async def forever() -> None:
        from agentropy.sandbox.server import listen

        async with _sandbox(args, ("numpy", "sympy")) as sandbox:
            server = await listen(sandbox, args.host, args.port)
            host, port = server.sockets[0].getsockname()[:2]
            level = sandbox.capabilities().level
            print(f"sandbox ({level}, {sandbox.workers} workers) at http://{host}:{port}", file=sys.stderr, flush=True)
            async with server:
                await server.serve_forever()

    try:
        asyncio.run(forever())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0
