"""The configuration of an evaluation: what is saved as its config.yaml, and what --resume goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentropy.config import RunConfig, load_config, resolved
from agentropy.errors import UserError
from agentropy.rollout.parts import pick_device
from agentropy.tasks.worlds import rollout_defaults
from agentropy.trajectory import write_lines

EMBEDDED = {"max_new_tokens": 128, "max_result_tokens": 64, "tool_timeout": 2.0}
OTHERS = {"max_new_tokens": 1024, "max_result_tokens": 512, "tool_timeout": 5.0}
ANY_TIME = ("server", "api_key_env", "concurrency", "request_timeout", "tries", "device", "threads")
"""What may change when an evaluation goes on: where and how fast, not what is asked."""


class EvaluationConfig(BaseModel):
    """Everything that decides what an evaluation does. None: see `filled`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    """A directory, a hub id, or the server's name for it. None: the world's own agent, or the server's only model."""
    server: str | None = None
    """URL of an OpenAI-compatible server."""
    api: Literal["auto", "completions", "chat"] = "auto"
    api_key_env: str | None = None
    """Name of the environment variable with the server's key."""
    concurrency: int = Field(32, ge=1)
    """Requests at once to a server."""
    request_timeout: float | None = Field(None, gt=0)
    """Seconds a request to a server may take."""
    tries: int | None = Field(None, ge=1)
    """Attempts at a request before its trajectory is given up."""
    tokenizer: str | None = None
    """For completions: a directory or hub id. None: the model's name."""
    benchmarks: list[str] = []
    data: dict[str, str] = {}
    """Files by benchmark, instead of the hub."""
    tasks: str | None = None
    world: str | None = None
    world_options: dict[str, Any] = {}
    split: Literal["all", "test", "validation"] | None = None
    """Of `tasks` (default: all questions of a file, the test split of an endless source) or `world` (default: test)."""
    limit: int | None = Field(None, ge=1)
    """The first so many questions of each benchmark."""
    samples: int = Field(1, ge=1)
    seed: int = Field(0, ge=0)
    tools: list[str] | None = None
    """None: each benchmark's own, or the world's; empty: none."""
    sandbox: str = "strict"
    protocol: str | None = None
    protocol_options: dict[str, Any] = {}
    system: str | None = None
    """None: each benchmark's own."""
    lenient: bool = False
    """Of an answer without a box, what follows "the answer is" and the like counts."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    max_turns: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    """Sampled tokens a trajectory, over all its turns."""
    max_result_tokens: int | None = Field(None, ge=4)
    max_context: int | None = Field(None, ge=8)
    tool_timeout: float | None = Field(None, gt=0)
    max_slots: int | None = Field(None, ge=1)
    """Sequences that the local engine decodes at once. None: 64; 32 for larger models on a CPU."""
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(None, ge=1, le=1024)

    @model_validator(mode="after")
    def _one_source(self) -> EvaluationConfig:
        given = [
            n for n, v in (("--benchmark", self.benchmarks), ("--tasks", self.tasks), ("--world", self.world)) if v
        ]
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}, not both")
        if len(set(self.benchmarks)) < len(self.benchmarks):
            raise ValueError("a benchmark is named twice")
        if self.split and self.benchmarks:
            raise ValueError("--split goes with --tasks or --world; a benchmark's split is its publisher's")
        return self

    @property
    def embedded(self) -> bool:
        """Whether the model is the world's own agent."""
        return self.model is None and self.server is None


def make_config(values: dict[str, Any]) -> EvaluationConfig:
    """The configuration of the given values. Raises UserError for the first thing wrong."""
    try:
        return EvaluationConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        option = f"--{where.replace('_', '-')}: " if where else ""
        raise UserError(f"{option}{message}" + (f" (got {first['input']!r})" if where else "")) from None


def filled(config: EvaluationConfig) -> EvaluationConfig:
    """The configuration with every value filled in: from the training run that the model comes from, else defaults."""
    run = None if config.server else training_run(config.model)
    updates: dict[str, Any] = {}
    if not config.benchmarks and not config.tasks and not config.world:
        if run is not None and run.world is not None:
            updates |= {"world": run.world, "world_options": run.world_options}
        elif config.embedded:
            updates["world"] = "arithmetic"
        else:
            raise UserError("name what to ask: --benchmark, --tasks or --world")
    world = updates.get("world", config.world)
    if config.embedded and world is None:
        raise UserError("--benchmark and --tasks need --model: the embedded agents only know their own worlds")
    if run is not None:
        r = run.rollout
        own: dict[str, Any] = {
            "protocol": run.protocol,
            "system": run.system,
            "max_turns": r.max_turns,
            "max_new_tokens": r.max_new_tokens,
            "max_result_tokens": r.max_result_tokens,
            "tool_timeout": r.tool_timeout,
            "max_context": r.max_context,
        }
        if not config.benchmarks:
            own["tools"] = run.tools
        updates |= {k: v for k, v in own.items() if getattr(config, k) is None and v is not None}
        if not config.protocol_options and updates.get("protocol"):
            updates["protocol_options"] = run.protocol_options
    options = updates.get("world_options", config.world_options)
    level = dict(rollout_defaults(world, options)) if world and config.embedded else {}
    defaults: dict[str, Any] = {"max_turns": 5} | (EMBEDDED if config.embedded else OTHERS) | level
    if not config.server:
        defaults["protocol"] = "tags" if config.embedded else "hermes"
    if config.server is None:
        on_cpu = pick_device(config.device).type == "cpu"
        defaults["max_slots"] = 32 if on_cpu and not config.embedded else 64
    updates |= {k: v for k, v in defaults.items() if getattr(config, k) is None and updates.get(k) is None}
    return config.model_copy(update=updates)


def training_run(model: str | None) -> RunConfig | None:
    """The configuration of the training run that a model's folder lies in, if it does."""
    folder = Path(model).expanduser().resolve() if model else None
    if folder is None or not folder.is_dir():
        return None
    for place in list(folder.parents)[:3]:
        if (place / "config.yaml").is_file() and (place / "metrics.jsonl").is_file():
            return resolved(load_config(place / "config.yaml"))
    return None


def save(config: EvaluationConfig, path: Path) -> None:
    """Write the configuration as YAML."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_lines(path, text.splitlines())


def saved(directory: Path) -> EvaluationConfig:
    """The configuration of an evaluation directory. Raises UserError where it is none."""
    path = directory / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{directory} is no evaluation directory (its config.yaml is missing)") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError):
        raise UserError(f"{path} cannot be read") from None
    if not isinstance(values, dict) or "benchmarks" not in values:
        raise UserError(f"{directory} is no evaluation directory (its config.yaml is none of an evaluation)")
    return make_config(values)
