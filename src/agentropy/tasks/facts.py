"""The `facts` world: multi-hop questions over a generated knowledge base that only a search tool can see.

People have a boss, a friend, a city and a job; cities have a country and a mayor. Every fact is one short document. The
names are built so that a search finds look-alikes: people share first and last names, and whoever is the boss of one
person has a boss too. A seed draws who is who, so nothing can be known by heart; answers are graded by F1.

Beside a fact may stand a distractor: the same relation, outdated or rumoured. Then the fact says `now`, and BM25 cannot
tell the two apart: which comes first is drawn by lot.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from agentropy.errors import UserError
from agentropy.tasks.base import Task
from agentropy.tasks.generated import GeneratedTasks


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _names(
    "Anna Boris Clara David Emma Felix Greta Henry Irene Jonas Karen Louis Maria Nils Olga Peter Quinn Rosa Simon "
    "Tina Ulrich Vera Walter Xenia Yusuf Zelda Amir Bella Carlos Diana Elias Fiona Gustav Helen Ivan Julia Kevin Laura"
)
LAST_NAMES = _names(
    "Adams Berg Costa Dorn Evans Frost Grant Holt Irwin Jung Klein Lopez Meyer Novak Olsen Price Reed Stone Torres "
    "Urban Vogel Weber Young Zuber"
)
CITIES = _names(
    "Athens Berlin Cairo Delhi Essen Florence Geneva Hanoi Istanbul Jena Kyoto Lima Madrid Naples Oslo Paris Quito "
    "Rome Seoul Tokyo Utrecht Vienna Warsaw Zurich"
)
COUNTRIES = _names("Avalon Borduria Elbonia Freedonia Genovia Latveria Narnia Ruritania Sylvania Wakanda")
JOBS = _names("baker carpenter dentist engineer farmer gardener judge lawyer miner nurse painter pilot singer tailor")

UNAVAILABLE = "Search failed."
"""What the agent reads when its tool fails through no fault of its own."""

PERSON_RELATIONS = ("boss", "friend", "city", "job")
CITY_RELATIONS = ("country", "mayor")


@dataclass(frozen=True)
class KnowledgeBase:
    """Who is who: `facts[(subject, relation)]` is the object. Subjects are people and cities."""

    people: tuple[str, ...]
    facts: Mapping[tuple[str, str], str]
    distractors: Mapping[tuple[str, str], Distractor] = field(default_factory=dict)

    def documents(self) -> list[dict[str, str]]:
        """`{title, text}` for every fact and distractor, titled by its subject."""
        return [{"title": key[0], "text": text} for key in self.facts for text in self.sentences(*key)]

    def sentences(self, subject: str, relation: str) -> list[str]:
        """A fact in words, and its distractor before or after it if there is one."""
        obj, other = self.facts[subject, relation], self.distractors.get((subject, relation))
        if other is None:
            return [sentence(subject, relation, obj)]
        kind, verb = ("former", "was") if other.outdated else ("rumoured", "is")
        both = [f"The {kind} {relation} of {subject} {verb} {other.obj}.", sentence(subject, relation, f"now {obj}")]
        return both if other.first else both[::-1]


@dataclass(frozen=True, slots=True)
class Distractor:
    """A wrong object of a relation: an outdated one or a rumour, before or after the fact in the collection."""

    obj: str
    outdated: bool
    first: bool


def sentence(subject: str, relation: str, obj: str) -> str:
    """A fact in words."""
    return f"The {relation} of {subject} is {obj}."


_FACT = re.compile(r"The (\w+) of (.+) is (now )?(.+)\.")


def read_fact(line: str, relation: str, subject: str) -> str | None:
    """The object of a fact as `KnowledgeBase.sentences` writes it; None for any other line."""
    m = _FACT.fullmatch(line)
    return m.group(4) if m and m.group(1, 2) == (relation, subject) else None


def false_fact(text: str, rng: random.Random) -> str:
    """A search result whose first fact has another object of the same sort; the same text where it holds no fact."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if m := _FACT.fullmatch(line):
            obj = random_object(rng, m.group(1), m.group(4))
            lines[i] = sentence(m.group(2), m.group(1), f"{m.group(3) or ''}{obj}")
            break
    return "\n".join(lines)


def random_object(rng: random.Random, relation: str, other_than: str = "") -> str:
    """Something of the right sort for a relation: a city, a country, a job, or a name."""
    while True:
        if relation in _SORTS:
            found = rng.choice(_SORTS[relation])
        else:
            found = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        if found != other_than:
            return found


_SORTS: Mapping[str, tuple[str, ...]] = {"city": CITIES, "country": COUNTRIES, "job": JOBS}


@lru_cache(maxsize=8)
def knowledge_base(seed: int = 0, people: int = 160, distractors: float = 0.0) -> KnowledgeBase:
    """Draw a knowledge base, in which a share of the facts has a distractor.

    Raises UserError where there are fewer names than people.
    """
    pairs = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    if not 3 <= people <= len(pairs):
        raise UserError(f"world facts: people must be 3 to {len(pairs)}, not {people}")
    rng = random.Random(f"facts/{seed}/{people}")
    names = rng.sample(pairs, people)
    facts: dict[tuple[str, str], str] = {}
    for name in names:
        boss, friend = [n for n in rng.sample(names, 3) if n != name][:2]
        facts[name, "boss"], facts[name, "friend"] = boss, friend
        facts[name, "city"], facts[name, "job"] = rng.choice(CITIES), rng.choice(JOBS)
    for city in CITIES:
        facts[city, "country"], facts[city, "mayor"] = rng.choice(COUNTRIES), rng.choice(names)
    return KnowledgeBase(tuple(names), facts, _distractors(facts, names, distractors, f"distractors/{seed}/{people}"))


def _distractors(
    facts: Mapping[tuple[str, str], str], names: Sequence[str], share: float, key: str
) -> dict[tuple[str, str], Distractor]:
    rng = random.Random(key)
    found: dict[tuple[str, str], Distractor] = {}
    for (subject, relation), obj in facts.items():
        if rng.random() < share:
            others = [x for x in _SORTS.get(relation, names) if x not in (obj, subject)]
            found[subject, relation] = Distractor(rng.choice(others), rng.random() < 0.5, rng.random() < 0.5)
    return found


@dataclass(frozen=True, slots=True)
class Riddle:
    """A question about `subject`: its answer is found by following `relations` one after the other."""

    question: str
    subject: str
    relations: tuple[str, ...]
    answer: str
    need: int

    @property
    def kind(self) -> str:
        """`given` (the answer stands in the question), or `hop1` to `hop4`."""
        return f"hop{self.need}" if self.need else "given"

    @property
    def key(self) -> str:
        """What is asked, whatever the phrasing."""
        return f"{self.kind}/{self.subject}/{'/'.join(self.relations)}"


_ASK: Mapping[str, Sequence[str]] = {
    "boss": ("Who is the boss of {}?", "Name the boss of {}."),
    "friend": ("Who is the friend of {}?", "Name the friend of {}."),
    "city": ("What is the city of {}?", "Which city is {} from?"),
    "job": ("What is the job of {}?", "Which job has {}?"),
    "country": ("Which country is {} in?", "What is the country of {}?"),
    "mayor": ("Who is the mayor of {}?", "Name the mayor of {}."),
}
_CHAINS: Mapping[int, Sequence[tuple[str, ...]]] = {
    1: [(r,) for r in (*PERSON_RELATIONS, *CITY_RELATIONS)],
    2: [(a, b) for a in ("boss", "friend") for b in PERSON_RELATIONS if a != b]
    + [("city", "country"), ("city", "mayor"), ("mayor", "job"), ("mayor", "city")],
    3: [(a, "city", b) for a in ("boss", "friend") for b in CITY_RELATIONS] + [("city", "mayor", "job")],
}
_LONG_CHAINS: Mapping[int, Sequence[tuple[str, ...]]] = {
    1: _CHAINS[1],
    2: _CHAINS[2],
    3: [(a, b, c) for a, b in (("boss", "friend"), ("friend", "boss")) for c in ("city", "job")]
    + [(a, "city", b) for a in ("boss", "friend") for b in CITY_RELATIONS]
    + [("city", "mayor", b) for b in ("boss", "friend", "job")],
    4: [(a, b, "city", c) for a, b in (("boss", "friend"), ("friend", "boss")) for c in CITY_RELATIONS]
    + [(a, "city", "mayor", b) for a in ("boss", "friend") for b in ("boss", "friend", "job") if a != b],
}
"""Chains where four searches in a row are asked for too. No relation comes twice in a chain."""
NEED_WEIGHTS: Mapping[int, float] = {0: 0.25, 1: 0.35, 2: 0.30, 3: 0.10}
"""Share of questions by the searches that they need."""
HARD_NEED_WEIGHTS: Mapping[int, float] = {0: 0.10, 1: 0.12, 2: 0.28, 3: 0.28, 4: 0.22}
"""As `NEED_WEIGHTS`, at the hard level."""


def draw(rng: random.Random, kb: KnowledgeBase, weights: Mapping[int, float] = NEED_WEIGHTS) -> Riddle:
    """One question about a knowledge base. `weights`: share of questions by the searches that they need, 0 to 4."""
    need = rng.choices(list(weights), list(weights.values()))[0]
    relations = rng.choice((_LONG_CHAINS if 4 in weights else _CHAINS)[max(need, 1)])
    subject = rng.choice(CITIES if relations[0] in CITY_RELATIONS else kb.people)
    answer = subject
    for relation in relations:
        answer = kb.facts[answer, relation]
    about = subject
    for relation in relations[:-1]:
        about = f"the {relation} of {about}"
    question = rng.choice(_ASK[relations[-1]]).format(about)
    if need == 0:
        other = rng.choice([r for r in _relations_of(subject) if r != relations[0]])
        given = [sentence(subject, r, kb.facts[subject, r]) for r in (relations[0], other)]
        rng.shuffle(given)
        question = f"{' '.join(given)} {question}"
    return Riddle(question, subject, relations, answer, need)


def _relations_of(subject: str) -> Sequence[str]:
    return CITY_RELATIONS if subject in CITIES else PERSON_RELATIONS


def to_task(riddle: Riddle) -> Task:
    """The riddle as a task. Its id is what is asked; the source replaces it."""
    return Task(
        id=riddle.key,
        question=riddle.question,
        answers=(riddle.answer,),
        grader="f1",
        kind=riddle.kind,
        need=riddle.need,
    )


def facts_tasks(
    kb: KnowledgeBase,
    seed: int = 0,
    validation_size: int = 128,
    test_size: int = 256,
    weights: Mapping[int, float] = NEED_WEIGHTS,
    name: str = "facts",
) -> GeneratedTasks:
    """Questions about a knowledge base. `seed` orders the training stream.

    All phrasings of a question fall into the same split.
    """
    return GeneratedTasks(
        name=name,
        draw=lambda rng: to_task(draw(rng, kb, weights)),
        seed=seed,
        validation_size=validation_size,
        test_size=test_size,
        key=lambda task: task.id,
    )
