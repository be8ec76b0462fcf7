"""What the TRL adapter does without TRL: rows to tasks, trajectories to messages, batches filled up, vLLM's turns."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.integrations.trl_batch import Item, collect, completion_logprobs, score_of
from agentropy.integrations.trl_rollout import (
    Surroundings,
    completion_of,
    messages_of,
    question_of,
    reward_sources,
    row_id,
    surroundings,
    task_of,
)
from agentropy.integrations.trl_vllm import VllmPolicy
from agentropy.methods import make_method
from agentropy.policies.base import PolicyInfo, SamplingParams, Stop
from agentropy.rollout.loop import ENVIRONMENT
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory
from make_trajectories import trajectory


class Game:
    def reset(self, **row: Any) -> None:
        self.row = row

    def play(self, move: int) -> int:
        """Make a move.

        Args:
            move: Which.
        """
        return move

    def get_reward(self) -> float:
        return 1.0


# -- rows -------------------------------------------------------------------------------------------------------------


def test_prompts() -> None:
    user = {"role": "user", "content": "Q"}
    assert question_of("plain") == (None, "plain")
    assert question_of([user]) == (None, "Q")
    assert question_of([{"role": "system", "content": "S"}, user]) == ("S", "Q")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert question_of([{"role": "user", "content": parts}]) == (None, "ab")
    with pytest.raises(UserError, match="images"):
        question_of([{"role": "user", "content": [{"type": "image", "image": None}]}])
    for wrong in ([user, user], [], [{"role": "assistant", "content": "A"}]):
        with pytest.raises(UserError, match="give one user message"):
            question_of(wrong)


def test_rows_are_named_by_their_id_or_by_all_that_is_in_them() -> None:
    assert row_id({"prompt": "a", "id": 7}) == "7"
    assert row_id({"prompt": "a", "x": 1}) == row_id({"x": 1, "prompt": "a"}) != row_id({"prompt": "a", "x": 2})


def test_who_scores_a_row() -> None:
    row = {"prompt": "Q", "answer": 42, "environment": "game"}
    plain = Surroundings(None, surroundings([], None, 1.0)[None].toolbox, None, None)
    task = task_of(row, "q", plain, "math", "answer")
    assert (task.grader, task.answers, task.row) == ("math", ("42",), row)
    assert task_of(row | {"answer": ["1", 2]}, "q", plain, "f1", "answer").answers == ("1", "2")
    assert task_of(row, "q", plain, None, "answer").grader == ""
    with pytest.raises(UserError, match="no 'gold' for the grader; its columns are prompt, answer"):
        task_of(row, "q", plain, "math", "gold")
    game = surroundings(None, {"game": Game}, 1.0)["game"]
    task = task_of(row, "q", game, "math", "answer")
    assert (task.grader, task.answers) == (ENVIRONMENT, ())
    assert task.row == {"prompt": "Q", "answer": 42}
    alone = surroundings(None, Game, 1.0)[None]
    assert "environment" in task_of(row, "q", alone, None, "answer").row
    assert surroundings(None, lambda: Game(), 1.0)[None].reward_name == "Game"


def test_reward_sources_speak_of_their_own_rows_only() -> None:
    places = surroundings(None, {"a": Game, "b": Game}, 1.0)
    ((name, reward),) = reward_sources(places, "math")
    ts = [trajectory([], 0.5), trajectory([], 0.25)]
    assert name == "Game"
    assert reward(trajectory=ts, environment=["a", "c"]) == [0.5, None]
    ((name, reward),) = reward_sources(surroundings([], None, 1.0), "math")
    assert (name, reward(trajectory=ts, prompts=[])) == ("grader", [0.5, 0.25])
    assert reward_sources(surroundings([], None, 1.0), None) == []


# -- what reward functions read ---------------------------------------------------------------------------------------


def test_messages_are_those_of_trls_loop() -> None:
    t = Trajectory(
        "q",
        "t",
        "",
        (
            Segment("prompt", (1,)),
            Segment("reasoning", (2, 3), (-0.5, -0.25)),
            Segment("call", (4,), (-1.0,), calls=(ToolCall("play", {"move": 3}), ToolCall("", error="unreadable"))),
            Segment("result", (5,), results=(ToolResult("3"), ToolResult("Invalid call", "invalid"))),
            Segment("reasoning", (6,), (-2.0,)),
            Segment("call", (7,), (-3.0,), calls=(ToolCall("play", {"move": 4}),)),
            Segment("result", (8, 9), results=(ToolResult("<answer>9</answer>", stop=True),)),
        ),
        "9",
        1.0,
        "answer",
    )
    one, three = ({"type": "function", "function": {"name": "play", "arguments": {"move": m}}} for m in (3, 4))
    unreadable = {"type": "function", "function": {"name": "", "arguments": {}}}
    assert messages_of(t, lambda ids: " ".join(map(str, ids))) == [
        {"role": "assistant", "content": "2 3", "tool_calls": [one, unreadable]},
        {"role": "tool", "name": "play", "content": "3"},
        {"role": "tool", "name": "", "content": "Invalid call"},
        {"role": "assistant", "content": "6", "tool_calls": [three]},
        {"role": "tool", "name": "play", "content": "<answer>9</answer>"},
    ]
    assert completion_of(t) == ([2, 3, 4, 5, 6, 7], [1, 1, 1, 0, 1, 1])
    assert completion_logprobs(t) == [-0.5, -0.25, -1.0, 0.0, -2.0, -3.0]
    empty = dataclasses.replace(t, segments=t.segments[:1])
    assert messages_of(empty, str) == [{"role": "assistant", "content": ""}]
    assert completion_of(empty) == ([], [])


def test_scores_are_sums_of_what_there_is() -> None:
    nan = float("nan")
    assert score_of([1.0, nan, 0.5], [2.0, 1.0, 4.0]) == 4.0
    assert score_of([nan], [1.0]) is None


# -- batches ----------------------------------------------------------------------------------------------------------


def run(samples: int, groups: int, budget: int, bad: Sequence[str]) -> Any:
    """Collect in one process. Questions called in `bad` are answered alike by all."""

    def sample(rows: Any, active: Any, rounds: int, known: Any) -> list[Item]:
        items = []
        for i in active:
            name = rows[i]["prompt"]
            score = 1.0 if name in bad else float(i % samples == 0)
            t = trajectory([([1.0], [1.0], ["ok"]), ([0.5], [], [])], score, question=name, name=f"{name}/{i}")
            items.append(Item(i, t, [], [score], {}))
        return items

    return collect(
        [{"prompt": f"q{i // samples}"} for i in range(groups * samples)],
        make_method("tao-rl", bonus=False),
        process=0,
        processes=1,
        samples=samples,
        budget=budget,
        sample=sample,
        gather=lambda items: items,
        replace=lambda rounds, n: [{"prompt": f"r{rounds}-{k}"} for k in range(n)],
    )


def test_removed_questions_are_replaced_within_the_budget() -> None:
    made, collected = run(4, 3, budget=3, bad=["q1"])
    assert (collected.rounds, collected.questions) == (1, 3)
    assert made.shaped.kept.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    made, collected = run(4, 3, budget=9, bad=["q1", "r1-0"])
    assert (collected.rounds, collected.questions) == (3, 5)
    assert [i.trajectory.question_id for i in made.items][::4] == ["q0", "r2-0", "q2"]
    assert made.shaped.kept.all()
    assert len(collected.sampled) == 20
    assert collected.filtered["filter/groups_removed"] == 2
    assert collected.shaped.metrics["filter/groups_removed"] == 0
    made, collected = run(4, 3, budget=4, bad=["q0", "q1"])
    assert (collected.rounds, collected.questions) == (2, 4)  # one of the two could be replaced
    assert int(made.shaped.kept.sum()) == 8


def test_a_question_that_is_there_twice_is_two_groups() -> None:
    """As in TRL, which compares runs of rows."""

    def sample(rows: Any, active: Any, rounds: int, known: Any) -> list[Item]:
        scores = [1.0, 0.0, 1.0, 1.0]
        ts = [trajectory([([1.0], [], [])], scores[i], question="same", name=f"t{i}") for i in active]
        return [Item(i, t, [], [], {}) for i, t in zip(active, ts, strict=True)]

    made, _ = collect(
        [{"prompt": "same"}] * 4,
        make_method("grpo"),
        process=0,
        processes=1,
        samples=2,
        budget=2,
        sample=sample,
        gather=lambda items: random.Random(0).sample(items, len(items)),  # whatever the order, places decide
        replace=lambda rounds, n: [],
    )
    assert [i.trajectory.question_id for i in made.items] == ["same", "same", "same#2", "same#2"]
    assert made.batch.score.tolist() == [1.0, 0.0, 1.0, 1.0]
    per = [float(made.shaped.advantages[made.batch.trajectory_of == i].abs().sum()) for i in range(4)]
    assert per[0] > 0
    assert per[2] == per[3] == 0


# -- vLLM -------------------------------------------------------------------------------------------------------------


class Generation:
    """As TRL's `VLLMGeneration`: counts up from the last id of each prompt."""

    max_completion_length = 7
    generation_kwargs: Any = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def generate(self, prompts: Any, images: Any, num_generations: int) -> Any:
        assert images is None
        assert num_generations == 1
        self.calls.append((prompts, self.max_completion_length, self.generation_kwargs))
        stops = self.generation_kwargs["stop_token_ids"]
        out = []
        for p in prompts:
            ids = [p[-1] + k + 1 for k in range(self.max_completion_length)]
            end = next((k + 1 for k, i in enumerate(ids) if i in stops), len(ids))
            out.append(ids[:end])
        if any(p[0] == 99 for p in prompts):
            raise RuntimeError("out of memory")
        return prompts, out, [[[None if i % 5 == 0 else -i / 10] for i in ids] for ids in out], None


class Letters:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def policy(context: int = 50) -> VllmPolicy:
    return VllmPolicy(Generation(), Letters(), PolicyInfo("vllm", 100, context, "exact"))


def test_turns_that_wait_share_a_call() -> None:
    vllm = policy()

    async def work() -> list[Any]:
        handles = vllm.open([1], [0, 1]) + vllm.open([2, 3], [2])
        stop, params = Stop(frozenset({6})), SamplingParams(max_new_tokens=4)
        return list(await asyncio.gather(*(vllm.generate(h, [], params, stop) for h in handles)))

    first, second, third = asyncio.run(work())
    (call,) = vllm.generation.calls
    assert call == ([[1], [1], [2, 3]], 4, {"stop": [], "include_stop_str_in_output": True, "stop_token_ids": [6]})
    assert first.ids == second.ids == (2, 3, 4, 5)
    assert (first.finish, third.ids, third.finish) == ("length", (4, 5, 6), "stop")
    assert first.logprobs[:3] == (-0.2, -0.3, -0.4)
    assert first.logprobs[3] != first.logprobs[3]  # vLLM's None
    assert (vllm.generation.max_completion_length, vllm.generation.generation_kwargs) == (7, None)


def test_turns_go_on_where_they_were_and_fit_the_window() -> None:
    vllm = policy(context=8)

    async def work() -> list[Any]:
        (handle,) = vllm.open([1], [0])
        stop = Stop(strings=("d",))
        out = [await vllm.generate(handle, [], SamplingParams(max_new_tokens=2), stop)]
        assert handle.length == 3
        out.append(await vllm.generate(handle, [9, 1], SamplingParams(max_new_tokens=9), stop))
        out.append(await vllm.generate(handle, [], SamplingParams(max_new_tokens=9), stop))
        return out

    one, two, three = asyncio.run(work())
    assert (one.ids, one.finish) == ((2, 3), "stop")
    assert (two.ids, two.finish) == ((2, 3, 4), "stop")
    assert vllm.generation.calls[1][0] == [[1, 2, 3, 9, 1]]
    assert (three.ids, three.finish) == ((), "context_full")


def test_an_error_of_the_engine_reaches_whoever_waits() -> None:
    vllm = policy()

    async def work() -> None:
        (handle,) = vllm.open([99], [0])
        with pytest.raises(RuntimeError, match="out of memory"):
            await vllm.generate(handle, [], SamplingParams(max_new_tokens=2), Stop())
        (other,) = vllm.open([1], [0])
        assert (await vllm.generate(other, [], SamplingParams(max_new_tokens=2), Stop())).ids == (2, 3)

    asyncio.run(work())
