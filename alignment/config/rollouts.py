"""Rollouts: how much the learner may ask for itself, beside what people ask. Torch-free, typed, in one place."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from alignment.config.algorithm import Frozen
from alignment.config.rewards import RewardsConfig, Source
from alignment.signals.rules import asked_about

FEEDBACK_ALONE = ("explicit", "next_turn")  # sources that people have to speak first for: nobody sees a rollout
GROUP_SAMPLING = "group_sampling"  # what a turn's share is drawn under
VerifierName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class GroupSamplingConfig(Frozen):
    """Siblings of a chat's reply: the same prompt and version, sampled again off the hot path, so that they are a
    group to compare. Off with 0."""

    extra_replies: int = Field(0, ge=0, le=15, description="of each reply; the user's own choices (`n`) count as such")
    share: float = Field(1.0, gt=0, le=1, description="of the replies that have group samples")
    tokens_per_hour: int = Field(100_000, ge=0, description="the most that they may generate in an hour")
    window_seconds: float = Field(
        120.0,
        gt=0,
        le=7 * 86400,
        description="how long a reply waits for its group samples; then they are not asked for",
    )


class RolloutsConfig(Frozen):
    """What the learner may ask of the engines itself, and when.

    Example: RolloutsConfig.model_validate({"group_sampling": {"extra_replies": 3, "share": 0.2}})
    """

    group_sampling: GroupSamplingConfig = GroupSamplingConfig()
    in_flight: int = Field(2, ge=1, le=256, description="rollouts of the policy that an engine works on at a time")
    most_chats: int = Field(0, ge=0, description="with more open chats on an engine it is asked for no rollout")
    timeout_seconds: float = Field(60.0, gt=0, le=3600, description="for one reply")
    max_plan_share: float = Field(
        0.5, gt=0, le=1, description="places of a batch that replies to prompt sets may have; the others are people's"
    )
    verifiers: dict[VerifierName, str] = Field(
        default_factory=dict,
        description="verifiers of your own as module:function, by name; in the deployment's settings only",
    )


def above(own: RolloutsConfig, most: RolloutsConfig) -> str | None:
    """The first of the settings that take an engine's room from others in which `own` goes beyond the deployment's."""
    for name in ("in_flight", "most_chats", "timeout_seconds"):
        if getattr(own, name) > getattr(most, name):
            return name
    return (
        "group_sampling.tokens_per_hour"
        if own.group_sampling.tokens_per_hour > most.group_sampling.tokens_per_hour
        else None
    )


def within(own: RolloutsConfig, most: RolloutsConfig) -> RolloutsConfig:
    """A policy's own, as far as the deployment's go."""
    names = ("in_flight", "most_chats", "timeout_seconds")
    tokens = min(own.group_sampling.tokens_per_hour, most.group_sampling.tokens_per_hour)
    group_sampling = own.group_sampling.model_copy(update={"tokens_per_hour": tokens})
    return own.model_copy(
        update={"group_sampling": group_sampling}
        | {name: min(getattr(own, name), getattr(most, name)) for name in names}
    )


def judges(source: Source) -> bool:
    """Whether it can tell what a reply is worth that no user has seen."""
    return source.type not in FEEDBACK_ALONE


def idle(config: GroupSamplingConfig, rewards: RewardsConfig) -> str | None:
    """Why no group samples are sampled, if none are."""
    if config.extra_replies == 0:
        return "extra_replies is 0"
    if config.tokens_per_hour == 0:
        return "tokens_per_hour is 0"
    if not any(judges(source) for source in rewards.sources):
        return "no source of the policy's rewards judges a reply that nobody has seen"
    if rewards.discount > 0:
        return "rewards.discount passes credit back from what came later, which group samples never have"
    return None


def wanted(completion_id: str, config: GroupSamplingConfig, sources: Sequence[Source]) -> bool:
    """Whether this completion's reply has group samples: it is in the share, and of some source that will judge them."""
    if not asked_about(completion_id, GROUP_SAMPLING, config.share):
        return False
    return any(
        judges(source) and asked_about(completion_id, source.name, getattr(source, "share", 1.0)) for source in sources
    )
