"""Scratch directories for calls without a mount namespace of their own; the supervisor makes and deletes them.

What a program leaves in its directory is hostile: links, thousands of nested directories, names of any bytes, modes
of 0. Everything here works relative to directory descriptors and never follows a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import queue
import stat
import tempfile
import threading
import time

PREFIX = "agentropy-sandbox-"
SHARED_MEMORY = "/dev/shm"  # tmpfs: a directory is made and removed in microseconds, on a disk that takes milliseconds
FRESH_S = 10.0  # a younger directory may not be locked yet
ENOUGH_BYTES = 1 << 30  # in small ones (Docker's default has 64 MiB) programs could starve others of it


class Scratch:
    """One directory per supervisor, locked while it lives, with one subdirectory per running call."""

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=f"{PREFIX}{os.geteuid()}-{os.getpid()}-", dir=places()[0])
        os.chmod(self.path, 0o711)
        self._trash: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._fresh = itertools.count()
        self._cleaner: threading.Thread | None = None
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def make(self, name: str, user: int | None) -> str:
        """A fresh empty directory that only `user` can enter."""
        path = f"{self.path}/{name}"
        os.mkdir(path, 0o700)
        if user is not None:
            os.chown(path, user, user)
        return path

    def remove(self, path: str) -> None:
        """Delete a call's directory. What a program left in it is deleted aside, so that no clock has to wait."""
        try:
            os.rmdir(path)
        except OSError:
            aside = f"{self.path}/trash-{next(self._fresh)}"
            os.rename(path, aside)
            if self._cleaner is None:
                self._cleaner = threading.Thread(target=self._clean, daemon=True)
                self._cleaner.start()
            self._trash.put(aside)

    def _clean(self) -> None:
        while (path := self._trash.get()) is not None:
            remove_tree(path)

    def close(self) -> None:
        """Delete everything and give up the lock."""
        if self._cleaner is not None:
            self._trash.put(None)
            self._cleaner.join(5.0)
        remove_tree(self.path)
        os.close(self._lock)


def places() -> list[str]:
    """Where scratch directories may lie, the best first."""
    disk = tempfile.gettempdir()
    try:
        about = os.statvfs(SHARED_MEMORY)
    except OSError:
        return [disk]
    roomy = about.f_bavail * about.f_frsize >= ENOUGH_BYTES and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return [SHARED_MEMORY, disk] if roomy else [disk]


def sweep() -> None:
    """Delete the directories of supervisors of this user that were killed: nobody holds their lock."""
    found: list[os.DirEntry[str]] = []
    for place in places():
        with os.scandir(place) as entries:
            found += entries
    for entry in found:
        if not entry.name.startswith(f"{PREFIX}{os.geteuid()}-") or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            about = entry.stat(follow_symlinks=False)
            if about.st_uid != os.geteuid() or time.time() - about.st_ctime < FRESH_S:
                continue
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(entry.path)
            finally:
                os.close(descriptor)


def remove_tree(path: str) -> None:
    """Delete a directory without recursion, whatever its depth: what lies deeper is first moved up to the top."""
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        os.chmod(path, 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    fresh = itertools.count()
    try:
        with contextlib.suppress(OSError):
            os.fchmod(top, 0o700)
        progress = True
        while progress and (names := os.listdir(top)):
            progress = False
            for name in names:
                with contextlib.suppress(OSError):
                    _remove_one(top, name, fresh)
                    progress = True
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _remove_one(top: int, name: str, fresh: itertools.count[int]) -> None:
    if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
        os.unlink(name, dir_fd=top)
        return
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for child in os.listdir(inner):
            if stat.S_ISDIR(os.lstat(child, dir_fd=inner).st_mode):
                os.chmod(child, 0o700, dir_fd=inner)
                os.rename(child, f".moved-{next(fresh)}", src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def usage(path: str, most_bytes: int, most_files: int) -> bool:
    """Whether a directory holds more than it may. Looks no further than needed to say so."""
    total, count, pending = 0, 0, [path]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > most_bytes or count > most_files:
                        return True
        except OSError:
            continue  # the program deletes while we look
    return False
