"""The parts of an agent from their names: device, local policy, sandbox, tool box.

Training and evaluation make theirs with the same functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from agentropy.errors import UserError
from agentropy.policies.local import LocalPolicy
from agentropy.sandbox import LocalSandbox, RemoteSandbox
from agentropy.tasks.worlds import World
from agentropy.tools.base import ToolBox
from agentropy.tools.faults import with_faults
from agentropy.tools.python import PythonPart
from agentropy.tools.session import make_toolbox

SMALL_MODEL = 10_000_000
"""Below this many parameters a second thread costs more than it gives."""
DEFAULT_CONTEXT, LONGEST_CONTEXT = 4096, 1 << 20


def make_sandbox(name: str) -> LocalSandbox | RemoteSandbox:
    """A sandbox from its name in the configuration: an isolation, `unsafe`, or a server's URL."""
    if name.startswith(("http://", "https://")):
        return RemoteSandbox(name)
    if name == "unsafe":
        return LocalSandbox(allow_unsafe=True)
    return LocalSandbox(isolation=name)


def assemble_toolbox(
    parts: Sequence[Any], *, timeout: float, sandbox: str = "strict", world: World | None = None, seed: int = 0
) -> ToolBox:
    """The parts as one tool box: Python on the named sandbox, a world's failures added where it has some."""
    for part in parts:
        if isinstance(part, PythonPart) and sandbox != "strict":
            part.use(make_sandbox(sandbox))
    toolbox: ToolBox = make_toolbox(parts, timeout=timeout)
    return with_faults(toolbox, world.faults(), seed=seed) if world is not None and world.tool_failures else toolbox


def local_policy(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    max_slots: int,
    max_context: int | None,
    deterministic: bool = True,
    threads: int | None = None,
) -> LocalPolicy:
    """The local engine on a loaded model. Also sets torch's threads, by the size of the model if `threads` is None."""
    torch.set_num_threads(threads or (1 if parameters(model) < SMALL_MODEL else os.cpu_count() or 1))
    return LocalPolicy(
        model,
        tokenizer,
        max_slots=max_slots,
        max_context=min(max_context or DEFAULT_CONTEXT, LONGEST_CONTEXT),
        deterministic=deterministic,
        name=name,
    )


def parameters(model: Any) -> int:
    """How many parameters a module has."""
    return sum(p.numel() for p in model.parameters())


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU. Raises UserError for a device that is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("unknown kind")
    except RuntimeError:
        raise UserError(f"no device {name!r}; there are auto, cpu, cuda, cuda:1 and mps") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].split(". ")[0] if device.type == "cuda" else f"this torch has no {device.type}"
        raise UserError(f"device {name!r} cannot be used here: {why}") from None
    return device
