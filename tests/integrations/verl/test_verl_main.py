"""The whole of verl's `main_ppo` on a CPU, started as a user starts it: a step of TAO-RL on an embedded agent, and,
started again, a second one from verl's checkpoint.

Real: Hydra, Ray, TransferQueue, verl's dataset and loaders, the FSDP2 actor (gloo, two processes), old
log-probabilities and entropies, padding, balancing, the optimiser, the weight push after each step, checkpoints. Ours
in place of vLLM: the local engine as the rollout servers (verl_on_cpu.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from verl_runs import CPU, PROMPT, QUESTIONS, RESPONSE, SAMPLES, model_path, write_tasks


@pytest.mark.timeout(2400)
def test_two_starts_of_main_ppo(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    env = os.environ | {
        "PYTHONPATH": here,
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "RAY_COLOR_PREFIX": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    numbers = {"questions": QUESTIONS, "samples": SAMPLES, "prompt-tokens": PROMPT, "response-tokens": RESPONSE}
    command = [sys.executable, "-m", "agentropy.cli", "launch", "verl", "--method", "tao-rl", "--protocol", "tags"]
    command += ["--model", model_path(), "--tasks", str(write_tasks(tmp_path / "tasks.jsonl"))]
    command += [part for name, n in numbers.items() for part in (f"--{name}", str(n))]
    command += ["--gpus", "2", "--lr", "1e-3", "--out", str(tmp_path / "run")]
    overrides = [*CPU, "trainer.save_freq=1", "+agentropy.max_result_tokens=64"]
    for step in (1, 2):
        more = ["--steps", str(step), *overrides, f"trainer.val_before_train={step == 1}"]
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
        check(done.stdout, step)
    # Started once more from its checkpoint, it trains on the second batch of questions only.
    assert set(logged(done.stdout)) == {"2"}


def logged(shown: str) -> dict[str, str]:
    """What verl printed of each step."""
    return dict(re.findall(r"step:(\d+) - (.*)", re.sub(r"np\.\w+\((.*?)\)", r"\1", shown)))


def check(shown: str, step: int) -> None:
    """What verl logged of the step, and of the validation before the first one."""
    lines = logged(shown)
    assert str(step) in lines, shown[-4000:]
    assert step > 1 or "val-core" in lines["0"], "validation before training"
    m = {k: float(v) for k, v in re.findall(r"(\S+?):(-?[\d.]+(?:e-?\d+)?)(?: -|$)", lines[str(step)])}
    assert m["filter/questions_sampled"] >= QUESTIONS
    assert m["filter/questions_failed"] == 0
    assert m["tool/valid_rate"] > 0, "python ran in its sandbox"
    assert m["entropy/exact"] == 1
    # The actor computes what the server sampled with, so it has the weights that it should have.
    assert m["training/rollout_probs_diff_max"] < 1e-3
    assert m["training/off_policy/trajectory_staleness/max"] == 0
    assert m["optim/skipped_empty"] == 0
    # One update of the whole batch: ratios are 1, and the loss is minus the mean advantage.
    assert m["actor/optim/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert m["actor/optim/loss"] == pytest.approx(-m["reward/advantage_mean"], abs=1e-4)
    assert m["actor/optim/loss_tokens"] > 0
    assert m["actor/grad_norm"] > 0
    assert m["actor/lr"] == pytest.approx(1e-3)
