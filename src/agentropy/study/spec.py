"""A study as its author writes it: the keys of its YAML file, read strictly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Statistic = Literal["mean", "final", "min", "max", "sum", "cv", "window_cv", "mean_change", "spike_rate"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]*")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Column(_Strict):
    """A column of the tables."""

    metric: str
    """A name of docs/metrics.md; with `at: train` also rollout/trajectories and rollout/tokens, those of a step."""
    label: str | None = None
    at: Literal["after", "before", "train"] = "after"
    """The evaluation after or before training, or a statistic of the training steps."""
    statistic: Statistic = "mean"
    """Only with `at: train`. cv is standard deviation over mean; the last four are those of gradient_fluctuation."""
    last: int | None = Field(None, ge=1)
    """Only with `at: train`: over the last so many steps. None: over all."""
    window: int = Field(10, ge=2)
    """Steps of the window of window_cv and spike_rate."""
    percent: bool = False
    scale: float = 1.0
    """What the numbers are multiplied with before they are printed."""
    digits: int | None = Field(None, ge=0, le=6)
    """Decimals. None: 1 for per cent, else 2."""

    @property
    def factor(self) -> float:
        return self.scale * (100 if self.percent else 1)

    @property
    def decimals(self) -> int:
        return self.digits if self.digits is not None else 1 if self.percent else 2

    @property
    def key(self) -> str:
        """Tells the column from every other one in the files."""
        span = f"[last {self.last}]" if self.last else ""
        window = f"[{self.window}]" if self.statistic in ("window_cv", "spike_rate") else ""
        return f"{self.metric}@{self.at}" + (f".{self.statistic}{window}{span}" if self.at == "train" else "")


class Curve(_Strict):
    """A metric of `metrics.jsonl` that is drawn over training."""

    metric: str
    label: str | None = None
    percent: bool = False
    over: Literal["step", "trajectories", "tokens"] = "step"
    """The horizontal axis: steps, or what was sampled so far."""


KNOWN = {
    "eval/avg": ("Avg@{k}", True),
    "eval/pass": ("Pass@{k}", True),
    "greedy/avg": ("greedy", True),
    "greedy/calls": ("calls, greedy", False),
    "tool/calls_per_question": ("calls a question", False),
    "eval/calls_need_0": ("calls, none needed", False),
    "eval/calls_need_1": ("calls, one needed", False),
    "eval/calls_need_2+": ("calls, several needed", False),
    "tool/effective_ratio": ("effective calls", True),
    "tool/valid_rate": ("valid calls", True),
    "tool/code_lines": ("code lines", False),
    "length/model_tokens": ("tokens", False),
    "entropy/model": ("entropy", False),
    "optim/grad_norm": ("gradient norm", False),
    "reward/accuracy": ("training accuracy", True),
    "validation/avg": ("validation Avg@{k}", True),
    "time/step": ("seconds a step", False),
    "rollout/trajectories": ("trajectories sampled", False),
    "rollout/tokens": ("tokens sampled", False),
}
"""What a metric is called where the study says nothing, and whether it is printed in per cent."""

STATISTIC_LABELS = {"cv": " std/mean", "window_cv": " std/mean in windows", "mean_change": " change a step"}


DEFAULT_COLUMNS: list[str | dict[str, Any]] = [
    "eval/avg",
    "eval/pass",
    "greedy/avg",
    "tool/calls_per_question",
    "eval/calls_need_0",
    "tool/effective_ratio",
    "tool/valid_rate",
    "tool/code_lines",
    "length/model_tokens",
    {"metric": "optim/grad_norm", "at": "train", "statistic": "cv"},
    {"metric": "rollout/trajectories", "label": "sampled, k", "at": "train", "statistic": "sum", "scale": 1e-3},
    {
        "metric": "rollout/tokens",
        "label": "tokens sampled, k",
        "at": "train",
        "statistic": "sum",
        "scale": 1e-3,
        "digits": 1,
    },
    {"metric": "time/step", "at": "train"},
]
DEFAULT_CURVES: list[str | dict[str, Any]] = [
    "reward/accuracy",
    {"metric": "reward/accuracy", "over": "trajectories"},
    "tool/calls_per_question",
    "entropy/model",
    "optim/grad_norm",
]


def _complete(given: Any) -> Any:
    """A column or curve from its metric alone, or with the label of the metric where it has none."""
    if isinstance(given, str):
        given = {"metric": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("metric"), str):
        return given
    label, percent = KNOWN.get(given["metric"], (given["metric"], False))
    statistic = given.get("statistic", "mean")
    share = percent and "scale" not in given and statistic in ("mean", "final", "min", "max")
    label += STATISTIC_LABELS.get(statistic, f", {statistic}" if statistic != "mean" else "")
    return {"label": label, "percent": share} | dict(given)


def _named(value: Any) -> Any:
    """Named overrides: a list of names, or a mapping whose values may be empty. Names may be numbers."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        if len({str(v) for v in value}) < len(value):
            raise ValueError("a name is there twice")
        return {str(v): {} for v in value}
    if isinstance(value, Mapping):
        named = {str(k): {} if v is None else v for k, v in value.items()}
        for name in named:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of a folder: letters, digits and . _ + = , @ - only")
        return named
    return value


class StudySpec(_Strict):
    """What a study compares and how it is reported. docs/study.md explains each key."""

    name: str = Field(min_length=1)
    base: dict[str, Any] = {}
    """Keys of `agentropy train` that all runs share."""
    seeds: list[int] = [0, 1, 2]
    """A list, or how many: 3 is [0, 1, 2]."""
    settings: dict[str, dict[str, Any]] = {"default": {}}
    """Named overrides that group the tables: worlds, sizes. One named like a world is that world."""
    variants: dict[str, dict[str, Any]]
    """Named overrides that are compared: methods, ablations. One named like a method is that method."""
    baseline: dict[str, list[str]] = {}
    """What differences are taken from: a variant, several (their mean), or a mapping of labels to either."""
    only: list[str] = []
    """Globs over setting/variant; what matches none is left out."""
    skip: list[str] = []
    """Globs over setting/variant that are left out."""
    validation: bool = False
    """Evaluate on the validation split, to choose hyperparameters."""
    columns: list[Column] = Field(DEFAULT_COLUMNS, validate_default=True)
    curves: list[Curve] = Field(DEFAULT_CURVES, validate_default=True)
    smooth: int = Field(5, ge=1)
    """Steps of the trailing mean that smooths the curves."""
    jobs: int | None = Field(None, ge=1)
    """Runs at once. None: as many as cores and memory allow."""
    out: str | None = None
    """The study's directory. None: runs/<name>."""
    keep_checkpoints: bool = False
    keep_models: bool = False
    """Keep the trained agents of complete runs."""
    keep_trajectories: bool = True
    """Keep what was sampled in training; what was sampled in evaluation always stays."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("a study needs at least one seed")
            return list(range(value))
        return value

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise ValueError("needs one or more different whole numbers from 0")
        return seeds

    @field_validator("settings", "variants", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return _named(value)

    @field_validator("settings", "variants")
    @classmethod
    def _some(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not value:
            raise ValueError("is empty")
        return value

    @field_validator("baseline", mode="before")
    @classmethod
    def _baselines(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {value: [value]}
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            return {value[0] if len(value) == 1 else f"the mean of {', '.join(value)}": value}
        if isinstance(value, Mapping):
            return {str(k): [v] if isinstance(v, str) else v for k, v in value.items()}
        return value

    @field_validator("only", "skip", mode="before")
    @classmethod
    def _globs(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("columns", "curves", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return [_complete(v) for v in value] if isinstance(value, list) else value
