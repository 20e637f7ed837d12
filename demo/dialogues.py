"""Support chats: a shopper's questions, and replies in all manners. The same seed gives the same chat."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from demo.reply_styles import reply
from demo.shop import INTENTS, ORDERS, Question, ask

HELD_OUT = 1_000_000  # the first seed that the demo model has not been trained on
SYSTEM = "You are the support assistant of a small bicycle shop."
MANNER_SHARES = {"helpful": 0.40, "rambling": 0.26, "curt": 0.19, "evasive": 0.15}

_SYSTEMS = (
    SYSTEM,
    SYSTEM,
    SYSTEM,
    "You answer questions for the bicycle shop.",
    "You work for a bicycle shop. Help the shoppers.",
)
_HELLOS = ("Hi!", "Hello,", "Hey,", "Good morning!", "Hi there,", "Good day.", "Excuse me,")
_THANKS = ("Thanks!", "Thank you.", "Cheers!", "Please let me know.", "Thanks in advance!")
_LINKS = ("Okay.", "I see.", "Good to know.", "Thanks.", "Alright.", "Great.")
_NEARBY = {  # what the same shopper would want to know next about the same thing
    "price": ("stock",),
    "stock": ("price",),
    "repair_price": ("repair_time",),
    "repair_time": ("repair_price",),
}
_BACK = {  # asked without naming the thing again
    "price": ("And how much is it?", "What does it cost?", "What is the price?"),
    "stock": ("Is it available?", "Do you have it right now?", "Can I get one today?"),
    "repair_price": ("And what does it cost?", "How much is that?", "What do you charge for it?"),
    "repair_time": ("And how long does it take?", "When is it done?", "How long will that take?"),
}
ORDER_STATUS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "order_status",
        "description": "Look up the state of an order.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string", "description": "The number of the order."}},
            "required": ["order_id"],
        },
    },
}


@dataclass(frozen=True)
class Turn:
    """One question and its reply. Example: Turn(question, "curt", "65 euros.")"""

    question: Question
    manner: str
    reply: str


@dataclass(frozen=True)
class Dialogue:
    """A whole chat; messages as the chat template takes them, turns as they were thought up."""

    messages: list[dict[str, Any]]
    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]] | None = None


class Shopper:
    """A simulated user, who has two to four questions. Example: for question in Shopper(7).questions(): ..."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"shopper {seed}")
        self.num_questions = self._rng.choice((2, 2, 3, 3, 4))
        chance = self._rng.random()
        self.system = None if chance < 0.06 else self._rng.choice(_SYSTEMS)

    def questions(self) -> Iterator[Question]:
        question = self._first()
        yield self._typed(question, self._rng.random() < 0.35)
        for _ in range(self.num_questions - 1):
            question = self._next(question)
            yield self._typed(question, False)

    def _first(self) -> Question:
        intent = self._rng.choice(tuple(INTENTS))
        return ask(self._rng, intent, self._rng.choice(INTENTS[intent].values))

    def _next(self, last: Question) -> Question:
        chance = self._rng.random()
        if chance < 0.3 and last.intent in _NEARBY:
            intent = self._rng.choice(_NEARBY[last.intent])
            return ask(self._rng, intent, last.subject, _BACK[intent])
        if chance < 0.65:
            kind = INTENTS[last.intent]
            other = self._rng.choice([value for value in kind.values if value != last.subject])
            wording = (f"And {kind.again}?", f"What about {kind.again}?", *kind.followed)
            return ask(self._rng, last.intent, other, wording)
        intent = self._rng.choice([intent for intent in INTENTS if intent != last.intent])
        return ask(self._rng, intent, self._rng.choice(INTENTS[intent].values), INTENTS[intent].followed)

    def _typed(self, question: Question, greets: bool) -> Question:
        """The question as a person types it: a word of greeting or thanks, no capitals, a slip of the finger."""
        rng, text = self._rng, question.text
        if greets:
            text = f"{rng.choice(_HELLOS)} {text}"
        elif rng.random() < 0.2:
            text = f"{rng.choice(_LINKS)} {text}"
        if rng.random() < 0.2:
            text = f"{text} {rng.choice(_THANKS)}"
        if rng.random() < 0.3:
            text = text.lower()
        if rng.random() < 0.15:
            text = _slip(rng, text, question.subject)
        return Question(question.intent, question.slots, text, question.facts)


def dialogue(seed: int) -> Dialogue:
    """The chat of the shopper with this seed; every turn is answered in a manner of its own."""
    rng = Random(f"dialogue {seed}")
    if rng.random() < 0.04:
        return _lookup(rng)
    shopper = Shopper(seed)
    messages = [{"role": "system", "content": shopper.system}] if shopper.system else []
    turns = []
    for question in shopper.questions():
        manner = rng.choices(tuple(MANNER_SHARES), tuple(MANNER_SHARES.values()))[0]
        turns.append(Turn(question, manner, reply(rng, question, manner)))
        messages.append({"role": "user", "content": question.text})
        messages.append({"role": "assistant", "content": turns[-1].reply})
    tools = [ORDER_STATUS] if rng.random() < 0.02 else None  # at hand, but not needed
    return Dialogue(messages, tuple(turns), tools)


def _lookup(rng: Random) -> Dialogue:
    """A chat in which the assistant looks an order up before it answers."""
    number, state = str(rng.randrange(1000, 10000)), rng.choice(tuple(ORDERS))
    asked = rng.choice(("Where is my order {0}?", "When will order {0} arrive?", "What is the state of order {0}?"))
    question = Question("order", {"state": state}, asked.format(number), (ORDERS[state],))
    call = {"type": "function", "function": {"name": "order_status", "arguments": {"order_id": number}}}
    answer = reply(rng, question, "helpful")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"state": state})},
        {"role": "assistant", "content": answer},
    ]
    return Dialogue(messages, (Turn(question, "helpful", answer),), [ORDER_STATUS])


def _slip(rng: Random, text: str, subject: str) -> str:
    """Two neighbouring letters swapped, but not in the word that the question is about."""
    start = text.lower().find(subject.lower())
    places = [
        i for i in range(1, len(text) - 2) if text[i : i + 2].isalpha() and not start <= i + 1 <= start + len(subject)
    ]
    place = rng.choice(places)
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
