"""How a freshly forked child locks itself in, before it has seen a line of the program.

The order matters. Mounts come before Landlock, which refuses them; the change of user clears the death signal, so
that is set again; capabilities go before the filter; the filter comes last because it refuses most of what the other
steps need.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from dataclasses import dataclass
from typing import Any

from agentropy.sandbox import landlock, namespaces, seccomp

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2
SCRATCH_IN_JAIL = "/box"
DEVICES_READ_WRITE = ("/dev/null", "/dev/zero", "/dev/full")
DEVICES_READ = ("/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Walls:
    """What a fork server prepares once, so that its children have little left to do."""

    libc: ctypes.CDLL
    landlock_abi: int  # 0: absent, the mount namespace alone hides files
    filter: seccomp.Filter | None  # None only when unsafe
    rules: tuple[tuple[int, int], ...]  # open descriptors and their Landlock rights
    jail: namespaces.Jail | None
    keep_dac: bool  # the interpreter lies in a directory that only root can enter
    change_user: bool
    limits: dict[str, int]


def prepare_rules(version: int, trees: list[str]) -> tuple[tuple[int, int], ...]:
    """Open the interpreter's trees for reading and a few devices, for the Landlock rules of every child."""
    rules = []
    wanted = [(tree, landlock.READ) for tree in trees]
    wanted += [(path, landlock.READ_FILE | landlock.WRITE_FILE) for path in DEVICES_READ_WRITE]
    wanted += [(path, landlock.READ_FILE) for path in DEVICES_READ]
    for path, rights in wanted:
        found = landlock.open_for_rule(path)
        if found is not None:
            descriptor, is_directory = found
            rules.append((descriptor, rights if is_directory else rights & landlock.FILE_RIGHTS))
    return tuple(rules) if version else ()


def lock_in(walls: Walls, order: dict[str, Any], zygote: int) -> None:
    """Confine the calling process for good. Raises OSError when any wall can't be put up: then nothing may run in it.

    `order` is what the supervisor asked for: `scratch`, `user`, `cpu` seconds and `processes` (0: unlimited).
    """
    libc, limits = walls.libc, walls.limits
    os.setsid()  # else kill(0) would reach the fork server and everything it was started by
    _die_with(zygote, libc)
    scratch = order["scratch"]
    if walls.jail is not None:
        scratch = SCRATCH_IN_JAIL
        namespaces.enter_call(walls.jail, scratch, limits, order["user"] if walls.change_user else None)
    os.chdir(scratch)
    _limit(limits, order)
    os.environ["HOME"] = os.environ["TMPDIR"] = scratch
    os.umask(0o077)
    if walls.change_user:
        _become(order["user"], walls.keep_dac, libc)
    _drop_capabilities(walls.keep_dac, libc)
    _die_with(zygote, libc)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if walls.landlock_abi:
        own = os.open(".", os.O_PATH | os.O_CLOEXEC)
        rules = (*walls.rules, (own, landlock.scratch_rights(walls.landlock_abi)))
        landlock.restrict(walls.landlock_abi, rules, libc)
        os.close(own)
    if walls.filter is not None:
        seccomp.install(walls.filter, os.getpid(), libc)


def _die_with(zygote: int, libc: ctypes.CDLL) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (zygote, 0):  # the fork server died before the death signal was set
        os._exit(1)


def _limit(limits: dict[str, int], order: dict[str, Any]) -> None:
    def both(which: int, value: int) -> None:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))

    both(resource.RLIMIT_CORE, 0)
    both(resource.RLIMIT_AS, limits["memory"])
    both(resource.RLIMIT_FSIZE, limits["file"])
    both(resource.RLIMIT_NOFILE, limits["descriptors"])
    both(resource.RLIMIT_MEMLOCK, 0)
    both(resource.RLIMIT_MSGQUEUE, 0)
    if order["cpu"]:  # the soft limit's SIGXCPU tells a timeout from a crash
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = order["cpu"] + 1 if hard == resource.RLIM_INFINITY else min(order["cpu"] + 1, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (min(order["cpu"], most), most))
    if order["processes"]:
        both(resource.RLIMIT_NPROC, order["processes"])


def _become(user: int, keep_dac: bool, libc: ctypes.CDLL) -> None:
    if keep_dac:
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _drop_capabilities(keep_dac: bool, libc: ctypes.CDLL) -> None:
    kept = 1 << CAP_DAC_READ_SEARCH if keep_dac else 0
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    if libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def can_read(trees: list[str], user: int | None, keep_dac: bool, libc: ctypes.CDLL) -> bool:
    """Whether a call could be run as `user` (None: as we are) and still import modules; tried in a throw-away child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if user is not None:
                _become(user, keep_dac, libc)
            _drop_capabilities(keep_dac, libc)
            code = 0 if all(_readable(tree) for tree in trees) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _readable(path: str) -> bool:
    try:
        os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True
