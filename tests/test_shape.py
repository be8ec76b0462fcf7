"""`agentropy shape`: from a file of trajectories to one line each, and one clear line where that cannot be."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentropy.algorithms.losses import LossConfig
from agentropy.commands import shape
from agentropy.errors import UserError
from agentropy.methods import METHODS, method_options
from agentropy.trajectory import Trajectory, from_json, write_jsonl
from make_trajectories import EXAMPLE, trajectory

KEYS = ["trajectory_id", "kept", "why", "reward", "turn_rewards", "entropy_change", "entropy_reducing"]
KEYS += ["advantages", "bonus"]


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    shape.register(parser.add_subparsers())
    return parser.parse_args(["shape", *arguments])


def shaped(path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = path.with_suffix(".shaped")
    args = command(*arguments, "--out", str(out), str(path))
    assert args.run(args) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def error(path: Path, *arguments: str) -> str:
    args = command(*arguments, str(path))
    with pytest.raises(UserError) as caught:
        args.run(args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """The documented example, once right, once wrong, and once lost."""
    rows = [from_json(EXAMPLE | {"trajectory_id": name, "score": s}) for name, s in zip("abc", (1.0, 0.0, None))]  # noqa: B905
    path = tmp_path / "t.jsonl"
    write_jsonl(path, rows)
    return path


def test_the_documented_example(group: Path) -> None:
    rows = shaped(group, "--method", "tepo-dense")
    assert [list(row) for row in rows] == [KEYS] * 3
    assert rows[0] == {
        "trajectory_id": "a",
        "kept": True,
        "why": None,
        "reward": 1.0,
        "turn_rewards": [1.5, 1.0],
        "entropy_change": [-0.625],
        "entropy_reducing": [True],
        "advantages": pytest.approx([1.16667] * 4 + [0.5] * 2, abs=1e-4),
        "bonus": [False] * 6,
    }
    assert rows[2]["kept"] is False
    assert rows[2]["why"] == "lost"
    assert rows[2]["reward"] is None
    assert rows[2]["turn_rewards"] == [None, None]
    assert rows[2]["advantages"] == [0.0] * 6


def test_the_bonus_stands_at_its_token(group: Path) -> None:
    right, wrong, _ = shaped(group, "--method", "tao-rl", "--q-h", "0.5", "--option", "alpha=0.1")
    assert right["bonus"] == wrong["bonus"] == [False, False, False, False, True, False]
    assert right["advantages"][4] != right["advantages"][3] == pytest.approx(0.70711, abs=1e-4)
    assert right["advantages"][4] == pytest.approx(-wrong["advantages"][4])


def test_undefined_changes_are_null(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", [trajectory([([], [1.0], ["ok"]), ([1.0], [1.0], ["ok"]), ([0.5], [], [])])])
    (row,) = shaped(tmp_path / "t.jsonl", "--method", "grpo")
    assert row["entropy_change"] == [None, -0.5]
    assert row["entropy_reducing"] == [False, True]


def test_one_trajectory_without_entropies_leaves_the_others_theirs(tmp_path: Path) -> None:
    turns = [([1.0], [1.0], ["ok"]), ([0.5], [], [])]
    rows = [trajectory(turns), trajectory(turns, 0.0, with_entropies=False)]
    half = rows[0].segments  # the second turn's entropies were not recorded, and no earlier turn stands in for it
    lacking = dataclasses.replace(half[-1], entropies=None)
    more = [([2.0], [1.0], ["ok"]), ([0.1], [], [])]
    longer = dataclasses.replace(rows[0], segments=(*half[:-1], lacking, *trajectory(more).segments[2:]))
    write_jsonl(tmp_path / "t.jsonl", [*rows, longer])
    out = shaped(tmp_path / "t.jsonl", "--method", "grpo")
    assert [row["entropy_change"] for row in out] == [[-0.5], [None], [None, None]]
    assert [row["entropy_reducing"] for row in out] == [[True], [False], [False, False]]
    assert all(row["kept"] for row in out)


def test_lines_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [trajectory([([1.0], [], [])], float(i % 2), question=f"q{i % 3}", name=str(i)) for i in range(9)]
    write_jsonl(tmp_path / "t.jsonl", rows)
    assert [row["trajectory_id"] for row in shaped(tmp_path / "t.jsonl", "--method", "grpo")] == list("012345678")


def test_standard_output_and_a_summary(group: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = command("--method", "grpo", str(group))
    assert args.run(args) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["trajectory_id"] for line in printed.out.splitlines()] == ["a", "b", "c"]
    shaped(group, "--method", "grpo")
    assert capsys.readouterr().err == "kept 2 of 3 trajectories (removed: 1 lost)\n"


def test_group_sizes_are_checked(group: Path) -> None:
    assert len(shaped(group, "--method", "grpo", "--group-size", "3")) == 3
    assert "question 'q7' has 3" in error(group, "--method", "grpo", "--group-size", "4")
    assert "--group-size 'many'" in error(group, "--method", "grpo", "--group-size", "many")
    assert "--group-size '0'" in error(group, "--method", "grpo", "--group-size", "0")


def test_errors_name_what_is_wrong(group: Path, tmp_path: Path) -> None:
    assert error(group, "--method", "tao") == "unknown method 'tao'; did you mean 'tao-rl'?"
    assert "did you mean 'q_h'" in error(group, "--method", "tao-rl", "--option", "qh=0.5")
    assert "method grpo has no option 'alpha'" in error(group, "--method", "grpo", "--alpha", "1")
    assert "not of the form KEY=VALUE" in error(group, "--method", "tao-rl", "--option", "alpha")
    assert "cannot read" in error(tmp_path / "none.jsonl", "--method", "grpo")
    assert "cannot write" in error(group, "--method", "grpo", "--out", str(tmp_path / "no" / "out"))
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no trajectories" in error(tmp_path / "empty.jsonl", "--method", "grpo")


def test_missing_entropies_are_named_by_line(tmp_path: Path) -> None:
    turns = [([1.0], [1.0], ["ok"]), ([0.5], [], [])]
    path = tmp_path / "t.jsonl"

    def rows(**options: Any) -> list[Trajectory]:
        return [trajectory(turns, 1.0, name="a"), trajectory(turns, 0.0, name="b", **options)]

    write_jsonl(path, rows(with_entropies=False))
    assert f"{path}, line 2: trajectory 'b' has model tokens without 'entropies'" in error(path, "--method", "tao-rl")
    assert all(row["kept"] for row in shaped(path, "--method", "tao-rl", "--bonus", "false"))
    assert [row["entropy_change"] for row in shaped(path, "--method", "grpo")] == [[-0.5], [None]]
    write_jsonl(path, rows(entropy_kind="top-k"))
    assert "line 2: trajectory 'b' has top-k estimates" in error(path, "--method", "tepo-sparse")
    accepted = shaped(path, "--method", "tepo-sparse", "--accept-estimates", "true")
    assert [row["reward"] for row in accepted] == [1.0, 0.0]


def test_trees_are_read_from_the_file(tmp_path: Path) -> None:
    turns = [([1.0], [0.5], ["ok"]), ([0.5], [], [])]
    path = tmp_path / "t.jsonl"
    rows = [trajectory(turns, 1.0, name="a"), trajectory([turns[0], ([0.1, 0.9], [], [])], 0.0, name="b")]
    write_jsonl(path, [rows[0], dataclasses.replace(rows[1], parent_id="a", fork_at=5)])
    high = pytest.approx(0.70711, abs=1e-4)
    low = pytest.approx(-0.70711, abs=1e-4)
    assert [r["advantages"] for r in shaped(path, "--method", "arpo")] == [[high] * 3, [low] * 4]
    hard = shaped(path, "--method", "arpo", "--estimation", "hard")
    assert [r["advantages"] for r in hard] == [[0.0, 0.0, high], [0.0, 0.0, low, low]]
    write_jsonl(path, [rows[0], dataclasses.replace(rows[1], parent_id="a", fork_at=7)])
    assert "'b' names 'a' as its parent, but does not share its first 7 tokens" in error(path, "--method", "arpo")


def test_flags_are_the_options_of_the_methods() -> None:
    loss = set(LossConfig.__dataclass_fields__)
    assert set(shape.FLAGS) == {o for name in METHODS for o in method_options(name)} - loss
    assert not loss & set(shape.FLAGS)


def test_help_needs_no_torch() -> None:
    code = "import sys, agentropy.commands.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def agentropy(*arguments: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentropy.cli", "shape", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=100, check=False)


def test_the_command_line_ends_in_one_line_and_code_2(group: Path) -> None:
    done = agentropy("--method", "tepo", str(group))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "agentropy shape: unknown method 'tepo'; did you mean 'tepo-dense'?\n"
    done = agentropy("--method", "tepo-sparse", str(group))
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["reward"] for line in done.stdout.splitlines()] == [1.0, 0.0, None]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output(group: Path) -> None:
    with open("/dev/full", "w") as full:
        done = agentropy("--method", "grpo", str(group), stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "agentropy shape: cannot write to standard output: No space left on device"
