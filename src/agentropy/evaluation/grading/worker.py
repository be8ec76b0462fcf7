"""The process that grades what needs more than plain numbers: `python -m agentropy.evaluation.grading.worker`.

One JSON list [gold, answer] a line on stdin, one JSON list [reason, detail] a line on stdout, in order; between the
lines "loading" and "loaded" the clock stands still. The parent keeps the clock and kills the process when a line is
late; nothing here needs to be interruptible.
"""

from __future__ import annotations

import json
import sys

from agentropy.worker_process import begin


def main() -> None:
    """Serve lines until stdin ends."""
    answers = begin()
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
