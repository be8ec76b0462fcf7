"""Peak memory and time of training log-probabilities with a vocabulary of 151,936: in chunks, and the naive way.

    python benchmarks/logprob.py [--tokens 512 1024 2048] [--width 256] [--vocabulary 151936] [--json FILE]

Each measurement runs in a process of its own, forward and backward, log-probability and detached entropy of every
token; its peak resident memory is read from the operating system, less what the process held before the first logit.
Times are the best of `--repeat` runs and compare only within one table. The naive way is the usual code: all logits,
`log_softmax`, `gather`, entropy from the same `log_softmax`, and autograd.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def measure(way: str, tokens: int, width: int, vocabulary: int, repeat: int) -> dict[str, float]:
    """One way in this process: peak bytes above the start, best seconds, and a checksum of values and gradients."""
    import torch

    from agentropy.algorithms.logprob import token_logprobs

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator).div_(width**0.5).requires_grad_()
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    weight.grad = torch.zeros_like(weight)  # every trainer holds these, whichever way the loss is computed

    def step() -> float:
        if way == "chunked":
            got = token_logprobs(hidden, lambda h: h @ weight.T, ids)
            logp, entropy = got.logprobs, got.entropies
        else:
            log_softmax = (hidden @ weight.T).float().log_softmax(-1)
            logp = log_softmax.gather(-1, ids[:, None]).squeeze(-1)
            with torch.no_grad():
                entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        assert entropy is not None
        logp.mean().backward()  # type: ignore[no-untyped-call]
        return float(logp.sum() + entropy.sum())

    before = peak()
    seconds, checksum = [], 0.0
    for _ in range(repeat):
        hidden.grad = None
        start = time.perf_counter()
        checksum = step()
        seconds.append(time.perf_counter() - start)
    assert hidden.grad is not None
    return {
        "bytes": float(peak() - before),
        "seconds": min(seconds),
        "checksum": checksum,
        "gradient": float(hidden.grad.abs().sum()),
    }


def peak() -> int:
    """Largest resident set of this process so far, in bytes (Linux counts in KiB, macOS in bytes)."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def run(way: str, tokens: int, args: argparse.Namespace) -> dict[str, float] | None:
    """Measure in a fresh process; None where it did not get the memory."""
    sizes = [str(tokens), str(args.width), str(args.vocabulary), str(args.repeat)]
    command = [sys.executable, __file__, "--worker", way, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        print(f"{way} with {tokens} tokens failed: {last}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> int:
    """Measure both ways for each number of tokens and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--width", type=int, default=256, help="hidden size; it sets the cost of the matrix products")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"vocabulary {args.vocabulary:,}, hidden size {args.width}, float32, forward and backward")
    print(" tokens   naive MiB  chunked MiB  ratio  naive s  chunked s  ratio")
    for tokens in args.tokens:
        naive, chunked = run("naive", tokens, args), run("chunked", tokens, args)
        rows.append({"tokens": tokens, "naive": naive, "chunked": chunked})
        if naive is None or chunked is None:
            continue
        assert abs(naive["checksum"] - chunked["checksum"]) <= 1e-4 * abs(naive["checksum"])
        assert abs(naive["gradient"] - chunked["gradient"]) <= 1e-3 * abs(naive["gradient"])
        memory = [x["bytes"] / 2**20 for x in (naive, chunked)]
        times = [x["seconds"] for x in (naive, chunked)]
        print(
            f"{tokens:>7}  {memory[0]:>10,.0f}  {memory[1]:>11,.0f}  {memory[0] / max(memory[1], 1):>5.1f}  "
            f"{times[0]:>7.2f}  {times[1]:>9.2f}  {times[1] / times[0]:>5.2f}"
        )
    if args.json:
        out = {"vocabulary": args.vocabulary, "width": args.width, "rows": rows}
        Path(args.json).write_text(json.dumps(out) + "\n")
    return 0 if all(r["naive"] and r["chunked"] for r in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        way, *sizes = sys.argv[2:]
        print(json.dumps(measure(way, *(int(s) for s in sizes))))
        sys.exit(0)
    sys.exit(main())
