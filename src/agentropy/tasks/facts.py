"""The `facts` world: multi-hop questions over a generated knowledge base that only a search tool can see.

People have a boss, a friend, a city and a job; cities have a country and a mayor. Every fact is one short document. The
names are built so that a search finds look-alikes: people share first and last names, and whoever is the boss of one
person has a boss too. A seed draws who is who, so nothing can be known by heart; answers are graded by F1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    def documents(self) -> list[dict[str, str]]:
        """One `{title, text}` a fact, titled by its subject."""
        return [{"title": s, "text": sentence(s, r, o)} for (s, r), o in self.facts.items()]


def sentence(subject: str, relation: str, obj: str) -> str:
    """A fact in words."""
    return f"The {relation} of {subject} is {obj}."


@lru_cache(maxsize=8)
def knowledge_base(seed: int = 0, people: int = 160) -> KnowledgeBase:
    """Draw a knowledge base. Raises UserError where there are fewer names than people."""
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
    return KnowledgeBase(tuple(names), facts)


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
        """`given` (the answer stands in the question), or `hop1` to `hop3`."""
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
NEED_WEIGHTS: Mapping[int, float] = {0: 0.25, 1: 0.35, 2: 0.30, 3: 0.10}
"""Share of questions by the searches that they need."""


def draw(rng: random.Random, kb: KnowledgeBase, weights: Mapping[int, float] = NEED_WEIGHTS) -> Riddle:
    """One question about a knowledge base."""
    need = rng.choices(list(weights), list(weights.values()))[0]
    relations = rng.choice(_CHAINS[max(need, 1)])
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
    seed: int = 0, knowledge_seed: int = 0, people: int = 160, validation_size: int = 128, test_size: int = 256
) -> GeneratedTasks:
    """The world's questions. `seed` orders the training stream; `knowledge_seed` draws the knowledge base.

    All phrasings of a question fall into the same split.
    """
    kb = knowledge_base(knowledge_seed, people)
    return GeneratedTasks(
        name="facts",
        draw=lambda rng: to_task(draw(rng, kb)),
        seed=seed,
        validation_size=validation_size,
        test_size=test_size,
        key=lambda task: task.id,
    )
