"""From a study's file to the runs that it asks for, every configuration checked before anything starts.

A run's configuration is `base`, then the overrides of its setting, then those of its variant; keys are those of
`agentropy train`, dotted or nested.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from agentropy.config import RunConfig, dotted_keys, load_config, resolved
from agentropy.errors import UserError
from agentropy.methods import METHODS, make_method
from agentropy.study.spec import NAME, Column, Curve, StudySpec
from agentropy.tasks.worlds import WORLDS, make_world

FREE = ("method_options", "world_options", "protocol_options")
SET_BY_THE_STUDY = ("seed", "out")


@dataclass(frozen=True)
class Run:
    """One training run of a study, with its resolved configuration (whose `out` is not set)."""

    setting: str
    variant: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """setting/variant/seed-n: its place under `runs/`."""
        return f"{self.setting}/{self.variant}/seed-{self.seed}"

    def directory(self, out: Path) -> Path:
        return out / "runs" / self.name


@dataclass(frozen=True)
class Study:
    """A study that was read and found valid. `runs` has the seeds outermost: an interrupted study has whole
    comparisons."""

    spec: StudySpec
    runs: tuple[Run, ...]
    baselines: Mapping[str, tuple[str, ...]]

    @property
    def out(self) -> Path:
        return Path(self.spec.out or f"runs/{self.spec.name}")


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets the last of two equal keys win; a variant would be lost without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_study(path: Path) -> Study:
    """Read a study and check every configuration in it. Raises UserError for the first thing wrong."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_UniqueKeys)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError):
        raise UserError(f"{path}: not a YAML file in UTF-8") from None
    except (yaml.YAMLError, TypeError, ValueError) as error:  # the last two: keys and dates that cannot be
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: the file must be a mapping of keys; the least is 'variants: [grpo, tao-rl]'")
    try:
        spec = StudySpec.model_validate({"name": path.stem} | data)
    except ValidationError as error:
        raise UserError(f"{path}: {_first(error)}") from None
    try:
        return _plan(spec)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _first(error: ValidationError) -> str:
    # A misspelt key is also a missing one; its own error says more.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    where = ".".join(str(p) for p in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        kinds: dict[str, type[BaseModel]] = {"columns": Column, "curves": Curve}
        owner = kinds.get(str(parents[0]) if parents else "", StudySpec)
        if not parents and any(k == key or k.startswith(f"{key}.") for k in dotted_keys()):
            return f"unknown key {where!r}; keys of training runs belong under 'base'"
        near = difflib.get_close_matches(str(key), owner.model_fields, n=1, cutoff=0.5)
        return f"unknown key {where!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {_list(owner)}")
    if first["type"] == "missing":
        return f"the key {where!r} is missing"
    given = f" (got {first['input']!r})"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{given if len(given) < 80 else ''}"


def _list(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _plan(spec: StudySpec) -> Study:
    if not NAME.fullmatch(spec.name):
        raise UserError(f"name: {spec.name!r} cannot be the name of a folder: letters, digits and . _ + = , @ - only")
    pairs = [(s, v) for s in spec.settings for v in spec.variants]
    for key, globs in (("only", spec.only), ("skip", spec.skip)):
        for glob in globs:
            if not any(matches(glob, s, v) for s, v in pairs):
                raise UserError(f"{key}: {glob!r} matches no setting/variant, such as '{pairs[0][0]}/{pairs[0][1]}'")
    pairs = [
        (s, v)
        for s, v in pairs
        if (not spec.only or any(matches(g, s, v) for g in spec.only)) and not any(matches(g, s, v) for g in spec.skip)
    ]
    if not pairs:
        raise UserError("only and skip leave nothing to run")
    configs = {pair: _configuration(spec, *pair) for pair in pairs}
    runs = [Run(s, v, seed, configs[s, v].model_copy(update={"seed": seed})) for seed in spec.seeds for s, v in configs]
    variants = list(dict.fromkeys(v for _, v in pairs))
    for label, members in spec.baseline.items():
        for member in members:
            if member not in variants:
                near = difflib.get_close_matches(member, variants, n=1, cutoff=0.5)
                guess = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(variants)}"
                raise UserError(f"baseline: no variant {member!r}{guess}")
        if not members:
            raise UserError(f"baseline: {label!r} names no variant")
    baselines = spec.baseline or ({variants[0]: [variants[0]]} if len(variants) > 1 else {})
    return Study(spec, tuple(runs), {label: tuple(members) for label, members in baselines.items()})


def matches(glob: str, setting: str, variant: str, seed: int | None = None) -> bool:
    """Does a glob select setting/variant (or the variant by its name alone, or one seed of it)?"""
    names = [
        f"{setting}/{variant}",
        variant,
        setting,
        *([f"{setting}/{variant}/seed-{seed}"] if seed is not None else []),
    ]
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


def dotted(overrides: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested and dotted keys as dotted ones."""
    sections = {key.split(".")[0] for key in dotted_keys() if "." in key} | set(FREE)
    out: dict[str, Any] = {}
    for name, value in overrides.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in sections:
            out |= dotted(value, f"{key}.")
        else:
            out[key] = value
    return out


def overrides_of(spec: StudySpec, setting: str, variant: str) -> dict[str, Any]:
    """All keys that the study sets for a run, dotted; the later of base, setting and variant wins."""
    base, own, mine = dotted(spec.base), dotted(spec.settings[setting]), dotted(spec.variants[variant])
    if setting in WORLDS and not {"world", "tasks"} & own.keys():
        own = {"world": setting} | own
    if variant in METHODS and "method" not in mine:
        mine = {"method": variant} | mine
    merged = {"threads": 1} | base | own | mine
    return merged | ({"evaluation.split": "validation"} if spec.validation else {})


def _configuration(spec: StudySpec, setting: str, variant: str) -> RunConfig:
    where = f"settings.{setting} with variants.{variant}"
    keys = overrides_of(spec, setting, variant)
    for key in SET_BY_THE_STUDY:
        if key in keys:
            instead = "list it under 'seeds'" if key == "seed" else "the study gives each run its own directory"
            raise UserError(f"{where}: {key!r} cannot be set here; {instead}")
    if "method" not in keys:
        near = difflib.get_close_matches(variant, METHODS, n=1, cutoff=0.6)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"variants.{variant}: no 'method' here or in base ({', '.join(METHODS)}){guess}")
    try:
        config = resolved(load_config(None, list(keys.items())))
        make_method(config.method, **config.method_options)
        if config.world is not None:
            make_world(config.world, seed=0, **config.world_options)
        _check_parts(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def _check_parts(config: RunConfig) -> None:
    from agentropy.rollout.parts import pick_device
    from agentropy.tools.named import tool_by_name
    from agentropy.training.loggers import TRACKERS

    pick_device(config.device)
    for name in config.tools or ():
        if name != "search" or config.world is None:
            tool_by_name(name, config.rollout.tool_timeout or 1.0, config.tasks)
    for name in config.log:
        if name not in TRACKERS:
            raise UserError(f"no tracker {name!r}; there are {', '.join(TRACKERS)}")


def select(runs: Sequence[Run], glob: str | None) -> list[Run]:
    """The runs that a glob of the command line selects. Raises UserError where it selects none."""
    chosen = [r for r in runs if glob is None or matches(glob, r.setting, r.variant, r.seed)]
    if not chosen:
        raise UserError(f"--only {glob!r} matches no run; they are called like {runs[0].name!r}")
    return chosen
