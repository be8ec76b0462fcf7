"""ARPO and AEPO train the shipped agent with its real tools, and a rerun is the same bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentropy.batch import make_batch
from agentropy.methods import make_method
from agentropy.trajectory import Trajectory, read_jsonl
from test_training_runs import rows, run, sampled

SMALL = ["--steps=2", "--seed=3", "--rollout.questions=4", "--rollout.samples=6", "--evaluation.questions=0"]
OFTEN = ["--method_options.tau=0.2", "--method_options.base=0.6", "--method_options.decision=draw"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["arpo", "aepo"])
def test_two_steps(tmp_path: Path, method: str) -> None:
    out = tmp_path / "run"
    run(f"--method={method}", f"--out={out}", *SMALL, *OFTEN)
    steps = rows(out)
    assert len(steps) == 2
    for number, step in enumerate(steps, 1):
        leaves = list(read_jsonl(out / "trajectories" / f"step-{number:06d}.jsonl"))
        for i in range(0, 24, 6):
            check_tree_of_a_file(leaves[i : i + 6])
        assert step["rollout/roots"] + step["rollout/forks"] == len(leaves) == 24
        assert step["rollout/roots"] == sum(t.parent_id is None for t in leaves)
        assert step["optim/updates"] >= 1
        assert step["optim/sampler_gap_max"] < 1e-4  # what a branch inherited is what the model gives there
        assert step["batch/shared_tokens"] > 0
    assert sum(step["rollout/forks"] for step in steps) > 0
    if method == "aepo":
        assert all(step["entropy/bonus_share"] > 0.01 for step in steps)
    shaped = make_method(method).shape(make_batch(leaves))
    assert shaped.metrics["batch/shared_tokens"] == steps[-1]["batch/shared_tokens"]
    if method == "arpo":
        again = tmp_path / "again"
        run(f"--method={method}", f"--out={again}", *SMALL, *OFTEN)
        assert sampled(again) == sampled(out)
        assert json.dumps(rows(again)) == json.dumps(steps)


def check_tree_of_a_file(leaves: list[Trajectory]) -> None:
    make_batch(leaves)
    assert len({t.trajectory_id for t in leaves}) == len(leaves)
    for t in leaves:
        parent = next((p for p in leaves if p.trajectory_id == t.parent_id), None)
        assert (parent is None) == (t.parent_id is None)
        if parent is not None:
            assert t.inherited == parent.segments[: len(t.inherited)]
