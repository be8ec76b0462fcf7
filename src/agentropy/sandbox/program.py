"""What a locked child does with a program: run it whole or cell by cell, echo its last expression, report its failure.

Nothing here trusts what the program left behind: patched builtins, closed streams, trace functions and audit hooks
may all be in the way, so a failure is written straight to descriptor 2 and the process always ends in `os._exit`.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import itertools
import linecache
import os
import signal
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any

HERE = __file__
LONGEST_REPORT = 200_000
MOST_FRAMES = 1100  # a little more than the default recursion limit

# A program may patch what it likes, so this module keeps builtins of its own, and copies of what formats a traceback.
__builtins__ = dict(vars(builtins))  # type: ignore[assignment]
CLOSING = (threading._shutdown, atexit._run_exitfuncs)  # type: ignore[attr-defined]
collect = gc.collect
PRISTINE = tuple((vars(module), dict(vars(module))) for module in (builtins, traceback, linecache))
FUTURE_FLAGS = 0x1FF0000  # the compiler flags that `from __future__ import …` sets

# Supervisor and session child speak in fixed headers: length of the code and echo; outcome, CPU seconds and KiB of
# peak memory.
CELL = struct.Struct("<I?")
OUTCOME = struct.Struct("<BdI")
OK, ERROR, INTERRUPTED = 0, 1, 2


def run_script(source: bytes, echo: bool, quit_: Any = os._exit) -> None:
    """Run a whole program the way `python main.py` would, then leave the process. Never returns."""
    code = 1
    try:
        module = _fresh_main()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _run(source, "main.py", module.__dict__, echo)
        code = max(code, _shut_down(module))
    except BaseException as error:
        _write_error(b"".join((type(error).__name__.encode(), b"\n")))
    finally:
        quit_(code & 0xFF)


def run_session(channel: int, quit_: Any = os._exit) -> None:
    """Run cells from `channel` in one namespace until it closes, then leave the process. Never returns."""
    try:
        module = _fresh_main()
        count = 0
        while True:
            header = _read_exactly(channel, CELL.size)
            if header is None:
                break
            length, echo = CELL.unpack(header)
            source = _read_exactly(channel, length)
            if source is None:
                break
            count += 1
            started = time.process_time()
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                code = _run(source, f"<cell {count}>", module.__dict__, echo)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                code = 1
            _flush()
            outcome = OUTCOME.pack(OK if code == 0 else ERROR, time.process_time() - started, _peak_memory())
            os.write(channel, outcome)
    finally:
        quit_(1)


def _fresh_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    sys.path.insert(0, "")
    return module


def _run(source: bytes, name: str, namespace: dict[str, Any], echo: bool) -> int:
    """Run one piece of source. Returns the exit code; only a KeyboardInterrupt in our own lines can escape."""
    try:
        text = source.decode("utf-8", "surrogatepass").removeprefix("\ufeff")
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        for step in _compile(text, name, echo):
            exec(step, namespace)
        return 0
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as error:
        _report(error)
        return 1


def _compile(text: str, name: str, echo: bool) -> list[types.CodeType]:
    tree = ast.parse(text, name)
    last = tree.body[-1] if tree.body else None
    if not echo or not isinstance(last, ast.Expr):
        return [compile(tree, name, "exec", dont_inherit=True)]
    tree.body.pop()
    body = compile(tree, name, "exec", dont_inherit=True)
    flags = body.co_flags & FUTURE_FLAGS
    return [body, compile(ast.Interactive([last]), name, "single", flags, dont_inherit=True)]


def _exit_code(leaving: SystemExit) -> int:
    value = leaving.code
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value) & 0xFF
    try:
        message = str(value).encode("utf-8", "backslashreplace")
    except BaseException:
        message = b"SystemExit"
    _flush()
    _write_error(message + b"\n")
    return 1


def _report(error: BaseException) -> None:
    """Write the traceback, without our own frames, to descriptor 2."""
    kind = type(error)
    name = str(getattr(kind, "__name__", "error"))
    try:
        sys.settrace(None)
        sys.setprofile(None)
    except BaseException:
        pass  # an audit hook may forbid it
    _flush()
    text = ""
    try:
        text = _format(kind, error)
    except BaseException:
        pass
    if name not in text:
        try:
            text = f"{name}: {error}\n"
        except BaseException:
            text = f"{name}\n"
    if len(text) > LONGEST_REPORT:  # a failure stays an error, however long its message
        half, left_out = LONGEST_REPORT // 2, len(text) - LONGEST_REPORT
        text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
    _write_error(text.encode("utf-8", "backslashreplace"))


def _format(kind: type[BaseException], error: BaseException) -> str:
    """The traceback; of a line with several statements only the failing one is shown, and columns stay as they are."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == HERE:
        frames = frames.tb_next
    if isinstance(error, SyntaxError) and frames is not None and frames.tb_frame.f_code.co_filename == ast.__file__:
        frames = None
    error.__traceback__ = frames
    left_out = _cut_frames(frames)
    patched = [dict(current) for current, _ in PRISTINE]
    sources = dict(linecache.cache)
    try:
        for current, original in PRISTINE:
            current.update(original)
        linecache.cache = dict(sources)
        try:
            _show_only_what_failed(frames)
        except Exception:
            pass
        lines = traceback.format_exception(kind, error, frames)
        return "".join([f"[{left_out} calls left out]\n", *lines] if left_out else lines)
    finally:
        for (current, _), theirs in zip(PRISTINE, patched, strict=True):
            current.update(theirs)
        linecache.cache = sources


def _cut_frames(frames: types.TracebackType | None) -> int:
    """Cut the middle out of a very long traceback, which would take minutes to format. Returns the calls cut."""
    count, frame = 0, frames
    while frame is not None:
        count, frame = count + 1, frame.tb_next
    if frames is None or count <= MOST_FRAMES:
        return 0
    first = frames
    for _ in range(20):
        assert first.tb_next is not None
        first = first.tb_next
    last = first
    for _ in range(count - 71):
        assert last.tb_next is not None
        last = last.tb_next
    first.tb_next = last
    return count - 71


def _show_only_what_failed(frames: types.TracebackType | None) -> None:
    trees: dict[str, ast.Module] = {}
    while frames is not None:
        code, row = frames.tb_frame.f_code, frames.tb_lineno
        name = code.co_filename
        entry = linecache.cache.get(name)
        if entry is not None and len(entry) == 4 and entry[1] is None and 0 < row <= len(entry[2]):
            lines = list(entry[2])
            column = next(itertools.islice(code.co_positions(), frames.tb_lasti // 2, None))[2]
            if ";" in lines[row - 1] and column is not None:
                if name not in trees:
                    trees[name] = ast.parse("".join(lines))
                lines[row - 1] = _statement_at(trees[name], row, column, lines[row - 1])
                linecache.cache[name] = (entry[0], None, lines, name)
        frames = frames.tb_next


def _statement_at(tree: ast.Module, row: int, column: int, line: str) -> str:
    data = line.encode()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno == row == node.end_lineno:
            start, end = node.col_offset, node.end_col_offset or len(data)
            if start <= column < end:
                return (b" " * start + data[start:end] + b"\n").decode()
    return line


def _shut_down(module: types.ModuleType) -> int:
    """What the interpreter does at its end: wait for threads, run atexit functions, delete the globals, flush."""
    code = 0
    try:
        sys.settrace(None)
        sys.setprofile(None)
    except BaseException:
        pass
    for step in (*CLOSING, lambda: _clear(module)):
        try:
            step()
        except BaseException:
            code = 1
    _flush()
    return code


def _clear(module: types.ModuleType) -> None:
    namespace = module.__dict__
    for name in list(namespace):
        if name != "__builtins__":
            namespace[name] = None
    collect()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except BaseException:
            pass


def _write_error(message: bytes) -> None:
    try:
        while message:
            message = message[os.write(2, message) :]
    except BaseException:
        pass


def _read_exactly(channel: int, length: int) -> bytes | None:
    parts = []
    while length:
        part = os.read(channel, min(length, 1 << 16))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _peak_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
