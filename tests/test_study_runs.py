"""`agentropy study` as a user runs it: real training runs of embedded agents, in processes that are really killed."""

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
import yaml

from agentropy.cli import main
from agentropy.study.plan import read_study
from agentropy.study.state import alone, locked
from study_runs import make_run, study_of

SMALL = {
    "steps": 2,
    "rollout": {"questions": 2, "samples": 2},
    "optim.minibatches": 1,
    "evaluation": {"questions": 3, "samples": 2, "greedy": False},
    "checkpoint.every": 1,
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentropy.cli", "study", *arguments]


def write(path: Path, **keys: Any) -> Path:
    path.write_text(yaml.safe_dump(keys, sort_keys=False))
    return path


def evaluations(out: Path) -> dict[str, Any]:
    """The final numbers of each run, and those of its steps without what the clock decides."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("runs/*/*/seed-*/evaluation-after.json")):
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        steps = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
        found[str(path.parent.relative_to(out))] = (json.loads(path.read_text()), steps)
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A reduced study from nothing to its report: two methods, two seeds. Its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("study")
    keys = {"variants": ["grpo", "tao-rl"], "seeds": 2, "base": SMALL, "jobs": 2, "validation": True}
    file = write(folder / "study.yaml", **keys, out=str(folder / "out"))
    finished = subprocess.run(command(str(file)), capture_output=True, text=True, timeout=300)
    return folder, finished


@pytest.mark.timeout(300)
def test_a_reduced_study_from_nothing_to_its_report(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, finished = done
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    out = folder / "out"
    assert "default/grpo/seed-1: starts" in finished.stdout
    assert "4 of 4 runs are complete." in finished.stdout
    numbers = evaluations(out)
    assert len(numbers) == 4
    data = json.loads((out / "results.json").read_text())
    column = [c["key"] for c in data["tables"][0]["columns"]].index("eval/avg@after")
    for row in data["tables"][0]["rows"][1:]:
        for seed, value in row["cells"][column]["values"].items():
            assert value == numbers[f"runs/default/{row['variant']}/seed-{seed}"][0]["eval/avg"]
    for run in out.glob("runs/default/*/seed-?"):
        assert not (run / "checkpoints").exists()
        assert not (run / "model").exists()
        assert (run / "trajectories" / "validation-after.jsonl").is_file()
        assert not locked(run)
        record = json.loads((run / "environment.json").read_text())
        assert record["command"][1:3] == ["train", "--config"]
    for name in ("results.md", "results.csv", "index.html", "figures/reward-accuracy.svg"):
        assert (out / name).stat().st_size > 200


@pytest.mark.timeout(300)
def test_hyperparameters_are_chosen_on_the_validation_split(
    done: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    from agentropy.tasks.worlds import make_world
    from agentropy.trajectory import read_jsonl

    run = done[0] / "out" / "runs" / "default" / "grpo" / "seed-0"
    validation = [t.id for t in make_world("arithmetic").tasks.split("validation")[:3]]
    for name in ("before", "after"):
        asked = [t.question_id for t in read_jsonl(run / "trajectories" / f"validation-{name}.jsonl")]
        assert asked == [question for question in validation for _ in range(2)]
    assert not list(run.glob("trajectories/test-*"))
    assert "of the validation split" in (done[0] / "out" / "results.md").read_text()
    # What was measured before must compare with what is measured after.
    assert main(["train", f"--resume={run}", "--evaluation.split=test"]) == 2
    assert "--evaluation.split cannot change in a resumed run" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_started_again_it_runs_nothing_and_says_the_same(
    done: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = done
    page = (folder / "out" / "index.html").read_bytes()
    assert main(["study", str(folder / "study.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 runs are complete already." in printed
    assert "starts" not in printed
    assert (folder / "out" / "index.html").read_bytes() == page


def test_another_configuration_is_refused_or_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(tmp_path, variants=["grpo", "tao-rl"], seeds=1, base={"steps": 0})
    out = tmp_path / "out"
    made = [make_run(run, out, after={"eval/avg": 0.5}) for run in study.runs]
    changed = study_of(
        tmp_path, variants={"grpo": {"optim.lr": 0.1}, "tao-rl": {"log": ["tensorboard"]}}, seeds=1, base={"steps": 0}
    )
    assert len(changed.runs) == 2
    assert main(["study", str(tmp_path / "study.yaml")]) == 2
    message = capsys.readouterr().err
    assert "1 of 2 runs" in message
    assert "default/grpo/seed-0: optim.lr was 0.0005, wanted 0.1" in message
    assert "--rerun-changed" in message
    assert all(path.is_dir() for path in made)
    # Those that did not change are not touched by it.
    assert main(["study", str(tmp_path / "study.yaml"), "--only=tao-rl"]) == 0
    from agentropy.study.execute import clear_changed

    assert clear_changed(changed.runs, out, rerun=True) == 1
    assert [path.is_dir() for path in made] == [False, True]


def test_a_second_study_on_one_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(tmp_path, variants=["grpo"], seeds=1, base={"steps": 0})
    make_run(study.runs[0], tmp_path / "out", after={"eval/avg": 0.5})
    with alone(tmp_path / "out"):
        assert main(["study", str(tmp_path / "study.yaml")]) == 2
        assert "another study is running in" in capsys.readouterr().err
        assert main(["study", str(tmp_path / "study.yaml"), "--report-only"]) == 0
    assert main(["study", str(tmp_path / "study.yaml")]) == 0


@pytest.mark.timeout(200)
def test_one_bad_run_does_not_lose_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = {"broken": {"method": "grpo", "model": "/no/such/model"}, "grpo": {}, "tao-rl": {}}
    study = study_of(tmp_path, variants=variants, seeds=1, base={"steps": 0}, jobs=1)
    for run in study.runs[1:]:
        make_run(run, tmp_path / "out", after={"eval/avg": 0.5})
    assert main(["study", str(tmp_path / "study.yaml")]) == 1
    printed = capsys.readouterr().out
    assert "default/broken/seed-0: FAILED, exit code 2" in printed
    assert "/no/such/model" in printed
    assert "2 of 3 runs are complete." in printed
    text = (tmp_path / "out" / "results.md").read_text()
    assert "- default/broken/seed-0: failed: exit code 2: " in text
    assert "| tao-rl | 1 | 50.0 |" in text
    # Where the report is only made again, the failure is still known.
    assert main(["study", str(tmp_path / "study.yaml"), "--report-only"]) == 0
    assert "- default/broken/seed-0: failed" in (tmp_path / "out" / "results.md").read_text()


def wait(condition: Any, process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the study ended before it was to be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(p) for p in text.split()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_or_stopped_and_started_again_it_ends_with_the_same_numbers(tmp_path: Path, how: signal.Signals) -> None:
    base = SMALL | {"steps": 6, "checkpoint.every": 2}
    keys: dict[str, Any] = {"variants": ["grpo", "tao-rl"], "seeds": 2, "base": base, "jobs": 2}
    straight = write(tmp_path / "straight.yaml", **keys)
    subprocess.run(command(str(straight), f"--out={tmp_path / 'straight'}"), check=True, timeout=300)
    broken = tmp_path / "broken"
    arguments = command(str(straight), f"--out={broken}")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait(lambda: list(broken.glob("runs/*/*/*/checkpoints/step-000002")), process)
        started = children(process.pid)
        assert len(started) == 2
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    if how != signal.SIGKILL:
        assert "To go on, give the same command again." in stdout
        assert stderr == ""
        assert all(is_gone(pid) for pid in started)
        assert "not finished, step" in (broken / "results.md").read_text()
        assert "failed" not in (broken / "results.md").read_text()
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "goes on after step" in again.stdout
    assert evaluations(broken) == evaluations(tmp_path / "straight")
    study = read_study(straight)
    assert len(evaluations(broken)) == len(study.runs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_end_when_the_study_is_killed(tmp_path: Path) -> None:
    file = write(
        tmp_path / "study.yaml", variants=["grpo"], seeds=1, base=SMALL | {"steps": 500}, out=str(tmp_path / "o")
    )
    with subprocess.Popen(command(str(file)), stdout=subprocess.DEVNULL, text=True) as process:
        run = tmp_path / "o" / "runs" / "default" / "grpo" / "seed-0"
        wait((run / "checkpoints" / "step-000001").exists, process)
        (pid,) = children(process.pid)
        process.kill()
    deadline = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < deadline, "the run went on without its study"
        time.sleep(0.1)
    assert not locked(run)
    log = (tmp_path / "o" / "runs" / "default" / "grpo" / "seed-0.log").read_text()
    assert "everything is saved" in log
    assert os.path.exists(run / "config.yaml")
