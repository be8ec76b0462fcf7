"""What `agentropy launch verl` hands to verl: data files in its schema, and overrides for its Hydra configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentropy.errors import UserError
from agentropy.integrations.verl.options import (
    GROUP,
    MANAGER,
    TRAINER,
    VerlOptions,
    check_config,
    method_of,
    read_options,
)
from agentropy.integrations.verl.rows import task_as_row
from agentropy.tasks.base import Task, TaskSource
from agentropy.tasks.files import FileTasks

GENERATED_TRAIN = 8192
"""Questions that are drawn from a source that never ends."""
PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")


@dataclass(frozen=True)
class Launch:
    """One run of verl. `questions` a step, `samples` trajectories a question, `minibatch` questions an update."""

    model: str
    options: VerlOptions
    folder: Path
    questions: int
    samples: int
    minibatch: int
    prompt_tokens: int
    response_tokens: int
    gpus: int
    nodes: int
    steps: int | None
    lr: float


def overrides(launch: Launch) -> list[str]:
    """verl's configuration for a run, as Hydra overrides in the order of their groups."""
    o, tokens = launch.options, launch.prompt_tokens + launch.response_tokens
    kl = float(o.method_options.get("kl_coef", 0) or 0)
    settings: dict[str, Any] = {
        "trainer.v1.trainer_mode": TRAINER,
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": MANAGER,
    }
    for key, value in o.model_dump(exclude_defaults=True).items():
        if isinstance(value, Mapping):
            settings |= {f"+{GROUP}.{key}.{name}": v for name, v in value.items()}
        else:
            settings[f"+{GROUP}.{key}"] = value
    settings |= {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": str(launch.folder / "train.parquet"),
        "data.val_files": str(launch.folder / "validation.parquet"),
        "data.train_batch_size": launch.questions,
        "data.max_prompt_length": launch.prompt_tokens,
        "data.max_response_length": launch.response_tokens,
        "actor_rollout_ref.model.path": launch.model,
        "actor_rollout_ref.actor.optim.lr": launch.lr,
        "actor_rollout_ref.actor.ppo_mini_batch_size": launch.minibatch,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2 * tokens,
        "actor_rollout_ref.actor.calculate_entropy": True,
        "actor_rollout_ref.actor.use_kl_loss": kl != 0,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": launch.samples,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.max_model_len": tokens,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        "trainer.n_gpus_per_node": launch.gpus,
        "trainer.nnodes": launch.nodes,
        "trainer.project_name": "agentropy",
        "trainer.experiment_name": launch.folder.name,
        "trainer.default_local_dir": str(launch.folder / "checkpoints"),
        "trainer.logger": ["console"],
        "trainer.save_freq": 20,
        "trainer.test_freq": 20,
    }
    if launch.steps is not None:
        settings["trainer.total_training_steps"] = launch.steps
    return [f"{key}={hydra_value(value)}" for key, value in settings.items()]


def hydra_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_value(v) for v in value) + "]"
    text = str(value)
    if PLAIN.fullmatch(text) and not re.fullmatch(r"(?i)null|true|false|[-+.\d].*", text):
        return text
    if "\n" in text:
        raise UserError(f"{text!r} has a line break, which Hydra's command line cannot hold: use a config file of verl")
    escaped = text.replace("\\", "\\\\") if text.endswith("\\") or '\\"' in text else text
    quoted = escaped.replace('"', '\\"')
    return f'"{quoted}"'


def write_data(source: TaskSource, folder: Path, train: int = GENERATED_TRAIN) -> tuple[int, int]:
    """Write `train.parquet` and `validation.parquet`; returns their numbers of questions.

    A source of files gives its training questions, one that never ends its first `train`. The validation split is the
    source's, or its test split where that one is empty. Raises UserError where either has no question.
    """
    tasks = _training(source, train)
    held = list(source.split("validation")) or list(source.split("test"))
    if not tasks or not held:
        raise UserError(f"{source.name} has no {'validation' if tasks else 'training'} question, and verl needs both")
    _write(folder / "train.parquet", tasks, source.name)
    _write(folder / "validation.parquet", held, source.name)
    return len(tasks), len(held)


def _training(source: TaskSource, n: int) -> list[Task]:
    if isinstance(source, FileTasks):
        return [t for t, split in zip(source.tasks, source.splits, strict=True) if split == "train"]
    return list(islice((source.train(i) for i in range(n)), n))


def _write(path: Path, tasks: Iterable[Task], name: str) -> None:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("verl's data files need pyarrow: pip install 'agentropy[data]'") from None
    rows = [task_as_row(task, i, name) for i, task in enumerate(tasks)]
    half = path.with_suffix(".part")
    parquet.write_table(pyarrow.Table.from_pylist(rows), half)
    half.replace(path)


def check(given: Sequence[str]) -> None:
    """Compose verl's configuration with the overrides and look for what cannot work, before anything is started.

    Raises: UserError for an override that verl does not know, and for a setting that contradicts the method.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            plain: Any = OmegaConf.to_container(compose("ppo_trainer", overrides=list(given)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"verl's configuration does not take the overrides: {first}") from None
    check_config(plain, method_of(read_options(plain), plain))
