"""A warm interpreter that forks one child for each program: `lean` with the standard library only, `full` with numpy and sympy.

It is started by exec, never by a fork of the trainer, and it never sees a program: code, input and output travel through
descriptors that it only passes on. It is single-threaded, which fork needs. Standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
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

from agentropy.sandbox import child, landlock, namespaces, program, seccomp

PR_SET_PDEATHSIG = 1
LOCKED, LOCK_FAILED = b"\x01", b"\x02"  # the first byte on stderr, before the program can write any
NO_ISOLATION = 77  # exit code: this kind of isolation can't be had here, another may

# numpy 2 imports its submodules on first use, so they are named; sympy fills its caches on first use, so they are warmed.
SUBMODULES = {
    "numpy": ("numpy", "numpy.linalg", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ma"),
    "sympy": ("sympy", "sympy.abc", "sympy.stats", "sympy.ntheory.modular"),
}
STANDARD = (
    "bisect, collections, collections.abc, copy, dataclasses, datetime, decimal, enum, fractions, functools, heapq, "
    "itertools, json, math, operator, random, re, statistics, string, textwrap, time, typing, unicodedata"
)
WARM_SYMPY = """
from sympy import *
x, y, z = symbols('x y z'); n = symbols('n', integer=True, positive=True); f = Function('f')
solve(x**2 - 5*x + 6, x); solve([x + y - 3, x - y - 1], [x, y]); solve(x**3 - 2*x + 1, x); solveset(x**2 - 2, x, S.Reals)
solve(2**x - 8, x); solve(sqrt(x) - 3, x); solve(x**2 - 4 > 0, x); linsolve([x + y - 2, x - y], x, y); nsolve(x**2 - 2, 1)
nonlinsolve([x**2 + y - 2, x - y], [x, y])
simplify(sin(x)**2 + cos(x)**2); simplify((x**2 - 1)/(x - 1)); trigsimp(2*sin(x)*cos(x)); radsimp(1/(1 + sqrt(2)))
expand((x + y)**4); factor(x**3 - 1); apart(1/(x*(x + 1))); together(1/x + 1/y); cancel((x**2 - 1)/(x - 1)); collect(x*y + x, x)
diff(sin(x)*exp(x), x); integrate(x**2*exp(-x), (x, 0, oo)); integrate(1/(1 + x**2), x); limit(sin(x)/x, x, 0)
series(exp(x), x, 0, 4); summation(1/n**2, (n, 1, oo)); summation(n, (n, 1, 10)); Sum(n, (n, 1, 3)).doit(); product(n, (n, 1, 4))
Matrix([[1, 2], [3, 4]]).det(); Matrix([[2, 1], [1, 2]]).eigenvals(); Matrix([[1, 2], [3, 4]]).inv(); Matrix([[1, 2], [2, 4]]).rref()
factorint(360); divisors(12); isprime(97); primerange(10); nextprime(10); totient(12); gcd(12, 18); lcm(4, 6); binomial(5, 2)
Rational(1, 3) + Rational(1, 6); N(pi, 20); sqrt(8); nsimplify(0.5); latex(x**2/2); str(pretty(x**2)); sympify('x**2 + 1')
Poly(x**2 - 1, x).all_roots(); roots(x**2 - 1, x); rsolve(f(n + 1) - 2*f(n), f(n)); dsolve(f(x).diff(x) - f(x), f(x))
Point(0, 0).distance(Point(3, 4)); Triangle(Point(0, 0), Point(4, 0), Point(0, 3)).area; Circle(Point(0, 0), 2).area
lambdify(x, x**2)(2); (sin(x) + 1).subs(x, pi/6).evalf(); floor(2.5); ceiling(2.5); Abs(-3); im(I); re(1 + I); log(8, 2); cbrt(27)
Eq(x, 1); Piecewise((x, x > 0), (0, True)).subs(x, 2); Interval(0, 1).contains(0.5); factorial(5); fibonacci(10); symbols('a:3')
"""


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
    absent = _preload(order["preload"])
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
        "absent": absent,
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
    root = os.geteuid() == 0
    walls = child.Walls(libc, version, ready, rules, jail, False, root, order["limits"])
    here = [path for path in sys.path if os.path.isdir(path)]
    if child.can_read_without_privilege(walls, order["first_user"] if root else None, here):
        return walls, missing
    if _has_capability(child.CAP_DAC_READ_SEARCH):
        return child.Walls(libc, version, ready, rules, jail, True, root, order["limits"]), missing
    if not root:
        raise OSError(f"this user can't read the interpreter's own files under {sys.base_prefix}")
    return child.Walls(libc, version, ready, rules, jail, False, False, order["limits"]), missing


def _has_capability(number: int) -> bool:
    header = struct.pack("=Ii", child.CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).capget(header, data)
    return bool(struct.unpack_from("=I", data)[0] >> number & 1)


def _preload(names: list[str]) -> list[str]:
    """Import and warm; returns the names that can't be imported here."""
    for name in STANDARD.split(", "):
        importlib.import_module(name)
    absent = []
    for name in names:
        try:
            for module in SUBMODULES.get(name, (name,)):
                importlib.import_module(module)
            if name == "sympy":
                exec(WARM_SYMPY, {})
        except ImportError as error:
            absent.append(f"{name}: {error}")
    sys.stdout.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    return absent


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
