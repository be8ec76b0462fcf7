"""Between verl's rows and ours: a row of a data set as a task, a trajectory as a row's per-token columns, and back.

verl keeps a trajectory as a prompt and a response; columns here stand beside the response, one entry a token, and
what belongs to the whole row is a plain mapping that verl carries along (`extra_fields`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentropy.batch import PROMPT, RESULT
from agentropy.errors import UserError
from agentropy.integrations.batches import PADDING, Columns, from_columns, to_columns
from agentropy.integrations.trl_rollout import question_of
from agentropy.tasks.base import Task
from agentropy.tasks.files import collect
from agentropy.trajectory import Trajectory

TASK = "agentropy"
"""In `extra_info` of a data set: a whole task as JSON. In `extra_fields` of a trajectory: what belongs to its row."""
TOKEN_COLUMNS = ("kinds", "segments", "calls", "statuses")
PREFIX = "agentropy_"
"""Of our columns in verl's TransferQueue."""
FIELDS = ("prompts", "responses", "extra_fields", "rm_scores")
"""Columns of verl that a trajectory is made of, beside ours."""

# -- tasks ------------------------------------------------------------------------------------------------------------


def task_as_row(task: Task, index: int, source: str) -> dict[str, Any]:
    """A task as a row of a data set in verl's schema; `task_of` gives the same task back."""
    return {
        "data_source": task.kind or source,
        "prompt": [{"role": "user", "content": task.question}],
        "reward_model": {"style": "rule", "ground_truth": task.answers[0] if task.answers else ""},
        "extra_info": {"index": index, TASK: json.dumps(dataclasses.asdict(task), ensure_ascii=False, default=str)},
    }


def task_of(row: Mapping[str, Any], grader: str | None, graded: bool) -> tuple[str | None, Task]:
    """The system turn that the row's prompt has, if any, and the question as a task.

    Args:
        row: as verl's data set gives it: `raw_prompt`, `reward_model.ground_truth`, `extra_info`.
        grader: scores rows that name none.
        graded: False where verl's reward function scores; a row then needs no answer.
    Raises: UserError for a prompt that no protocol can render, and for a row that nothing can grade.
    """
    extra = row.get("extra_info") or {}
    if isinstance(extra, Mapping) and isinstance(extra.get(TASK), str):
        known = json.loads(extra[TASK])
        return None, Task(**known | {"answers": tuple(known["answers"])})
    system, question = question_of(row["raw_prompt"])
    name = str(extra.get("index", row.get("index", ""))) if isinstance(extra, Mapping) else ""
    if not graded:
        return system, Task(
            name or question[:40], question, (), "", kind=str(row.get("data_source", "")), row=dict(extra)
        )
    if not (grader or row.get("grader") or row.get("tests")):
        raise UserError("nothing says how answers are scored: set agentropy.grader (math, f1, em, choice or code)")
    named = {k: row[k] for k in ("reward_model", "grader", "tests", "checker", "setup", "data_source") if row.get(k)}
    options = {"grader": grader} if grader else {}
    return system, collect([("a row of the data set", {"question": question} | named)], "verl", 0, options).tasks[0]


# -- trajectories as rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A trajectory as verl keeps it: `prompt[P]`, `response[R]` and beside it `mask[R]` (1: sampled), `logprobs[R]`
    of the sampler and the columns of `TOKEN_COLUMNS`; `about` is what belongs to the whole row, as plain values."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    columns: dict[str, list[int]]
    about: dict[str, Any]


def row_of(t: Trajectory, room: int, pad: int) -> Row:
    """A trajectory as a row.

    A result that ended it is cut so that prompt and response have at most `room` tokens, but keeps one, which holds
    its statuses. verl needs a token in each response; one that has none gets `pad`, masked.
    """
    last = t.segments[-1]
    over = len(t.ids) - room
    if last.kind == "result" and over > 0:
        keep = max(len(last.ids) - over, 1)
        t = dataclasses.replace(t, segments=(*t.segments[:-1], dataclasses.replace(last, ids=last.ids[:keep])))
    columns, start = to_columns([t]), len(t.prompt)
    response = list(t.ids[start:])
    token = {name: getattr(columns, name)[0, start:].tolist() for name in TOKEN_COLUMNS}
    logprobs = [p for s in t.segments if s.kind != "prompt" for p in (s.logprobs or (0.0,) * len(s.ids))]
    mask = [int(s.is_model) for s in t.segments if s.kind != "prompt" for _ in s.ids]
    if not response:
        response, mask, logprobs = [pad], [0], [0.0]
        token = {name: [PADDING if name == "kinds" else 0] for name in TOKEN_COLUMNS}
    about = {
        "id": t.trajectory_id,
        "score": t.score,
        "stop": int(columns.stop[0]),
        "answered": bool(columns.answered[0]),
        "lost": t.stop == "error" or any(r.status == "lost" for r in t.results),
        "parent": t.parent_id,
        "fork_at": t.fork_at,
    }
    return Row(list(t.prompt), response, mask, logprobs, token, about)


def trajectories_of(
    groups: Sequence[str],
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    columns: Mapping[str, Sequence[Tensor]],
    about: Sequence[Mapping[str, Any]],
    logprobs: Sequence[Tensor] | None = None,
    entropies: Sequence[Tensor] | None = None,
    rewards: Sequence[float] | None = None,
) -> list[Trajectory]:
    """The trajectories of rows; what `row_of` made, with other log-probabilities and (exact) entropies.

    Args:
        groups: the question of each row.
        prompts, responses: `[P]` and `[R]` of each row.
        columns: by the names of TOKEN_COLUMNS, `[R]` of each row.
        about: `Row.about` of each row.
        logprobs, entropies: `[R]` of each row; None: zeros, for filters, which look at neither.
        rewards: what verl's reward function gave each row; None: the scores of our graders.
    """
    scores = [a["score"] if rewards is None else rewards[i] for i, a in enumerate(about)]
    made = {
        "ids": [torch.cat([p, r]) for p, r in zip(prompts, responses, strict=True)],
        "kinds": [_behind(p, c, PROMPT) for p, c in zip(prompts, columns["kinds"], strict=True)],
        **{n: [_behind(p, c, 0) for p, c in zip(prompts, columns[n], strict=True)] for n in TOKEN_COLUMNS[1:]},
        "logprobs": _values(prompts, columns["kinds"], logprobs),
        "entropies": _values(prompts, columns["kinds"], entropies),
    }
    rows = Columns(
        **{
            name: pad_sequence(list(made[name]), batch_first=True, padding_value=PADDING if name == "kinds" else 0)
            for name in (f.name for f in fields(Columns)[:7])
        },
        score=torch.tensor(
            [math.nan if s is None or a["lost"] else float(s) for s, a in zip(scores, about, strict=True)],
            dtype=torch.float64,
        ),
        stop=torch.tensor([a["stop"] for a in about], dtype=torch.int64),
        answered=torch.tensor([a["answered"] for a in about], dtype=torch.bool),
        exact=torch.ones(len(about), dtype=torch.bool),
    )
    out = from_columns(rows, groups, [a["id"] for a in about])
    return [
        dataclasses.replace(t, parent_id=a["parent"], fork_at=a["fork_at"]) for t, a in zip(out, about, strict=True)
    ]


def _behind(prompt: Tensor, column: Tensor, fill: int) -> Tensor:
    return torch.cat([column.new_full(prompt.shape, fill), column])


def _values(prompts: Sequence[Tensor], kinds: Sequence[Tensor], values: Sequence[Tensor] | None) -> list[Tensor]:
    """A value for each model token, NaN (none) at the others."""
    out = []
    for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        row = torch.zeros(kind.shape, dtype=torch.float64) if values is None else values[i].double()
        row = torch.where((kind == RESULT) | (kind == PADDING), torch.nan, row)
        out.append(torch.cat([torch.full(prompt.shape, torch.nan, dtype=torch.float64), row]))
    return out


def read_trajectories(
    data: Any, keys: Sequence[str], rows: Sequence[int], rewards: str, scores: tuple[str, str] | None = None
) -> list[Trajectory]:
    """The trajectories of some rows of what the TransferQueue gave; the first part of a key names the question.

    Args:
        data: FIELDS and our columns, a row a key.
        rewards: "grader" takes the scores of our graders, "verl" those of verl's reward function.
        scores: the names of the columns with log-probabilities and entropies, `[response]` each; None: zeros.
    Raises: UserError for a trajectory that our agent loop did not make.
    """
    about = []
    extra_fields = list(data["extra_fields"])
    for i in rows:
        extra = getattr(extra_fields[i], "data", extra_fields[i])
        if TASK not in extra:
            raise UserError(
                "the TransferQueue holds a trajectory that our agent loop did not make: "
                "set actor_rollout_ref.rollout.agent.agent_loop_manager_class"
            )
        about.append(extra[TASK])

    def of(name: str) -> list[Tensor]:
        column = unbound(data[name])
        return [column[i] for i in rows]

    return trajectories_of(
        [keys[i].split("_")[0] for i in rows],
        of("prompts"),
        of("responses"),
        {n: of(PREFIX + n) for n in TOKEN_COLUMNS},
        about,
        logprobs=of(scores[0]) if scores else None,
        entropies=of(scores[1]) if scores else None,
        rewards=None if rewards == "grader" else [float(s.sum()) for s in of("rm_scores")],
    )


def unbound(column: Any) -> list[Any]:
    """The rows of a column, jagged or dense."""
    return list(column.unbind())
