"""Several processes that sample from one server: the first one pushes, and all see the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentropy.trajectory import read_jsonl
from sampler_server import agent_server, running
from test_training_runs import environment, rows

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "agentropy"]


@pytest.mark.timeout(600)
def test_two_processes_share_a_server(tmp_path: Path) -> None:
    server, out = agent_server(), tmp_path / "run"
    with running(server) as served:
        command = [
            *TORCHRUN, "train", "--method=tao-rl", "--steps=2", f"--out={out}", f"--rollout.server={served.url}",
            "--rollout.questions=4", "--rollout.samples=4", "--evaluation.questions=2", "--evaluation.samples=1",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.log.count("collective_rpc") == 3
    assert server.wrong == []
    steps = rows(out)
    assert len(steps) == 2
    assert all(step["sampler/gap_max"] < 1e-4 and step["entropy/exact"] == 1 for step in steps)
    assert sum(step["optim/updates"] for step in steps) > 0
    for path in (out / "trajectories").glob("step-*.jsonl"):
        assert all(t.entropy_kind == "exact" for t in read_jsonl(path))


def test_versions_are_needed(tmp_path: Path) -> None:
    with running(agent_server(versions=False)) as served:
        command = [*TORCHRUN, "train", "--steps=1", f"--out={tmp_path / 'run'}", f"--rollout.server={served.url}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode
    assert done.stderr.count("keeps no version of its weights") == 1
