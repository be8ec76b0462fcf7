"""Complete run directories made by hand, with numbers that a test can work out, in the files that runs write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentropy.config import save_config
from agentropy.study.plan import Run, Study, read_study
from agentropy.study.state import write_status

ENVIRONMENT = {"agentropy": "1.2.3", "commit": "abc", "python": "3.11", "packages": {"torch": "2"}}


def study_of(folder: Path, **keys: Any) -> Study:
    """The study of a YAML file with these keys, written to the folder."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"out": str(folder / "out")} | keys, sort_keys=False))
    return read_study(path)


def make_run(
    run: Run,
    out: Path,
    *,
    after: Mapping[str, float | None],
    before: Mapping[str, float | None] | None = None,
    rows: Sequence[Mapping[str, float | None]] = (),
    environment: Mapping[str, Any] = ENVIRONMENT,
) -> Path:
    """A complete run; rows: one a step."""
    directory = run.directory(out)
    (directory / "trajectories").mkdir(parents=True)
    save_config(run.config.model_copy(update={"out": str(directory)}), directory / "config.yaml")
    (directory / "environment.json").write_text(json.dumps(environment))
    for name, numbers in (("before", before or {}), ("after", after)):
        (directory / f"evaluation-{name}.json").write_text(json.dumps({"step": 0} | dict(numbers)))
    lines = [json.dumps({"step": i} | dict(row)) + "\n" for i, row in enumerate(rows, 1)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    write_status(directory, "complete")
    return directory
