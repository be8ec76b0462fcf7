"""More than one process, as torchrun starts them: who they are, how they agree, and how they share the rollout.

Every process (a rank) runs the same program on the same data; each samples its share of the questions, and then all
have all trajectories, in one order. So whatever follows from them is decided alike everywhere, and nothing else needs
to be told. Rank 0 writes the run directory.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from agentropy.errors import UserError
from agentropy.policies.base import SamplingParams
from agentropy.rollout.loop import Agent, Attempt, Limits, RolloutFunction
from agentropy.trajectory import Trajectory

T = TypeVar("T")

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment of each process."""
TIMEOUT_VARIABLE, TIMEOUT_MINUTES = "AGENTROPY_RANK_TIMEOUT", 10.0
"""How long ranks wait for one that gives no sign of life; torchrun ends them at once where one has died."""
PREPARING = timedelta(hours=12)
"""How long ranks wait for the first one of their machine, which may have to download or to train a warm start."""
BEAT_SECONDS = 15.0
"""Between a rank's signs of life during a rollout."""
FAILED = "failed"
"""Key of the store: how many ranks have failed."""
POLL_SECONDS = (0.002, 0.5)
"""How often a rank looks whether the others are done, at first and in the end."""


class OtherRankFailed(Exception):
    """Another rank has ended the run and says why."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run and which of them this is; with one process everything here is the identity.

    `machine` is the number of this rank's machine and `local_rank`, of `local_size`, its place there. `store` is the
    key-value store of the run, `patience` the seconds after which a rank without a sign of life is given up.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    machine: int = 0
    store: Any = None
    patience: float = 0.0
    _rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run directory and speaks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of each rank, by rank. All ranks must call; each waits for the last."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def same(self, value: T) -> T:
        """Rank 0's value. All ranks must call."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def in_turn(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank, on the first of each machine before the others: it fills caches for them."""
        if self.size == 1:
            return make()
        done = f"prepared/{self.machine}"
        if self.local_rank:
            self.store.wait([done], PREPARING)
            return make()
        made = make()
        self.store.set(done, "1")
        return made

    def device(self, name: str) -> str:
        """This rank's device for the configuration's: with `auto` each has a GPU of its own, or all compute on the CPU.

        Raises UserError where there are fewer GPUs than ranks, and for a device that they cannot share.
        """
        if self.size == 1:
            return name
        import torch

        if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return "cpu"
        if name not in ("auto", "cuda"):
            raise UserError(f"device {name!r} is one for all {self.size} processes: leave it at auto, or set cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{self.local_size} processes on a machine with {torch.cuda.device_count()} GPUs: start as many as "
                "there are (torchrun --nproc_per_node), or set --device cpu"
            )
        return f"cuda:{self.local_rank}"

    def share(self, roll: RolloutFunction, stop: asyncio.Event | None = None) -> RolloutFunction:
        """A rollout that samples this rank's questions with `roll` and returns everybody's trajectories, in order.

        All samples of a question stay together. No rank waits for another until its own share is done. One that is
        cancelled cancels the others, when they are done, and sets their `stop`; without that they raise
        OtherRankFailed, as they do at once where another rank has failed.
        """
        if self.size == 1:
            return roll

        async def shared(
            agent: Agent, attempts: Sequence[Attempt], params: SamplingParams, limits: Limits
        ) -> list[Trajectory]:
            number, owners = next(self._rounds), deal_questions(attempts, self.size)
            mine = [a for a, owner in zip(attempts, owners, strict=True) if owner == self.rank]
            found: list[Trajectory] = []
            cancelled = False
            beating = asyncio.ensure_future(self._beat())
            try:
                try:
                    if mine:
                        found = await roll(agent, mine, params, limits)
                except asyncio.CancelledError:
                    cancelled = True
                self.store.set(f"done/{self.rank}", str(number))
                while not await self._all_done(number):
                    cancelled = True
            finally:
                beating.cancel()
            parts = self.gather((cancelled, found))
            if cancelled:
                raise asyncio.CancelledError
            if any(other for other, _ in parts):
                if stop is None:
                    raise OtherRankFailed
                stop.set()
                raise asyncio.CancelledError
            queues = [iter(part) for _, part in parts]
            return [next(queues[owner]) for owner in owners]

        return shared

    async def _beat(self) -> None:
        for n in itertools.count():
            self.store.set(f"beat/{self.rank}", str(n))
            await asyncio.sleep(min(BEAT_SECONDS, self.patience / 4))

    async def _all_done(self, number: int) -> bool:
        """Wait until the shares of all ranks are done, however long they take; False where this was cancelled.

        Raises OtherRankFailed where one has ended the run, and UserError for one that gives no sign of life. A
        collective would wait a fixed time only, and nothing else could run meanwhile.
        """
        pause, ranks = POLL_SECONDS[0], range(self.size)
        beats: list[tuple[bytes, float]] = [(b"", time.monotonic())] * self.size
        while True:
            waiting = [r for r, n in enumerate(self._read("done")) if int(n) < number]
            if not waiting:
                return True
            if self.store.check([FAILED]):
                raise OtherRankFailed
            now = time.monotonic()
            seen = self._read("beat")
            beats = [beats[r] if beats[r][0] == seen[r] else (seen[r], now) for r in ranks]
            if late := [str(r) for r in waiting if now - beats[r][1] > self.patience]:
                raise UserError(
                    f"no sign of life from rank {', '.join(late)} for {self.patience / 60:g} minutes; go on from the "
                    f"last checkpoint with --resume ({TIMEOUT_VARIABLE} sets other minutes)"
                )
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                return False
            pause = min(2 * pause, POLL_SECONDS[1])

    def _read(self, what: str) -> list[bytes]:
        values: list[bytes] = self.store.multi_get([f"{what}/{rank}" for rank in range(self.size)])
        return values


ALONE = Ranks()


def deal_questions(attempts: Sequence[Attempt], ranks: int) -> list[int]:
    """The rank that samples each attempt. Attempts at one question that follow each other stay together; questions go
    round, so that shares differ by one question at most."""
    owners: list[int] = []
    question = -1
    for i, attempt in enumerate(attempts):
        question += i == 0 or attempts[i - 1].task.id != attempt.task.id
        owners.append(question % ranks)
    return owners


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return all(os.environ.get(name) for name in VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def run_joined(work: Callable[[Ranks], int]) -> int:
    """Join the other processes, do the work, and return its exit code.

    Whatever ends the run is said by one rank only: the others return 1 in silence.
    """
    import torch.distributed as dist

    ranks = _join()
    try:
        code = work(ranks)
        ranks.gather(None)  # else torchrun would end rank 0 amid its last words
    except OtherRankFailed:
        return 1
    except (Exception, KeyboardInterrupt):
        # No farewell to the others, who may be waiting for something else: torchrun ends them when this one is gone.
        if _first_to_fail(ranks):
            raise
        return 1
    dist.destroy_process_group()
    return code


def _join() -> Ranks:
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    try:
        rank, size, local_rank, local_size, machine = (int(os.environ[name]) for name in VARIABLES[:5])
        minutes = float(os.environ.get(TIMEOUT_VARIABLE, TIMEOUT_MINUTES))
        if not minutes > 0:
            raise ValueError(f"{TIMEOUT_VARIABLE} is {minutes:g}, which is no time")
        patience = timedelta(minutes=minutes)
    except (ValueError, OverflowError) as error:
        names = ", ".join((*VARIABLES[:5], TIMEOUT_VARIABLE))
        raise UserError(f"the environment variables {names} must be numbers: {error}") from None
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    # Numbers that are small and on the CPU go by gloo on every machine.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    store, _, _ = next(rendezvous("env://", timeout=patience))
    dist.init_process_group(backend, store=PrefixStore("ranks", store), rank=rank, world_size=size, timeout=patience)
    ours = PrefixStore("agentropy", store)
    for what in ("done", "beat"):
        ours.set(f"{what}/{rank}", "0")
    return Ranks(rank, size, local_rank, local_size, machine, ours, patience.total_seconds())


def _first_to_fail(ranks: Ranks) -> bool:
    """Whether no other rank has failed before. Where the store is gone, its owner has."""
    try:
        return int(ranks.store.add(FAILED, 1)) == 1
    except RuntimeError:
        return False
