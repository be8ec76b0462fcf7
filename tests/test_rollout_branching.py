"""Branching rollouts: trees keep their budget, share their tokens, and do not depend on how long tools take."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentropy.algorithms.branching import Branching, branch_probability, shared_tokens, window_entropy
from agentropy.batch import make_batch
from agentropy.errors import UserError
from agentropy.evaluation.summary import rollout_metrics
from agentropy.policies.base import Finish, SamplingParams
from agentropy.policies.local import LocalPolicy
from agentropy.policies.scripted import ScriptedPolicy, ScriptedTurn
from agentropy.protocols.base import Turn
from agentropy.rollout.branching import branching_rollout, rollout_for
from agentropy.rollout.loop import Agent, Limits, rollout
from agentropy.tools.python import python_tool
from agentropy.tools.session import make_toolbox
from agentropy.trajectory import ToolCall, Trajectory, dumps, from_json
from branching_agents import IdDialect, attempts_of, bare, check_tree, even, grow, slow_tool
from engine_models import VOCAB, tiny_model

ALWAYS = Branching(base=1.0, beta=0.0, decision="draw")
NEVER = Branching(base=0.0, beta=0.0)
CALL, ANSWER = 5, 18


def turn(entropy: float, last: int, length: int = 4) -> ScriptedTurn:
    return ScriptedTurn((*range(30, 29 + length), last), entropies=(entropy,) * length)


def scripted(*turns: ScriptedTurn) -> ScriptedPolicy:
    return ScriptedPolicy(lambda prompt, seed: turns, VOCAB)


def roots(leaves: Sequence[Trajectory]) -> list[Trajectory]:
    return [t for t in leaves if t.parent_id is None]


def places(leaves: Sequence[Trajectory]) -> list[tuple[int, int]]:
    """Number of the parent and of the results before the fork, for each branch."""
    return [
        (int((t.parent_id or "").split("/")[1]), sum(s.kind == "result" for s in t.inherited))
        for t in leaves
        if t.parent_id is not None
    ]


def test_half_of_the_budget_is_kept_for_branches_at_the_first_results() -> None:
    policy = scripted(turn(0.5, CALL), turn(0.6, CALL), turn(0.5, ANSWER))
    leaves = grow(policy, ALWAYS, samples=7)
    check_tree(leaves, 7)
    assert len(roots(leaves)) == 4
    assert places(leaves) == [(0, 1), (1, 1), (2, 1)]
    assert all(s.closed for s in policy.opened)
    for sequence in policy.opened:
        assert any(tuple(sequence.ids) == t.ids for t in leaves)


def test_what_the_branches_leave_is_filled_with_fresh_roots() -> None:
    policy = scripted(turn(0.5, CALL), turn(0.6, CALL), turn(0.5, ANSWER))
    leaves = grow(policy, NEVER, samples=7)
    check_tree(leaves, 7)
    assert len(roots(leaves)) == 7
    assert all(t.score is not None and t.stop == "answer" for t in leaves)
    no_tools = grow(scripted(turn(0.5, ANSWER)), ALWAYS, samples=5)
    check_tree(no_tools, 5)
    assert len(roots(no_tools)) == 5


def test_a_branch_forks_again_but_not_where_it_came_from() -> None:
    policy = scripted(turn(0.5, CALL), turn(0.6, CALL), turn(0.7, CALL), turn(0.5, ANSWER))
    leaves = grow(policy, dataclasses.replace(ALWAYS, roots=1), samples=9)
    check_tree(leaves, 9)
    # Of 9 leaves 8: the trunk's three results, the two and the one that its branches have left, and so on.
    assert sorted(n for _, n in places(leaves)) == [1, 2, 2, 3, 3, 3, 3]
    assert len({t.parent_id for t in leaves}) == 5
    three = grow(policy, dataclasses.replace(ALWAYS, roots=1, beam=3), samples=4)
    check_tree(three, 4)
    assert places(three) == [(0, 1), (0, 1), (0, 2)]
    one = grow(policy, dataclasses.replace(ALWAYS, roots=1, beam=1), samples=4)
    assert len(roots(one)) == 4


def test_the_turn_after_the_result_decides_or_the_one_before_it() -> None:
    high = turn(3.0, CALL)
    late = Branching(base=0.5, beta=0.2, decision="threshold", roots=1)
    policy = scripted(turn(0.5, CALL), high, turn(0.2, CALL), turn(0.2, ANSWER))
    leaves = grow(policy, late, samples=2)
    assert places(leaves) == [(0, 1)]
    leaves = grow(policy, dataclasses.replace(late, timing="before"), samples=2)
    assert places(leaves) == [(0, 2)]


def test_only_the_first_tokens_of_a_turn_count() -> None:
    long = ScriptedTurn((*range(30, 37), CALL), entropies=(0.1,) * 2 + (9.0,) * 6)
    policy = scripted(turn(0.5, CALL), long, turn(0.1, ANSWER))
    spec = Branching(decision="threshold", roots=1, window=2)
    assert len(roots(grow(policy, spec, samples=2))) == 2
    assert len(roots(grow(policy, dataclasses.replace(spec, window=3), samples=2))) == 1


def test_forks_in_a_row_are_penalised_along_the_path() -> None:
    turns = [turn(0.5, CALL), turn(0.6, CALL), turn(0.6, CALL), turn(0.3, CALL), turn(0.6, CALL), turn(0.6, ANSWER)]
    spec = Branching(base=0.5, beta=0.2, decision="threshold", roots=1, fork_penalty=0.05)
    limits = Limits(9, 100, 400)
    leaves = grow(scripted(*turns), spec, samples=16, limits=limits)
    check_tree(leaves, 16)
    # After result 1 and, the row broken by the second and third, after 4; nothing after 2, 3 and 5, where P is too low.
    assert {n for _, n in places(leaves)} == {1, 4}
    free = grow(scripted(*turns), dataclasses.replace(spec, fork_penalty=0.0), samples=16, limits=limits)
    assert {n for _, n in places(free)} == {1, 2, 4, 5}


@pytest.mark.parametrize(("root", "tool", "n"), [(0.5, 4.5, 2), (3.0, 1.0, 12), (1.0, 1.0, 8)])
def test_the_pilot_splits_the_budget_counts_as_a_root_and_is_branched_from(root: float, tool: float, n: int) -> None:
    turns = [turn(root, CALL), turn(tool, CALL), turn(tool, ANSWER)]
    policy = scripted(*turns)
    leaves = grow(policy, dataclasses.replace(ALWAYS, split_beta=0.5), samples=16)
    check_tree(leaves, 16)
    assert roots(leaves)[0].trajectory_id == "q0/0"
    if n == 2:  # 14 places for branches and fewer chances: the rest are fresh
        assert len(roots(leaves)) >= 2
        assert (0, 1) in places(leaves)
        assert (0, 2) in places(leaves)
    else:
        assert len(roots(leaves)) == n
        assert places(leaves)[:2] == [(0, 1), (0, 2)]
    assert len(policy.opened) == 16  # no pilot is thrown away


def test_a_pilot_without_calls_gives_half_of_the_budget() -> None:
    def script(prompt: Sequence[int], seed: int) -> list[ScriptedTurn]:
        return [turn(0.5, ANSWER)] if not opened else [turn(0.5, CALL), turn(0.6, CALL), turn(0.5, ANSWER)]

    opened: list[int] = []
    policy = ScriptedPolicy(lambda p, s: (script(p, s), opened.append(s))[0], VOCAB)
    leaves = grow(policy, dataclasses.replace(ALWAYS, split_beta=0.5), samples=8)
    check_tree(leaves, 8)
    assert len(roots(leaves)) == 4


def test_a_tool_that_ends_the_trajectory_and_a_full_context_still_keep_the_budget() -> None:
    policy = scripted(turn(0.5, CALL), turn(0.6, CALL + 1), turn(0.5, ANSWER))
    leaves = grow(policy, ALWAYS, samples=6, parts=[slow_tool(1, last=lambda x: x == CALL + 1)])
    check_tree(leaves, 6)
    assert {t.stop for t in leaves} == {"answer"}
    for spec in (ALWAYS, dataclasses.replace(ALWAYS, split_beta=0.5)):
        leaves = grow(policy, spec, samples=4, limits=Limits(4, 40, 5))
        assert [(t.stop, t.model_tokens) for t in leaves] == [("context_full", 0)] * 4
        tight = grow(policy, spec, samples=4, limits=Limits(4, 40, 17))
        check_tree(tight, 4)


class Counter:
    """An environment with a state."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def reset(self) -> str | None:
        return None

    def tool(self, x: int) -> str:
        """Count.

        Args:
            x: A number.
        """
        self.seen.append(x)
        return ",".join(map(str, self.seen))


def test_stateful_tools_are_copied_as_they_were_at_the_fork() -> None:
    turns = [turn(0.5, CALL), turn(0.6, CALL + 1), turn(0.7, CALL + 2), turn(0.5, ANSWER)]
    for pilot in (None, 0.5):
        leaves = grow(scripted(*turns), dataclasses.replace(ALWAYS, split_beta=pilot), samples=8, parts=[Counter])
        check_tree(leaves, 8)
        assert len(roots(leaves)) < 8
        for t in leaves:
            assert [r.content for r in t.results] == ["5", "5,6", "5,6,7"]


def test_a_stateful_interpreter_is_copied_as_it_was_at_the_fork() -> None:
    part = python_tool(stateful=True)

    class Programs(IdDialect):
        def read(self, ids: Sequence[int], finish: Finish) -> Turn:
            read = super().read(ids, finish)
            code = f"seen = globals().get('seen', []) + [{ids[-1]}]\nprint(seen)"
            return Turn(read.call_start, (ToolCall("python", {"code": code}),) if read.calls else (), read.answer)

    turns = [turn(0.5, CALL), turn(0.6, CALL + 1), turn(0.7, CALL + 2), turn(0.5, ANSWER)]
    limits = Limits(4, 40, 400)
    leaves = grow(scripted(*turns), ALWAYS, samples=4, parts=[part], limits=limits, dialect=Programs())
    check_tree(leaves, 4)
    assert len(roots(leaves)) == 2
    for t in leaves:
        assert [r.content.strip() for r in t.results] == ["[5]", "[5, 6]", "[5, 6, 7]"]


def test_tools_that_cannot_be_copied_are_refused_with_the_reason() -> None:
    class Stuck(Counter):
        def fork(self) -> Any:
            raise RuntimeError("holds a socket")

    policy = scripted(turn(0.5, CALL), turn(0.6, ANSWER))
    with pytest.raises(UserError, match=r"method arpo branches after tool results.*Stuck.*holds a socket"):
        grow(policy, ALWAYS, samples=4, parts=[Stuck])
    assert all(s.closed for s in policy.opened)


def test_a_busy_sandbox_makes_a_root_of_the_branch() -> None:
    class Busy:
        keeps_time = repeatable = True
        specs = [slow_tool().spec()]  # noqa: RUF012
        tools = (slow_tool(),)

        async def start(self) -> None: ...
        async def open(self, row: Any, seed: int) -> tuple[Any, None]:
            return self, None

        async def reward(self) -> float | None:
            return None

        async def fork(self) -> Any:
            raise RuntimeError("the queue is full")

        async def close(self) -> None: ...

    for pilot in (None, 0.5):
        policy = scripted(turn(0.5, CALL), turn(0.6, CALL), turn(0.5, ANSWER))
        leaves = grow(policy, dataclasses.replace(ALWAYS, split_beta=pilot), samples=6, parts=[Busy()])
        check_tree(leaves, 6)
        assert len(roots(leaves)) == 6


def test_environments_that_ask_every_attempt_something_else() -> None:
    class Asking(Counter):
        count = 0

        def reset(self) -> str | None:
            Asking.count += 1
            return f"variant {Asking.count}"

    turns = [turn(0.5, CALL), turn(0.6, CALL), turn(0.5, ANSWER)]
    for pilot in (None, 0.5):
        for policy in (scripted(*turns), LocalPolicy(tiny_model("qwen3"))):
            leaves = grow(policy, dataclasses.replace(ALWAYS, split_beta=pilot), samples=6, parts=[Asking])
            check_tree(leaves, 6)
            assert len({t.prompt for t in roots(leaves)}) == len(roots(leaves))


def test_a_rollout_that_is_cancelled_closes_everything() -> None:
    async def main() -> None:
        policy = LocalPolicy(tiny_model("qwen3"))
        toolbox = make_toolbox([slow_tool(1)])
        agent = Agent(policy, IdDialect(), toolbox, even)
        rolled = branching_rollout(ALWAYS, 8, agent, attempts_of(2, 8), SamplingParams(max_new_tokens=12), Limits())
        task = asyncio.create_task(rolled)
        while policy.statistics()["steps"] < 15:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        policy.end()  # raises where a sequence is still open

    asyncio.run(main())


def test_the_file_keeps_the_tree() -> None:
    policy = scripted(turn(0.5, CALL), turn(0.6, CALL), turn(0.5, ANSWER))
    leaves = grow(policy, ALWAYS, samples=6)
    read = [from_json(__import__("json").loads(dumps(t))) for t in leaves]
    assert read == leaves
    metrics = rollout_metrics(read)
    assert (metrics["rollout/roots"], metrics["rollout/forks"]) == (3, 3)
    assert metrics["rollout/executed_calls"] == 6 * 2 - 3
    assert sum(t.own_model_tokens for t in read) == 6 * 12 - 3 * 4
    assert int(shared_tokens(make_batch(read)).sum()) == 3 * 4


def test_what_a_method_names_is_what_is_run() -> None:
    assert rollout_for(None, 4) is rollout
    with pytest.raises(UserError, match="roots=5 is more than the 4 trajectories"):
        rollout_for(Branching(roots=5), 4)

    class Other:
        name = "other"

    with pytest.raises(UserError, match="no rollout 'other'"):
        rollout_for(Other(), 4)


# -- any policy --------------------------------------------------------------------------------------------------------

Turns = list[tuple[int, int, int]]


def random_script(shape: int) -> Callable[[Sequence[int], int], list[ScriptedTurn]]:
    def script(prompt: Sequence[int], seed: int) -> list[ScriptedTurn]:
        rng = random.Random(f"{shape}/{seed}")
        turns = []
        for _ in range(6):
            length = rng.randrange(1, 6)
            ids = (*(rng.randrange(30, 90) for _ in range(length - 1)), rng.choice([CALL, CALL, CALL + 1, ANSWER, 40]))
            turns.append(ScriptedTurn(ids, entropies=tuple(rng.random() * 3 for _ in ids), delay=rng.random() * 1e-3))
        return turns

    return script


@given(
    shape=st.integers(0, 10**6),
    samples=st.integers(1, 9),
    share=st.floats(0.1, 1.0),
    beam=st.integers(1, 4),
    base=st.floats(0, 1),
    pilot=st.sampled_from([None, 0.5, -2.0, 40.0]),
    decision=st.sampled_from(["threshold-draw", "threshold", "draw"]),
    timing=st.sampled_from(["after", "before"]),
    ends=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_tree_keeps_its_budget_and_shares_its_tokens(
    shape: int, samples: int, share: float, beam: int, base: float, pilot: Any, decision: Any, timing: Any, ends: bool
) -> None:
    spec = Branching(
        roots=max(1, int(samples * share)), beam=beam, base=base, tau=0.2, decision=decision, timing=timing,
        split_beta=pilot, fork_penalty=0.05,
    )  # fmt: skip
    policy = ScriptedPolicy(random_script(shape), VOCAB)
    tool = slow_tool(shape, last=lambda x: ends and x == CALL + 1)
    leaves = grow(policy, spec, questions=2, samples=samples, parts=[tool], limits=Limits(4, 14, 60))
    for i in range(2):
        check_tree(leaves[i * samples : (i + 1) * samples], samples)
    assert [t.trajectory_id for t in leaves] == [f"q{i}/{k}" for i in range(2) for k in range(samples)]
    assert all(s.closed for s in policy.opened)
    for t in leaves:
        assert t.model_tokens <= 14
        assert len(t.results) < 4
    if beam == 1 or base == 0.0:
        assert len(roots(leaves)) == 2 * samples or base > 0 or spec.beta
    batch = make_batch(leaves)  # checks the prefixes once more
    assert int((batch.parent_of >= 0).sum()) == 2 * samples - len(roots(leaves))


# -- the local engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pilot", [None, 0.5])
@pytest.mark.parametrize("slots", [128, 5])
def test_trees_of_the_engine_are_bit_equal_whatever_the_tools_timing(pilot: float | None, slots: int) -> None:
    spec = Branching(base=0.7, beta=0.5, tau=0.3, split_beta=pilot, fork_penalty=0.05)
    policy = LocalPolicy(tiny_model("qwen3"), max_slots=slots)
    seen = []
    for timing in (None, 1, 2):
        tool = slow_tool(timing, last=lambda x: x == 7)
        with policy.rollout():
            leaves = grow(policy, spec, questions=3, samples=8, parts=[tool])
        for i in range(3):
            check_tree(leaves[i * 8 : i * 8 + 8], 8)
        seen.append([bare(t) for t in leaves])
    assert seen[0] == seen[1] == seen[2]
    branches = len(seen[0]) - len(roots(seen[0]))
    assert branches >= 4
    with policy.rollout():
        assert [bare(t) for t in grow(policy, spec, questions=3, samples=8, seed=1)] != seen[0]


@pytest.mark.parametrize("seed", [0, 8, 11])
def test_when_a_budget_is_filled_up_does_not_hang_on_the_tools_speed(seed: int) -> None:
    """Tools that end a trajectory decide who is the last of its tree; the engine must compute the same steps."""
    policy = LocalPolicy(tiny_model("qwen3"))
    computed = []
    for seconds in (0.0, 0.08):
        before = policy.statistics()
        with policy.rollout():
            tool = slow_tool(last=lambda x: True, seconds=seconds)
            limit = SamplingParams(max_new_tokens=20)
            grow(policy, Branching(roots=2), questions=6, samples=4, parts=[tool], params=limit, seed=seed)
        computed.append({k: v - before[k] for k, v in policy.statistics().items()})
    assert computed[0] == computed[1]


@pytest.mark.parametrize("options", [{"deterministic": False}, {"result_delay": None}, {"max_slots": 1}])
def test_trees_are_whole_in_every_mode_of_the_engine(options: dict[str, Any]) -> None:
    policy = LocalPolicy(tiny_model("qwen3"), **options)
    for pilot in (None, 0.5):
        with policy.rollout():
            spec = Branching(base=0.7, tau=0.3, split_beta=pilot)
            leaves = grow(policy, spec, questions=2, samples=6, parts=[slow_tool(3, last=lambda x: x == 7)])
        for i in range(2):
            check_tree(leaves[i * 6 : i * 6 + 6], 6)


def test_the_engine_prefills_no_shared_token_twice_and_branches_part() -> None:
    policy = LocalPolicy(tiny_model("qwen3"))
    with policy.rollout():
        leaves = grow(policy, dataclasses.replace(ALWAYS, roots=2), samples=10)
    check_tree(leaves, 10)
    assert len(roots(leaves)) < 10
    by_id = {t.trajectory_id: t for t in leaves}
    parted = 0
    for t in leaves:
        if t.parent_id is not None:
            parted += t.ids != by_id[t.parent_id].ids
    assert parted == 10 - len(roots(leaves))
    results = sum(len(s.ids) for t in leaves for s in t.segments[len(t.inherited) :] if s.kind == "result")
    prompt = len(leaves[0].prompt)
    # The prompt but its last token, once; with each result the sampled token before it, but not its own last one.
    assert policy.statistics()["prefilled_tokens"] <= prompt - 1 + results


def test_branches_sample_from_the_distributions_that_their_parent_had() -> None:
    """The first own token of a branch was drawn from the same distribution as the parent's token at that place."""
    policy = LocalPolicy(tiny_model("qwen3"))
    with policy.rollout():
        leaves = grow(policy, dataclasses.replace(ALWAYS, roots=2), samples=10)
    by_id = {t.trajectory_id: t for t in leaves}
    compared = 0
    for t in leaves:
        if t.parent_id is None:
            continue
        own, other = t.segments[len(t.inherited)], by_id[t.parent_id].segments[len(t.inherited)]
        assert own.entropies is not None
        assert other.entropies is not None
        assert own.entropies[0] == pytest.approx(other.entropies[0], abs=1e-4)
        compared += 1
    assert compared


def test_decisions_are_those_of_the_formula() -> None:
    """Every fork of a deterministic decision can be computed again from the recorded entropies."""
    policy = LocalPolicy(tiny_model("qwen3"))
    spec = Branching(roots=8, beta=3.0, decision="threshold", beam=2)
    with policy.rollout():
        leaves = grow(policy, spec, samples=64, limits=Limits(3, 40, 200))
    check_tree(leaves, 64)
    forked = {(t.parent_id, t.fork_at) for t in leaves if t.parent_id is not None}
    assert forked
    checked = 0
    for t in leaves:
        first: float | None = None
        place = 0
        turn_entropies: list[float] = []
        starts = 0
        for i, s in enumerate(t.segments):
            place += len(s.ids)
            if s.kind in ("prompt", "result"):
                turn_entropies, starts = [], place
                continue
            turn_entropies += s.entropies or ()
            ends = i + 1 == len(t.segments) or t.segments[i + 1].kind == "result"
            if not ends:
                continue
            now = window_entropy(turn_entropies, spec.window)
            if first is None:
                first = now
                continue
            if starts > (t.fork_at or 0) and int(t.trajectory_id.split("/")[1]) < 8 and not math.isnan(now):
                p = branch_probability(now, first, VOCAB, spec.base, spec.beta)
                assert ((t.trajectory_id, starts) in forked) == (p > spec.tau)
                checked += 1
    assert checked > len(forked)
