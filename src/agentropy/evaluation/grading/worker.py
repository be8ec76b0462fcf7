"""The process that grades what needs more than plain numbers: `python -m agentropy.evaluation.grading.worker`.

One JSON list [gold, answer] a line on stdin, one JSON list [reason, detail] a line on stdout, in order; between the
lines "loading" and "loaded" the clock stands still. The parent keeps the clock and kills the process when a line is
late; nothing here needs to be interruptible.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import warnings

MEMORY_LIMIT = 2 << 30


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, even while an answer keeps it busy."""
    import ctypes

    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Serve lines until stdin ends."""
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a library that prints must not be taken for an answer
    from agentropy.evaluation.grading import fallback
    from agentropy.evaluation.grading.symbolic import compare

    def say(line: str) -> None:
        answers.write(line + "\n")
        answers.flush()

    def load() -> bool:
        if "math_verify" in sys.modules:
            return True
        say("loading")  # the import takes a second or more, which is not the answer's fault
        found = fallback.load()
        say("loaded")
        return found

    say("ready")
    for line in sys.stdin.buffer:
        gold, answer = json.loads(line)
        try:
            reply = compare(gold, answer, load)
        except MemoryError:
            reply = ("parse_error", "the answer needs too much memory")
        except BaseException as error:  # math-verify's time-out derives from BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reply = ("parse_error", f"{type(error).__name__}: {error}"[:300])
        say(json.dumps(reply))


if __name__ == "__main__":
    main()
