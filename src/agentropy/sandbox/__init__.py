"""Where untrusted code runs: a warm fork server on this machine, or a server that speaks SandboxFusion's protocol.

`LocalSandbox` and `RemoteSandbox` have the same methods: `execute` for programs that know nothing of each other,
`session` for an interpreter that keeps its state. docs/sandbox.md says what is isolated and what is not.
"""

from __future__ import annotations

from agentropy.sandbox.local import LocalSandbox, SandboxBusy
from agentropy.sandbox.remote import RemoteSandbox
from agentropy.sandbox.results import Capabilities, ExecutionResult, Limits
from agentropy.sandbox.session import Session

__all__ = [
    "Capabilities",
    "ExecutionResult",
    "Limits",
    "LocalSandbox",
    "RemoteSandbox",
    "SandboxBusy",
    "Session",
    "run_sync",
]


def run_sync(
    code: str, *, timeout: float = 5.0, stdin: str | None = None, seed: int = 0, echo: bool = True
) -> ExecutionResult:
    """Run one program in a sandbox that is started and closed for it. For scripts; loops should keep a LocalSandbox."""
    import asyncio

    async def once() -> ExecutionResult:
        async with LocalSandbox(workers=1, preload=_preload(code)) as sandbox:
            return await sandbox.call(code, timeout=timeout, stdin=stdin, seed=seed, echo=echo)

    return asyncio.run(once())


def _preload(code: str) -> tuple[str, ...]:
    from agentropy.sandbox.supervisor import WANTS_FULL

    return ("numpy", "sympy") if WANTS_FULL.search(code.encode("utf-8", "surrogatepass")) else ()
