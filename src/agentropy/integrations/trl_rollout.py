"""From rows of a TRL dataset to trajectories, and from trajectories to what TRL's reward functions read.

Nothing here imports TRL. A row is what TRL knows it as: `prompt`, and whatever columns reward functions, graders and
environments want.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentropy.errors import UserError
from agentropy.policies.base import Policy, SamplingParams
from agentropy.protocols.base import Dialect
from agentropy.rollout.loop import ENVIRONMENT, Agent, Attempt, Grade, Limits, RolloutFunction
from agentropy.tasks.base import Task
from agentropy.tools.base import ToolBox
from agentropy.tools.functions import EnvironmentPart, EnvironmentSession
from agentropy.tools.named import tool_by_name
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import Trajectory

Row = Mapping[str, Any]
ENVIRONMENT_COLUMN = "environment"
"""The column by which TRL chooses among several environments."""
UNGRADED = ""
"""The grader of tasks that reward functions score."""


class KeptEnvironments(EnvironmentPart):
    """Environments that can still be asked after their trajectories ended, by the attempts' seeds: TRL's reward
    functions may take them as `environments`. (A branch has a copy, which is not kept.)"""

    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__(factory)
        self.kind = type(self._spare)
        self.opened: dict[int, Any] = {}

    async def open(self, row: Mapping[str, Any], seed: int) -> tuple[EnvironmentSession, str | None]:
        session, text = await super().open(row, seed)
        self.opened[seed] = session.environment
        return session, text


@dataclass(frozen=True)
class Surroundings:
    """The tools of the rows that name one environment. `name` is None where there is but one."""

    name: str | None
    toolbox: ToolBox
    environments: KeptEnvironments | None
    reward_name: str | None
    """The environment's class, where it says itself what a trajectory earned."""


def surroundings(tools: Any, factory: Any, timeout: float) -> dict[str | None, Surroundings]:
    """Tool boxes by the name of the environment.

    Args:
        tools: a ready ToolBox, or a sequence of functions, `Tool` records, built-in tools or their names.
        factory: TRL's `environment_factory`: None, a class or another callable, or a mapping of names to these.
    Raises: UserError where something is no tool or no environment.
    """
    if isinstance(tools, Sequence) or tools is None:
        parts = [tool_by_name(t, timeout) if isinstance(t, str) else t for t in tools or ()]
    elif factory is not None:
        raise UserError("a ready tool box leaves no room for environments: give tools as a list")
    else:
        return {None: Surroundings(None, tools, None, None)}
    if factory is None:
        return {None: Surroundings(None, make_toolbox(parts, timeout=timeout), None, None)}
    made = {}
    for name, make in factory.items() if isinstance(factory, Mapping) else [(None, factory)]:
        part = KeptEnvironments(make)
        reward = part.kind.__name__ if hasattr(part.kind, "get_reward") else None
        made[name] = Surroundings(name, make_toolbox([*parts, part], timeout=timeout), part, reward)
    return made


RewardSource = tuple[str, Callable[..., list[float | None]]]


def reward_sources(places: Mapping[str | None, Surroundings], grader: str | None) -> list[RewardSource]:
    """Reward functions in TRL's form, by name, for what environments and our grader say of their trajectories."""
    rows: dict[str, set[str | None]] = {}
    for place in places.values():
        name = place.reward_name or (None if grader is None else "grader")
        if name is not None:
            rows.setdefault(name, set()).add(place.name)
    return [(name, _scores(name, of)) for name, of in rows.items()]


def _scores(name: str, places: set[str | None]) -> Callable[..., list[float | None]]:
    def reward(trajectory: Sequence[Trajectory], **columns: Any) -> list[float | None]:
        of = [None] * len(trajectory) if None in places else columns[ENVIRONMENT_COLUMN]
        return [t.score if e in places else None for t, e in zip(trajectory, of, strict=True)]

    reward.__name__ = name
    return reward


# -- rows -------------------------------------------------------------------------------------------------------------


def question_of(prompt: Any) -> tuple[str | None, str]:
    """The system turn and the question of a prompt: a text, or one user message that a system message may precede.

    Raises: UserError for other conversations, which no protocol can render from a question, and for images.
    """
    if isinstance(prompt, str):
        return None, prompt
    roles = [m.get("role") for m in prompt]
    if roles not in (["user"], ["system", "user"]):
        raise UserError(
            f"a prompt with the roles {', '.join(map(str, roles))}: give one user message, or a system one before it"
        )
    texts = [_text(m["content"]) for m in prompt]
    return (texts[0] if len(texts) > 1 else None), texts[-1]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise UserError("a prompt with images or other media: agentropy's loop reads text only")
    return "".join(part["text"] for part in content)


def row_id(row: Row) -> str:
    """What names a question: the column `id`, else a hash of the row."""
    if row.get("id") is not None:
        return str(row["id"])
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def task_of(row: Row, question_id: str, place: Surroundings, grader: str | None, answer_column: str) -> Task:
    """The row as a task of our loop. Its own environment scores it, else our grader, else nobody here.

    Raises: UserError where our grader has to score a row without an answer.
    """
    if row.get("prompt") is None:
        raise UserError(f"a row has no 'prompt'; its columns are {', '.join(row)}")
    _, question = question_of(row["prompt"])
    scorer = ENVIRONMENT if place.reward_name is not None else UNGRADED if grader is None else grader
    answers = _answers(row, answer_column) if scorer not in (ENVIRONMENT, UNGRADED) else ()
    # In a run with several environments TRL keeps the column that chooses one from `reset`.
    known = {k: v for k, v in row.items() if place.name is None or k != ENVIRONMENT_COLUMN}
    return Task(question_id, question, answers, scorer, row=known)


def _answers(row: Row, column: str) -> tuple[str, ...]:
    value = row.get(column)
    if value is None and "tests" in row:
        return ()
    if value is None:
        raise UserError(f"a row has no {column!r} for the grader; its columns are {', '.join(row)} (see answer_column)")
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


# -- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampler:
    """What turns rows into trajectories, but the policy."""

    dialect: Dialect
    places: Mapping[str | None, Surroundings]
    grade: Grade
    grader: str | None
    answer_column: str
    system: str | None

    def place_of(self, row: Row) -> Surroundings:
        """The environment of a row. Raises UserError where it names none that there is."""
        if None in self.places:
            return self.places[None]
        name = row.get(ENVIRONMENT_COLUMN)
        if name not in self.places:
            raise UserError(f"a row has environment={name!r}; there are {', '.join(map(str, self.places))}")
        return self.places[name]

    async def sample(
        self,
        policy: Policy,
        roll: RolloutFunction,
        rows: Sequence[Row],
        names: Sequence[tuple[str, str, int]],
        params: SamplingParams,
        limits: Limits,
    ) -> list[Trajectory]:
        """One trajectory for each row, in order. `names`: question id, trajectory id and seed of each.

        Rows with the same tools and the same system turn are sampled together.
        """
        runs: dict[tuple[str | None, str | None], list[int]] = {}
        for i, row in enumerate(rows):
            system, _ = question_of(row["prompt"])
            runs.setdefault((self.place_of(row).name, self.system if system is None else system), []).append(i)
        out: dict[int, Trajectory] = {}
        for (name, system), members in runs.items():
            place = self.places[name]
            agent = Agent(policy, self.dialect, place.toolbox, self.grade, system)
            attempts = [self._attempt(rows[i], place, *names[i]) for i in members]
            out |= zip(members, await roll(agent, attempts, params, limits), strict=True)
        return [out[i] for i in range(len(rows))]

    def _attempt(self, row: Row, place: Surroundings, question: str, name: str, seed: int) -> Attempt:
        return Attempt(task_of(row, question, place, self.grader, self.answer_column), name, seed)

    async def start(self) -> None:
        """Start the tools. Raises UserError where one cannot work."""
        for place in self.places.values():
            await place.toolbox.start()

    async def close(self) -> None:
        for place in self.places.values():
            await place.toolbox.close()


async def nobody_grades(task: Task, answer: str) -> float | None:
    """For tasks that TRL's reward functions score after the rollout."""
    return None


# -- what reward functions read ---------------------------------------------------------------------------------------


def messages_of(t: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """A trajectory as the messages that TRL's tool loop makes: the policy's turns, with their calls, and tool messages.

    Only the last message can be the answer: what a tool wrote never stands in it.
    """
    out: list[dict[str, Any]] = []
    waiting: list[str] = []
    for s in t.segments:
        if s.is_model:
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": ""})
            # Calls are told apart; their text is not repeated, as TRL's parsed messages do not either.
            if s.calls:
                waiting += [c.tool for c in s.calls]
                out[-1].setdefault("tool_calls", []).extend(
                    {"type": "function", "function": {"name": c.tool, "arguments": dict(c.arguments)}} for c in s.calls
                )
            else:
                out[-1]["content"] += decode(s.ids)
        for r in s.results:
            out.append({"role": "tool", "name": waiting.pop(0) if waiting else "", "content": r.content})
    return out or [{"role": "assistant", "content": ""}]


def completion_of(t: Trajectory) -> tuple[list[int], list[int]]:
    """The ids after the prompt, up to the policy's last token, and for each 1 where the policy sampled it.

    A result that nothing follows is left out: it may reach beyond what the model can read.
    """
    ids: list[int] = []
    mask: list[int] = []
    for s in t.segments:
        if s.kind != "prompt":
            ids += s.ids
            mask += [int(s.is_model)] * len(s.ids)
    last = max((i for i, m in enumerate(mask) if m), default=-1)
    return ids[: last + 1], mask[: last + 1]
