"""All benchmarks one after the other: `python -m benchmarks [NAME …]`, which `make bench` runs.

Each runs in a process of its own with its defaults and prints its own tables; docs/benchmarks.md says how to read them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "engine": ["benchmarks/engine.py"],
    "sandbox": ["benchmarks/sandbox.py"],
    "logprob": ["benchmarks/logprob.py"],
    "grading": ["benchmarks/grading.py"],
    "trl": ["-m", "benchmarks.trl"],
    "analyze": ["benchmarks/analyze.py"],
}


def main() -> int:
    """Run the benchmarks that were named, or all; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(COMMANDS)}; default: all")
    names = parser.parse_args().names or list(COMMANDS)
    unknown = [name for name in names if name not in COMMANDS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(COMMANDS)}")
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        started = time.perf_counter()
        if subprocess.run([sys.executable, *COMMANDS[name]], cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
