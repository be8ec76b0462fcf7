"""A vLLM server in miniature that takes new weights, as one does in its development mode, on a thread of its own.

It really samples, with a transformers model, and really loads the files that it is told to. Ways to be wrong are
options.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

from fake_vllm import TinyServer
from faulty_server import Refuse, Served, serve


@dataclass
class WeightServer(TinyServer):
    """`log`: the calls about weights, in order. `wrong`: what a client did at the wrong time."""

    dev_mode: bool = True
    versions: bool = True
    """It keeps a version of its weights, as vLLM 0.32 does."""
    forgets: bool = False
    """It says that it has loaded weights, and has not."""
    fails: str | None = None
    """Why it cannot load weights."""
    restarts_at: int | None = None
    """Number of the completion before which it is another process, with the weights it began with."""
    restarted_version: str = "default"
    """What its weights are called after that: another run's, if that run has pushed them."""
    version: str = "default"
    paused: bool = False
    stale: bool = False
    completions: int = 0
    log: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = copy.deepcopy(self.model.state_dict())

    def __call__(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        url = urlsplit(path)
        name = url.path.strip("/")
        handler = getattr(self, f"on_{name}", None)
        if handler is not None:
            if not self.dev_mode or ("version" in name or name == "weight_info") > self.versions:
                raise Refuse(404, {"detail": "Not Found"})
            query = {k: v[0] for k, v in parse_qs(url.query).items()}
            if body is not None or query or name not in ("is_paused", "weight_info", "get_world_size"):
                self.log.append(name)
            return handler(body or query)
        if url.path == "/v1/completions":
            self.completions += 1
            if self.completions == self.restarts_at:
                self.model.load_state_dict(self.first)
                self.version = self.restarted_version
            if self.paused or self.stale:
                self.wrong.append("a completion while weights are on their way, or from an old cache")
        return super().__call__(url.path, body, headers)

    def on_is_paused(self, body: Any) -> Any:
        return {"is_paused": self.paused}

    def on_weight_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    def on_get_world_size(self, body: Any) -> Any:
        return {"world_size": 2}

    def on_pause(self, body: Any) -> Any:
        assert body["mode"] == "wait"
        self.paused = True
        return {"status": "paused"}

    def on_resume(self, body: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def on_collective_rpc(self, body: Any) -> Any:
        assert body["method"] == "reload_weights"
        if not self.paused:
            self.wrong.append("new weights without a pause")
        if self.fails:
            raise Refuse(500, {"error": {"message": self.fails}})
        weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        if not self.forgets:
            self.model.load_state_dict({k: v.to(self.model.dtype) for k, v in weights.items()}, strict=True)
        self.stale = True
        return {"results": [None]}

    def on_reset_prefix_cache(self, body: Any) -> Any:
        self.stale = False
        return {"success": True}

    def on_update_weight_version(self, body: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True}


@contextlib.contextmanager
def running(brain: Any) -> Iterator[Served]:
    """Serve from another thread, so that the test's own event loop can be the trainer's."""
    ready, done = threading.Event(), asyncio.Event()
    box: list[Any] = []

    async def main() -> None:
        async with serve(brain) as served:
            box.extend((served, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield box[0]
    finally:
        box[1].call_soon_threadsafe(done.set)
        thread.join(30)


def agent_server(world: str = "arithmetic", **options: Any) -> WeightServer:
    """A server of the embedded agent of a world, in the precision of `dtype`."""
    from agentropy.policies.loading import load_model
    from agentropy.tasks.worlds import make_world

    dtype = options.pop("dtype", torch.float32)
    model, tokenizer = load_model(make_world(world).warm_start(), dtype=dtype)
    return WeightServer(model, tokenizer, window=512, max_logprobs=20, **options)
