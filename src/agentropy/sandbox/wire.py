"""How client and supervisor talk: JSON messages, each behind its length; and the supervisor's epoll."""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Iterator
from typing import Any


def frame(message: dict[str, Any]) -> bytes:
    """A message with its length in four bytes before it."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "little") + text


class Frames:
    """Puts the messages of a byte stream together again."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Take in bytes; yields the messages that are complete by now."""
        self._data += data
        while len(self._data) >= 4:
            end = 4 + int.from_bytes(self._data[:4], "little")
            if len(self._data) < end:
                return
            message = json.loads(self._data[4:end])
            del self._data[:end]
            yield message


class Events:
    """Descriptors and what to do when they have something to say. Standard library only, for the supervisor."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `descriptor` is readable, until `unwatch`."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Forget a descriptor; needed before it is closed."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def writing(self, descriptor: int, wanted: bool) -> None:
        """Whether `handler` is also wanted when there is room to write."""
        if descriptor in self._handlers:
            self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def turn(self, timeout: float) -> None:
        """Wait for at most `timeout` seconds and call the handlers of what is ready."""
        for descriptor, _ in self._poll.poll(timeout):
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler()
