"""A warm interpreter that forks a child for each program: `lean` has the standard library, `full` numpy, sympy.

It is started by exec, never by a fork of the trainer, and it never sees a program: code, input and output travel
through descriptors that it only passes on. It is single-threaded, which fork needs. Standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import select
import socket
import struct
import sys
import time
from typing import Any

from agentropy.sandbox import child, landlock, namespaces, preload, program, seccomp

PR_SET_PDEATHSIG = 1
LOCKED, LOCK_FAILED = b"\x01", b"\x02"  # the first byte on stderr, before the program can write any
NO_ISOLATION = 77  # exit code: this kind of isolation can't be had here, another may


def main(argument: str) -> None:
    """Serve orders from the socket named in the JSON `argument` until the supervisor goes away."""
    order = json.loads(argument)
    channel = socket.socket(fileno=order["fd"])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != order["supervisor"]:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        walls, missing = _build_walls(order, libc)
    except OSError as error:
        channel.send(json.dumps({"failed": str(error)}).encode())
        sys.exit(NO_ISOLATION)
    preload.load(order["preload"])
    gc.collect()
    gc.freeze()
    about = {
        "ready": True,
        "landlock": walls.landlock_abi,
        "seccomp": walls.filter is not None,
        "namespaces": order["namespaces"],
        "user_namespace": walls.jail is not None and walls.jail.own_user_namespace,
        "own_user": walls.change_user,
        "keep_dac": walls.keep_dac,
        "missing": missing,
        "threads": _thread_count(walls),
    }
    channel.send(json.dumps(about).encode())
    _serve(channel, walls)


def _build_walls(order: dict[str, Any], libc: ctypes.CDLL) -> tuple[child.Walls, list[str]]:
    missing = []
    version = landlock.abi(libc)
    if not version:
        missing.append("Landlock (needs Linux 5.13 or later, with landlock among the security modules in use)")
    try:
        ready: seccomp.Filter | None = seccomp.build(version)
    except OSError as error:
        ready = None
        missing.append(f"seccomp ({error})")
    trees = order["trees"]
    jail = namespaces.build(libc, trees, child.SCRATCH_IN_JAIL) if order["namespaces"] else None
    sys.path[:] = [path for path in sys.path if any(path == tree or path.startswith(tree + "/") for tree in trees)]
    if not order["unsafe"] and (ready is None or (not version and jail is None)):
        raise OSError("; ".join(missing))
    rules = child.prepare_rules(version, trees)
    if not os.path.isdir(os.path.dirname(os.__file__)):
        raise OSError(f"{sys.base_prefix} can't be shown inside a namespace")
    # A user of its own for each call is best; a capability to read is kept only where the interpreter needs it.
    users = [order["first_user"], None] if os.geteuid() == 0 else [None]
    keeps = [False, True] if _has_capability(child.CAP_DAC_READ_SEARCH) else [False]
    here = [path for path in sys.path if os.path.isdir(path)]
    for user in users:
        for keep in keeps:
            if child.can_read(here, user, keep, libc):
                walls = child.Walls(libc, version, ready, rules, jail, keep, user is not None, order["limits"])
                return walls, missing
    raise OSError(f"this user can't read the interpreter's own files under {sys.base_prefix}")


def _has_capability(number: int) -> bool:
    header = struct.pack("=Ii", child.CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).capget(header, data)
    return bool(struct.unpack_from("=I", data)[0] >> number & 1)


def _serve(channel: socket.socket, walls: child.Walls) -> None:
    me = os.getpid()
    alive: dict[int, tuple[int, int]] = {}  # pidfd -> pid, number of the order
    poll = select.epoll()
    poll.register(channel.fileno(), select.EPOLLIN)
    gc.disable()
    top = os.dup(0)  # everything opened later has a higher number
    while True:
        for descriptor, _event in poll.poll():
            if descriptor in alive:
                pid, number = alive.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _, status, usage = os.wait4(pid, 0)
                cpu = usage.ru_utime + usage.ru_stime
                channel.send(json.dumps({"id": number, "status": status, "cpu": cpu, "rss": usage.ru_maxrss}).encode())
                continue
            message, descriptors, _flags, _address = socket.recv_fds(channel, 4096, 8)
            if not message:
                return
            order = json.loads(message)
            started = time.monotonic()
            try:
                pid = os.fork()
            except OSError as error:
                channel.send(json.dumps({"id": order["id"], "failed": f"fork: {error}"}).encode())
                pid = -1
            if pid == 0:
                _live(walls, order, descriptors, me, top)
            for passed in descriptors:
                os.close(passed)
            if pid > 0:
                watch = os.pidfd_open(pid)
                alive[watch] = (pid, order["id"])
                poll.register(watch, select.EPOLLIN)
                text = json.dumps({"id": order["id"], "pid": pid, "at": started}).encode()
                socket.send_fds(channel, [text], [watch])


def _live(walls: child.Walls, order: dict[str, Any], descriptors: list[int], zygote: int, top: int) -> None:
    """The child's life; `descriptors` are stdin, stdout, stderr and the code or the cell channel. Never returns."""
    quit_ = os._exit
    try:
        for target, source in enumerate(descriptors[:3]):
            os.dup2(source, target)
        os.dup2(descriptors[3], top + 1)
        os.closerange(top + 2, 1 << 20)  # what belongs to other children
        child.lock_in(walls, order, zygote)
        os.dup2(top + 1, 3)
        os.closerange(4, 1 << 20)
        _seed(order["seed"])
        gc.enable()
    except BaseException as error:
        os.write(2, LOCK_FAILED + f"{type(error).__name__}: {error}".encode())
        quit_(1)
    os.write(2, LOCKED)
    if order["session"]:
        program.run_session(3)
    source_text = os.pread(3, os.fstat(3).st_size, 0)
    os.close(3)
    program.run_script(source_text, order["echo"])


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if "sympy" in sys.modules:
        sys.modules["sympy.core.random"].seed(seed)


def _thread_count(walls: child.Walls) -> int:
    try:
        where = walls.jail.proc if walls.jail is not None else os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        tasks = os.open(f"{os.getpid()}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=where)
        count = len(os.listdir(tasks))
        os.close(tasks)
        return count
    except OSError:
        return 1
