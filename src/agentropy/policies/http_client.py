"""Requests to a model's server: retried, limited in time and number, counted.

What may go away by itself is tried again: no connection, a dead connection, no answer in time, 408, 409, 425, 429, 5xx,
an answer that is no JSON or lacks what it must have. What will not go away is said: a refused key ends the run, any
other refusal is the caller's to read (`Refused`).
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from agentropy.errors import UserError
from agentropy.policies.base import PolicyLost

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

TRY_AGAIN = frozenset({408, 409, 425, 429})
"""And every 5xx but 501."""
LONGEST_PAUSE = 30.0
LONGEST_RETRY_AFTER = 120.0
"""Seconds; a server that asks for more is asked again after so many."""
MOST_TIMEOUTS = 3
"""What was too slow so often will be again."""
_CONTEXT = re.compile(
    r"context[ _-]?(length|size|window)|maximum context|prompt is too long|too many tokens|"
    r"(prompt|input|request)\b.{0,60}(longer|exceeds?|too long)\b.{0,60}(token|context|length|model)|"
    r"max_model_len|exceed_context|string_above_max_length|reduce the length of",
    re.IGNORECASE | re.DOTALL,
)


class BadAnswer(Exception):
    """The server's answer is not what the API says. It is asked again."""


class Refused(Exception):
    """The server understood the request and refuses it; asking again would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message

    @property
    def is_context(self) -> bool:
        """True where the sequence does not fit the model's window."""
        return self.status in (400, 413, 422) and _CONTEXT.search(self.message) is not None


@dataclass
class Usage:
    """What was asked of a server so far.

    requests: answered requests that were of use; the tokens are theirs, as the server counts them
    retries: further tries, by cause: `connection`, `timeout`, `429`, `503`, …, `rubbish` (no JSON), `incomplete`
    lost: requests given up after all tries, or refused: each ended a trajectory
    waited: seconds slept between tries
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    waited: float = 0.0

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        """One answered request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def to_json(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "retries": dict(sorted(self.retries.items())),
            "lost": self.lost,
            "waited_seconds": round(self.waited, 3),
        }


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for.

    timeout: seconds one request may take from connecting to the last byte
    tries: times a request is sent
    pause: seconds before the second try; doubled for each further one up to 30, less a random part of up to a half
    """

    timeout: float = 600.0
    tries: int = 8
    pause: float = 0.5


class Client:
    """JSON over HTTP to one server, from one event loop at a time: `close` before it ends, and another one can follow.

    Args:
        root: the server's address without `/v1`.
        key: the API key, sent as a bearer token; None sends none.
        concurrency: requests at once; others wait, and what they wait is not counted.
    """

    def __init__(self, root: str, key: str | None, concurrency: int, patience: Patience) -> None:
        self.root = root
        self.patience = patience
        self.usage = Usage()
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._concurrency = concurrency
        self._http: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._down = False

    async def close(self) -> None:
        """Close the connections. Safe to call twice; the next request opens new ones."""
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    def _connections(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._http is None or self._slots is None or self._loop is not loop:
            import httpx

            limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
            self._http = httpx.AsyncClient(base_url=self.root, headers=self._headers, limits=limits, timeout=None)
            self._slots = asyncio.Semaphore(self._concurrency)
            self._loop = loop
        return self._http, self._slots

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Send a request until `read` takes its answer.

        Raises: UserError where the key is refused; Refused where the request is; PolicyLost after the last try.
        """
        http, slots = self._connections()
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        async with slots:
            # A server that was just given up on gets a short trial by each further request, until one is answered.
            tries = min(self.patience.tries, 3) if self._down else self.patience.tries
            timeouts, why = 0, ""
            for attempt in range(1, tries + 1):
                answer = await self._once(http, path, content, read)
                if not isinstance(answer, Retry):
                    self._down = False
                    return answer
                timeouts, why = timeouts + (answer.cause == "timeout"), answer.message
                if attempt == tries or timeouts == MOST_TIMEOUTS:
                    break
                self.usage.retries[answer.cause] += 1
                await self._sleep(attempt, answer.retry_after)
        self._down = True
        self.usage.lost += 1
        raise PolicyLost(f"{self.root}{path}: {why}; tried {attempt} times")

    async def _sleep(self, attempt: int, retry_after: float | None) -> None:
        seconds = min(LONGEST_PAUSE, self.patience.pause * 2 ** (attempt - 1)) * (1 - random.random() / 2)
        if retry_after is not None:
            seconds = max(seconds, min(retry_after, LONGEST_RETRY_AFTER))
        self.usage.waited += seconds
        await asyncio.sleep(seconds)

    async def _once(self, http: httpx.AsyncClient, path: str, content: bytes, read: Callable[[Any], T]) -> T | Retry:
        import httpx

        try:
            async with asyncio.timeout(self.patience.timeout):
                headers = {"content-type": "application/json"}
                response = await http.post(path, content=content, headers=headers)
        except TimeoutError:
            return Retry("timeout", f"no answer within {self.patience.timeout:g} s")
        except httpx.HTTPError as error:
            return Retry("connection", f"{type(error).__name__}: {error}".rstrip(": "))
        if response.status_code != 200:
            return judge(response, self.root)
        try:
            return read(response.json())
        except (ValueError, RecursionError):  # UnicodeDecodeError is one, too
            return Retry("rubbish", f"an answer that is no JSON: {response.content[:60]!r}")
        except BadAnswer as error:
            return Retry("incomplete", f"an answer without what was asked for: {error}")


@dataclass(frozen=True, slots=True)
class Retry:
    """Why a request is sent again."""

    cause: str
    message: str
    retry_after: float | None = None


def judge(response: httpx.Response, root: str) -> Retry:
    """A failure that may go away, from an answer with another status than 200; raises what will not."""
    status, message = response.status_code, error_text(response)
    if "location" in response.headers:
        message += f" (it is at {response.headers['location']})"
    if status in (401, 403):
        raise UserError(f"{root} refuses the API key (HTTP {status}: {message}): check --api-key-env")
    if status == 402 or (status == 429 and "insufficient_quota" in response.text):
        raise UserError(f"{root}: the account has nothing left to pay with (HTTP {status}: {message})")
    refused = Refused(status, message)
    if refused.is_context:
        raise refused
    if status in TRY_AGAIN or (status >= 500 and status != 501):
        return Retry(str(status), f"HTTP {status}: {message}", retry_after(response.headers))
    raise refused


def error_text(response: httpx.Response) -> str:
    """What the server says is wrong, in one line of at most 300 characters; OpenAI's, FastAPI's and other forms."""
    text = response.text
    try:
        data = response.json()
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict):
        found = data.get("error", data.get("detail", data.get("message", text)))
        if isinstance(found, dict):
            found = " ".join(str(found[k]) for k in ("message", "code") if found.get(k)) or found
        text = str(found)
    text = " ".join(re.sub(r"<[^<>]*>", " ", text).split()) or response.reason_phrase
    return text if len(text) <= 300 else text[:299] + "…"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to be left alone, by `retry-after-ms` or `Retry-After` (seconds or a date)."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) / unit
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
            except ValueError:
                continue
        if 0 <= seconds < float("inf"):
            return seconds
    return None
