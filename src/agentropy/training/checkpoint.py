"""Checkpoints: everything that a run needs to go on exactly where it was.

A checkpoint is a directory `checkpoints/step-000010` with the model as an ordinary Hugging Face checkpoint, and
`state.pt` with the optimiser and the position in the data. It is written under another name and renamed, so a killed
run never leaves half a checkpoint. No random state is stored because none is kept: all randomness is derived from the
run's seed by name (`agentropy.seeds`).
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from agentropy.errors import UserError
from agentropy.training.optimizer import MasterAdamW

if TYPE_CHECKING:
    from agentropy.training.sharding import Shards


@dataclass
class Progress:
    """Where a run is: steps done, the next index of the training stream, and the recent share of kept groups."""

    step: int = 0
    next_index: int = 0
    keep_rate: float = 1.0
    tokens: int = 0
    seconds: float = 0.0


def save_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write model and tokenizer as an ordinary Hugging Face checkpoint."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    share(directory)


def share(directory: Path) -> None:
    """Give weights the rights that other new files get: safetensors lets nobody but their owner read them."""
    mode = (directory / "tokenizer_config.json").stat().st_mode & 0o777
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)


def optimizer_state(optimizer: MasterAdamW) -> dict[str, Any]:
    """What a checkpoint keeps of an optimiser."""
    return {"optimizer": optimizer.state_dict(), "masters": [m.cpu() for m in optimizer.masters()]}


def save_checkpoint(
    directory: Path, model: Any, tokenizer: Any, state: Mapping[str, Any], progress: Progress, keep: int
) -> Path:
    """Write one checkpoint below `directory` and delete all but the newest `keep`. `state` is `optimizer_state`."""
    final = directory / checkpoint_name(progress.step)
    partial = directory / f".partial-{progress.step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_model(model, tokenizer, partial / "model")
        trainable = {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}
        torch.save(
            {
                **state,
                "progress": asdict(progress),
                "trainable": trainable,
            },
            partial / "state.pt",
        )
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # the last two are how torch and safetensors fail to write
        shutil.rmtree(partial, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not all was written; a full disk?"
        raise UserError(f"cannot write the checkpoint {final}: {why}") from None
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step:06d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step-[0-9]*") if (p / "state.pt").is_file())


def restore(checkpoint: Path, model: Any, optimizer: MasterAdamW, shards: Shards | None = None) -> Progress:
    """Load the trainable weights and the optimiser in place. Frozen weights are those the run started from.

    With `shards`, whose `model` it must be, each rank takes its parts.

    Raises UserError for a file that is damaged, or of another model.
    """
    try:
        # The ranks of a machine share the file's memory; they would not fit with a copy each.
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True, mmap=shards is not None)
        progress = Progress(**state["progress"])
        masters, momenta, trainable = state["masters"], state["optimizer"], state["trainable"]
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint / 'state.pt'} is damaged ({type(error).__name__}); delete {checkpoint} to go on from the "
            "checkpoint before it, or from the start"
        ) from None
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if {n: p.shape for n, p in parameters.items()} != {n: p.shape for n, p in trainable.items()}:
        raise UserError(f"{checkpoint} does not fit the model: it trains other weights (was LoRA switched?)")
    if shards is not None:
        shards.load(trainable, state, optimizer)
        return progress
    with torch.no_grad():
        for name, value in trainable.items():
            parameters[name].copy_(value)
    optimizer.load_state_dict(momenta)
    optimizer.load_masters(masters)
    return progress
