"""Weights from the trainer to a vLLM server that runs in its development mode.

Two ways behind one interface: as a file that the server reads again, and from GPU to GPU by vLLM's own transfer
engine. Around either, `push_weights` pauses the server, forgets what its cache holds of the old weights, and gives the
new ones a version, so that a server that lost them can be told from one that has them.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentropy.errors import UserError
from agentropy.policies.http_client import error_text

DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, which adds the endpoints for new weights (docs/sampler.md)"


class ServerGone(Exception):
    """The server does not answer. It may come back."""


CALL_SECONDS, LOAD_SECONDS = 60.0, 600.0
"""How long a call may take, and one that moves weights."""
LOADING = ("/collective_rpc", "/init_weight_transfer_engine", "/update_weights", "/finish_weight_update")


class Control:
    """A vLLM server's endpoints for weights. Blocking."""

    def __init__(self, root: str, key: str | None = None) -> None:
        import httpx

        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.root = root
        self._http = httpx.Client(base_url=root, headers=headers)

    def get(self, path: str) -> Any:
        """The JSON of an answer; None where there is no such endpoint."""
        return self._ask("GET", path, missing=True)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, missing: bool = False, **query: str) -> Any:
        """The JSON of an answer, `{}` where it is empty; None where there is no such endpoint and `missing` allows it.

        Raises ServerGone where there is no answer, UserError where the server refuses.
        """
        return self._ask("POST", path, body, missing, query)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        missing: bool = False,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        import httpx

        try:
            timeout = httpx.Timeout(LOAD_SECONDS if path in LOADING else CALL_SECONDS, connect=10.0)
            response = self._http.request(method, path, json=body, params=dict(query or {}), timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerGone(f"{self.root}{path}: {type(error).__name__}: {error}".rstrip(": ")) from None
        if response.status_code == 404:
            if missing:
                return None
            raise UserError(f"{self.root} has no {path}: {DEV_MODE}")
        if response.status_code in (401, 403):
            raise UserError(f"{self.root}{path} refuses (HTTP {response.status_code}): check sampler.api_key_env")
        if response.status_code in (502, 503, 504):
            raise ServerGone(f"{self.root}{path}: HTTP {response.status_code}")
        if response.status_code != 200:
            raise UserError(f"{self.root}{path} failed (HTTP {response.status_code}): {error_text(response)}")
        try:
            return response.json() if response.content else {}
        except ValueError:
            raise ServerGone(f"{self.root}{path}: an answer that is no JSON") from None


class Transport(Protocol):
    """Brings weights to the server. Raises ServerGone, or UserError for what will not mend itself."""

    def send(self, model: Any, version: str) -> None: ...

    def reset(self) -> None:
        """Forget the connection: the server is another process now."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def push_weights(control: Control, transport: Transport, model: Any, version: str) -> None:
    """Replace the server's weights while it waits, and name them `version` where it can be told.

    Raises: ServerGone, or UserError; nothing that the server samples after that is to be trusted.
    """
    control.post("/pause", mode="wait", clear_cache="true")
    try:
        transport.send(model, version)
        answer = control.post("/reset_prefix_cache")
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise UserError(f"{control.root} did not reset its prefix cache: is something else using the server?")
        control.post("/update_weight_version", {"new_version": version}, missing=True)
    except BaseException:
        with contextlib.suppress(ServerGone, UserError):
            control.post("/resume")
        raise
    control.post("/resume")


def served_version(control: Control) -> str | None:
    """The version that the server's weights have; None where it keeps none (as older vLLMs)."""
    answer = control.get("/weight_info")
    return str(answer.get("weight_version")) if isinstance(answer, Mapping) else None


# -- weights ----------------------------------------------------------------------------------------------------------


def checkpoint_weights(model: Any) -> dict[str, Tensor]:
    """Every weight under the names that a checkpoint has for it, LoRA adapters added to what they adapt.

    Tied weights come under each of their names: a server may have untied them (a checkpoint with both, a CPU that packs
    the head), and one that has not passes over the second. Tensors share the model's memory except where an adapter is
    merged.
    """
    from transformers.core_model_loading import revert_weight_conversion

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    adapted = {name: m for name, m in base.named_modules() if hasattr(m, "get_delta_weight")}
    weights: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if any(part.startswith("lora_") for part in name.split(".")):
            continue
        owner = owner.removesuffix(".base_layer")
        value = tensor.detach()
        if owner in adapted and leaf == "weight":
            module = adapted[owner]
            for adapter in module.active_adapters:
                value = value + module.get_delta_weight(adapter).detach().to(value.dtype)
        weights[f"{owner}.{leaf}" if owner else leaf] = value
    converted: dict[str, Tensor] = revert_weight_conversion(base, weights)
    return converted


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, each in memory of its own, as safetensors wants it."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in weights.items():
        value = weight.cpu().contiguous()
        out[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return out


@dataclass
class DiskTransport:
    """A safetensors file in a directory of its own for each version, under a path that the server can read too."""

    control: Control
    directory: Path
    _sent: Path | None = field(default=None, init=False)

    def send(self, model: Any, version: str) -> None:
        target, partial = self.directory / version, self.directory / f".{version}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
            partial.mkdir(parents=True)
            file = partial / "model.safetensors"
            save_file(_apart(checkpoint_weights(model)), file, {"format": "pt"})
            file.chmod((partial.stat().st_mode & 0o444) | 0o200)  # safetensors lets nobody but the owner read
            partial.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(f"cannot write weights for the server to {target}: {why}") from None
        try:
            self.control.post(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(target.resolve())}}
            )
        except UserError as error:
            raise UserError(
                f"{error}; it was to load {target.resolve()}: can it read that path (sampler.directory), and is it the "
                "same model?"
            ) from None
        if self._sent != target:
            self.close()
        self._sent = target

    def reset(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Delete the last file: the server has what was in it."""
        if self._sent is not None:
            shutil.rmtree(self._sent, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: another run's
                self.directory.rmdir()


@dataclass
class NcclTransport:
    """vLLM's NCCL engine: the trainer is rank 0 of a group with all of the server's workers.

    vLLM's own trainer-side classes do the work and drive the four phases (init, start, update, finish) through our
    `Control`, so the protocol is theirs in whichever version is installed; it must be that of the server. `address` is
    the trainer's as the server sees it.
    """

    control: Control
    address: str
    _engine: Any = field(default=None, init=False)
    _source: Any = field(default=None, init=False)

    def send(self, model: Any, version: str) -> None:
        if self._engine is None:
            self._engine = self._connect(model)
        self._source.model = model
        try:
            self._engine.send_weights()
        except RuntimeError as error:
            self.reset()
            raise UserError(f"the NCCL transfer to {self.control.root} failed: {str(error).splitlines()[0]}") from None

    def reset(self) -> None:
        """The group cannot outlive one of its members."""
        self._engine = None

    def close(self) -> None:
        """Leave the group: the server may be used by another run."""
        if self._engine is not None:
            with contextlib.suppress(ServerGone, UserError):
                self.control.post("/shutdown_weight_transfer_engine", missing=True)
        self.reset()

    def _connect(self, model: Any) -> Any:
        try:
            from vllm.distributed.weight_transfer.base import ParamMeta
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )
        except ImportError:
            raise UserError(
                "sampler.push nccl needs the server's version of vLLM (0.26 or newer) in this environment too, for its "
                "trainer's side; or use --sampler.push disk"
            ) from None
        answer = self.control.get("/get_world_size")
        if not isinstance(answer, Mapping):
            raise UserError(f"{self.control.root} has no /get_world_size: {DEV_MODE}")
        self._source = _Source(model, ParamMeta)
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=self.address,
            master_port=_free_port(),
            world_size=int(answer["world_size"]) + 1,
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=_Client(self.control), source=self._source)


@dataclass
class _Source:
    """vLLM's `WeightSource`: what will be sent, and then the tensors in the same order."""

    model: Any
    meta: Any

    def metadata(self) -> list[Any]:
        return [self.meta(name, w.dtype, tuple(w.shape)) for name, w in checkpoint_weights(self.model).items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in checkpoint_weights(self.model).items():
            yield name, weight.contiguous()


@dataclass
class _Client:
    """vLLM's `VLLMWeightSyncClient`, over our connection."""

    control: Control

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.control.post("/init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self.control.post("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self.control.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.control.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.control.post(
            "/finish_weight_update", None if weight_version is None else {"weight_version": weight_version}
        )


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])
