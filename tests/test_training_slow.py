"""A real pretrained model, real questions, the real Python tool: SmolLM2-135M on GSM8K."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentropy.errors import UserError


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_trains_on_gsm8k_with_python(tmp_path: Path, shared_dir: Path) -> None:
    from agentropy.policies.loading import find_smollm2

    try:
        model = find_smollm2()
    except UserError as error:
        pytest.skip(str(error))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "agentropy.cli", "train", f"--model={model}", "--tools=python", "--steps=2"]
    command += [f"--tasks={shared_dir / 'data' / 'train_gsm8k.jsonl'}", f"--out={out}", "--method=grpo"]
    # A model of this size is hardly ever right, so an entropy bonus gives the update something to do.
    command += [
        "--rollout.questions=2",
        "--rollout.samples=3",
        "--rollout.max_new_tokens=64",
        "--loss.entropy_coef=1e-3",
    ]
    command += [
        "--evaluation.questions=2",
        "--evaluation.samples=1",
        "--evaluation.greedy=false",
        "--checkpoint.keep=1",
    ]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2]
    for m in metrics:
        assert m["optim/updates"] >= 1
        assert m["optim/sampler_gap_max"] < 1e-3
        assert 0 < m["entropy/model"] < 11

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    for line in (out / "trajectories" / "step-000001.jsonl").read_text().splitlines():
        t = json.loads(line)
        prompt = tokenizer.decode(t["segments"][0]["ids"])
        assert t["question"] in prompt
        assert '"name": "python"' in prompt
        assert prompt.endswith("<|im_start|>assistant\n")
        sampled = sum(len(s["ids"]) for s in t["segments"] if s["kind"] in ("reasoning", "call"))
        assert 0 < sampled <= 64
