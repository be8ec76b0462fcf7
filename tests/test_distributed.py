"""Several processes as one: gradients, trajectories, checkpoints and endings, with real torchrun and gloo on CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentropy.cli import main
from agentropy.policies.scoring import count_forwards, hidden_states
from agentropy.rollout.loop import Attempt
from agentropy.tasks.base import Task
from agentropy.training.distributed import ALONE, VARIABLES, deal_questions, launched
from agentropy.training.sharding import deal_rows
from distributed_ranks import CASES, qwen
from test_training_runs import environment, other_model, rows, sampled, wait_for, weights

__all__ = ["other_model"]
HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SMALL = [
    "--rollout.questions=3",
    "--rollout.samples=4",
    "--evaluation.questions=3",
    "--evaluation.samples=2",
    "--evaluation.greedy=false",
    "--checkpoint.every=2",
    "--seed=5",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `distributed_ranks.py` found, on each rank."""
    out = tmp_path_factory.mktemp("ranks")
    command = [*TORCHRUN, str(HERE / "distributed_ranks.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(found: list[dict[str, Any]], case: str) -> None:
    lead = found[0][case]
    assert lead["updates"] == 2 * CASES[case][3].get("epochs", 1)
    assert lead["gradients"][0] < 1e-5  # norm of the difference over the norm
    assert max(lead["gradients"]) < 1e-3  # later ones start from weights that differ, which Adam makes larger
    assert lead["weights"] < 1e-4
    assert lead["momenta"] < 1e-5


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_the_whole_batch(found: list[dict[str, Any]], case: str) -> None:
    expected, of_many = found[0][case]["metrics"]
    assert of_many.keys() == expected.keys()
    assert of_many == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert found[1][case]["metrics"][1] == of_many


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_part_only(found: list[dict[str, Any]], case: str) -> None:
    assert [rank[case]["freed"] for rank in found] == [0, 0]
    assert sum(rank[case]["held"] for rank in found) == pytest.approx(1.0)
    assert max(rank[case]["held"] for rank in found) < 0.6


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", CASES)
def test_an_optimiser_comes_back_out_of_its_whole_state(found: list[dict[str, Any]], case: str) -> None:
    assert found[0][case]["restored"]
    assert [rank[case]["loaded"] for rank in found] == [0.0, 0.0]


@pytest.mark.timeout(700)
def test_bfloat16_weights_have_float32_masters_in_shards(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["bfloat16"]["dtypes"] == ["torch.bfloat16"]
        assert 1e-7 < rank["bfloat16"]["moved"] <= rank["bfloat16"]["most"] < 1e-5


@pytest.mark.timeout(700)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(found: list[dict[str, Any]]) -> None:
    assert [rank["not finite"] for rank in found] == [{"skipped": 1.0, "same": True}] * 2


@pytest.mark.timeout(700)
def test_questions_are_shared_and_trajectories_come_back_in_order(found: list[dict[str, Any]]) -> None:
    assert found[0]["rollouts"]["whole"] == found[1]["rollouts"]["whole"]
    rank_of = [0, 1, 0, 1, 0]
    names = [f"q{q}/{i}/{k} by {rank_of[i]}" for i, q in enumerate((0, 1, 2, 0, 3)) for k in range(2)]
    assert found[0]["rollouts"]["whole"] == str(names)
    assert [rank["rollouts"]["one question"] for rank in found] == ["['q0/0/0 by 0']"] * 2


@pytest.mark.timeout(700)
def test_all_ranks_learn_of_a_failure_and_of_a_stop(found: list[dict[str, Any]]) -> None:
    quiet, loud = (rank["rollouts"] for rank in found)
    assert (quiet["fail"], loud["fail"]) == ("OtherRankFailed False", "RuntimeError False")
    assert (quiet["stop in evaluation"], loud["stop in evaluation"]) == (
        "OtherRankFailed False",
        "CancelledError False",
    )
    assert quiet["stop"] == "CancelledError True"
    assert loud["stop"].startswith("CancelledError")


def test_rows_are_dealt_evenly_by_tokens() -> None:
    lengths = [(7 * i) % 40 + 1 for i in range(40)]
    dealt = deal_rows(lengths, 3)
    assert sorted(i for part in dealt for i in part) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in part) for part in dealt]
    assert max(tokens) - min(tokens) <= 3
    assert deal_rows([5], 3) == [[0], [], []]


def test_a_question_stays_on_one_rank() -> None:
    tasks = [Task(f"q{i}", "", (), "math") for i in range(5)]
    attempts = [Attempt(t, f"{t.id}/{k}", 0) for t in tasks for k in range(3)]
    owners = deal_questions(attempts, 2)
    assert owners == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert deal_questions([], 2) == []


@pytest.mark.parametrize("prompts", [None, [40, 40, 40, 3, 40]])
def test_forwards_are_counted_as_they_are_run(prompts: list[int] | None) -> None:
    model = qwen()
    calls: list[int] = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    sequences = [[1] * 40 + [2] * n for n in (3, 5, 900, 1, 1100)]
    with torch.no_grad():
        hidden_states(model, sequences, prompts)
    assert count_forwards(sequences, prompts) == len(calls) > 1
    assert count_forwards([]) == 0


def test_one_process_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")  # torchrun with one process
    assert not launched()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched()
    assert ALONE.gather(3) == [3]
    assert ALONE.leads


def test_numbers_of_a_launcher_that_are_none_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "two")
    assert main(["train", "--steps=0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- whole runs -------------------------------------------------------------------------------------------------------


def torchrun(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "-m", "--", "agentropy", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def alone(*arguments: str) -> None:
    command = [sys.executable, "-m", "agentropy", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def layout(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def same_but_for_rounding(a: Path, b: Path) -> None:
    """Ids, scores and log-probabilities of all that was sampled, metrics, and the trained weights."""
    for x, y in zip(sampled(a), sampled(b), strict=True):
        assert x[:2] == y[:2]
        for (ids, logprobs), (other_ids, other_logprobs) in zip(x[2], y[2], strict=True):
            assert ids == other_ids
            assert logprobs == (other_logprobs if logprobs is None else pytest.approx(other_logprobs, abs=1e-3))
    for x, y in zip(rows(a), rows(b), strict=True):
        assert x.keys() == y.keys()
        for key in x.keys() - {"optim/sampler_gap_mean", "optim/sampler_gap_max"}:
            assert x[key] == (y[key] if y[key] is None else pytest.approx(y[key], rel=1e-2, abs=1e-4)), key
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert max(float((left[k] - right[k]).abs().max()) for k in left) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_two_processes_is_that_of_one_and_either_goes_on_with_it(tmp_path: Path) -> None:
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    arguments = ["--method=tao-rl", "--steps=4", *SMALL]
    alone(*arguments, f"--out={one}")
    done = torchrun(*arguments, f"--out={two}")
    assert done.stdout.count("step 4/4") == 1
    assert done.stdout.count(f"Run directory: {two}") == 1
    assert layout(one) == layout(two)
    same_but_for_rounding(one, two)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2

    torchrun("--method=tao-rl", "--steps=1", *SMALL, f"--out={mixed}")
    alone(f"--resume={mixed}", "--steps=2")
    torchrun(f"--resume={mixed}", "--steps=4")
    same_but_for_rounding(one, mixed)


def started(out: Path, method: str, stderr: int) -> subprocess.Popen[str]:
    """A run of two processes that goes on until something ends it."""
    command = [*TORCHRUN, "-m", "--", "agentropy", "train", f"--method={method}", "--steps=500", f"--out={out}", *SMALL]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ctrl_c_saves_and_leaves_on_all_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, "aepo", stderr=subprocess.PIPE) as process:
        wait_for(out / "trajectories" / "step-000002.jsonl", process, 300)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert stdout.count(f"agentropy train --resume {out}") == 1, stdout + stderr
    assert "[rank" not in stderr  # a rank's traceback; torchrun shows its own
    done = len(rows(out))
    assert (out / "checkpoints" / f"step-{done:06d}" / "state.pt").is_file()
    torchrun(f"--resume={out}", f"--steps={done + 1}")
    assert [r["step"] for r in rows(out)] == list(range(1, done + 2))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_ends_all(tmp_path: Path, victim: int) -> None:
    out = tmp_path / "run"
    with started(out, "grpo", stderr=subprocess.STDOUT) as process:
        wait_for(out / "trajectories" / "step-000001.jsonl", process, 300)
        ranks = [p for p in psutil.Process(process.pid).children() if "RANK" in p.environ()]
        assert len(ranks) == 2
        next(p for p in ranks if p.environ()["RANK"] == str(victim)).kill()
        died = time.monotonic()
        process.communicate(timeout=120)
        assert process.returncode not in (0, None)
        assert time.monotonic() - died < 100
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method=grpoo"], "grpoo"),
        (["--out=/proc/nowhere"], "/proc/nowhere"),
        (["--device=cuda:1"], "one for all 2 processes"),
        (["--resume=/no/such/run"], "no run directory"),
        (["--log=chalkboard"], "chalkboard"),
    ],
)
def test_a_wrong_option_is_said_once(tmp_path: Path, arguments: list[str], words: str) -> None:
    out = [] if arguments[0].startswith(("--out", "--resume")) else [f"--out={tmp_path / 'run'}"]
    done = torchrun(*arguments, *out, expect=1)  # torchrun's own code for a process that failed
    assert done.stderr.count("agentropy train: ") == 1, done.stderr
    assert words in done.stderr
    assert "[rank" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", [["--lora.rank=3", "--loss.kl_coef=0.1"], ["--dtype=bfloat16", "--loss.kl_coef=0.1"]])
def test_other_models_train_with_lora_and_in_bfloat16(tmp_path: Path, other_model: Path, extra: list[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    arguments = [f"--model={other_model}", "--world=arithmetic", "--protocol=tags", "--method=grpo", "--steps=1"]
    arguments += ["--loss.entropy_coef=0.01", "--optim.lr=1e-3", "--rollout.max_new_tokens=24", *extra, *SMALL]
    alone(*arguments, f"--out={one}")
    torchrun(*arguments, f"--out={two}")
    assert layout(one) == layout(two)
    assert rows(two)[0]["optim/updates"] == rows(one)[0]["optim/updates"] > 0
    [name] = (path.name for path in (one / "model").glob("*.safetensors"))  # LoRA's, or the model's
    a, b = (load_file(run / "model" / name) for run in (one, two))
    assert {k: (v.dtype, v.shape) for k, v in a.items()} == {k: (v.dtype, v.shape) for k, v in b.items()}
    torchrun(f"--resume={two}", "--steps=2")
    alone(f"--resume={two}", "--steps=3")
    assert [r["step"] for r in rows(two)] == [1, 2, 3]
