"""Where metrics go: always `metrics.jsonl`, and trackers that users already run, behind one small interface."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentropy.errors import UserError
from agentropy.trajectory import write_lines


class Logger(Protocol):
    """Takes numbers by name, once a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object a step in a file that is flushed at once. Numbers that are not finite are written as null."""

    def __init__(self, path: Path, from_step: int = 0) -> None:
        """Opens the file; lines of steps after `from_step` are dropped (a resumed run writes them again)."""
        kept = []
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    if json.loads(line)["step"] <= from_step:
                        kept.append(line.decode("utf-8"))
                except (ValueError, KeyError, TypeError):
                    continue  # the half line of a killed run
        write_lines(path, kept)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step} | {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project="agentropy", name=directory.name, dir=str(directory), config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project="agentropy", name=directory.name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment("agentropy")
        mlflow.start_run(run_name=directory.name)
        mlflow.log_params({k: str(v)[:500] for k, v in config.items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({k: v for k, v in metrics.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, tuple[Callable[[Path, Mapping[str, Any]], Logger], str]] = {
    "tensorboard": (_TensorBoard, "tensorboard"),
    "wandb": (_Wandb, "wandb"),
    "trackio": (_Trackio, "trackio"),
    "mlflow": (_Mlflow, "mlflow-skinny"),
}


def make_loggers(names: Sequence[str], directory: Path, config: Mapping[str, Any], from_step: int) -> list[Logger]:
    """The JSONL logger and the trackers by name. Raises UserError for unknown names and missing packages."""
    made: list[Logger] = []
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"no tracker {name!r}; there are {', '.join(TRACKERS)}")
        factory, package = TRACKERS[name]
        try:
            made.append(factory(directory, config))
        except ImportError:
            raise UserError(f"--log {name} needs the package {package}: pip install 'agentropy[{name}]'") from None
    return [JsonlLogger(directory / "metrics.jsonl", from_step), *made]
