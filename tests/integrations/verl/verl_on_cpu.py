"""Lets the whole of verl run on a CPU, for tests: a platform, our local engine as a rollout server, gloo and FSDP2.

verl loads this module in every process (VERL_USE_EXTERNAL_MODULES). It has plug-in points for platforms and rollout
replicas; two things are put in by force: the adapter in the actor's process, and the backend of the process group.
Everything else is verl as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the FSDP engine is registered for it alone, and does not insist


def _none(*args: Any, **kwargs: Any) -> int:
    return 0


QUIET = (
    *("empty_cache", "synchronize", "max_memory_allocated", "max_memory_reserved", "memory_allocated"),
    *("memory_reserved", "set_device", "reset_peak_memory_stats", "ipc_collect", "manual_seed", "manual_seed_all"),
    *("device_count", "current_device"),
)


class CpuPlatform(PlatformBase):
    """What verl asks of a device, for the CPU. Ray is told that there is a GPU, and nobody looks for it."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **dict.fromkeys(QUIET, _none),
        is_available=lambda: True,
        mem_get_info=lambda *a: (1 << 33, 1 << 34),
        get_device_name=lambda *a: "CPU",
        get_rng_state=lambda *a: torch.get_rng_state(),
        set_rng_state=lambda state, *a: torch.set_rng_state(state),
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> Any:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def get_collective_module(self) -> Any:
        return None

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> Any:
        return None


platform_manager.set_platform(CpuPlatform())


class Server:
    """A rollout server: our local engine, on weights that the actor sends."""

    def __init__(self, path: str) -> None:
        from agentropy.policies.loading import load_model
        from agentropy.policies.local import LocalPolicy

        torch.set_num_threads(1)
        model, tokenizer = load_model(path)
        self.policy = LocalPolicy(model, tokenizer, deterministic=False)
        self.policy.begin()
        self.version = -1
        self.seed = 0

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        from agentropy.policies.base import SamplingParams, Stop

        p = sampling_params
        self.seed += 1
        [handle] = self.policy.open(list(prompt_ids), [self.seed])
        params = SamplingParams(p["temperature"], p["top_p"], max(p["top_k"], 0), p["max_tokens"])
        stop = Stop(frozenset(p.get("stop_token_ids", ())), tuple(p.get("stop", ())))
        out = await self.policy.generate(handle, (), params, stop)
        self.policy.close(handle)
        return TokenOutput(
            token_ids=list(out.ids),
            log_probs=list(out.logprobs),
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )

    async def load(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        self.policy.end()
        missing, unexpected = self.policy.model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert all("lm_head" in name for name in missing), missing
        self.policy.begin()
        self.version = self.version if version is None else version

    async def wake_up(self, *args: Any, **kwargs: Any) -> None: ...

    async def sleep(self, *args: Any, **kwargs: Any) -> None: ...

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> None: ...

    async def resume_generation(self, *args: Any, **kwargs: Any) -> None: ...

    async def clear_kv_cache(self, *args: Any, **kwargs: Any) -> None: ...


def server_name(rank: int) -> str:
    return f"agentropy_cpu_server_{rank}"


def _replica() -> Any:
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self) -> None:
            path = self.model_config["path"]
            name = server_name(self.replica_rank)
            self._server_handle = ray.remote(Server).options(name=name, num_cpus=0).remote(path)
            self._server_address = name
            self.servers = [self._server_handle]

    return Replica


class Adapter:
    """In an actor's process: sends the weights to the server of the same rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        self.config = config

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: Any = None, **kwargs: Any) -> None:
        named = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        await ray.get_actor(server_name(int(os.environ.get("RANK", 0)))).load.remote(named, global_steps)


def _register() -> None:
    from verl.utils import distributed
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", _replica)
    base._ROLLOUT_REGISTRY[("vllm", "async")] = "verl_on_cpu.Adapter"
    # verl asks torch for "cpu:gloo" and one more for its device, which here is the same.
    distributed.initialize_global_process_group_ray = functools.partial(
        distributed.initialize_global_process_group_ray, backend="gloo"
    )


_register()
