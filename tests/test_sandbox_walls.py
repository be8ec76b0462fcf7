"""The walls themselves: the filter call by call, the numbers behind it, and refusal where they can't be put up."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from agentropy.sandbox import LocalSandbox, landlock, seccomp, selftest, syscalls

EMULATION = Path(__file__).with_name("sandbox_emulation.py")
SOURCE = Path(__file__).parents[1] / "src"
TABLES = (syscalls.ALLOW, syscalls.ANSWER_ZERO, syscalls.NOT_SUPPORTED, syscalls.REFUSE, syscalls.BY_ARGUMENT)
ALLOW, KILL = "allow", "kill"
PID = 4321


def interpret(ready: seccomp.Filter, number: int, arguments: tuple[int, ...] = (), arch: int = 0xC000003E) -> str | int:
    """What the kernel would do with a call: run the BPF program over its seccomp_data."""
    full = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, arch, 0, *(a & 0xFFFFFFFFFFFFFFFF for a in full))
    program = [struct.unpack_from("=HBBI", ready.program, i) for i in range(0, len(ready.program), 8)]
    at = accumulator = 0
    while True:
        code, yes, no, k = program[at]
        k = PID if at in ready.pid_at else k
        at += 1
        if code == seccomp.LD_WORD:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == seccomp.AND:
            accumulator &= k
        elif code == seccomp.JA:
            at += k
        elif code == seccomp.RET:
            return ALLOW if k == seccomp.RET_ALLOW else KILL if k == seccomp.RET_KILL else k & 0xFFFF
        else:
            true = {seccomp.JEQ: accumulator == k, seccomp.JGE: accumulator >= k, seccomp.JSET: bool(accumulator & k)}
            at += yes if true[code] else no


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_every_call_gets_the_verdict_of_its_table(machine: str) -> None:
    arch, column = seccomp.ARCHITECTURES[machine]
    ready = seccomp.build(7, machine)
    verdicts: list[tuple[dict[str, syscalls.Numbers], str | int]] = [
        (syscalls.ALLOW, ALLOW),
        (syscalls.ANSWER_ZERO, 0),
        (syscalls.NOT_SUPPORTED, errno.ENOTSUP),
        (syscalls.REFUSE, errno.EPERM),
    ]
    known = {table[name][column] for table in TABLES for name in table}
    for table, verdict in verdicts:
        for name, numbers in table.items():
            if numbers[column] is not None:
                assert interpret(ready, numbers[column], arch=arch) == verdict, name
    for number in range(700):
        if number not in known:
            assert interpret(ready, number, arch=arch) == errno.ENOSYS
    assert interpret(ready, 435, arch=arch) == errno.ENOSYS  # clone3
    assert interpret(ready, 0, arch=0x40000003) == KILL  # 32-bit calls
    assert interpret(ready, 0x40000000 + 41, arch=arch) == errno.ENOSYS  # x32


def call(name: str) -> int:
    number = syscalls.BY_ARGUMENT[name][0]
    assert number is not None
    return number


@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("kill", (PID, 9), ALLOW),
        ("kill", (PID | 1 << 32, 9), ALLOW),
        ("kill", (0, 9), errno.EPERM),
        ("kill", (-1, 9), errno.EPERM),
        ("kill", (-PID, 9), errno.EPERM),
        ("kill", (PID + 1, 9), errno.EPERM),
        ("tgkill", (PID, 5, 9), ALLOW),
        ("tgkill", (1, PID, 9), errno.EPERM),
        ("prlimit64", (0, 7, 0, 1), ALLOW),
        ("prlimit64", (0, 7, 1 << 40, 1), errno.EPERM),
        ("prlimit64", (0, 7, 8, 1), errno.EPERM),
        ("prlimit64", (5, 7, 0, 1), errno.EPERM),
        ("clone", (0x3D0F00,), ALLOW),
        ("clone", (17,), errno.EPERM),
        ("clone", (0x4111,), errno.EPERM),
        ("sched_setaffinity", (0,), ALLOW),
        ("sched_setaffinity", (7,), errno.EPERM),
        ("socketpair", (1, 1, 0), ALLOW),
        ("socketpair", (2, 1, 0), errno.EPERM),
        ("sendto", (3, 4, 5, 0, 0), ALLOW),
        ("sendto", (3, 4, 5, 0, 1 << 33), errno.EPERM),
        ("sendto", (3, 4, 5, 0, 8), errno.EPERM),
        ("prctl", (15,), ALLOW),
        ("prctl", (1, 0), errno.EPERM),
        ("prctl", (4,), errno.EPERM),
        ("fcntl", (0, 3), ALLOW),
        ("fcntl", (0, 8), errno.EPERM),
        ("fcntl", (0, 1031), errno.EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x8902), errno.ENOTTY),
        ("open", (1, 0), ALLOW),
        ("openat", (1, 2, os.O_WRONLY | os.O_TRUNC | os.O_CREAT), ALLOW),
        ("openat", (1, 2, os.O_RDONLY | os.O_TRUNC), errno.EPERM),
        ("open", (1, os.O_TRUNC), errno.EPERM),
        ("truncate", (1, 0), ALLOW),
    ],
)
def test_conditions_on_arguments(name: str, arguments: tuple[int, ...], verdict: str | int) -> None:
    assert interpret(seccomp.build(7, "x86_64"), call(name), arguments) == verdict


def test_truncate_is_refused_where_landlock_does_not_cover_it() -> None:
    for abi, verdict in ((0, ALLOW), (1, errno.EPERM), (2, errno.EPERM), (3, ALLOW)):
        assert interpret(seccomp.build(abi, "x86_64"), call("truncate")) == verdict


def test_no_call_is_in_two_tables() -> None:
    names = [name for table in TABLES for name in table]
    assert len(names) == len(set(names))
    for column in (0, 1):
        numbers = [table[name][column] for table in TABLES for name in table if table[name][column] is not None]
        assert len(numbers) == len(set(numbers))


def test_numbers_are_those_of_libseccomp() -> None:
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("libseccomp is not installed")
    library = ctypes.CDLL(path)
    compared = 0
    for column, token in ((0, 0xC000003E), (1, 0xC00000B7)):
        for table in TABLES:
            for name, numbers in table.items():
                theirs = library.seccomp_syscall_resolve_name_arch(token, name.encode())
                if theirs == -1:
                    continue  # newer than this libseccomp
                assert (theirs if theirs >= 0 else None) == numbers[column], name
                compared += 1
    assert compared > 400


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.build(7, "riscv64")


def test_landlock_asks_only_for_what_a_kernel_knows() -> None:
    assert landlock.all_rights(1) == (1 << 13) - 1
    assert landlock.all_rights(2) & landlock.REFER
    assert not landlock.all_rights(2) & landlock.TRUNCATE
    assert landlock.all_rights(3) & landlock.TRUNCATE
    assert not landlock.all_rights(4) & landlock.IOCTL_DEV
    assert landlock.all_rights(5) == landlock.all_rights(99) == (1 << 16) - 1
    assert not landlock.scratch_rights(7) & (landlock.EXECUTE | landlock.MAKE_CHAR | landlock.MAKE_BLOCK)


def test_the_self_test_finds_leaks() -> None:
    fine = "denied\n" * len(selftest.ATTEMPTS)
    assert selftest.leaks(fine) == []
    assert len(selftest.proven(fine)) == len(selftest.ATTEMPTS)
    assert selftest.leaks(fine.replace("denied", "allowed", 1)) == ["a program could read a file outside"]
    assert "ended early" in selftest.leaks("denied\n")[0]


def test_the_self_test_program_succeeds_at_everything_outside() -> None:
    done = subprocess.run([sys.executable, "-c", selftest.PROGRAM], capture_output=True, text=True, cwd="/tmp")
    Path("/tmp/own").unlink()
    allowed = done.stdout.split().count("allowed")
    assert allowed >= 5, done  # unshare and writing to system directories depend on who we are
    for folder in ("", "/var/tmp", os.path.dirname(os.__file__)):
        Path(f"{folder}/agentropy-self-test").unlink(missing_ok=True)


REFUSAL = (
    "import asyncio\nfrom agentropy.errors import UserError\nfrom agentropy.sandbox import LocalSandbox\n"
    "async def main():\n"
    "    try:\n"
    "        async with LocalSandbox(1, (), isolation={isolation!r}, allow_unsafe={unsafe}) as sandbox:\n"
    "            about = sandbox.capabilities()\n"
    "            result = await sandbox.call('print(1)')\n"
    "            assert result.unsafe == (about.level == 'unsafe')\n"
    "            print(about.level, result.stdout.strip(), *about.missing)\n"
    "    except UserError as error:\n"
    "        print('refused:', error)\n"
    "asyncio.run(main())\n"
)


def start_on(*options: str, isolation: str = "strict", unsafe: bool = False) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can install filters without giving up privileges first")
    script = REFUSAL.format(isolation=isolation, unsafe=unsafe)
    command = [sys.executable, str(EMULATION), *options, "--", sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_landlock_and_namespaces_it_refuses_and_says_why() -> None:
    text = start_on("--docker", "--deny", "landlock_create_ruleset")
    assert text.startswith("refused: no safe sandbox on this machine: Landlock (needs Linux 5.13")
    assert "unshare: Operation not permitted" in text
    assert "allow_unsafe=True" in text


def test_as_nobody_without_landlock_and_namespaces_it_refuses_too() -> None:
    assert start_on("--nobody", "--docker", "--deny", "landlock_create_ruleset").startswith("refused")


def test_without_landlock_namespaces_are_enough() -> None:
    text = start_on("--deny", "landlock_create_ruleset")
    assert text.startswith("namespaces 1 Landlock")


def test_namespaces_can_be_required() -> None:
    assert start_on("--docker", isolation="namespaces").startswith("refused")
    assert start_on("--nobody", isolation="namespaces").startswith("namespaces 1")


def test_unsafe_must_be_asked_for_and_is_said() -> None:
    text = start_on("--docker", "--deny", "landlock_create_ruleset", unsafe=True)
    assert text.startswith("unsafe 1 Landlock")
    assert "a program could read a file outside" in text


def test_capabilities_here() -> None:
    async def work() -> None:
        async with LocalSandbox(workers=3, preload=()) as sandbox:
            about = sandbox.capabilities()
            assert about.level in ("strict", "namespaces")
            assert about.seccomp
            assert about.workers == 3
            assert about.proven == selftest.ATTEMPTS

    asyncio.run(work())
