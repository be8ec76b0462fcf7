"""Where untrusted code runs: a warm fork server on this machine, or a remote server that speaks SandboxFusion's protocol."""

from __future__ import annotations

from agentropy.sandbox.local import LocalSandbox, SandboxBusy
from agentropy.sandbox.results import Capabilities, ExecutionResult, Limits
from agentropy.sandbox.session import Session

__all__ = ["Capabilities", "ExecutionResult", "Limits", "LocalSandbox", "SandboxBusy", "Session"]
