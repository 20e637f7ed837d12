"""Case: one question to one source, with all that is needed to ask it; and what may come of asking."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alignment.config.rewards import EndpointConfig, JudgeSource, Source
from alignment.signals.rules import Facts

OUT_OF_BUDGET = "its budget of the hour is spent"
NOT_IN_SHARE = "it is asked about a share of the turns only"
NOT_CONFIGURED = "the policy does not listen to it"
DELETED = "the turn is deleted"
OWN_QUESTION = "the turn is a judge's own question"
NOTHING_TO_SAY = "it has nothing to say"
NO_REPLY = "there is no reply to judge"
NO_NEXT_MESSAGE = "the next message is not the user's"


class Silent(Exception):
    """There is no answer, and there will be none."""


class Unanswered(Exception):
    """No answer that can be read: another attempt may bring one."""


class Broken(Exception):
    """No answer, and another attempt would bring none."""


@dataclass(frozen=True)
class Claim:
    """A judgement that is ours until its lease runs out."""

    id: str
    fence: int
    attempt: int
    turn_id: str
    policy_id: str
    source: str
    asks: int = 0  # that earlier attempts made


@dataclass(frozen=True)
class JudgeRequest:
    """`claims` is one judgement; where replies are compared it is those of all replies that are free."""

    claims: tuple[Claim, ...]
    source: Source
    endpoint: EndpointConfig | None  # who is asked over HTTP, if anybody: of next_turn its judge
    closed: str | None  # why the endpoint must not be asked
    own: bool  # the rewards are the policy's own, and not the deployment's
    facts: Facts
    about: Mapping[str, Any]  # the turn, as a service of yours is told of it
    before: str | None = None  # the user's last message before the reply
    next_message: str | None = None  # and the one after it
    replies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # to compare, by turn
    waits: bool = False  # a reply to compare with is still being made
    window_left: float = 0.0  # seconds in which it is still worth waiting

    @property
    def judge(self) -> JudgeSource:
        assert isinstance(self.endpoint, JudgeSource)
        return self.endpoint


@dataclass(frozen=True)
class Answer:
    """`value` in [-1, 1]."""

    value: float
    explanation: str = ""


@dataclass
class Meter:
    """What asking has cost, whatever came of it."""

    asks: int = 0
    tokens: int = 0


def number(value: Any) -> float:
    """Raises Broken for what is no reward."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Broken(f"{str(value)[:100]!r} is no number")
    if not -1 <= value <= 1:
        raise Broken(f"{value!r} does not lie between -1 and 1")
    return float(value)
