"""Many trajectories end to end in flat tensors, with index maps. There is no padding, so there are no padding bugs.

Letters in shapes: T tokens, N trajectories, G groups, S segments, U turns, C executed calls. A *turn* is what the model
samples between two tool results; it is the reasoning r_k and the call k+1 that ends it, if it has one. A mask says what
True means where it is declared. Everything is on the CPU until `to` moves it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentropy.errors import UserError
from agentropy.trajectory import KINDS, STATUSES, Trajectory, check_results

PROMPT, REASONING, CALL, RESULT = range(len(KINDS))
OK, ERROR, TIMEOUT, INVALID, LOST = range(len(STATUSES))


@dataclass(frozen=True)
class Batch:
    """Flat tensors over the tokens of all trajectories, and one table for each of trajectories, turns and calls.

    Tokens, in the order of the trajectories:
      tokens[T]         int64, the ids as sampled or as fed; zeros where their source gave none
      logprobs[T]       float32, log-probability of a model token under the policy that sampled it; 0 elsewhere
      entropies[T]      float64, nats, of the distribution that the token was sampled from; NaN where it was not
                        recorded, 0 outside the model's tokens. Not float32: whether a change of their means is
                        below 0 must not hang on how a decimal was rounded
      is_model[T]       bool, True where the policy sampled the token
      kind_of[T]        int64, PROMPT, REASONING, CALL or RESULT
      segment_of[T]     int64, index into segments (over the whole batch)
      trajectory_of[T]  int64
      turn_of[T]        int64, index into turns; -1 for prompt and result tokens
    Trajectories:
      group_of[N]       int64, trajectories of one question share a group, numbered by first appearance
      score[N]          float64, the outcome in [0, 1]; NaN where it could not be graded
      truncated[N]      bool, True where a length limit cut the trajectory off (the engine's word, never a padded width)
      void[N]           bool, True where a turn has neither a complete call nor an answer (SimpleTIR)
      lost[N]           bool, True where a fault of ours (status `lost`, stop `error`, no score) spoils the trajectory
      answered[N]       bool, True where the trajectory ended with an answer
      parent_of[N]      int64, the trajectory that it was forked from; -1 where there is none in the batch
      fork_at[N]        int64, it shares its first fork_at tokens with its parent; -1 where parent_of is
      token_start[N+1]  int64, trajectory i owns tokens token_start[i]:token_start[i+1]
      turn_start[N+1]   int64, likewise for turns
      call_start[N+1]   int64, likewise for calls
    Turns and executed calls (a call that was written but never run has no row):
      turn_trajectory[U]  int64
      turn_has_call[U]    bool, True where the turn ends in at least one executed call
      call_trajectory[C]  int64
      call_turn[C]        int64, the turn that wrote the call; parallel calls share it
      call_status[C]      int64, OK, ERROR, TIMEOUT, INVALID or LOST
      call_tool[C]        int64, index into tools
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor
    is_model: Tensor
    kind_of: Tensor
    segment_of: Tensor
    trajectory_of: Tensor
    turn_of: Tensor
    group_of: Tensor
    score: Tensor
    truncated: Tensor
    void: Tensor
    lost: Tensor
    answered: Tensor
    parent_of: Tensor
    fork_at: Tensor
    token_start: Tensor
    turn_start: Tensor
    call_start: Tensor
    turn_trajectory: Tensor
    turn_has_call: Tensor
    call_trajectory: Tensor
    call_turn: Tensor
    call_status: Tensor
    call_tool: Tensor
    tools: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    question_ids: tuple[str, ...]
    has_logprobs: bool
    """True where every model token came with its sampler's log-probability."""
    has_entropies: bool
    """True where every model token came with its entropy."""
    entropies_exact: bool
    """False where some entropies are top-k estimates."""
    has_ids: bool
    """False where `tokens` of some trajectory are zeros, since its source gave no ids: it can be shaped, not scored."""

    @property
    def n_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def n_trajectories(self) -> int:
        return int(self.group_of.shape[0])

    @property
    def n_groups(self) -> int:
        return int(self.group_of.max()) + 1 if self.n_trajectories else 0

    @property
    def n_turns(self) -> int:
        return int(self.turn_trajectory.shape[0])

    @property
    def n_calls(self) -> int:
        return int(self.call_trajectory.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


def make_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Lay trajectories end to end. Groups are formed by `question_id`; the order of trajectories is kept.

    Raises UserError where results do not fit the calls they answer (more results than calls in a turn), or where a
    trajectory does not begin as the parent that it names.
    """
    rows: dict[str, list[int]] = {name: [] for name in ("tokens", "kind", "segment", "trajectory", "turn")}
    logprobs: list[float] = []
    entropies: list[float] = []
    turn_trajectory: list[int] = []
    turn_has_call: list[bool] = []
    calls: list[tuple[int, int, int]] = []
    call_tool: list[int] = []
    tools: dict[str, int] = {}
    starts: dict[str, list[int]] = {"token": [0], "turn": [0], "call": [0]}
    group_index: dict[str, int] = {}
    group_of, score, truncated, void, lost = [], [], [], [], []
    has_logprobs = has_entropies = True
    n_segments = 0

    for i, t in enumerate(trajectories):
        first_turn = len(turn_trajectory)
        first_call = len(calls)
        check_results(t)
        after_result = True  # the first model segment opens a turn
        wrote_call = True
        waiting: list[str] = []
        skipped_call = False  # a turn before the last has no call: what follows it was not asked for
        for s in t.segments:
            turn = -1
            if s.is_model:
                if after_result:
                    turn_trajectory.append(i)
                    turn_has_call.append(False)
                    skipped_call = skipped_call or not wrote_call
                    after_result, wrote_call = False, False
                    waiting = []
                waiting += [c.tool for c in s.calls]
                turn = len(turn_trajectory) - 1
                wrote_call = wrote_call or bool(s.calls)
                has_logprobs = has_logprobs and (s.logprobs is not None or not s.ids)
                has_entropies = has_entropies and (s.entropies is not None or not s.ids)
            elif s.kind == "result":
                after_result = True
                if s.results:
                    turn_has_call[-1] = wrote_call = True
                calls.extend((i, len(turn_trajectory) - 1, STATUSES.index(r.status)) for r in s.results)
                for _ in s.results:
                    name = waiting.pop(0) if waiting else ""
                    call_tool.append(tools.setdefault(name, len(tools)))
            n = len(s.ids)
            rows["tokens"].extend(s.ids)
            rows["kind"].extend([KINDS.index(s.kind)] * n)
            rows["segment"].extend([n_segments] * n)
            rows["trajectory"].extend([i] * n)
            rows["turn"].extend([turn] * n)
            logprobs.extend(s.logprobs if s.is_model and s.logprobs is not None else [0.0] * n)
            unknown = math.nan if s.is_model else 0.0
            entropies.extend(s.entropies if s.is_model and s.entropies is not None else [unknown] * n)
            n_segments += 1
        statuses = [status for _, _, status in calls[first_call:]]
        ends_in_turn = len(turn_trajectory) > first_turn and not after_result
        cut = t.stop in ("max_tokens", "context_full")
        group_of.append(group_index.setdefault(t.question_id, len(group_index)))
        score.append(float("nan") if t.score is None else t.score)
        truncated.append(cut)
        # A limit ended a turn of plain text; what stopped with "answer" has one, even if its text was not recorded.
        limited = cut or t.stop == "max_turns"
        last_void = limited and ends_in_turn and not wrote_call and t.answer is None
        void.append(t.stop == "void" or skipped_call or last_void)
        lost.append(t.stop == "error" or t.score is None or LOST in statuses)
        starts["token"].append(len(rows["tokens"]))
        starts["turn"].append(len(turn_trajectory))
        starts["call"].append(len(calls))

    def long(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def flags(values: Sequence[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.bool)

    kind_of = long(rows["kind"])
    parent_of, fork_at = _parents(trajectories)
    return Batch(
        tokens=long(rows["tokens"]),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        entropies=torch.tensor(entropies, dtype=torch.float64),
        is_model=(kind_of == REASONING) | (kind_of == CALL),
        kind_of=kind_of,
        segment_of=long(rows["segment"]),
        trajectory_of=long(rows["trajectory"]),
        turn_of=long(rows["turn"]),
        group_of=long(group_of),
        score=torch.tensor(score, dtype=torch.float64),
        truncated=flags(truncated),
        void=flags(void),
        lost=flags(lost),
        answered=flags([t.stop == "answer" for t in trajectories]),
        parent_of=long(parent_of),
        fork_at=long(fork_at),
        token_start=long(starts["token"]),
        turn_start=long(starts["turn"]),
        call_start=long(starts["call"]),
        turn_trajectory=long(turn_trajectory),
        turn_has_call=flags(turn_has_call),
        call_trajectory=long([c[0] for c in calls]),
        call_turn=long([c[1] for c in calls]),
        call_status=long([c[2] for c in calls]),
        call_tool=long(call_tool),
        tools=tuple(tools),
        trajectory_ids=tuple(t.trajectory_id for t in trajectories),
        question_ids=tuple(t.question_id for t in trajectories),
        has_logprobs=has_logprobs,
        has_entropies=has_entropies,
        entropies_exact=all(t.entropy_kind == "exact" for t in trajectories),
        has_ids=all(t.ids_kind == "sampled" for t in trajectories),
    )


def _parents(trajectories: Sequence[Trajectory]) -> tuple[list[int], list[int]]:
    """`parent_of` and `fork_at` of a batch. A parent that is not in the batch shares nothing that could be found."""
    forked = [i for i, t in enumerate(trajectories) if t.parent_id is not None and t.fork_at is not None]
    parent_of, fork_at = [-1] * len(trajectories), [-1] * len(trajectories)
    if not forked:
        return parent_of, fork_at
    place = {(t.question_id, t.trajectory_id): i for i, t in enumerate(trajectories)}
    for i in forked:
        t = trajectories[i]
        assert t.parent_id is not None
        assert t.fork_at is not None
        parent = place.get((t.question_id, t.parent_id), -1)
        if parent < 0:
            continue
        seen = {i}
        ancestor = parent
        while ancestor >= 0 and ancestor not in seen:
            seen.add(ancestor)
            ancestor = parent_of[ancestor]
        ids, others = t.ids[: t.fork_at], trajectories[parent].ids[: t.fork_at]
        if ancestor >= 0 or len(ids) < t.fork_at or ids != others:
            why = "is its own ancestor" if ancestor >= 0 else f"does not share its first {t.fork_at} tokens with it"
            raise UserError(f"trajectory {t.trajectory_id!r} names {t.parent_id!r} as its parent, but {why}")
        parent_of[i], fork_at[i] = parent, t.fork_at
    return parent_of, fork_at
