"""The flawed expert of the `facts` world's hard level: longer chains, distractors, a search that fails and lies."""

from __future__ import annotations

import random
from collections.abc import Callable

from agentropy.tasks.facts import (
    CITIES,
    CITY_RELATIONS,
    LAST_NAMES,
    PERSON_RELATIONS,
    UNAVAILABLE,
    Riddle,
    draw,
    false_fact,
    knowledge_base,
    random_object,
    read_fact,
)
from agentropy.training.expert import IDLE_WORDS, Part, Trace, call, chance, final, trace
from agentropy.training.expert_facts import (
    FIRST_KNOWLEDGE_SEED,
    NOTHING,
    TRACES_PER_KNOWLEDGE_BASE,
    MiniSearch,
    fits,
    look_up,
)

MAX_CALLS = 7
# Easier than the world: shorter chains, fewer distractors.
NEED_WEIGHTS = {0: 0.12, 1: 0.16, 2: 0.34, 3: 0.24, 4: 0.14}
DISTRACTORS = 0.5
# As often as in the world itself: a search that is down, and one that lies.
FLAKY, LIES = 0.2, 0.05
# The answer stands in the question: answering at once, and slipping then.
EASY_DIRECT, EASY_SLIP = 0.5, 0.25
# Otherwise: a guess instead of a search; a bad query; thinking of a guess before the search.
GUESS, BAD_QUERY, THINKS_GUESS = 0.15, 0.15, 0.65
# After a good hit: believing the distractor, stopping before the last hop, a needless search, ignoring the result.
MISLED, STOPS_EARLY, VERIFY, IGNORE = 0.25, 0.25, 0.12, 0.08
# After a useless hit: taking it for the answer; after any failure: giving up.
FOOLED, GIVE_UP = 0.3, 0.2


def facts_hard_expert() -> Callable[[random.Random], Trace]:
    """An expert that moves to a new knowledge base every so many traces."""
    made = 0
    kb = knowledge_base(FIRST_KNOWLEDGE_SEED, distractors=DISTRACTORS)
    search = MiniSearch(kb)

    def expert(rng: random.Random) -> Trace:
        nonlocal made, kb, search
        if made % TRACES_PER_KNOWLEDGE_BASE == 0:
            kb = knowledge_base(FIRST_KNOWLEDGE_SEED + rng.randrange(10**9), distractors=DISTRACTORS)
            search = MiniSearch(kb)
        made += 1
        riddle = draw(rng, kb, NEED_WEIGHTS)
        return _easy(rng, riddle, search) if riddle.need == 0 else _hard(rng, riddle, search)

    return expert


def _easy(rng: random.Random, r: Riddle, search: MiniSearch) -> Trace:
    if chance(rng, EASY_DIRECT):
        answer = r.answer
        if chance(rng, EASY_SLIP):
            answer = random_object(rng, r.relations[0]) if chance(rng, 0.5) else r.subject
        return trace(r.question, [final("given", f" {answer}")], answer == r.answer)
    query = _query(rng, r.relations[0], r.subject)
    turns = [call("search", "given, check", query), ("result", _result(rng, search, query))]
    turns.append(final(rng.choice(IDLE_WORDS), f" {r.answer}"))
    return trace(r.question, turns, True)


def _hard(rng: random.Random, r: Riddle, search: MiniSearch) -> Trace:
    last = r.relations[-1]
    guess = random_object(rng, last)
    # Whether a guess comes to mind says nothing about whether a search follows, so learning to search leaves it alone.
    thought = _maybe(rng, last, " then ".join(r.relations), guess)
    if chance(rng, GUESS):
        return trace(r.question, [final(thought, f" {guess}")], guess == r.answer)
    turns: list[tuple[Part, str]] = []
    about, step, calls, before = r.subject, 0, 0, ""
    while True:
        relation = r.relations[step]
        query = _query(rng, relation, about)
        result = _result(rng, search, query)
        calls += 1
        turns += [call("search", thought, query), ("result", result)]
        found = _read(rng, result, relation, about)
        if found is None and result not in (NOTHING, UNAVAILABLE) and chance(rng, FOOLED):
            found = result.split("\n")[0].rpartition(" is ")[2].removeprefix("now ").rstrip(".")
        if found is None:
            if calls == MAX_CALLS or chance(rng, GIVE_UP):
                guess = random_object(rng, last)
                turns.append(final(f"failed, maybe {guess}", f" {guess}"))
                return trace(r.question, turns, guess == r.answer)
            thought = _maybe(rng, last, f"failed, again {relation}")
            continue
        if before and before != found and calls < MAX_CALLS:  # a check that says something else: once more
            before, thought = found, f"or {found}, check {relation}"
            continue
        if not before and calls < MAX_CALLS and chance(rng, VERIFY):
            before, thought = found, f"it is {found}, check {relation}"
            continue
        about, step, before = found, step + 1, ""
        if step == len(r.relations) or calls == MAX_CALLS or chance(rng, STOPS_EARLY):
            break
        if not fits(r.relations[step], about):
            break
        thought = _maybe(rng, last, f"it is {about}, then {r.relations[step]}")
    answer = guess if chance(rng, IGNORE) else about
    turns.append(final(f"it is {about}", f" {answer}"))
    return trace(r.question, turns, answer == r.answer)


def _read(rng: random.Random, result: str, relation: str, about: str) -> str | None:
    """What the result says of a relation, or what its distractor says."""
    lines = result.split("\n")
    found = next((obj for line in lines if (obj := read_fact(line, relation, about))), None)
    if found and chance(rng, MISLED):
        for kind in ("former", "rumoured"):
            for line in lines:
                if line.startswith(f"The {kind} {relation} of {about} "):
                    return line.rpartition(" was " if kind == "former" else " is ")[2].rstrip(".")
    return found


def _maybe(rng: random.Random, relation: str, thought: str, guess: str = "") -> str:
    """The thought, mostly with a guess after it."""
    return f"{thought}, maybe {guess or random_object(rng, relation)}" if chance(rng, THINKS_GUESS) else thought


def _query(rng: random.Random, relation: str, about: str) -> str:
    """`relation of somebody`, now and then with another relation, a wrong or missing name, or nothing useful."""
    if not chance(rng, BAD_QUERY):
        return f"{relation} of {about}"
    first, _, surname = about.partition(" ")
    roll = rng.random()
    if roll < 0.4 or not surname:
        others = [x for x in (CITY_RELATIONS if about in CITIES else PERSON_RELATIONS) if x != relation]
        return f"{rng.choice(others)} of {about}"
    if roll < 0.7:
        return f"{relation} of {first} {rng.choice(LAST_NAMES)}"
    return f"{relation} of {rng.choice((first, surname))}" if roll < 0.9 else "help"


def _result(rng: random.Random, search: MiniSearch, query: str) -> str:
    if chance(rng, FLAKY):
        return UNAVAILABLE
    result = look_up(search, query)
    return false_fact(result, rng) if chance(rng, LIES) else result
