"""One configuration for a training run, in YAML and on the command line by the same dotted names.

Unknown keys are errors that name the nearest key. The resolved configuration is saved with every run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from agentropy.errors import UserError
from agentropy.trajectory import write_lines


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flags_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """An option whose value was forgotten reads as true, which must not pass for a 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(f"needs a value, not {str(value).lower()}")
        return value


class RolloutConfig(_Strict):
    """How trajectories are sampled."""

    questions: int = Field(16, ge=1)
    """Questions a step (after dynamic sampling has replaced what the filters removed)."""
    samples: int = Field(8, ge=1)
    """Trajectories a question: the group size G."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    max_turns: int | None = Field(None, ge=1)
    """Turns of the policy a trajectory; a call in the last one is not run. None: 5, or what the world's level says."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Sampled tokens a trajectory, over all its turns. None: 128 for the embedded agents, or what the world's level
    says; 1024 for other models."""
    max_result_tokens: int | None = Field(None, ge=4)
    """Longer tool results are cut in the middle. None: 64 for the embedded agents, 512 for other models."""
    max_context: int | None = Field(None, ge=8)
    """Tokens a trajectory, prompt and results included. None: what the model's configuration allows, at most 4096."""
    tool_timeout: float | None = Field(None, gt=0)
    """Seconds a tool call may take. None: 2 for the embedded agents, 5 for other models."""
    max_slots: int = Field(128, ge=1)
    """Sequences that decode at once; bounds the cache's memory."""
    max_oversample: float = Field(2.0, ge=1)
    """Dynamic sampling stops after this many times `questions`, and trains on what it has."""
    deterministic: bool = True
    """Admit tool results at fixed decode steps, so that a rerun is bit-identical. False admits them at once."""
    server: str | None = None
    """URL of a vLLM server that samples instead of this process; each step's weights are pushed to it
    (docs/sampler.md)."""

    @field_validator("server")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("a server's URL starts with http:// or https://")
        return value


class SamplerConfig(_Strict):
    """How `rollout.server` is used; without it nothing of this counts."""

    model: str | None = None
    """The model's name on the server. None: the one that it serves."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""
    concurrency: int = Field(128, ge=1)
    """Requests at once."""
    push: Literal["disk", "nccl"] = "disk"
    """How weights go to the server: as files in `directory`, or from GPU to GPU with vLLM's own transfer engine."""
    directory: str | None = None
    """Where weights are written for the server, under the same path on its machine. None: weights/ in the run
    directory."""
    address: str = "127.0.0.1"
    """With `push: nccl`: this machine's address as the server sees it."""
    wait: float = Field(600.0, ge=0)
    """Seconds to wait for a server that does not answer before the run stops."""
    correction: Literal["auto", "always", "never"] = "auto"
    """Truncated importance weights for tokens that the server gave another probability than the trainer does. auto:
    in steps whose mean gap is above `correction_above`."""
    correction_cap: float = Field(2.0, ge=1)
    """Largest importance weight of a token."""
    correction_above: float = Field(0.01, ge=0)
    """Nats; mean size of the difference of the log-probabilities."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(_Strict):
    """AdamW and how a batch is cut into updates."""

    lr: float | None = Field(None, gt=0)
    """None: 5e-4 for the embedded agents, 1e-6 for other models, 1e-5 with LoRA."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    grad_clip: float = Field(1.0, gt=0)
    minibatches: int = Field(2, ge=1)
    """Optimiser updates a batch and epoch; groups are never split."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens in one forward pass; only memory and speed depend on it, the gradient does not."""


class LossConfig(_Strict):
    """The clipped surrogate (ALGORITHMS: GRPO with DAPO's pieces)."""

    clip_low: float = Field(0.2, ge=0, le=1)
    clip_high: float | None = Field(None, ge=0, le=1e6)
    """None: the method's own, 0.28, or 0.2 for arpo and aepo."""
    dual_clip: float = Field(3.0, gt=1)
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-norm"] = "token-mean"
    norm_constant: float | None = Field(None, gt=0)
    """Denominator of sequence-sum-norm. None: trajectories an update times `rollout.max_new_tokens`."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the k3 estimate of the KL divergence to the initial policy; 0 keeps no reference model."""
    entropy_coef: float = 0.0


class EvaluationConfig(_Strict):
    """Evaluation before and after training, and on the validation split every `every` steps."""

    every: int = Field(0, ge=0)
    """0: only before and after."""
    before: bool = True
    """False: only after (a study's runs all begin with the same agent)."""
    split: Literal["test", "validation"] = "test"
    """What is evaluated on before and after training; validation is for choosing hyperparameters."""
    questions: int = Field(128, ge=0)
    """0: no evaluation at all."""
    samples: int = Field(8, ge=1)
    """K of Avg@K and Pass@K."""
    temperature: float = Field(1.0, ge=0)
    greedy: bool = True
    """Also answer each question once at temperature 0."""


class LoraConfig(_Strict):
    """LoRA by peft; off unless `rank` is set."""

    rank: int = Field(0, ge=0)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = "all-linear"


class CheckpointConfig(_Strict):
    every: int = Field(10, ge=1)
    """Steps between checkpoints; one is also written at the end, on Ctrl-C and on SIGTERM."""
    keep: int = Field(2, ge=1)
    """Older ones are deleted."""


class RunConfig(_Strict):
    """Everything that decides what a run does."""

    method: str = "tao-rl"
    """grpo, simpletir, tao-rl, tepo-sparse, tepo-dense, arpo or aepo."""
    method_options: dict[str, Any] = {}
    """Options of the method, such as `alpha` or `q_h`; docs/algorithms.md lists them."""
    world: str | None = None
    """A generated world: arithmetic (the default) or facts."""
    world_options: dict[str, Any] = {}
    """Settings of the world, such as `level` (default or hard) and `tool_failures`; docs/worlds.md lists them."""
    tasks: str | None = None
    """Instead of a world: a file (JSONL, Parquet), hf:NAME or reasoning-gym:TASK."""
    model: str | None = None
    """A directory or hub id of a transformers causal LM. None: the world's embedded agent."""
    tools: list[str] | None = None
    """Built-in tools by name: python, python:stateful, search:FILE, search (the world's, or corpus.jsonl beside the
    questions), web-search:URL, read-page, mcp:COMMAND, mcp:URL; docs/tools.md explains them. None: the world's own."""
    sandbox: str = "strict"
    """Where the python tool runs code: strict (Landlock and seccomp, namespaces where possible), namespaces (both or
    nothing), unsafe (at your own risk, where neither is to be had), or the URL of a SandboxFusion-compatible server."""
    protocol: str | None = None
    """hermes, fence or tags. None: tags for the embedded agents, hermes otherwise."""
    protocol_options: dict[str, Any] = {}
    system: str | None = None
    """System prompt. None: none for the embedded agents; others are told how to mark the answer."""
    seed: int = Field(0, ge=0)
    steps: int = Field(60, ge=0)
    out: str | None = None
    """The run directory. None: runs/<method>-<world>-<seed>-<time>."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch. None: one for models under 10 million parameters, else all cores."""
    log: list[str] = []
    """Also log to tensorboard, wandb, trackio, mlflow."""
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    lora: LoraConfig = LoraConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _one_source(self) -> RunConfig:
        if self.world is not None and self.tasks is not None:
            raise ValueError("set 'world' or 'tasks', not both")
        if self.tasks is not None and self.model is None:
            raise ValueError("'tasks' needs 'model': the embedded agents only know their own worlds")
        if self.rollout.server is None and self.sampler != SamplerConfig():
            raise ValueError("options of 'sampler' go with 'rollout.server', the URL of a vLLM server")
        return self


def dotted_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, str]:
    """Every key by its dotted name, with its doc line."""
    keys: dict[str, str] = {}
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys |= dotted_keys(annotation, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = " ".join((info.description or "").split())
    return keys


_TEXTS = {name for name, info in RunConfig.model_fields.items() if info.annotation in (str, str | None)}


def _check_key(key: str) -> None:
    known = dotted_keys()
    inside = [k for k in known if k.startswith(f"{key}.")]
    if inside:
        raise UserError(f"{key!r} is a section and holds keys, such as {inside[0]!r}")
    free = ("method_options.", "world_options.", "protocol_options.")
    if key in known or key.startswith(free):
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    tail = [k for k in known if k.split(".")[-1] == key.split(".")[-1]]
    guess = tail[0] if tail else near[0] if near else None
    raise UserError(f"unknown key {key!r}" + (f"; did you mean {guess!r}?" if guess else ""))


def _flatten(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    sections = {k.split(".")[0] for k in dotted_keys() if "." in k}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not prefix and name in sections:
            keys += _flatten(value, f"{key}.")
        else:
            keys.append(key)
    return keys


def load_config(path: Path | str | None, overrides: Sequence[tuple[str, Any]] = ()) -> RunConfig:
    """Read a YAML file (or nothing) and put dotted overrides on top. Raises UserError for the first thing wrong."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (UnicodeDecodeError, RecursionError):
            raise UserError(f"{path}: not a YAML file in UTF-8") from None
        except yaml.YAMLError as error:
            raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise UserError(f"{path}: the file must be a mapping of keys")
        data = loaded or {}
        for key in _flatten(data):
            try:
                _check_key(key)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
    for key, value in overrides:
        _check_key(key)
        node = data
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        given = f" (got {first['input']!r})" if where else ""
        raise UserError(f"{where + ': ' if where else ''}{message}{given}") from None


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with every value filled in that depends on others: what is saved with a run."""
    from agentropy.tasks.worlds import rollout_defaults

    embedded = config.model is None
    r, o = config.rollout, config.optim
    world = {} if config.tasks else rollout_defaults(config.world or "arithmetic", config.world_options)
    lr = 5e-4 if embedded else 1e-5 if config.lora.rank else 1e-6
    return config.model_copy(
        update={
            "world": config.world or (None if config.tasks else "arithmetic"),
            "protocol": config.protocol or ("tags" if embedded else "hermes"),
            "rollout": r.model_copy(
                update={
                    "max_turns": r.max_turns or world.get("max_turns", 5),
                    "max_new_tokens": r.max_new_tokens or (world.get("max_new_tokens", 128) if embedded else 1024),
                    "max_result_tokens": r.max_result_tokens or (64 if embedded else 512),
                    "tool_timeout": r.tool_timeout or (2.0 if embedded else 5.0),
                }
            ),
            "optim": o.model_copy(update={"lr": o.lr or lr}),
        }
    )


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML that `--config` reads back."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_lines(path, text.splitlines())


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """`--a.b 3 --c=text --flag` as (key, value) pairs; values are read as YAML (3, 1e-5, true, [a, b])."""
    pairs: list[tuple[str, Any]] = []
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise UserError(f"do not know what to do with {name!r}; options start with --")
        key, equals, text = name[2:].partition("=")
        key = key.replace("-", "_")
        _check_key(key)
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            else:
                text = "true"
        pairs.append((key, _value(key, text)))
    return pairs


def split_list(text: str) -> list[str]:
    """The items between commas. Commas in quotes do not count, and quotes around a whole item are dropped."""
    items = [item.strip() for item in re.findall(r"""(?:"[^"]*"|'[^']*'|[^,])+""", text)]
    whole = re.compile(r"""(["'])((?:(?!\1).)+)\1""")
    return [match[2] if (match := whole.fullmatch(item)) else item for item in items if item]


def _value(key: str, text: str) -> Any:
    if key in ("log", "tools"):
        return split_list(text)
    if key in _TEXTS:  # `--out 2024` and `--system "Note: be brief"` are text, whatever YAML makes of them
        return None if text in ("null", "~") else text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        # YAML 1.1 reads 1e-5 as text because it lacks a dot.
        try:
            return float(value)
        except ValueError:
            return text
    return text if value is None and text not in ("null", "~", "None", "none") else value
