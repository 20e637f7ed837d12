"""Reward settings: the sources of a policy's rewards and how they are combined."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from alignment.config.algorithm import UpdateConfig
from alignment.config.frozen_model import Frozen
from alignment.config.policy_gradient_algorithms import GiGPOConfig, PPOConfig

EXPLICIT = "explicit"
LEARNED = "learned"
VERIFIER = "verifier"  # the source of the rewards of planned rollouts: every policy has it, none configures it
SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class SourceConfig(Frozen):
    """Settings of all reward sources. `weight` is relative to the other sources of the same turn."""

    name: SourceName
    weight: float = Field(1.0, ge=0, le=100)
    window_seconds: float = Field(
        0.0, ge=0, le=7 * 86400, description="how long after a reply a batch waits for this source"
    )


class ExplicitSource(SourceConfig):
    """Feedback that people and programs send through the feedback API."""

    type: Literal["explicit"] = "explicit"
    name: Literal["explicit"] = EXPLICIT  # type: ignore[assignment]
    correction: float | None = Field(
        -0.5,
        ge=-1,
        le=1,
        description="the reward of a reply that a person corrected; null: nothing is learned from corrections",
    )
    labels: dict[str, Annotated[float, Field(ge=-1, le=1)]] = Field(
        default_factory=dict, description='the rewards of labels, e.g. {"wrong language": -1}; other labels have none'
    )


class NextTurnSource(SourceConfig):
    """Evidence in the user's next message: thanks, a correction, the same question again.

    Rules come first. Where no rule applies, the judge source named by `judge` decides.
    """

    type: Literal["next_turn"] = "next_turn"
    name: SourceName = "next_turn"
    weight: float = Field(0.5, ge=0, le=100)
    window_seconds: float = Field(60.0, ge=0, le=7 * 86400)
    judge: SourceName | None = None


class EndpointConfig(SourceConfig):
    """A source that is called over HTTP, off the hot path.

    `key` is the name of a secret of the deployment, never the secret itself. ATTUNE_SECRETS holds it as `key@host`, for
    that host only, or (not for a policy's own rewards) as `key`.
    """

    url: str = Field(pattern=r"^https?://[^\s]+$", max_length=2000)
    key: SourceName | None = None
    timeout_seconds: float = Field(20.0, gt=0, le=600)
    per_hour: int = Field(3600, ge=1, description="the most requests in an hour; further turns are skipped")
    share: float = Field(1.0, gt=0, le=1, description="the share of turns that are judged")
    weight: float = Field(0.5, ge=0, le=100)
    window_seconds: float = Field(60.0, ge=0, le=7 * 86400)


class JudgeSource(EndpointConfig):
    """A language model behind an OpenAI-compatible endpoint that grades a reply by a rubric."""

    type: Literal["judge"] = "judge"
    name: SourceName = "judge"
    model: str = Field(min_length=1, max_length=255)
    rubric: str = Field("Is the reply correct, helpful and polite?", min_length=1, max_length=10_000)
    compare: bool = Field(
        False, description="several replies to one prompt are compared with each other, not graded one by one"
    )
    max_tokens: int = Field(256, ge=16, le=4096, description="length limit of the judge's answer")
    max_chars: int = Field(
        24_000,
        ge=1000,
        le=1_000_000,
        description="of the conversation in the judge's prompt; the oldest messages are left out first",
    )


class HTTPSource(EndpointConfig):
    """A service of your own: it gets the turn as JSON and answers {"reward": number or null}."""

    type: Literal["http"] = "http"
    name: SourceName = "http"


class RuleSource(SourceConfig):
    """A Python function: `tool_outcome`, `length`, `ended`, an entry point of `attune.rewards`, or (in the deployment's
    own settings only) `module:function`."""

    type: Literal["rule"] = "rule"
    function: str = Field(min_length=1, max_length=255)
    weight: float = Field(0.5, ge=0, le=100)


class RewardModelSource(SourceConfig, title="LearnedSource"):
    """A reward model: a head on the base model, trained on human feedback, that scores replies without feedback.

    It cannot be the only source. Its score is ignored where a person gave the opposite feedback on the same reply.
    """

    type: Literal["learned"] = "learned"
    name: Literal["learned"] = LEARNED  # type: ignore[assignment]
    weight: float = Field(0.5, ge=0, le=100)
    window_seconds: float = Field(60.0, ge=0, le=7 * 86400)
    min_pairs: int = Field(
        100, ge=2, description="comparisons and rankings that a first fit needs, unless `min_feedback` is reached"
    )
    min_feedback: int = Field(300, ge=2, description="pieces of human feedback of any kind that a first fit needs")
    refit_after: int = Field(500, ge=1, description="new pieces of human feedback after which it is refitted")
    min_agreement: float = Field(
        0.6,
        ge=0.5,
        lt=1,
        description="a model serves if votes show with 95 % confidence that it scores liked replies above disliked "
        "ones more often than this (0.5 is chance); it is disabled if votes do not show that it is better than chance",
    )


# The source that is added where few replies get feedback. Its first fit needs enough feedback to hold ten pieces out.
SPARSE_REWARD_MODEL = RewardModelSource(min_feedback=60, min_pairs=60, refit_after=30, window_seconds=0.0)

Source = Annotated[
    ExplicitSource | NextTurnSource | JudgeSource | HTTPSource | RuleSource | RewardModelSource,
    Field(discriminator="type"),
]


class RewardsConfig(Frozen):
    """The reward sources of a policy, and how their rewards are combined.

    Example: RewardsConfig.model_validate({"sources": [{"type": "explicit"}, {"type": "next_turn", "weight": 0.3}]})
    """

    sources: tuple[Source, ...] = Field(
        (ExplicitSource(),), description="where rewards come from, each a table with a `type`; see docs/rewards.md"
    )
    discount: float = Field(
        0.0, ge=0, le=1, description="discount per turn: a reply also gets this share of the next reply's return"
    )
    credit_seconds: float = Field(
        600.0,
        ge=0,
        le=7 * 86400,
        description="with `discount`, replies that end so long after a reply count for it, and it waits for them",
    )
    spread: Literal["even", "last", "discounted"] = Field(
        "even", description="how feedback on a whole conversation is distributed over its replies"
    )
    episode_credit: Literal["outcome", "return"] = Field(
        "outcome",
        description="the reward of an agent's turn: the outcome of its episode, spread as `spread` says, or its return "
        "along the tree of the episode's turns; see docs/episodes.md",
    )
    episode_discount: float = Field(
        0.95, gt=0, le=1, description="discount per turn of the tree, with `episode_credit` return"
    )
    episode_limit_cap: float | None = Field(
        0.0,
        ge=-1,
        le=1,
        description="the most that the outcome of an episode counts whose end is reported with a limit as its reason "
        "(max_turns, max_tokens, deadline); null: as reported",
    )
    episode_failure: float | None = Field(
        -1.0,
        ge=-1,
        le=1,
        description="the outcome of an episode whose end is reported as failed without one; null: none",
    )
    automated_weight_factor: float = Field(
        0.25, ge=0, le=1, description="factor on the weight of automated sources where a person gave feedback"
    )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            raise ValueError("sources must not be empty, and their names must be unique")
        if VERIFIER in names:
            raise ValueError(f"the name '{VERIFIER}' is reserved for the verifiers of planned rollouts")
        if self.reward_model and not any(source.type != "learned" and source.weight > 0 for source in self.sources):
            raise ValueError("a learned source cannot be the only one: it learns from the other sources")
        if any(source.name == LEARNED and source.type != "learned" for source in self.sources):
            raise ValueError(f"the name '{LEARNED}' is reserved for the source of that type")
        judges = {source.name for source in self.sources if source.type == "judge"}
        for source in self.sources:
            if isinstance(source, NextTurnSource) and source.judge is not None and source.judge not in judges:
                raise ValueError(f"next_turn names the judge '{source.judge}', which is not one of the sources")
        return self

    def source(self, name: str) -> Source | None:
        return next((source for source in self.sources if source.name == name), None)

    @property
    def reward_model(self) -> RewardModelSource | None:
        return next((source for source in self.sources if isinstance(source, RewardModelSource)), None)

    def check_credit(self, algorithm: UpdateConfig) -> None:
        """Raise ValueError if the rewards of later turns would count twice for earlier ones."""
        if self.episode_credit == "return" and isinstance(algorithm, GiGPOConfig):
            raise ValueError("gigpo needs episode_credit outcome: it compares the returns of turns beside the outcomes")
        if self.episode_credit == "outcome" and isinstance(algorithm, PPOConfig) and algorithm.estimator == "turn_gae":
            raise ValueError("estimator turn_gae needs episode_credit return: it goes along the tree of turns")
        turn_discount = getattr(algorithm, "turn_discount", 0.0)
        if self.episode_credit == "return" and turn_discount > 0:
            raise ValueError(
                f"episode_credit return and the algorithm's turn_discount ({turn_discount:g}) would both give a turn "
                "the rewards of later turns: set turn_discount to 0"
            )
        if self.discount > 0 and turn_discount > 0:
            raise ValueError(
                f"discount ({self.discount:g}) and the algorithm's turn_discount ({turn_discount:g}) would both give a "
                "reply the rewards of later replies. Set one of them to 0: keep discount, which finds the later "
                "replies of the conversation whatever batch they are in; turn_discount knows those of one batch alone."
            )

    @property
    def reaches_other_turns(self) -> bool:
        """Return whether the reward of a turn changes the samples of other turns."""
        return self.discount > 0 or self.episode_credit != "outcome"

    @property
    def uses_feedback(self) -> bool:
        """Return whether feedback through the feedback API counts."""
        explicit = self.source(EXPLICIT)
        return explicit is not None and explicit.weight > 0

    @property
    def window_seconds(self) -> float:
        """Return the longest window of all sources."""
        return max(source.window_seconds for source in self.sources)
