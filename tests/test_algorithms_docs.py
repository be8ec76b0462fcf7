"""The documentation says what the code does: its example reads, its options and metrics are all there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentropy.algorithms.filters import REASONS
from agentropy.algorithms.losses import LossConfig, LossInputs
from agentropy.batch import make_batch
from agentropy.methods import METHODS, make_method, method_options
from agentropy.trajectory import STATUSES, STOPS, from_json, to_json
from make_trajectories import EXAMPLE, trajectory

DOCS = Path(__file__).parents[1] / "docs"


def test_the_example_of_the_trajectory_page_reads() -> None:
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / "trajectory.md").read_text(), flags=re.DOTALL)
    assert json.loads(blocks[0]) == EXAMPLE
    assert to_json(from_json(EXAMPLE)) == EXAMPLE


def test_the_trajectory_page_names_every_word_of_the_format() -> None:
    page = (DOCS / "trajectory.md").read_text()
    keys = {"entropy_kind", "parent_id", "fork_at", "reward", "stop", "seconds", *EXAMPLE}
    missing = [word for word in {*STATUSES, *STOPS, *REASONS, *keys} if f"`{word}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_documented(name: str) -> None:
    page = (DOCS / "algorithms.md").read_text()
    assert [option for option in method_options(name) if f"`{option}`" not in page] == []


def test_every_metric_is_documented() -> None:
    page = (DOCS / "algorithms.md").read_text()
    turns = [([1.0], [1.0], ["ok"]), ([0.5], [], [])]
    batch = make_batch([trajectory(turns, score) for score in (1.0, 0.0)])
    method = make_method("tao-rl")
    shaped = method.shape(batch)
    weights = method.token_weights(batch, shaped.loss_mask)
    inputs = LossInputs(batch.logprobs, batch.logprobs, shaped.advantages, weights, shaped.loss_mask)
    _, stats = method.compute_loss(inputs)
    names = {*shaped.metrics, *stats.metrics()}
    short = {n: n.removeprefix("optim/clip_fraction") or n for n in names}
    undocumented = {n for n in names if f"`{n}`" not in page and f"`{short[n]}`" not in page}
    assert not undocumented
    assert LossConfig().aggregation in page
