"""Dynamic sampling inside verl: waits for the questions of a step, and replaces those that the filters remove."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from agentropy.batch import make_batch
from agentropy.errors import UserError
from agentropy.integrations.verl.rows import FIELDS, PREFIX, TOKEN_COLUMNS, read_trajectories
from agentropy.methods.base import Method
from agentropy.trajectory import Trajectory

POLL_SECONDS = 0.5


class GroupBuffer(ReplayBuffer):  # type: ignore[misc]
    """verl's replay buffer of a synchronous run that keeps the questions a method learns from.

    Rounds, as in the embedded trainer: all questions are awaited; for those that the method's filters removed (or that
    could not be sampled) others are drawn, as many as the recent share of kept ones makes likely, until the batch is
    full or `max_oversample` times its questions were drawn. A step then trains on what it has: nothing is duplicated,
    and a batch may be smaller. Where nothing was kept at all, the removed questions are the batch, and teach nothing.
    """

    def __init__(self, *, method: Method, rewards: str, max_oversample: float, **kwargs: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **kwargs)
        self._method = method
        self._rewards = rewards
        self._max_oversample = max_oversample
        self._keep_rate = 1.0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """The trajectories of `batch_size` questions, or of fewer, and what was drawn for them.

        Raises: UserError where not one question could be sampled; it says why.
        """
        if partition_id == "val":
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            if not batch.keys:
                raise UserError("no question of the validation set could be sampled; the workers' logs say why")
            return batch, metrics
        budget = max(math.floor(batch_size * self._max_oversample), batch_size)
        drawn, rounds = batch_size, 1
        alive: list[str] = []
        removed: list[str] = []
        failed: dict[str, str] = {}
        while True:
            self._await_all(partition_id)
            seen = {*alive, *removed, *failed}
            fresh = [u for u in self._terminal(partition_id) if u not in seen]
            kept, dead, lost = self._sort(partition_id, fresh)
            alive, removed, failed = alive + kept, removed + dead, failed | lost
            self._keep_rate += 0.5 * (len(kept) / max(len(fresh), 1) - self._keep_rate)
            want = batch_size - len(alive)
            if want <= 0 or drawn >= budget or self.refill_fn is None:
                break
            count = min(math.ceil(want / max(self._keep_rate, 0.25)), budget - drawn)
            self.refill_fn(count)
            drawn, rounds = drawn + count, rounds + 1
        chosen = alive[:batch_size] or removed[:batch_size]
        if not chosen:
            why = next(iter(failed.values()), "no reason is known")
            raise UserError(f"none of {len(failed)} questions could be sampled: {why}")
        metrics = {
            "filter/questions_sampled": float(drawn),
            "filter/questions_removed": float(len(removed)),
            "filter/questions_failed": float(len(failed)),
            "filter/rounds": float(rounds),
        }
        snapshot = dict(self.partitions[partition_id])
        batch = self._materialize_batch(partition_id, chosen, snapshot)
        self._clear_groups(partition_id, {*alive, *removed, *failed} - set(chosen))
        return batch, metrics

    def _await_all(self, partition_id: str) -> None:
        """Until no question is pending or running."""
        while True:
            self._sync_metadata_from_transfer_queue()
            if not self.pending_keys[partition_id] and not self.running_keys[partition_id]:
                return
            time.sleep(self.poll_interval)

    def _terminal(self, partition_id: str) -> list[str]:
        """Questions whose sampling has ended, in the order in which they were drawn as far as it is known."""
        ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
        return [u for u in self.prompt_global_steps[partition_id] if u in ended]

    def _sort(self, partition_id: str, uids: Sequence[str]) -> tuple[list[str], list[str], dict[str, str]]:
        """Questions that the method keeps, those that it removes, and those without trajectories, with the reason."""
        keys = [k for k in self.partitions[partition_id] if k.split("_")[0] in set(uids)]
        owners = {k.split("_")[0] for k in keys}
        tags = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        lost = {u: str(tags.get(u, {}).get("why", "it has no trajectory")) for u in uids if u not in owners}
        sampled = [u for u in uids if u in owners]
        if not sampled or not self._method.filters:
            return sampled, [], lost
        trajectories = stored(partition_id, keys, self._rewards)
        groups = make_batch(trajectories)
        kept = self._method.shape(groups).kept
        names = {groups.question_ids[i] for i in kept.nonzero().flatten().tolist()}
        return [u for u in sampled if u in names], [u for u in sampled if u not in names], lost


def stored(partition_id: str, keys: Sequence[str], rewards: str) -> list[Trajectory]:
    """The trajectories of keys in the TransferQueue, for filters: without log-probabilities and entropies."""
    fields = [*FIELDS, *(PREFIX + n for n in TOKEN_COLUMNS)]
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=fields)
    return read_trajectories(data, keys, range(len(keys)), rewards)
