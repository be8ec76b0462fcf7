"""Landlock through ctypes (Linux 5.13 and later): a process gives up every right to files but those it lists.

Only the access bits that the running kernel knows are asked for; `syscalls.py` closes what older kernels leave open.
See https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
VERSION, PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, REFER, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
READ = READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


def abi(libc: ctypes.CDLL) -> int:
    """The Landlock version of the running kernel, 0 where there is none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION)))


def all_rights(version: int) -> int:
    """Every file right that this version can take away."""
    return (1 << {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


def scratch_rights(version: int) -> int:
    """What a program may do in its own directory: all but start programs and make devices."""
    return all_rights(version) & ~(EXECUTE | MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)


def restrict(version: int, rules: Iterable[tuple[int, int]], libc: ctypes.CDLL) -> None:
    """Confine the calling process, which needs no_new_privs, to `rules`: open directories or files with their rights.

    No TCP and, from version 6, no abstract sockets and no signals beyond the process. Raises OSError.
    """
    attributes = struct.pack("=QQQ", all_rights(version), 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for descriptor, rights in rules:
        rule = struct.pack("=Qi", rights & all_rights(version), descriptor)
        if libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule")
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def open_for_rule(path: str) -> tuple[int, bool] | None:
    """(O_PATH descriptor, is it a directory), or None where the path is absent."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    return descriptor, os.path.isdir(path)
