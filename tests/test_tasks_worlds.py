"""The generated worlds: reproducible, disjoint splits, right answers."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter

import pytest

from agentropy.errors import UserError
from agentropy.tasks import make_world, warm_start_path
from agentropy.tasks.arithmetic import KINDS, WEIGHTS, draw
from agentropy.tasks.facts import draw as draw_riddle
from agentropy.tasks.facts import knowledge_base, sentence
from agentropy.tasks.generated import GeneratedTasks, split_of
from agentropy.training.expert import run_program
from agentropy.trajectory import ToolCall

WORLD_NAMES = ("arithmetic", "facts")


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_same_index_same_question_and_seeds_differ(name: str) -> None:
    first, again, other = make_world(name).tasks, make_world(name).tasks, make_world(name, seed=1).tasks
    assert [first.train(i) for i in range(40)] == [again.train(i) for i in range(40)]
    assert [first.train(i) for i in range(40)] != [other.train(i) for i in range(40)]
    assert first.train(10**9) == again.train(10**9)


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_splits_are_disjoint_fixed_and_full(name: str) -> None:
    world = make_world(name).tasks
    test, validation = world.split("test"), world.split("validation")
    assert (len(test), len(validation)) == (256, 128)
    assert len({t.question for t in test}) == 256
    assert test == make_world(name, seed=7).tasks.split("test")
    train = {world.train(i).question for i in range(600)} | {
        make_world(name, seed=9).tasks.train(i).question for i in range(300)
    }
    tested, validated = {t.question for t in test}, {t.question for t in validation}
    assert not train & tested
    assert not train & validated
    assert not tested & validated
    assert len({t.id for t in test}) == 256


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_questions_need_no_call_one_and_several(name: str) -> None:
    world = make_world(name).tasks
    needs = Counter(min(2, world.train(i).need or 0) for i in range(500))
    assert all(needs[k] >= 30 for k in (0, 1, 2)), needs


def test_phrasings_of_one_fact_share_a_split() -> None:
    kb = knowledge_base(0)
    rng = random.Random(0)
    questions: dict[str, set[str]] = {}
    for _ in range(4000):
        riddle = draw_riddle(rng, kb)
        if riddle.need:
            questions.setdefault(riddle.key, set()).add(riddle.question)
    world = make_world("facts").tasks
    train = {world.train(i).question for i in range(1500)}
    several = [q for q in questions.values() if len(q) > 1]
    assert len(several) > 200
    tested = {t.question for t in world.split("test")}
    for group in several:
        assert not (group & train and group & tested)


def test_arithmetic_answers_are_what_the_reference_programs_print() -> None:
    rng = random.Random(1)
    seen = Counter()
    for _ in range(1500):
        p = draw(rng)
        seen[p.kind] += 1
        last = ""
        for program in p.programs:
            ok, last = run_program(program.format(last))
            assert ok, (p, last)
        if p.kind == "parity":
            last = ("even", "odd")[int(last)]
        assert last == p.answer, p
        assert len(p.programs) == max(1, p.need)
    assert set(seen) == set(KINDS) == set(WEIGHTS)


def test_facts_answers_follow_the_knowledge_base_by_search_alone() -> None:
    from agentropy.tools.search import SearchIndex

    kb = knowledge_base(0)
    index = SearchIndex.from_documents(kb.documents())
    rng = random.Random(2)
    found = 0
    for _ in range(300):
        riddle = draw_riddle(rng, kb)
        about = riddle.subject
        for relation in riddle.relations:
            hits = index.search(f"{relation} of {about}", 2)
            match = next(
                m for h in hits if (m := re.fullmatch(rf"The {relation} of {about} is (.+)\.", h.document.text))
            )
            found += hits[0].document.text == match.group(0)
            about = match.group(1)
        assert about == riddle.answer
        if riddle.need == 0:
            assert sentence(riddle.subject, riddle.relations[0], riddle.answer) in riddle.question
    assert found > 300


def test_knowledge_differs_between_seeds_and_has_no_self_relations() -> None:
    kb = knowledge_base(3)
    assert all(obj != subject for (subject, _), obj in kb.facts.items())
    assert kb.facts != knowledge_base(4).facts
    assert knowledge_base(3, 12).people != knowledge_base(3, 13).people


def test_tools_of_the_worlds_answer_tersely() -> None:
    from agentropy.tools import make_toolbox

    async def ask(name: str, tool: str, arguments: dict[str, str]) -> tuple[str, str]:
        box = make_toolbox(make_world(name).tools())
        await box.start()
        try:
            session, _ = await box.open({}, 0)
            result = (await session.call([ToolCall(tool, arguments)]))[0]
            await session.close()
        finally:
            await box.close()
        return result.status, result.content

    kb = knowledge_base(0)
    person = kb.people[0]
    status, text = asyncio.run(ask("facts", "search", {"query": f"job of {person}"}))
    assert status == "ok"
    assert text.split("\n")[0] == f"The job of {person} is {kb.facts[person, 'job']}."
    assert len(text.split("\n")) == 2
    assert asyncio.run(ask("facts", "search", {"query": "zzz"})) == ("ok", "No results.")
    assert asyncio.run(ask("arithmetic", "python", {"code": "print(6*7)"})) == ("ok", "42")
    status, text = asyncio.run(ask("arithmetic", "python", {"code": "print(6*7"}))
    assert (status, text) == ("error", run_program("print(6*7")[1])
    status, text = asyncio.run(ask("arithmetic", "python", {"code": "print(1)\npint(2)"}))
    assert (status, text) == ("error", "NameError: name 'pint' is not defined")


def test_failures_are_a_setting() -> None:
    assert make_world("arithmetic").faults() == ()
    assert [f.probability for f in make_world("facts").faults()] == [0.08]
    (fault,) = make_world("arithmetic", tool_failures=0.25).faults()
    assert (fault.probability, fault.status, fault.content) == (0.25, "error", "ConnectionError: tool unavailable")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("chess", {}, "no world 'chess'"),
        ("arithmetic", {"people": 3}, "no setting 'people'"),
        ("arithmetic", {"kinds": ("mul", "sqrt")}, "no kind 'sqrt'"),
        ("facts", {"people": 2}, "people must be 3 to"),
        ("facts", {"hits": 0}, "hits must be"),
        ("facts", {"tool_failures": 1.5}, "tool_failures must lie"),
    ],
)
def test_wrong_settings_are_told(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_world(name, **settings)


def test_kinds_restrict_the_mix() -> None:
    world = make_world("arithmetic", kinds=("mul", "gcd")).tasks
    assert {world.train(i).kind for i in range(60)} == {"mul", "gcd"}


def test_a_world_too_small_says_so() -> None:
    from agentropy.tasks.base import Task

    world = GeneratedTasks("tiny", lambda rng: Task("", "always this", ("x",), "em"))
    empty = next(s for s in ("validation", "test") if split_of("always this") != s)
    with pytest.raises(UserError, match=r"no .* question in"):
        world.split(empty)


def test_unknown_warm_start_is_told() -> None:
    with pytest.raises(UserError, match="no world 'chess'"):
        warm_start_path("chess")
