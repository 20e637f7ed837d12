"""Simulated users for any chat model: they like replies that begin with the subject that they ask about."""

import re
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

from demo.shop import Question
from demo.simulate import Person, Reply, SimulatedUsers

# SmolLM2-135M-Instruct begins about half of its replies to these questions with the subject.
WORDINGS = (
    "What is {}?",
    "Tell me about {}.",
    "How does {} work?",
    "What makes {} special?",
    "Describe {} in one sentence.",
    "Where does {} come from?",
    "What is interesting about {}?",
    "Give me a fact about {}.",
    "I want to learn about {}.",
)
SUBJECTS = (
    *("algebra", "amber", "archery", "astronomy", "ballet", "bamboo", "baseball", "basketball", "bread", "bronze"),
    *("calligraphy", "carbon", "cheese", "chess", "chocolate", "clay", "coffee", "concrete", "copper", "cotton"),
    *("cricket", "curling", "democracy", "electricity", "fencing", "football", "gardening", "glass", "gold", "gravity"),
    *("honey", "inflation", "iron", "jazz", "judo", "karate", "knitting", "leather", "lightning", "magnetism"),
    *("marble", "meditation", "mercury", "milk", "music", "nylon", "opera", "origami", "oxygen", "paper", "pepper"),
    *("photosynthesis", "poetry", "polo", "pottery", "rice", "rowing", "rubber", "rugby", "salt", "silk", "silver"),
    *("skiing", "snow", "steel", "sugar", "surfing", "tea", "tennis", "thunder", "wool", "yoga"),
)


def begins_with_subject(subject: str, text: str) -> bool:
    """Return whether the text begins with the subject. Signs and an article may precede it, in upper or lower case.

    Example: begins_with_subject("honey", "**Honey** is sweet.") -> True
    """
    return re.match(rf"\W*(?:(?:an?|the)\s+)?{re.escape(subject)}\b", text, re.IGNORECASE) is not None


class CuriousPerson:
    """Someone who asks one question. Example: next(CuriousPerson(7).questions()).text -> "What is tea?" """

    system: str | None = None

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"curious person {seed}")

    def questions(self) -> Iterator[Question]:
        subject = self._rng.choice(SUBJECTS)
        yield Question("about", {"subject": subject}, self._rng.choice(WORDINGS).format(subject), ())


class CuriousUsers(SimulatedUsers):
    """Users who each ask one question, get a short reply, and vote by its first words."""

    sampling: ClassVar[dict[str, Any]] = {"max_tokens": 24, "temperature": 0.8}

    def make_person(self, seed: int) -> Person:
        return CuriousPerson(seed)

    def approves(self, question: Question, reply: Reply) -> bool:
        return begins_with_subject(question.subject, reply.text)
