"""What servers answered, on disk: a question asked again, by any process and in any later run, costs no request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def cache_directory(name: str) -> Path:
    """A folder of our cache: under $AGENTROPY_CACHE, or ~/.cache/agentropy."""
    return Path(os.environ.get("AGENTROPY_CACHE") or "~/.cache/agentropy").expanduser() / name


class DiskCache:
    """JSON values by text keys, one file each. Entries never expire: a run repeats itself until they are deleted.

    directory: made at the first write. Several processes may use it at once. What cannot be read or is damaged counts
    as missing; what cannot be written is not kept.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._running: dict[str, asyncio.Future[Any]] = {}

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()
        return self.directory / digest[:2] / f"{digest[2:]}.json"

    def get(self, key: str) -> Any:
        """The value, or None."""
        try:
            entry = json.loads(self._path(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(entry, dict) or entry.get("key") != key:
            return None
        return entry.get("value")

    def put(self, key: str, value: Any) -> None:
        """Keep a value, whole or not at all."""
        path = self._path(key)
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"key": key, "value": value}, file)
            os.replace(temporary, path)
        except OSError:
            if temporary:
                Path(temporary).unlink(missing_ok=True)

    async def fetch(self, key: str, make: Callable[[], Awaitable[Any]], fits: Callable[[Any], bool]) -> Any:
        """The value from disk if it `fits`, or what `make` gives, which is kept. Who asks for the same at the same time
        waits for the one that asked first. Raises what `make` raises."""
        value = self.get(key)
        if value is not None and fits(value):
            return value
        running = self._running.get(key)
        if running is None:
            running = asyncio.ensure_future(self._make(key, make))
            self._running[key] = running
            running.add_done_callback(lambda done: self._forget(key, done))
        # One that gives up must not take the answer from the others.
        return await asyncio.shield(running)

    def _forget(self, key: str, done: asyncio.Future[Any]) -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # seen, even if everybody has given up waiting

    async def _make(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        value = await make()
        self.put(key, value)
        return value

    async def close(self) -> None:
        """Cancel what nobody waits for any more."""
        running = list(self._running.values())
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)
