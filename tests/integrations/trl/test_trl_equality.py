"""One recorded batch through `agentropy shape`, the embedded trainer's path and the TRL trainer: the same numbers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_runs import QUESTIONS, SAMPLES, Recorder, Replay, model_path, record_gradients, recorded, trainer

from agentropy.batch import make_batch
from agentropy.cli import main
from agentropy.methods import make_method
from agentropy.policies.loading import load_model
from agentropy.training.update import UpdateOptions, update
from agentropy.trajectory import Trajectory, write_jsonl

METHODS = ["tao-rl", "tepo-dense", "tepo-sparse", "simpletir"]


def replay(tmp_path: Path, trajectories: Any, **changes: Any) -> Any:
    run = trainer(tmp_path, Replay, **changes)
    run.replayed = trajectories
    return run


def generated(run: Any) -> dict[str, Any]:
    """TRL's batch as it goes into the updates, before it is shuffled."""
    run.model.train()
    rows = [run.train_dataset[i // SAMPLES] for i in range(QUESTIONS * SAMPLES)]
    out: dict[str, Any] = run._generate_and_score_completions(rows)
    return out


@pytest.mark.parametrize("name", METHODS)
def test_flags_rewards_and_advantages_agree(name: str, tmp_path: Path) -> None:
    trajectories = recorded()
    file, shaped_file = tmp_path / "t.jsonl", tmp_path / "shaped.jsonl"
    write_jsonl(file, trajectories)
    assert main(["shape", "--method", name, str(file), "--out", str(shaped_file)]) in (0, None)
    lines = [json.loads(line) for line in shaped_file.read_text().splitlines()]
    shaped = make_method(name).shape(make_batch(trajectories))

    run = replay(tmp_path, trajectories, method=name)
    out = generated(run)
    made = run._made
    assert [line["kept"] for line in lines] == shaped.kept.tolist() == made.shaped.kept.tolist()
    assert [line["why"] for line in lines] == list(shaped.why) == list(made.shaped.why)
    torch.testing.assert_close(made.shaped.reward, shaped.reward, atol=1e-5, rtol=0, equal_nan=True)
    width = out["completion_ids"].shape[1]
    for i, (t, line) in enumerate(zip(trajectories, lines, strict=True)):
        ours = torch.tensor([s.is_model for s in t.segments for _ in s.ids][len(t.prompt) :][:width])
        there = out["completion_mask"][i].bool()
        assert out["completion_ids"][i][there].tolist() == list(t.ids[len(t.prompt) :])[: int(there.sum())]
        found = out["advantages"][i][: len(ours)][ours]
        torch.testing.assert_close(found, torch.tensor(line["advantages"]), atol=1e-5, rtol=0)
        assert float(out["advantages"][i].abs().sum()) == pytest.approx(float(found.abs().sum()))
        assert out["loss_mask"][i].tolist() == [k < len(ours) and bool(ours[k]) and line["kept"] for k in range(width)]
    run.close()


def embedded_gradient(trajectories: Any, method: Any) -> list[torch.Tensor]:
    model, _ = load_model(model_path())
    batch = make_batch(trajectories)
    recorder = Recorder(model.parameters())
    options = UpdateOptions(minibatches=1, epochs=1, micro_batch_tokens=10**6, grad_clip=1e9, temperature=1.0)
    update(model, recorder, method, batch, method.shape(batch), options, seed=0)
    (found,) = recorder.seen
    return found


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("tao-rl", {}, {}),
        ("tepo-dense", {"aggregation": "sequence-mean"}, {"loss_type": "grpo"}),
        ("aepo", {"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
        ("grpo", {"aggregation": "sequence-sum-norm", "norm_constant": 1024.0}, {"loss_type": "dr_grpo"}),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_of_one_update_agrees(
    name: str, options: dict[str, Any], settings: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    # Other old probabilities than the model's, so that some ratios are clipped.
    trajectories = [shifted(t, 0.4 * (i % 3 - 1)) for i, t in enumerate(recorded())]
    expected = embedded_gradient(trajectories, make_method(name, **options))
    sizes = {
        "per_device_train_batch_size": QUESTIONS * SAMPLES // accumulate,
        "gradient_accumulation_steps": accumulate,
        "max_grad_norm": 1e9,
    }
    run = replay(tmp_path, trajectories, method=name, settings=sizes | settings)
    recorder = record_gradients(run)
    run.train()
    (found,) = recorder.seen
    largest = max(float(g.abs().max()) for g in expected)
    assert largest > 1e-3
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * largest, rtol=1e-4)
    run.close()


def shifted(t: Trajectory, by: float) -> Trajectory:
    segments = [
        dataclasses.replace(s, logprobs=tuple(min(p - by, 0.0) for p in s.logprobs)) if s.logprobs else s
        for s in t.segments
    ]
    return dataclasses.replace(t, segments=tuple(segments))


def test_two_updates_of_a_batch_have_denominators_of_their_own(tmp_path: Path) -> None:
    """Four micro-batches, two an update: each update's weights add up to one over its own tokens."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    run = replay(tmp_path, recorded(), method="grpo", settings=sizes | {"max_steps": 2})
    run.train()
    parts = run._buffered_inputs
    assert len(parts) == 4
    for first in (0, 2):
        window = parts[first : first + 2]
        assert sum(float(p["weights"].sum()) for p in window) == pytest.approx(1.0, abs=1e-5)
        assert all(bool((p["weights"] > 0).eq(p["loss_mask"]).all()) for p in window)
    assert sorted(int(r) for p in parts for r in p["row"]) == list(range(16))
    run.close()


PROCESSES = """
import sys
import torch
sys.path[:0] = {paths!r}
from trl_runs import Replay, record_gradients, recorded, sampled_in_rounds, trainer
run = trainer({out!r}, Replay, method="tao-rl", settings={settings!r})
run.replayed = recorded()
recorder = record_gradients(run)
run.train()
run.close()
rounds = sampled_in_rounds({out!r}, {settings!r})
torch.save(
    [recorder.seen, run.state.log_history, rounds.state.log_history, [p.detach() for p in rounds.model.parameters()]],
    {out!r} + f"/{{run.accelerator.process_index}}.pt",
)
"""


@pytest.mark.timeout(300)
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """Groups of 4 over processes with 6 rows each, so that one lies across both."""
    shared = {"max_grad_norm": 1e9, "gradient_accumulation_steps": 2}
    alone = trainer(tmp_path, Replay, method="tao-rl", settings=shared | {"per_device_train_batch_size": 6})
    alone.replayed = recorded()
    single = record_gradients(alone)
    alone.train()
    alone.close()
    here = Path(__file__).parent
    script = tmp_path / "run.py"
    settings = shared | {"per_device_train_batch_size": 3}
    script.write_text(PROCESSES.format(paths=[str(here), str(here.parents[1])], out=str(tmp_path), settings=settings))
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--rdzv_endpoint", "localhost:0", str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in (0, 1))
    (expected,), (found,) = single.seen, first[0]
    largest = max(float(g.abs().max()) for g in expected)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * largest, rtol=1e-4)
    for name in ("filter/kept", "optim/loss_tokens", "reward", "completions/mean_length", "optim/ratio_mean"):
        assert first[1][0][name] == pytest.approx(alone.state.log_history[0][name], rel=1e-5)
    # Sampled by themselves, in rounds for which one process has more rows than the other, or none.
    record = first[2][0]
    assert record["filter/rounds"] > 1
    assert record["optim/sampler_gap_max"] < 1e-4
    for a, b in zip(first[3], second[3], strict=True):
        assert torch.equal(a, b)
