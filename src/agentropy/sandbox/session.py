"""A stateful interpreter, one a trajectory: variables, imports and files stay from cell to cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentropy.sandbox.results import ExecutionResult

if TYPE_CHECKING:
    from agentropy.sandbox.local import LocalSandbox


class Session:
    """Cells of one session run one after another, sessions side by side. Made by `LocalSandbox.session`.

    A session can end early: its cell crashed, hung through an interrupt, or was idle while too many others were live.
    The next cell then starts with an empty namespace and its result says `session_reset`.
    """

    def __init__(self, sandbox: LocalSandbox, key: str, seed: int) -> None:
        self._sandbox = sandbox
        self._key = key
        self._seed = seed
        self._lost = False
        self._cells: list[tuple[str, float, bool]] = []  # what led to the present state: code, timeout, echo

    async def run(self, code: str, *, timeout: float = 5.0, echo: bool = True) -> ExecutionResult:
        """Run one cell. At `timeout` (seconds) it is interrupted, and if it obeys, the variables stay."""
        await self._sandbox.start()
        if not self._sandbox.has_session(self._key):
            self._key = self._sandbox.new_session(self._seed)
            self._lost = bool(self._cells)
        result = await self._sandbox.call(code, timeout=timeout, echo=echo, session=self._key)
        if self._lost and not result.session_reset:
            result = _with_reset(result)
        self._lost = False
        if result.session_reset:
            self._cells.clear()
        if not (
            result.session_reset
            and result.status in ("timeout", "crash", "output_limit", "disk_limit", "sandbox_error")
        ):
            self._cells.append((code, timeout, echo))
        return result

    async def fork(self) -> Session:
        """A second session in the same state, made by running this one's cells again with the same seed.

        Equal as far as Python is deterministic: what depends on the time of day or on where an interrupt fell may
        differ.
        """
        twin = await self._sandbox.open_session(seed=self._seed)
        for code, timeout, echo in self._cells:
            await twin.run(code, timeout=timeout, echo=echo)
        return twin

    async def close(self) -> None:
        """End the interpreter. Cells still waiting get a `sandbox_error`."""
        self._sandbox.end_session(self._key)


def _with_reset(result: ExecutionResult) -> ExecutionResult:
    from dataclasses import replace

    return replace(result, session_reset=True)
