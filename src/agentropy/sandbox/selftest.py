"""The proof at the start: a program that tries what must be denied, so that a wall that does not hold is found."""

from __future__ import annotations

ATTEMPTS = (
    "read a file outside",
    "list a directory outside",
    "write a file outside",
    "open a socket",
    "start a process",
    "signal another process",
    "read /proc of its parent",
    "unshare namespaces",
)

PROGRAM = """
import os, socket, sys
def read(): open("/etc/passwd").read()
def list_(): os.listdir("/var")
def write():
    refusals = 0
    for folder in ("", "/var/tmp", os.path.dirname(os.__file__)):
        try: open(folder + "/agentropy-self-test", "x").close()
        except OSError: refusals += 1
    if refusals == 3: raise OSError
def connect(): socket.socket()
def fork():
    if os.fork() == 0: os._exit(0)
def kill(): os.kill(os.getppid() or 1, 0)
def proc(): open(f"/proc/{os.getppid()}/environ", "rb").read()
def unshare():
    import ctypes
    if ctypes.CDLL(None).unshare(0x10000000) != 0: raise OSError
for attempt in (read, list_, write, connect, fork, kill, proc, unshare):
    try: attempt()
    except OSError: print("denied")
    else: print("allowed")
open("own", "w").write("x")
"""


def leaks(output: str) -> list[str]:
    """What the program managed to do, from its output; an output of the wrong shape counts as a failure of all."""
    verdicts = output.split()
    if len(verdicts) != len(ATTEMPTS):
        return [f"the self-test ended early: {output[:200]!r}"]
    return [f"a program could {what}" for what, verdict in zip(ATTEMPTS, verdicts, strict=True) if verdict != "denied"]


def proven(output: str) -> list[str]:
    """What was tried and denied."""
    return [what for what, verdict in zip(ATTEMPTS, output.split(), strict=False) if verdict == "denied"]
