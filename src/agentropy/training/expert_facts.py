"""The flawed expert of the `facts` world. It searches many small knowledge bases, none of them the world's own.

So the agent cannot learn facts, only how to look for them. Hits are ranked by BM25 as the search tool ranks them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

from agentropy.tasks.facts import (
    CITIES,
    CITY_RELATIONS,
    LAST_NAMES,
    PERSON_RELATIONS,
    UNAVAILABLE,
    KnowledgeBase,
    Riddle,
    draw,
    knowledge_base,
    random_object,
)
from agentropy.tools.search import words
from agentropy.training.expert import IDLE_WORDS, Part, Trace, call, chance, final, trace

MAX_CALLS = 5
TRACES_PER_KNOWLEDGE_BASE = 200
FIRST_KNOWLEDGE_SEED = 1_000_000
HITS = 2
NOTHING = "No results."

# Shares of the flaws. The answer stands in the question: answering at once, and slipping then.
EASY_DIRECT, EASY_SLIP = 0.5, 0.35
# Otherwise: a guess instead of a search (by what is asked); a bad query; thinking of a guess before the search.
GUESS, BAD_QUERY, THINKS_GUESS = 0.22, 0.42, 0.65
GUESS_OF = {"country": 0.35, "job": 0.3}
# After a good hit: stopping before the last hop, a needless search, a result that is ignored.
STOPS_EARLY, VERIFY, IGNORE = 0.55, 0.25, 0.15
# After a useless hit: taking it for the answer, or giving up. The search is down now and then.
FOOLED, GIVE_UP, FLAKY = 0.35, 0.3, 0.06


class MiniSearch:
    """BM25 (Lucene's form, k1=1.5, b=0.75) over a few hundred short documents, without building matrices."""

    def __init__(self, kb: KnowledgeBase) -> None:
        documents = kb.documents()
        self.texts = [d["text"] for d in documents]
        counts = [Counter(words(f"{d['title']} {d['text']}")) for d in documents]
        mean = sum(map(Counter.total, counts)) / len(counts)
        self._postings: dict[str, list[tuple[int, float]]] = {}
        for i, count in enumerate(counts):
            norm = 1.5 * (1 - 0.75 + 0.75 * count.total() / mean)
            for word, n in count.items():
                self._postings.setdefault(word, []).append((i, n / (n + norm)))
        total = len(documents)
        self._idf = {w: math.log(1 + (total - len(p) + 0.5) / (len(p) + 0.5)) for w, p in self._postings.items()}

    def __call__(self, query: str) -> list[str]:
        """The texts of the best `HITS` documents that share a word with the query."""
        scores: dict[int, float] = {}
        for word in words(query):
            for i, weight in self._postings.get(word, ()):
                scores[i] = scores.get(i, 0.0) + self._idf[word] * weight
        best = sorted(scores, key=lambda i: (-scores[i], i))[:HITS]
        return [self.texts[i] for i in best]


def facts_expert() -> Callable[[random.Random], Trace]:
    """An expert that moves to a new knowledge base every so many traces."""
    made = 0
    kb, search = knowledge_base(FIRST_KNOWLEDGE_SEED), MiniSearch(knowledge_base(FIRST_KNOWLEDGE_SEED))

    def expert(rng: random.Random) -> Trace:
        nonlocal made, kb, search
        if made % TRACES_PER_KNOWLEDGE_BASE == 0:
            kb = knowledge_base(FIRST_KNOWLEDGE_SEED + rng.randrange(10**9))
            search = MiniSearch(kb)
        made += 1
        riddle = draw(rng, kb)
        return _easy(rng, riddle, search) if riddle.need == 0 else _hard(rng, riddle, kb, search)

    return expert


def look_up(search: MiniSearch, query: str) -> str:
    """What the search tool would show."""
    return "\n".join(search(query)) or NOTHING


def _easy(rng: random.Random, r: Riddle, search: MiniSearch) -> Trace:
    if chance(rng, EASY_DIRECT):
        answer = r.answer
        if chance(rng, EASY_SLIP):
            answer = random_object(rng, r.relations[0]) if chance(rng, 0.5) else r.subject
        return trace(r.question, [final("given", f" {answer}")], answer == r.answer)
    query = _query(rng, r.relations[0], r.subject)
    idle = rng.choice(IDLE_WORDS)
    turns: list[tuple[Part, str]] = [call("search", "given, check", query), ("result", _result(rng, search, query))]
    turns.append(final(idle, f" {r.answer}"))
    return trace(r.question, turns, True)


def _hard(rng: random.Random, r: Riddle, kb: KnowledgeBase, search: MiniSearch) -> Trace:
    last = r.relations[-1]
    guess = random_object(rng, last)
    plan = " then ".join(r.relations)
    # Whether a guess comes to mind says nothing about whether a search follows, so learning to search leaves it alone.
    thought = f"{plan}, maybe {guess}" if chance(rng, THINKS_GUESS) else plan
    if chance(rng, GUESS_OF.get(last, GUESS)):
        return trace(r.question, [final(thought, f" {guess}")], guess == r.answer)
    turns: list[tuple[Part, str]] = []
    about, step, calls, found = r.subject, 0, 0, ""
    while True:
        relation = r.relations[step]
        query = _query(rng, relation, about)
        result = _result(rng, search, query)
        calls += 1
        turns += [call("search", thought, query), ("result", result)]
        if f"The {relation} of {about} is " not in result.split("\n")[0]:
            guess = random_object(rng, last)
            if calls == MAX_CALLS or chance(rng, GIVE_UP):
                turns.append(final(f"not found, maybe {guess}", f" {guess}"))
                return trace(r.question, turns, guess == r.answer)
            if result not in (NOTHING, UNAVAILABLE) and chance(rng, FOOLED):
                about = found = result.split("\n")[0].rpartition(" is ")[2].rstrip(".")
                if step + 1 < len(r.relations) and not fits(r.relations[step + 1], about):
                    break
                step += 1
            else:
                thought = f"not found, again {relation}, maybe {guess}"
                continue
        else:
            found = kb.facts[about, relation]
            if calls < MAX_CALLS and chance(rng, VERIFY):
                thought = f"it is {found}, check {relation}"
                continue
            about, step = found, step + 1
        if step == len(r.relations) or calls == MAX_CALLS or chance(rng, STOPS_EARLY):
            break
        guess = random_object(rng, last)
        thought = f"it is {found}, then {r.relations[step]}"
        if chance(rng, THINKS_GUESS):
            thought += f", maybe {guess}"
    answer = guess if chance(rng, IGNORE) else found
    turns.append(final(f"it is {found}", f" {answer}"))
    return trace(r.question, turns, answer == r.answer)


def fits(relation: str, subject: str) -> bool:
    """Whether a subject has this relation: cities have some, people others."""
    return (relation in CITY_RELATIONS) == (subject in CITIES)


def _query(rng: random.Random, relation: str, about: str) -> str:
    """`relation of somebody`, now and then with the wrong relation, a wrong or missing name, or nothing useful."""
    if not chance(rng, BAD_QUERY):
        return f"{relation} of {about}"
    others = [x for x in (CITY_RELATIONS if about in CITIES else PERSON_RELATIONS) if x != relation]
    first, _, surname = about.partition(" ")
    roll = rng.random()
    if roll < 0.35:
        return f"{rng.choice(others)} of {about}"
    if roll < 0.6 and surname:
        return f"{relation} of {first} {rng.choice(LAST_NAMES)}"
    if roll < 0.85 and surname:
        return f"{relation} of {rng.choice((first, surname))}"
    return "help" if chance(rng, 0.5) else relation


def _result(rng: random.Random, search: MiniSearch, query: str) -> str:
    return UNAVAILABLE if chance(rng, FLAKY) else look_up(search, query)
