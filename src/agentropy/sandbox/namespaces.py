"""A private file system, network and IPC around a fork server, where the machine permits (root, or user namespaces).

The new root holds the interpreter's trees (read-only), a few devices and an empty directory on which every call
mounts its own small tmpfs. There is no /proc in it. Landlock and seccomp hold without all this; the namespaces add
that not even names and sizes of the host's files can be seen, and that the kernel itself enforces the disk quota.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Jail:
    """The fork server's own namespaces, as its children need to know them."""

    libc: ctypes.CDLL
    proc: int  # O_PATH descriptor of the host's /proc, for the id maps of later user namespaces
    own_user_namespace: bool


def build(libc: ctypes.CDLL, trees: list[str], scratch: str) -> Jail:
    """Move the calling process into a root file system of its own. Raises OSError at the first step that is refused."""
    own_user = os.geteuid() != 0
    pairs = sorted({(path, os.path.realpath(path)) for tree in trees for path in (tree, os.path.realpath(tree))})
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _check(libc.unshare(flags | (CLONE_NEWUSER if own_user else 0)), "unshare")
    if own_user:
        _map_ids(proc, user, group)
    _mount(libc, None, "/", None, MS_REC | MS_PRIVATE)
    base = "/tmp" if os.path.isdir("/tmp") else "/var"
    _mount(libc, "tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir(base + "/new", 0o755)
    os.mkdir(base + "/old", 0o755)
    _mount(libc, base + "/new", base + "/new", None, MS_BIND | MS_REC)
    _pivot(libc, base, base + "/old")
    os.chdir("/")
    _populate(libc, pairs, scratch)
    os.chdir("/new")
    _pivot(libc, ".", ".")
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    _mount(libc, None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    return Jail(libc, proc, own_user)


def enter_call(jail: Jail, scratch: str, limits: dict[str, int], user: int | None) -> None:
    """Give the calling child its own mount namespace with an empty tmpfs on `scratch`."""
    owner, group = os.geteuid(), os.getegid()
    _check(jail.libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if jail.own_user_namespace else 0)), "unshare")
    if jail.own_user_namespace:
        _map_ids(jail.proc, owner, group)
    if user is not None:
        owner = group = user
    options = f"mode=700,size={limits['scratch']},nr_inodes={limits['scratch_files']},uid={owner},gid={group}"
    _mount(jail.libc, "tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _populate(libc: ctypes.CDLL, pairs: list[tuple[str, str]], scratch: str) -> None:
    done: list[str] = []
    for path, real in pairs:
        if any(path == parent or path.startswith(parent + "/") for parent in done):
            continue
        source, target = "/old" + real, "/new" + path
        if os.path.isdir(source):
            os.makedirs(target, 0o755, exist_ok=True)
        elif os.path.isfile(source):
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        else:
            continue
        _mount(libc, source, target, None, MS_BIND | MS_REC)
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        _mount(libc, None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
        done.append(path)
    os.makedirs("/new/dev", 0o755, exist_ok=True)
    for device in DEVICES:
        os.close(os.open("/new" + device, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(libc, "/old" + device, "/new" + device, None, MS_BIND)
    os.makedirs("/new" + scratch, 0o755, exist_ok=True)
    if not os.path.lexists(
        "/new/tmp"
    ):  # programs write to /tmp by name; a tree may lie there, then it stays a directory
        os.symlink(scratch, "/new/tmp")


def _map_ids(proc: int, user: int, group: int) -> None:
    pid = os.getpid()
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        descriptor = os.open(f"{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _mount(
    libc: ctypes.CDLL, source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    done = libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(done, f"mount {target}")


def _pivot(libc: ctypes.CDLL, new_root: str, put_old: str) -> None:
    done = libc.syscall(PIVOT_ROOT[os.uname().machine], os.fsencode(new_root), os.fsencode(put_old))
    _check(done, "pivot_root")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
