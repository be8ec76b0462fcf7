"""What a run gives back, what it may use, and what this machine offers: records shared by every kind of sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "error", "timeout", "crash", "output_limit", "disk_limit", "sandbox_error"]

TRACEBACK_START = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use. Sizes in the unit their name ends in; the wall-clock limit is an argument of each call."""

    memory_mb: int = 1024
    """Address space of the process."""
    file_mb: int = 16
    """Largest single file."""
    descriptors: int = 64
    threads: int = 32
    """Enforced where the call has a user of its own (root, or user namespaces); else memory alone bounds threads."""
    scratch_mb: int = 32
    scratch_files: int = 2048
    code_kb: int = 1024
    output_kb: int = 32
    """Kept of each stream: the first half and the last half."""
    output_kill_mb: int = 4
    """A program that writes more than this, both streams together, is stopped."""
    queue: int = 10_000
    """Calls that may wait for a free slot."""
    sessions: int = 256
    """Live sessions; beyond, the one idle for longest is ended."""
    session_idle_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The outcome of one call. A failing program is a result, never an exception."""

    status: Status
    """`ok`: the program ended with exit code 0, nothing more. `sandbox_error`: our failure, not the program's."""
    stdout: str = ""
    stderr: str = ""
    duration: float = 0.0
    """Seconds from the start of the program (not of the call: see `queue_time`) to its end."""
    cpu_time: float = 0.0
    """Seconds of CPU, locking-in included."""
    queue_time: float = 0.0
    """Seconds the call waited for a free slot."""
    max_rss_mb: int = 0
    exit_code: int | None = None
    """None where a signal ended the program; minus the signal's number is not used."""
    truncated: bool = False
    """Whether the middle of a stream was left out."""
    session_reset: bool = False
    """Whether the session's variables were lost, before or during this call."""
    unsafe: bool = False
    """Whether the program ran without the promised isolation (`allow_unsafe=True` on a machine that lacks it)."""

    @property
    def ok(self) -> bool:
        """Whether the program ran to its end without failure."""
        return self.status == "ok"

    def for_model(self, max_chars: int = 2000, traceback_lines: int = 8) -> str:
        """The text a model should see: stdout, then the last useful lines of stderr, then what went wrong in words."""
        parts = [self.stdout.rstrip("\n")] if self.stdout.strip() else []
        if self.stderr.strip():
            parts.append(last_lines(self.stderr, traceback_lines))
        if self.session_reset:
            parts.append("[the interpreter was restarted: earlier variables are gone]")
        note = _NOTES.get(self.status)
        if note is not None:
            parts.append(note.format(seconds=self.duration))
        return cut_middle("\n".join(parts), max_chars)


_NOTES = {
    "timeout": "[stopped: time limit of {seconds:.1f} s reached]",
    "crash": "[the interpreter crashed]",
    "output_limit": "[stopped: too much output]",
    "disk_limit": "[stopped: too many or too large files]",
    "sandbox_error": "[the sandbox failed; the program may not have run]",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which walls are up. `level` is `namespaces`, `strict` (Landlock and seccomp), `remote` or `unsafe`."""

    level: str
    landlock_abi: int = 0
    seccomp: bool = False
    namespaces: bool = False
    own_user: bool = False
    """Whether every call runs as a user that owns nothing else."""
    workers: int = 0
    preloaded: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    """What the self-test tried at the start and found denied."""
    missing: tuple[str, ...] = ()
    """What is not in force, each with the reason."""
    details: dict[str, str] = field(default_factory=dict)


def cut_middle(text: str, max_chars: int) -> str:
    """At most about `max_chars` characters: beginning and end, with a count of what was left out between them."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars} characters left out ...]\n{text[len(text) - tail :]}"


def last_lines(stderr: str, lines: int) -> str:
    """The end of stderr, where a traceback says what happened; its first line is kept when it has to be cut."""
    rows = stderr.rstrip("\n").split("\n")
    if len(rows) <= lines:
        return "\n".join(rows)
    kept = rows[-lines:]
    if TRACEBACK_START in rows[:-lines]:
        kept = [TRACEBACK_START, "  ...", *kept]
    return "\n".join(kept)
