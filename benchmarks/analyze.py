"""Trajectories a second, and memory, of `agentropy analyze` over a long file of trajectories.

    python benchmarks/analyze.py [--trajectories 20000] [--tokens 1000] [--workers N] [--json FILE]

The file has groups of 8 trajectories with three calls each, ids of a vocabulary of 150,000, and numbers written as an
engine writes them (float32 in full), some 40 KB a trajectory of 1,000 tokens. The command runs in a process of its own,
with all that it writes; memory is the largest sum over it and its workers of their resident sets less what they share.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES = 8
DISTINCT = 512
"""So many trajectories are made; the file repeats them under other names."""


def trajectory(rng: random.Random, tokens: int) -> dict[str, Any]:
    """One trajectory: prompt, then three times reasoning, call and result, then reasoning with the answer."""

    def single(x: float) -> float:
        return float(struct.unpack("f", struct.pack("f", x))[0])

    def segment(kind: str, n: int, **rest: Any) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": kind, "ids": [rng.randrange(150_000) for _ in range(n)]}
        if kind in ("reasoning", "call"):
            out["logprobs"] = [-single(rng.expovariate(2)) for _ in range(n)]
            out["entropies"] = [single(rng.expovariate(2)) for _ in range(n)]
        return out | rest

    unit = tokens // 20
    segments = [segment("prompt", 2 * unit)]
    for _ in range(3):
        code = f"print({rng.randrange(1000)} * {rng.randrange(1000)})"
        status = rng.choice(["ok", "ok", "ok", "error"])
        output = f"{rng.randrange(10**6)}\n" if status == "ok" else "NameError: name 'x' is not defined"
        result = {"status": status, "output": output, "seconds": rng.random()}
        segments.append(segment("reasoning", 3 * unit))
        segments.append(segment("call", unit, calls=[{"tool": "python", "arguments": {"code": code}}]))
        segments.append(segment("result", unit, results=[result]))
    used = sum(len(s["ids"]) for s in segments)
    segments.append(segment("reasoning", tokens - used))
    score = float(rng.random() < 0.5)
    return {"question": "How much is it?", "segments": segments, "answer": "1", "score": score, "stop": "answer"}


def write(path: Path, count: int, tokens: int) -> None:
    """The file, in one pass."""
    rng = random.Random(0)
    bodies = [json.dumps(trajectory(rng, tokens), separators=(",", ":"))[1:] for _ in range(min(DISTINCT, count))]
    with path.open("w") as file:
        for i in range(count):
            names = {"schema": "agentropy.trajectory/1", "question_id": f"q{i // SAMPLES}", "trajectory_id": f"t{i}"}
            file.write(json.dumps(names)[:-1] + "," + bodies[i % len(bodies)] + "\n")


def watch(process: subprocess.Popen[bytes]) -> int:
    """The largest sum of the proportional resident sets of a process and its children, until it ends."""
    import psutil

    parent, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        total = 0
        try:
            for p in (parent, *parent.children(recursive=True)):
                total += p.memory_full_info().pss
        except psutil.Error:
            pass
        peak = max(peak, total)
        time.sleep(0.2)
    return peak


def main() -> int:
    """Make the file, analyse it, print what it took; 1 if the command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--workers", type=int, help="default: all cores")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.jsonl"
        write(path, args.trajectories, args.tokens)
        size = path.stat().st_size
        command = [sys.executable, "-m", "agentropy.cli", "analyze", str(path), "--out", str(Path(folder) / "out")]
        if args.workers is not None:
            command += ["--workers", str(args.workers)]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak = watch(process)
        seconds = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        page = Path(folder) / "out" / "report.html"
        page_bytes = page.stat().st_size if page.exists() else 0
    result = {
        "trajectories": args.trajectories,
        "tokens": args.tokens,
        "file_bytes": size,
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "a_second": args.trajectories / seconds,
        "peak_bytes": peak,
        "page_bytes": page_bytes,
    }
    print(f"{args.trajectories} trajectories of {args.tokens} tokens, {size / 1e9:.2f} GB")
    rate = f"{seconds:.1f} s, {result['a_second']:.0f} a second, with {result['cpu_seconds']:.1f} s of CPU time"
    print(f"{rate}; {peak / 2**20:.0f} MiB at most; page of {page_bytes} bytes")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
