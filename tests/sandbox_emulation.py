"""Runs a command as on another machine: as an unprivileged user, under Docker's default limits, without Landlock.

    python tests/sandbox_emulation.py [--nobody] [--docker] [--deny NAME …] … -- COMMAND …     (as root)

`--docker`: the 14 capabilities of Docker's default profile, and EPERM for the calls that profile refuses without
CAP_SYS_ADMIN. `--deny`: calls that answer ENOSYS, as on a kernel built without them.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import struct
import sys

NOBODY = 65534
DOCKER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
CALLS = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "userfaultfd": (323, 282), "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),
}  # fmt: skip
DOCKER_REFUSES = [
    name for name in CALLS if not name.startswith("landlock") and name not in ("seccomp", "keyctl", "pidfd_getfd")
]
CLONE, CLONE3 = (56, 220), (435, 435)
NEW_NAMESPACE = 0x7E020000
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def show_interpreter() -> None:
    """Make an interpreter under a closed directory readable for everybody, in a mount namespace of our own."""
    prefix = os.path.realpath(sys.base_prefix)
    closed = next((p for p in parents(prefix) if not os.stat(p).st_mode & 1), None)
    if closed is None:
        return
    check(libc.unshare(0x20000), "unshare")
    check(libc.mount(None, b"/", None, ctypes.c_ulong(16384 | 1 << 18), None), "mount private")
    aside = "/mnt"
    check(libc.mount(prefix.encode(), aside.encode(), None, ctypes.c_ulong(4096), None), "bind")
    check(libc.mount(b"tmpfs", closed.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=755"), "tmpfs")
    os.makedirs(prefix, exist_ok=True)
    check(libc.mount(aside.encode(), prefix.encode(), None, ctypes.c_ulong(8192), None), "move")


def parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[: i + 1]) for i in range(len(parts))]


def install_filter(docker: bool, absent: list[str]) -> None:
    """A deny-list; everything else passes."""
    answers = {CALLS[name][COLUMN]: errno.ENOSYS for name in absent}
    if docker:
        answers |= {CALLS[name][COLUMN]: errno.EPERM for name in DOCKER_REFUSES}
        answers[CLONE3[COLUMN]] = errno.ENOSYS
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, ARCH), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    for number, answer in answers.items():
        program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | answer)]
    if docker:
        program += [(0x15, 0, 3, CLONE[COLUMN]), (0x20, 0, 0, 16), (0x45, 0, 1, NEW_NAMESPACE)]
        program += [(0x06, 0, 0, 0x00050000 | errno.EPERM)]
    program.append((0x06, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    check(libc.prctl(22, 2, header, 0, 0), "seccomp")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nobody", action="store_true")
    parser.add_argument("--docker", action="store_true")
    parser.add_argument("--no-capabilities", action="store_true", help="as with docker run --cap-drop ALL")
    parser.add_argument(
        "--mapped-root", action="store_true", help="root of a user namespace with one user, as rootless podman"
    )
    parser.add_argument("--deny", nargs="*", default=[], choices=sorted(CALLS))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.nobody:
        show_interpreter()
    if args.docker or args.no_capabilities:
        kept_numbers = DOCKER_CAPABILITIES if args.docker else ()
        for number in range(64):
            if number not in kept_numbers and libc.prctl(23, number, 0, 0, 0) == 1:
                check(libc.prctl(24, number, 0, 0, 0), "bounding set")
    if args.docker or args.deny:
        install_filter(args.docker, args.deny)
    if args.nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        os.environ["HOME"] = "/"
    elif args.docker:
        kept = sum(1 << number for number in DOCKER_CAPABILITIES)
        header = struct.pack("=Ii", 0x20080522, 0)
        data = struct.pack("=6I", kept & 0xFFFFFFFF, kept & 0xFFFFFFFF, 0, kept >> 32, kept >> 32, 0)
        check(libc.capset(header, data), "capset")
    if args.mapped_root:
        user, group = os.geteuid(), os.getegid()
        libc.prctl(4, 1, 0, 0, 0)  # dumpable again after the change of user: /proc/self is ours
        check(libc.unshare(0x10000000), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
