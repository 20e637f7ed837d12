"""What a turn is worth: sources kept apart, combined by a typed config, and credit over a conversation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from alignment.config.algorithm import Frozen

KINDS = ("binary", "score", "rating")
WITHDRAWAL = "withdrawal"
EXPLICIT = "explicit"
LEARNED = "learned"
VERIFIER = "verifier"  # whose word a planned rollout is worth: a source that every policy has, and none configures
SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class SourceConfig(Frozen):
    """What all sources of rewards share. `weight` is against the others of the same turn."""

    name: SourceName
    weight: float = Field(1.0, ge=0, le=100)
    window_seconds: float = Field(
        0.0, ge=0, le=7 * 86400, description="how long after a reply a batch waits for this source's word"
    )


class ExplicitSource(SourceConfig):
    """What people and programs say through the feedback API."""

    type: Literal["explicit"] = "explicit"
    name: Literal["explicit"] = EXPLICIT  # type: ignore[assignment]
    correction: float | None = Field(
        -0.5, ge=-1, le=1, description="what a reply is worth that somebody wrote a better one for; null: nothing"
    )
    labels: dict[str, Annotated[float, Field(ge=-1, le=1)]] = Field(
        default_factory=dict, description='what labels are worth, e.g. {"wrong language": -1}; others: nothing'
    )


class NextTurnSource(SourceConfig):
    """The user's next message as evidence: thanks, a correction, the same question again. By rule, and by a judge
    (`judge` names one of the sources) where no rule speaks."""

    type: Literal["next_turn"] = "next_turn"
    name: SourceName = "next_turn"
    weight: float = Field(0.5, ge=0, le=100)
    window_seconds: float = Field(60.0, ge=0, le=7 * 86400)
    judge: SourceName | None = None


class EndpointConfig(SourceConfig):
    """Asked over HTTP, off the hot path. `key` names a secret of the deployment and never holds one: ATTUNE_SECRETS has
    it as `key@host`, good for that host alone, or (not for a policy's own rewards) as `key`."""

    url: str = Field(pattern=r"^https?://[^\s]+$", max_length=2000)
    key: SourceName | None = None
    timeout_seconds: float = Field(20.0, gt=0, le=600)
    per_hour: int = Field(3600, ge=1, description="the most that is asked in an hour; what comes beyond is skipped")
    share: float = Field(1.0, gt=0, le=1, description="of the turns that are asked about")
    weight: float = Field(0.5, ge=0, le=100)
    window_seconds: float = Field(60.0, ge=0, le=7 * 86400)


class JudgeSource(EndpointConfig):
    """A language model behind any OpenAI-compatible endpoint, which grades a reply against a rubric."""

    type: Literal["judge"] = "judge"
    name: SourceName = "judge"
    model: str = Field(min_length=1, max_length=255)
    rubric: str = Field("Is the reply correct, helpful and polite?", min_length=1, max_length=10_000)
    compare: bool = Field(
        False, description="several replies to one prompt are judged against each other, and not each by itself"
    )
    max_tokens: int = Field(256, ge=16, le=4096, description="of the judge's answer")
    max_chars: int = Field(
        24_000, ge=1000, le=1_000_000, description="of the conversation that the judge is shown; the oldest goes first"
    )


class HTTPSource(EndpointConfig):
    """A service of your own: gets the turn as JSON, answers {"reward": number or null}."""

    type: Literal["http"] = "http"
    name: SourceName = "http"


class RuleSource(SourceConfig):
    """A Python function: `tool_outcome`, `length`, `ended`, an entry point of `attune.rewards`, or (in the deployment's
    own settings only) `module:function`."""

    type: Literal["rule"] = "rule"
    function: str = Field(min_length=1, max_length=255)
    weight: float = Field(0.5, ge=0, le=100)


class LearnedSource(SourceConfig):
    """A reward model: a head on the trainer's own trunk that learns what people say, and says it of replies that nobody
    has judged. Never the only source; where a person has said the contrary of the same reply it counts for nothing."""

    type: Literal["learned"] = "learned"
    name: Literal["learned"] = LEARNED  # type: ignore[assignment]
    weight: float = Field(0.5, ge=0, le=100)
    window_seconds: float = Field(60.0, ge=0, le=7 * 86400)
    min_pairs: int = Field(100, ge=2, description="comparisons and rankings by people before a first fit, or")
    min_words: int = Field(300, ge=2, description="words of people of any kind before it")
    refit_after: int = Field(500, ge=1, description="new words of people after which it is fitted anew")
    min_agreement: float = Field(
        0.6, ge=0.5, lt=1, description="with people: a model below does not serve, and one that falls below is silenced"
    )


Source = Annotated[
    ExplicitSource | NextTurnSource | JudgeSource | HTTPSource | RuleSource | LearnedSource,
    Field(discriminator="type"),
]


class RewardsConfig(Frozen):
    """Which sources a policy listens to, and what their words come to together.

    Example: RewardsConfig.model_validate({"sources": [{"type": "explicit"}, {"type": "next_turn", "weight": 0.3}]})
    """

    sources: tuple[Source, ...] = (ExplicitSource(),)
    discount: float = Field(
        0.0, ge=0, le=1, description="share of the next reply's worth that a reply is credited with, and so on"
    )
    spread: Literal["even", "last", "discounted"] = Field(
        "even", description="how what is said of a whole conversation falls on its replies"
    )
    beside_people: float = Field(
        0.25, ge=0, le=1, description="what a machine's weight is multiplied by where a person has spoken"
    )

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            raise ValueError("give at least one source, each with a name of its own")
        if VERIFIER in names:
            raise ValueError(f"'{VERIFIER}' is the name of what judges planned rollouts")
        if self.learned and not any(source.type != "learned" and source.weight > 0 for source in self.sources):
            raise ValueError("a learned source repeats what others have said: it cannot be the only one")
        if any(source.name == LEARNED and source.type != "learned" for source in self.sources):
            raise ValueError(f"'{LEARNED}' is the name of the source of that type")
        judges = {source.name for source in self.sources if source.type == "judge"}
        for source in self.sources:
            if isinstance(source, NextTurnSource) and source.judge is not None and source.judge not in judges:
                raise ValueError(f"next_turn asks the judge '{source.judge}', which is none of the sources")
        return self

    def source(self, name: str) -> Source | None:
        return next((source for source in self.sources if source.name == name), None)

    @property
    def learned(self) -> LearnedSource | None:
        return next((source for source in self.sources if isinstance(source, LearnedSource)), None)

    @property
    def window_seconds(self) -> float:
        """The longest that any source is waited for."""
        return max(source.window_seconds for source in self.sources)


@dataclass(frozen=True)
class Signal:
    """One source's number about one turn. `origin` names the configured source that it counts under; `weight` is how
    far its rater is believed, from 0 to 1; `person`: a human being said it."""

    origin: str
    value: float
    weight: float = 1.0
    person: bool = False


def worth(kind: str, value: float | None, label: object, source: ExplicitSource) -> float | None:
    """The reward of one piece of feedback; None for what carries no preference, such as a comment.

    `value` is the number of a binary (1 or -1), a score or a rating (in [-1, 1]); `label` a categorical's word.
    """
    if kind == "correction":
        return source.correction
    if kind == "categorical":
        return source.labels.get(label) if isinstance(label, str) else None
    if kind not in KINDS:
        return None
    if value is None or not math.isfinite(value) or not -1 <= value <= 1:
        raise ValueError(f"A {kind} lies between -1 and 1, and {value!r} does not.")
    if kind == "binary" and abs(value) != 1:
        raise ValueError(f"A binary is 1 or -1, not {value!r}.")
    return value


def combine(words: Sequence[Signal], config: RewardsConfig) -> float | None:
    """The one number a turn is worth by itself, in [-1, 1]; None when nobody who counts has spoken.

    Per configured source the mean of its words by their raters' weights, and over the sources the mean by theirs.
    Where a person has spoken, all that machines say counts `beside_people` as much, and what a reward model says counts
    for nothing where a person has said the contrary.
    """
    words = [word for word in words if word.origin != LEARNED or not contradicted(word, words)]
    people = any(word.person and word.weight > 0 for word in words)
    total = mass = 0.0
    for name, share in [*((source.name, source.weight) for source in config.sources), (VERIFIER, 1.0)]:
        mine = [word for word in words if word.origin == name and word.weight > 0]
        if not mine:
            continue
        if people and not any(word.person for word in mine):
            share *= config.beside_people
        believed = sum(word.weight for word in mine)
        total += share * sum(word.weight * word.value for word in mine) / believed
        mass += share
    return total / mass if mass > 0 else None


def contradicted(word: Signal, words: Sequence[Signal]) -> bool:
    """Has a person who is believed at all said something of the other sign?"""
    return any(other.person and other.weight > 0 and other.value * word.value < 0 for other in words)


def credit(own: float | None, later: float | None, discount: float) -> float | None:
    """A reply's own worth plus `discount` times the credit of the reply after it: r_t + γ c_{t+1}.

    A reply that nobody judged is worth 0 of its own, and still gets what comes after it; None when nothing does.

    Example: credit(None, 1.0, 0.5) -> 0.5
    """
    passed_on = discount * later if later is not None and discount > 0 else None
    if own is None and passed_on is None:
        return None
    return (own or 0.0) + (passed_on or 0.0)


def spread(value: float, num_turns: int, config: RewardsConfig) -> list[float]:
    """What is said of a whole conversation, as a share for each of its replies.  → [num_turns], in [-1, 1]

    "even" gives each the same word, "last" gives it to the last and 0 to the others, "discounted" less the earlier.
    """
    if config.spread == "even":
        return [value] * num_turns
    factor = 0.0 if config.spread == "last" else (config.discount or 0.9)
    return [value * factor ** (num_turns - 1 - place) for place in range(num_turns)]


def order(ranks: Mapping[str, int]) -> dict[str, float]:
    """Ranks, 0 the best, as numbers from 1 (the best) to -1 (the worst), equal ones alike; all 0 when all are tied.

    Example: order({"a": 0, "b": 1}) -> {"a": 1.0, "b": -1.0}
    """
    places = {rank: place for place, rank in enumerate(sorted(set(ranks.values())))}
    last = len(places) - 1
    return {name: 1.0 - 2.0 * places[rank] / last if last else 0.0 for name, rank in ranks.items()}


def preferred(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of an order by their numbers, each (better, worse); what is tied is no pair.

    Example: preferred({"a": 1.0, "b": 0.0, "c": 0.0}) -> [("a", "b"), ("a", "c")]
    """
    ranked = sorted(values, key=lambda name: (-values[name], name))
    pairs = [(better, worse) for at, better in enumerate(ranked) for worse in ranked[at + 1 :]]
    return [(better, worse) for better, worse in pairs if values[better] > values[worse]]
