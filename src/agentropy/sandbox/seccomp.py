"""The system-call filter of a sandboxed program: an allow-list in classic BPF, built once and installed by every child.

The program is a binary search over ranges of call numbers (about ten comparisons a call, and cheap to install). Calls
that would reach another process are allowed for the child's own pid only: that constant is patched into the ready
program. What the filter cannot see (memory behind pointers) decides what must be refused whole: clone3, sendmsg,
openat2.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass

from agentropy.sandbox import syscalls

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # machine -> (AUDIT_ARCH, column of the table)

RET_KILL = 0x80000000
RET_ERRNO = 0x00050000
RET_ALLOW = 0x7FFF0000

LD_WORD, JEQ, JGE, JSET, JA, RET, AND = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06, 0x54
NUMBER, ARCH, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

OWN_PID = 0x7FFFFFF1  # stands for the child's pid until `install` patches it

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

CLONE_THREAD = 0x10000
O_ACCMODE, O_TRUNC = 0o3, 0o1000
AF_UNIX = 1
PRCTL_ALLOWED = (3, 15, 16)  # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME
# F_SETOWN, F_SETSIG, F_SETOWN_EX and F_NOTIFY send signals to others; F_SETPIPE_SZ takes memory that no limit counts.
FCNTL_REFUSED = (8, 10, 15, 1024, 1026, 1031)
IOCTL_ALLOWED = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Filter:
    """A BPF program and the places where the pid of the process that installs it belongs."""

    program: bytes
    pid_at: tuple[int, ...]


def build(landlock_abi: int, machine: str | None = None) -> Filter:
    """The filter for this machine. `landlock_abi` 0: Landlock is absent. Raises OSError on other architectures."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system-call table for {machine}")
    arch, column = ARCHITECTURES[machine]
    leaves: dict[int, list[Instruction]] = {}
    for table, verdict in (
        (syscalls.ALLOW, RET_ALLOW),
        (syscalls.ANSWER_ZERO, RET_ERRNO),
        (syscalls.NOT_SUPPORTED, RET_ERRNO | errno.ENOTSUP),
        (syscalls.REFUSE, RET_ERRNO | errno.EPERM),
    ):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                leaves[number] = [_ret(verdict)]
    conditions = _conditions(landlock_abi)
    for name, numbers in syscalls.BY_ARGUMENT.items():
        number = numbers[column]
        if number is not None:
            leaves[number] = conditions[name]
    program: list[Instruction] = [(LD_WORD, 0, 0, ARCH), (JEQ, 1, 0, arch), _ret(RET_KILL), (LD_WORD, 0, 0, NUMBER)]
    program += _search(_ranges(leaves))
    pid_at = tuple(i for i, (_, _, _, k) in enumerate(program) if k == OWN_PID)
    return Filter(b"".join(struct.pack("=HBBI", *i) for i in program), pid_at)


def install(ready: Filter, pid: int, libc: ctypes.CDLL) -> None:
    """Put the calling process, which must have no_new_privs, behind the filter for good. Raises OSError."""
    program = bytearray(ready.program)
    for index in ready.pid_at:
        struct.pack_into("=I", program, index * 8 + 4, pid)
    buffer = (ctypes.c_char * len(program)).from_buffer(program)
    header = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _ret(value: int) -> Instruction:
    return (RET, 0, 0, value)


def _argument(index: int, high: bool = False) -> Instruction:
    return (LD_WORD, 0, 0, ARGUMENT + 8 * index + (4 if high else 0))


def _one_of(index: int, values: tuple[int, ...], then: int, otherwise: int) -> list[Instruction]:
    """Compare the low word of an argument with each value: `then` on a match, else `otherwise`."""
    tests = [(JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _ret(otherwise), _ret(then)]


def _conditions(landlock_abi: int) -> dict[str, list[Instruction]]:
    allow, refuse = RET_ALLOW, RET_ERRNO | errno.EPERM
    own_process = _one_of(0, (OWN_PID,), allow, refuse)

    def opens(flags: int) -> list[Instruction]:
        # Landlock before ABI 3 lets O_RDONLY|O_TRUNC empty a file that is only readable.
        truncates = [_argument(flags), (AND, 0, 0, O_ACCMODE | O_TRUNC), (JEQ, 0, 1, O_TRUNC)]
        return [*truncates, _ret(refuse), _ret(allow)]

    null_address = [_argument(4), (JEQ, 0, 2, 0), _argument(4, high=True), (JEQ, 1, 0, 0), _ret(refuse), _ret(allow)]
    no_new_limit = [_argument(2), (JEQ, 0, 4, 0), _argument(2, high=True), (JEQ, 0, 2, 0)]
    return {
        "open": opens(1),
        "openat": opens(2),
        "truncate": [_ret(allow if landlock_abi >= 3 or landlock_abi == 0 else refuse)],
        "prctl": _one_of(0, PRCTL_ALLOWED, allow, refuse),
        "fcntl": _one_of(1, FCNTL_REFUSED, refuse, allow),
        "ioctl": _one_of(1, IOCTL_ALLOWED, allow, RET_ERRNO | errno.ENOTTY),
        "prlimit64": [*no_new_limit, _argument(0), (JEQ, 1, 0, 0), _ret(refuse), _ret(allow)],
        "kill": own_process,
        "tgkill": own_process,
        "clone": [_argument(0), (JSET, 1, 0, CLONE_THREAD), _ret(refuse), _ret(allow)],
        "sched_setaffinity": _one_of(0, (0,), allow, refuse),
        "socketpair": _one_of(0, (AF_UNIX,), allow, refuse),
        "sendto": null_address,
    }


def _ranges(leaves: dict[int, list[Instruction]]) -> list[tuple[int, list[Instruction]]]:
    """(first number, what to do from there on), ascending; gaps and the end are unknown calls."""
    unknown = [_ret(RET_ERRNO | errno.ENOSYS)]
    ranges: list[tuple[int, list[Instruction]]] = []
    for number in range(max(leaves) + 2):
        what = leaves.get(number, unknown)
        if not ranges or ranges[-1][1] != what:
            ranges.append((number, what))
    return ranges


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(low) <= 255:
        return [(JGE, len(low), 0, first), *low, *high]
    return [(JGE, 0, 1, first), (JA, 0, 0, len(low)), *low, *high]
