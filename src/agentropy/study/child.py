"""`python -m agentropy.study.child PID ARGUMENTS…`: the command line, in a process that does not outlive process PID.

The kernel sends SIGTERM when the parent dies, however it dies, and a training run then saves and leaves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command line with the arguments after PID."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        return 143
    from agentropy import cli

    sys.argv = [cli.__file__, *arguments]  # what the run records as its command
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
