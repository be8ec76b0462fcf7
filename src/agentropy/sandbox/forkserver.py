"""The supervisor's side of a fork server: start it, send it orders with descriptors, read what it reports."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

# A module of ours is started by path and without the package's __init__, which may import half the world.
BOOT = """
import sys, types
for name, path in (("agentropy", sys.argv[2]), ("agentropy.sandbox", sys.argv[2] + "/sandbox")):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from importlib import import_module
main = import_module("agentropy.sandbox." + sys.argv[1]).main
if sys.argv[1] == "zygote":
    for name in [name for name in sys.modules if name.startswith("agentropy")]:
        del sys.modules[name]
main(sys.argv[3])
"""
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

F_ADD_SEALS, ALL_SEALS = 1033, 0xF  # nobody may change, grow or shrink the file, nor unseal it


def command(module: str, argument: dict[str, Any], isolated: bool) -> list[str]:
    """The argument list that runs `module.main(json)` in a fresh interpreter. `-I` would ignore PYTHONHASHSEED."""
    flags = ["-I", "-S"] if isolated else ["-s", "-P"]
    return [sys.executable, *flags, "-X", "utf8", "-c", BOOT, module, PACKAGE, json.dumps(argument)]


def clean_environment() -> dict[str, str]:
    """All that a sandboxed program may see of an environment; every key the caller holds stays outside."""
    one_thread = (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "BLIS_NUM_THREADS",
    )
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    return (
        kept
        | dict.fromkeys(one_thread, "1")
        | {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "HOME": "/",
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "Agg",
            "USER": "agent",
            "LOGNAME": "agent",
        }
    )


class ForkServer:
    """A zygote process and the socket to it. Not ready until it has said so."""

    def __init__(self, name: str, order: dict[str, Any]) -> None:
        self.name = name
        self.ready = False
        self.about: dict[str, Any] = {}
        self.started = time.monotonic()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argument = {**order, "fd": 3, "supervisor": os.getpid()}
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 10)  # so that dup2 to 3 is never a no-op
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, high, 3)]
        argv = command("zygote", argument, isolated=False)
        try:
            self.pid = os.posix_spawn(argv[0], argv, clean_environment(), file_actions=actions)
        finally:
            for descriptor in (null, high):
                os.close(descriptor)
            theirs.close()
        self.socket.setblocking(False)

    def send(self, order: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Pass on an order. Raises OSError when the fork server is gone or does not keep up."""
        socket.send_fds(self.socket, [json.dumps(order).encode()], list(descriptors))

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next report and its descriptors; None when there is none. Raises EOFError when the server is gone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 4)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not message:
            raise EOFError
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return json.loads(message), descriptors

    def end(self) -> None:
        """Kill and reap it; its children die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.socket.close()


def sealed_file(data: bytes) -> int:
    """A descriptor of an anonymous file with this content, at its start, that nobody can change."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, F_ADD_SEALS, ALL_SEALS)
    return descriptor
