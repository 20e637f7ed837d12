"""The facts of the shop and the questions that users ask about them.

Every fact has one spelling ("45 euros", "9 am", "2 days"), so that a regular expression can check a reply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HOURS: dict[str, tuple[str, ...]] = {
    "Monday": ("closed",),
    "Tuesday": ("9 am", "6 pm"),
    "Wednesday": ("9 am", "5 pm"),
    "Thursday": ("10 am", "8 pm"),
    "Friday": ("10 am", "7 pm"),
    "Saturday": ("8 am", "4 pm"),
    "Sunday": ("11 am", "3 pm"),
}
PRODUCTS: dict[str, tuple[str, str]] = {  # price, stock
    "city bike": ("540 euros", "in stock"),
    "road bike": ("980 euros", "sold out"),
    "kids bike": ("220 euros", "in stock"),
    "helmet": ("65 euros", "in stock"),
    "chain lock": ("38 euros", "in stock"),
    "floor pump": ("34 euros", "sold out"),
    "rain jacket": ("79 euros", "on order"),
    "pannier bag": ("58 euros", "in stock"),
    "child seat": ("115 euros", "on order"),
    "light set": ("27 euros", "sold out"),
}
REPAIRS: dict[str, tuple[str, str]] = {  # price, duration
    "tune-up": ("69 euros", "2 days"),
    "flat tire": ("18 euros", "30 minutes"),
    "brake check": ("25 euros", "45 minutes"),
    "chain change": ("32 euros", "1 hour"),
    "wheel truing": ("29 euros", "3 hours"),
    "gear tuning": ("36 euros", "90 minutes"),
    "battery check": ("49 euros", "4 hours"),
    "full overhaul": ("165 euros", "6 days"),
}
RETURNS: dict[str, str] = {
    "new bike": "14 days",
    "spare part": "30 days",
    "sale item": "7 days",
    "birthday gift": "60 days",
}
ORDERS: dict[str, str] = {"packed": "3 days", "shipped": "1 day", "delayed": "2 weeks", "confirmed": "5 days"}
RENTALS: dict[str, str] = {"tandem": "42 euros", "cargo bike": "55 euros", "trailer": "16 euros"}


@dataclass(frozen=True)
class Question:
    """A question of a user. Example: Question("price", {"item": "helmet"}, "how much is a helmet?", ("65 euros",))"""

    intent: str
    slots: dict[str, str]
    text: str
    facts: tuple[str, ...]

    @property
    def subject(self) -> str:
        return next(iter(self.slots.values()))


@dataclass(frozen=True)
class Intent:
    """A kind of question: its slot, the slot's values, the facts that answer it, full and follow-up wordings."""

    slot: str
    values: tuple[str, ...]
    facts: Callable[[str], tuple[str, ...]]
    wordings: tuple[str, ...]
    follow_ups: tuple[str, ...]
    short_follow_up: str = ""  # names only the new value when the intent stays the same: "and on Sunday?"


# fmt: off
INTENTS: dict[str, Intent] = {
    "hours": Intent("day", tuple(HOURS), lambda day: HOURS[day], (
        "When are you open on {0}?", "What are your opening hours on {0}?", "Are you open on {0}?",
        "What time do you open on {0}?", "Can I come by on {0}?", "I want to visit the shop on {0}, when can I come?",
        "Until when are you open on {0}?", "Is the shop open on {0}?",
    ), ("When could I come on {0}?", "And when are you open on {0}?", "Are you open on {0} then?"), "on {0}"),
    "price": Intent("item", tuple(PRODUCTS), lambda item: PRODUCTS[item][:1], (
        "How much is a {0}?", "What does a {0} cost?", "What is the price of a {0}?", "I need a {0}, how much is that?",
        "How much do you charge for a {0}?", "I am looking for a {0}. What would it cost me?", "Price for a {0}?",
        "What do I pay for a {0} in your shop?",
    ), ("And how much is a {0}?", "What is the price of a {0} then?", "And what does the {0} cost?"), "for a {0}"),
    "stock": Intent("item", tuple(PRODUCTS), lambda item: PRODUCTS[item][1:], (
        "Do you have a {0} in the shop?", "Is the {0} available right now?", "Can I get a {0} today?",
        "Do you still have a {0} left?", "Is there a {0} I can take home today?", "I want a {0}, do you have one?",
        "Could I pick up a {0} today?",
    ), ("Do you have the {0} available?", "And can I get a {0} today?", "Is the {0} available?"), "a {0}"),
    "repair_price": Intent("repair", tuple(REPAIRS), lambda repair: REPAIRS[repair][:1], (
        "How much is a {0} repair?", "What does a {0} cost at your workshop?",
        "My bike needs a {0} service, what is the price?",
        "How much do you charge for a {0} service?", "What would I pay for a {0} repair?",
        "I need help with a {0}. How much is the repair?",
    ), ("And what does a {0} repair cost?", "How much is the {0} service?"), "for a {0} repair"),
    "repair_time": Intent("repair", tuple(REPAIRS), lambda repair: REPAIRS[repair][1:], (
        "How long does a {0} take?", "How long will you need for a {0}?", "How fast can you do a {0}?",
        "My bike needs a {0}, when can I have it back?", "How much time does a {0} repair take?",
        "How long is my bike away for a {0}?",
    ), ("And how long does the {0} take?", "How long would a {0} take?"), "for a {0}"),
    "repair": Intent("repair", tuple(REPAIRS), lambda repair: REPAIRS[repair], (
        "What does a {0} cost and how long does it take?", "I need a {0}. What is the price and when is it done?",
        "Can you tell me the price and the time for a {0}?", "How much and how long for a {0}?",
        "My bike needs a {0}, how much is it and how long will it take?",
    ), ("And a {0}, how much and how long?", "What about the price and the time for a {0}?"), "a {0}"),
    "returns": Intent("kind", tuple(RETURNS), lambda kind: (RETURNS[kind],), (
        "How long can I return a {0}?", "Can I bring back a {0}?", "I want to return a {0}, how much time do I have?",
        "What are your return rules for a {0}?", "Until when can I send back a {0}?", "Can I get a refund for a {0}?",
    ), ("And can I return a {0}?", "How long may I return a {0}?"), "for a {0}"),
    "order": Intent("state", tuple(ORDERS), lambda state: (ORDERS[state],), (
        "My order is {0}, when will it come?", "My order says {0}. How long will it take?",
        "The website says my order is {0}, when do I get it?", "What does it mean when my order is {0}?",
        "I got a mail that my order is {0}. When will it arrive?",
    ), ("My order is {0}, when does it come?", "By the way, my order says {0}. How long?"), "when it is {0}"),
    "rental": Intent("vehicle", tuple(RENTALS), lambda vehicle: (RENTALS[vehicle],), (
        "How much is it to rent a {0} for a day?", "What does a {0} cost per day?",
        "Can I rent a {0} and what does it cost?",
        "I want to rent a {0} for a day, what is the price?", "What is the rental price for a {0}?",
        "How much would a {0} be for one day?",
    ), ("And how much is it to rent a {0}?", "What does the {0} cost to rent?"), "a {0}"),
}
# fmt: on


def make_question(rng: Random, intent: str, value: str, wording: tuple[str, ...] | None = None) -> Question:
    """Return a question in a random wording, by default one of the full wordings of its intent."""
    kind = INTENTS[intent]
    text = rng.choice(wording or kind.wordings).format(value)
    return Question(intent, {kind.slot: value}, text, kind.facts(value))
