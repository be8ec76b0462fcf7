"""The hard levels of the worlds: hidden data, distractors, longer chains, tools that fail and lie."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from agentropy.cli import main
from agentropy.config import RunConfig, resolved
from agentropy.errors import UserError
from agentropy.tasks import make_world
from agentropy.tasks.arithmetic import draw
from agentropy.tasks.arithmetic_hard import HARD_KINDS, HARD_WEIGHTS
from agentropy.tasks.facts import _LONG_CHAINS, HARD_NEED_WEIGHTS, false_fact, knowledge_base, read_fact
from agentropy.tasks.facts import draw as draw_riddle
from agentropy.tasks.generated import split_of
from agentropy.training.expert import run_program

WORLD_NAMES = ("arithmetic", "facts")


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_splits_are_fixed_full_and_disjoint(name: str) -> None:
    world = make_world(name, level="hard").tasks
    test, validation = world.split("test"), world.split("validation")
    assert (len({t.id for t in test}), len({t.id for t in validation})) == (256, 128)
    assert test == make_world(name, seed=7, level="hard").tasks.split("test")
    train = [make_world(name, seed=s, level="hard").tasks.train(i) for s in (0, 9) for i in range(300)]
    assert len({t.id for t in train}) > 400
    for a, b in ((train, test), (train, validation), (test, validation)):
        assert not {t.id for t in a} & {t.id for t in b}
        # Hidden data are a part of the question: the same words may ask for something else.
        assert not {(t.question, str(t.row)) for t in a} & {(t.question, str(t.row)) for t in b}


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_the_default_level_is_as_it_was_and_the_default(name: str) -> None:
    world, named = make_world(name), make_world(name, level="default")
    assert world.name == world.tasks.name == name
    assert [world.tasks.train(i) for i in range(30)] == [named.tasks.train(i) for i in range(30)]
    assert not any(world.tasks.train(i).row for i in range(100))
    first = {"arithmetic": "arithmetic-aee83eefcb4b", "facts": "facts-621559ab7666"}[name]
    assert world.tasks.train(0).id == first
    assert make_world(name, level="hard").name == f"{name}-hard"


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_most_questions_need_several_calls(name: str) -> None:
    world = make_world(name, level="hard").tasks
    needs = Counter(world.train(i).need for i in range(1500))
    assert set(needs) == {0, 1, 2, 3, 4}
    assert sum(needs[n] for n in (2, 3, 4)) > 0.5 * 1500
    assert min(needs.values()) > 0.03 * 1500


def test_reference_programs_give_the_answer_one_after_the_other() -> None:
    rng = random.Random(1)
    seen = Counter()
    for _ in range(1200):
        p = draw(rng, HARD_WEIGHTS, HARD_KINDS)
        seen[p.kind] += 1
        output = ""
        for k, program in enumerate(p.programs):
            if "d['" in program and k:
                # The entry before names this one, so this program could not be written without it.
                assert output.removeprefix("as ") == program.split("'")[1]
            ok, output = run_program(f"{p.setup}\n{program}")
            assert ok, (p, output)
        found = {"0": "even", "1": "odd"}.get(output, output) if p.kind == "parity" else output
        if p.kind.startswith("look"):
            found = next(w for w in output.replace("}", "").split() if w.isdigit())
        assert found == p.answer, p
        assert len(p.programs) == max(1, p.need)
    assert set(seen) == set(HARD_KINDS) == set(HARD_WEIGHTS)
    assert sum(HARD_WEIGHTS.values()) == pytest.approx(1)


def test_a_question_does_not_tell_how_many_steps_it_takes() -> None:
    rng = random.Random(2)
    words: dict[str, set[str]] = {}
    for _ in range(3000):
        p = draw(rng, HARD_WEIGHTS, HARD_KINDS)
        if p.kind.startswith("look"):
            words.setdefault(p.question, set()).add(p.kind)
    assert sum(len(kinds) == 3 for kinds in words.values()) > 20


def test_hidden_data_come_in_three_forms() -> None:
    rng = random.Random(3)
    problems = [HARD_KINDS["look"](rng) for _ in range(300)]
    outputs = [run_program(f"{p.setup}\n{p.programs[0]}")[1] for p in problems]
    forms = Counter("dict" if o.startswith("{") else "coins" if o.endswith("coins") else "int" for o in outputs)
    assert min(forms.values()) > 60


def test_search_ranks_facts_and_distractors_side_by_side() -> None:
    from agentropy.tools.search import SearchIndex

    kb = knowledge_base(0, distractors=0.5)
    assert kb.facts == knowledge_base(0).facts
    assert 0.4 < len(kb.distractors) / len(kb.facts) < 0.6
    index = SearchIndex.from_documents(kb.documents())
    both, first = 0, Counter()
    for (subject, relation), other in kb.distractors.items():
        assert other.obj not in (kb.facts[subject, relation], subject)
        hits = [h.document.text for h in index.search(f"{relation} of {subject}", 2)]
        if set(hits) != set(kb.sentences(subject, relation)):
            continue
        both += 1
        assert [o for h in hits if (o := read_fact(h, relation, subject))] == [kb.facts[subject, relation]]
        assert any(other.obj in h for h in hits)
        first["true" if read_fact(hits[0], relation, subject) else "false"] += 1
    assert both > 0.99 * len(kb.distractors)  # the rest: a namesake's document fits even better
    assert min(first.values()) > 0.4 * both


def test_long_chains_fit_together_and_can_be_followed_by_search() -> None:
    from agentropy.tools.search import SearchIndex

    kb = knowledge_base(0, distractors=0.5)
    index = SearchIndex.from_documents(kb.documents())
    assert all(len(set(c)) == len(c) == n for n, chains in _LONG_CHAINS.items() for c in chains)
    rng = random.Random(2)
    for _ in range(200):
        riddle = draw_riddle(rng, kb, HARD_NEED_WEIGHTS)
        about = riddle.subject
        for relation in riddle.relations:
            hits = [h.document.text for h in index.search(f"{relation} of {about} now", 2)]
            about = next(obj for h in hits if (obj := read_fact(h, relation, about)))
        assert about == riddle.answer


def test_a_false_fact_is_well_formed_and_wrong() -> None:
    rng = random.Random(0)
    kb = knowledge_base(0, distractors=0.5)
    for subject, relation in list(kb.facts)[:300]:
        text = "\n".join(kb.sentences(subject, relation))
        lied = [read_fact(line, relation, subject) for line in false_fact(text, rng).split("\n")]
        assert [x is not None for x in lied] == [read_fact(t, relation, subject) is not None for t in text.split("\n")]
        assert kb.facts[subject, relation] not in lied
    assert false_fact("No results.", rng) == "No results."


@pytest.mark.parametrize("name", WORLD_NAMES)
def test_failures_and_lies_are_settings_of_every_level(name: str) -> None:
    def shares(**settings: Any) -> list[tuple[float, str]]:
        return [(f.probability, f.status) for f in make_world(name, **settings).faults()]

    assert shares(level="hard") == [(0.2, "error"), (0.05, "ok")]
    assert shares(level="hard", tool_failures=0, tool_lies=0) == []
    assert shares(tool_failures=0, tool_lies=0.1) == [(0.1, "ok")]


def test_distractors_and_needs_are_settings() -> None:
    world = make_world("facts", needs=[0, 0, 0, 0, 1]).tasks
    assert {world.train(i).need for i in range(40)} == {4}
    world = make_world("facts", level="hard", needs=[0, 0, 0, 1]).tasks
    asked = {re.sub(r" (of|in|from|has|is) [A-Z].*", "", world.train(i).question) for i in range(150)}
    assert any("friend of the boss" in a for a in asked), "chains of the hard level"
    world = make_world("facts", level="hard", needs=[0.5, 0.5]).tasks
    assert {world.train(i).need for i in range(60)} == {0, 1}
    hard = make_world("arithmetic", level="hard", kinds=["price 4", "look"]).tasks
    assert {hard.train(i).kind for i in range(60)} == {"price 4", "look"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("facts", {"level": "mad"}, "no level 'mad'; it has default, hard"),
        ("facts", {"level": 3}, "no level 3"),
        ("facts", {"level": ["hard"]}, "no level"),
        ("facts", {"tool_lies": -0.1}, "tool_lies must lie between"),
        ("facts", {"tool_lies": 0.9, "tool_failures": 0.2}, "add up to more than 1"),
        ("facts", {"level": "hard", "tool_lies": 0.9}, "add up to more than 1"),
        ("facts", {"distractors": True}, "distractors must lie between"),
        ("facts", {"needs": [0, 0]}, "needs must be the shares"),
        ("facts", {"needs": [1] * 6}, "needs must be the shares"),
        ("facts", {"needs": "hard"}, "needs must be the shares"),
        ("arithmetic", {"kinds": ["price"]}, "no kind 'price'"),
        ("arithmetic", {"level": "hard", "kinds": ["gcd"]}, "world arithmetic-hard has no kind 'gcd'"),
        ("arithmetic", {"distractors": 0.5}, "no setting 'distractors'"),
    ],
)
def test_wrong_settings_are_told(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_world(name, **settings)


def test_hard_levels_get_more_turns_unless_the_user_says() -> None:
    def turns(**options: Any) -> tuple[int | None, int | None]:
        r = resolved(RunConfig(**options)).rollout
        return r.max_turns, r.max_new_tokens

    assert turns() == (5, 128)
    assert turns(world="facts", world_options={"level": "hard"}) == (8, 192)
    assert turns(world_options={"level": "hard"}) == (8, 160)
    assert turns(world_options={"level": "hard"}, rollout={"max_turns": 3, "max_new_tokens": 50}) == (3, 50)
    assert turns(world_options={"level": "hard"}, model="m") == (8, 1024)
    assert turns(tasks="x.jsonl", model="m") == (5, 1024)


def test_tasks_show_takes_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "show", "arithmetic?level=hard&kinds=[price 4]", "--n", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[price 4, needs 4 calls") == 2
    assert shown.count("only the tool sees: d = {") == 2
    assert main(["tasks", "show", "facts?level"]) == 2
    assert "write KEY=VALUE" in capsys.readouterr().err
    assert main(["tasks", "show", "facts?levl=hard"]) == 2
    assert "no setting 'levl'" in capsys.readouterr().err


def test_the_same_words_with_other_data_are_another_question() -> None:
    world = make_world("arithmetic", level="hard", kinds=("look",)).tasks
    tasks = [world.train(i) for i in range(200)]
    by_words: dict[str, set[str]] = {}
    for t in tasks:
        by_words.setdefault(t.question, set()).add(t.id)
        assert split_of(f"{t.question}\n{t.row['setup']}") == "train"
    assert any(len(ids) > 1 for ids in by_words.values())
