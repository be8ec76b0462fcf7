"""`agentropy train` as a user runs it: in a process of its own, with the shipped agent, real tools and real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

SMALL = [
    "--rollout.questions=3",
    "--rollout.samples=4",
    "--evaluation.questions=4",
    "--evaluation.samples=2",
    "--checkpoint.every=3",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentropy.cli", "train", *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def rows(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def sampled(directory: Path) -> list[list[Any]]:
    """Ids, log-probabilities and scores of everything sampled in training."""
    out = []
    for path in sorted((directory / "trajectories").glob("step-*.jsonl")):
        for line in path.read_text().splitlines():
            t = json.loads(line)
            out.append([t["trajectory_id"], t["score"], [(s["ids"], s.get("logprobs")) for s in t["segments"]]])
    return out


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model" / "model.safetensors")


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "the run ended before it was to be stopped"
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def test_a_run_need_not_evaluate_before(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run("--method=grpo", "--steps=1", f"--out={out}", "--evaluation.before=false", *SMALL)
    assert "Evaluating after" in done.stdout
    assert "before.jsonl" not in done.stdout
    assert not (out / "evaluation-before.json").exists()
    assert not (out / "trajectories" / "test-before.jsonl").exists()
    assert json.loads((out / "evaluation-after.json").read_text())["eval/questions"] == 4


@pytest.mark.timeout(400)
def test_killed_and_resumed_equals_uninterrupted_bit_by_bit(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run("--method=tao-rl", "--steps=6", "--seed=5", f"--out={straight}", *SMALL)
    arguments = ["--method=tao-rl", "--steps=6", "--seed=5", f"--out={broken}", *SMALL]
    with subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, text=True, env=environment()) as process:
        wait_for(broken / "checkpoints" / "step-000003", process)
        process.send_signal(signal.SIGKILL)
    run(f"--resume={broken}")
    assert sampled(broken) == sampled(straight)
    assert rows(broken) == rows(straight)
    a, b = weights(straight), weights(broken)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert (straight / "evaluation-after.json").read_text() == (broken / "evaluation-after.json").read_text()
    # The weights did move, or the comparison would say nothing.
    from safetensors.torch import load_file

    first = load_file(straight / "checkpoints" / "step-000003" / "model" / "model.safetensors")
    assert any(not torch.equal(first[k], a[k]) for k in a)


@pytest.mark.timeout(200)
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(
        command("--method=grpo", "--steps=500", f"--out={out}", *SMALL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        wait_for(out / "trajectories" / "step-000002.jsonl", process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stdout + stderr
    assert f"agentropy train --resume {out}" in stdout
    assert "Traceback" not in stderr
    done = len(rows(out))
    assert (out / "checkpoints" / f"step-{done:06d}" / "state.pt").is_file()
    run(f"--resume={out}", f"--steps={done + 1}")
    assert [r["step"] for r in rows(out)] == list(range(1, done + 2))


@pytest.mark.timeout(200)
def test_a_run_directory_explains_itself(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"method": "tepo-sparse", "world": "facts", "steps": 2, "optim": {"lr": 1e-4}}))
    done = run(f"--config={config}", f"--out={out}", "--log=tensorboard", "--evaluation.every=1", *SMALL)
    assert "step 2/2 accuracy" in done.stdout
    assert "test Avg@2" in done.stdout
    assert str(out) in done.stdout
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert saved["method"] == "tepo-sparse"
    assert saved["optim"]["lr"] == 1e-4
    record = json.loads((out / "environment.json").read_text())
    assert record["packages"]["torch"]
    assert len(list((out / "tensorboard").glob("events*"))) == 1
    validation = [r for r in rows(out) if "validation/avg" in r]
    assert len(validation) == 2
    again = run("--method=grpo", f"--out={out}", expect=2)
    assert "not empty" in again.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method=grpoo"], "grpo"),
        (["--world=maths"], "arithmetic, facts"),
        (["--model=/no/such/model"], "/no/such/model"),
        (["--tools=calculator"], "no built-in tool 'calculator'"),
        (["--method_options.alfa=1"], "alpha"),
        (["--device=cuda:7"], "cuda:7"),
        (["--log=chalkboard"], "chalkboard"),
        (["--resume=/no/such/run"], "no run directory"),
        (["--protocol=morse"], "morse"),
    ],
)
def test_wrong_input_ends_in_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    from agentropy.cli import main

    out = tmp_path / "run"
    code, stderr = _captured(main, ["train", *arguments, *([] if "--resume" in arguments[0] else [f"--out={out}"])])
    assert code == 2
    assert words in stderr
    assert len(stderr.strip().splitlines()) == 1


def _captured(function: Any, arguments: list[str]) -> tuple[int, str]:
    import contextlib
    import io

    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = function(arguments)
    return code, stderr.getvalue()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint with the tokenizer of an embedded agent."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from agentropy.tasks.worlds import warm_start_path

    tokenizer = AutoTokenizer.from_pretrained(warm_start_path("arithmetic"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.timeout(200)
@pytest.mark.parametrize("extra", [["--lora.rank=4", "--loss.kl_coef=0.1"], ["--dtype=bfloat16", "--loss.kl_coef=0.1"]])
def test_other_models_train_with_lora_and_in_bfloat16(tmp_path: Path, other_model: Path, extra: list[str]) -> None:
    """tepo-dense and an entropy bonus give a random policy, which is never right, something to learn from."""
    out = tmp_path / "run"
    arguments = [f"--model={other_model}", "--world=arithmetic", "--protocol=tags", "--method=grpo", "--steps=2"]
    arguments += ["--loss.entropy_coef=0.01", "--optim.lr=1e-3", "--rollout.max_new_tokens=24", *extra, *SMALL]
    run(*arguments, f"--out={out}")
    metrics = rows(out)
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(
        m["optim/sampler_gap_max"] < (1e-4 if "lora" in extra[0] else 0.2) for m in metrics if m["optim/updates"]
    )
    assert (out / "model").is_dir()
    run(f"--resume={out}", "--steps=3")
    assert len(rows(out)) == 3
