"""The facts of the shop and the questions that users ask about them.

Every fact has one spelling ("45 euros", "9 am", "2 days"), so that a regular expression can check a reply.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

TEXTS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "texts.toml").read_text())
_WORDINGS = TEXTS["questions"]
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
    wordings: Sequence[str]
    follow_ups: Sequence[str]
    short_follow_up: str  # names only the new value when the intent stays the same: "and on Sunday?"


INTENTS: dict[str, Intent] = {
    "hours": Intent("day", tuple(HOURS), lambda day: HOURS[day], **_WORDINGS["hours"]),
    "price": Intent("item", tuple(PRODUCTS), lambda item: PRODUCTS[item][:1], **_WORDINGS["price"]),
    "stock": Intent("item", tuple(PRODUCTS), lambda item: PRODUCTS[item][1:], **_WORDINGS["stock"]),
    "repair_price": Intent("repair", tuple(REPAIRS), lambda repair: REPAIRS[repair][:1], **_WORDINGS["repair_price"]),
    "repair_time": Intent("repair", tuple(REPAIRS), lambda repair: REPAIRS[repair][1:], **_WORDINGS["repair_time"]),
    "repair": Intent("repair", tuple(REPAIRS), lambda repair: REPAIRS[repair], **_WORDINGS["repair"]),
    "returns": Intent("kind", tuple(RETURNS), lambda kind: (RETURNS[kind],), **_WORDINGS["returns"]),
    "order": Intent("state", tuple(ORDERS), lambda state: (ORDERS[state],), **_WORDINGS["order"]),
    "rental": Intent("vehicle", tuple(RENTALS), lambda vehicle: (RENTALS[vehicle],), **_WORDINGS["rental"]),
}


def make_question(rng: Random, intent: str, value: str, wording: Sequence[str] | None = None) -> Question:
    """Return a question in a random wording, by default one of the full wordings of its intent."""
    kind = INTENTS[intent]
    text = rng.choice(wording or kind.wordings).format(value)
    return Question(intent, {kind.slot: value}, text, kind.facts(value))
