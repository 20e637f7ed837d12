"""Support chats: the questions of a simulated user, and replies in all styles. The same seed gives the same chat."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from demo.reply_styles import reply
from demo.shop import INTENTS, ORDERS, TEXTS, Question, make_question

HELD_OUT = 1_000_000  # the first seed that the demo model was not trained on
SYSTEM = "You are the support assistant of a small bicycle shop."
STYLE_SHARES = {"helpful": 0.40, "rambling": 0.26, "curt": 0.19, "evasive": 0.15}

_SYSTEMS = (
    SYSTEM,
    SYSTEM,
    SYSTEM,
    "You answer questions for the bicycle shop.",
    "You work for a bicycle shop. Help the shoppers.",
)
_TEXTS: dict[str, Any] = TEXTS["users"]
_RELATED_INTENTS = {  # questions that the same user asks next about the same thing
    "price": ("stock",),
    "stock": ("price",),
    "repair_price": ("repair_time",),
    "repair_time": ("repair_price",),
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
    """A question and its reply. Example: Turn(question, "curt", "65 euros.")"""

    question: Question
    style: str
    reply: str


@dataclass(frozen=True)
class Dialogue:
    """A chat: messages in the format of the chat template, and the turns they were made from."""

    messages: list[dict[str, Any]]
    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]] | None = None


class SimulatedUser:
    """A simulated user with two to four questions. Example: for question in SimulatedUser(7).questions(): ..."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"shopper {seed}")  # the demo model was trained on the chats of this seed string
        self.num_questions = self._rng.choice((2, 2, 3, 3, 4))
        chance = self._rng.random()
        self.system = None if chance < 0.06 else self._rng.choice(_SYSTEMS)

    def questions(self) -> Iterator[Question]:
        question = self._first_question()
        yield self._add_typing_noise(question, self._rng.random() < 0.35)
        for _ in range(self.num_questions - 1):
            question = self._next_question(question)
            yield self._add_typing_noise(question, False)

    def _first_question(self) -> Question:
        intent = self._rng.choice(tuple(INTENTS))
        return make_question(self._rng, intent, self._rng.choice(INTENTS[intent].values))

    def _next_question(self, last: Question) -> Question:
        chance = self._rng.random()
        if chance < 0.3 and last.intent in _RELATED_INTENTS:
            intent = self._rng.choice(_RELATED_INTENTS[last.intent])
            return make_question(self._rng, intent, last.subject, _TEXTS["follow_ups"][intent])
        if chance < 0.65:
            kind = INTENTS[last.intent]
            other = self._rng.choice([value for value in kind.values if value != last.subject])
            wording = (f"And {kind.short_follow_up}?", f"What about {kind.short_follow_up}?", *kind.follow_ups)
            return make_question(self._rng, last.intent, other, wording)
        intent = self._rng.choice([intent for intent in INTENTS if intent != last.intent])
        return make_question(self._rng, intent, self._rng.choice(INTENTS[intent].values), INTENTS[intent].follow_ups)

    def _add_typing_noise(self, question: Question, greets: bool) -> Question:
        """Return the question as a person types it: with a greeting or thanks, in lower case, with a typing error."""
        rng, text = self._rng, question.text
        if greets:
            text = f"{rng.choice(_TEXTS['greetings'])} {text}"
        elif rng.random() < 0.2:
            text = f"{rng.choice(_TEXTS['acknowledgements'])} {text}"
        if rng.random() < 0.2:
            text = f"{text} {rng.choice(_TEXTS['thanks'])}"
        if rng.random() < 0.3:
            text = text.lower()
        if rng.random() < 0.15:
            text = _swap_letters(rng, text, question.subject)
        return Question(question.intent, question.slots, text, question.facts)


def dialogue(seed: int) -> Dialogue:
    """Return the chat of the user with this seed. Each turn is answered in a random style."""
    rng = Random(f"dialogue {seed}")
    if rng.random() < 0.04:
        return _order_lookup(rng)
    user = SimulatedUser(seed)
    messages = [{"role": "system", "content": user.system}] if user.system else []
    turns = []
    for question in user.questions():
        style = rng.choices(tuple(STYLE_SHARES), tuple(STYLE_SHARES.values()))[0]
        turns.append(Turn(question, style, reply(rng, question, style)))
        messages.append({"role": "user", "content": question.text})
        messages.append({"role": "assistant", "content": turns[-1].reply})
    tools = [ORDER_STATUS] if rng.random() < 0.02 else None  # available, but not needed
    return Dialogue(messages, tuple(turns), tools)


def _order_lookup(rng: Random) -> Dialogue:
    """Return a chat in which the assistant calls a tool to look up an order before it answers."""
    number, state = str(rng.randrange(1000, 10000)), rng.choice(tuple(ORDERS))
    wording = rng.choice(("Where is my order {0}?", "When will order {0} arrive?", "What is the state of order {0}?"))
    question = Question("order", {"state": state}, wording.format(number), (ORDERS[state],))
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


def _swap_letters(rng: Random, text: str, subject: str) -> str:
    """Swap two adjacent letters outside of the word that the question is about."""
    start = text.lower().find(subject.lower())
    places = [
        i for i in range(1, len(text) - 2) if text[i : i + 2].isalpha() and not start <= i + 1 <= start + len(subject)
    ]
    place = rng.choice(places)
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
