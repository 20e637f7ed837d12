"""Rollout settings: group samples, limits per engine, and verifiers."""

from typing import Annotated

from pydantic import Field

from alignment.config.frozen_model import Frozen

LIMITED = ("in_flight", "max_open_chats", "timeout_seconds")
VerifierName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class GroupSamplingConfig(Frozen):
    """More replies to the prompt of a chat turn, sampled from the same version off the hot path, so they form a group.

    `extra_replies` 0 disables it.
    """

    extra_replies: int = Field(
        0, ge=0, le=15, description="group samples per reply; the choices (`n`) of the request count too"
    )
    share: float = Field(1.0, gt=0, le=1, description="the share of replies that get group samples")
    tokens_per_hour: int = Field(100_000, ge=0, description="the most tokens that they may generate in an hour")
    window_seconds: float = Field(
        120.0,
        gt=0,
        le=7 * 86400,
        description="how long a reply waits for its group samples; later they are not sampled any more",
    )


class RolloutsConfig(Frozen):
    """What the trainer may request from the engines, and when.

    Example: RolloutsConfig.model_validate({"group_sampling": {"extra_replies": 3, "share": 0.2}})
    """

    group_sampling: GroupSamplingConfig = GroupSamplingConfig()
    in_flight: int = Field(2, ge=1, le=256, description="the most concurrent rollouts of the policy on an engine")
    max_open_chats: int = Field(0, ge=0, description="an engine with more open chats than this gets no rollouts")
    timeout_seconds: float = Field(60.0, gt=0, le=3600, description="for one reply")
    max_plan_share: float = Field(
        0.5, gt=0, le=1, description="the largest share of a batch for replies to prompt sets; the rest is for chats"
    )
    verifiers: dict[VerifierName, str] = Field(
        default_factory=dict,
        description="your own verifiers, name to module:function; in the deployment's settings only",
    )


def apply_limits(own: RolloutsConfig, limits: RolloutsConfig) -> RolloutsConfig:
    """Return a policy's settings, capped by the limits of the deployment."""
    tokens = min(own.group_sampling.tokens_per_hour, limits.group_sampling.tokens_per_hour)
    capped = {name: min(getattr(own, name), getattr(limits, name)) for name in LIMITED}
    return own.model_copy(
        update={**capped, "group_sampling": own.group_sampling.model_copy(update={"tokens_per_hour": tokens})}
    )


def exceeded_limit(own: RolloutsConfig, limits: RolloutsConfig) -> str | None:
    """Return the first resource setting in which `own` exceeds the limits of the deployment, None if there is none."""
    capped = apply_limits(own, limits)
    exceeded = [name for name in LIMITED if getattr(own, name) > getattr(capped, name)]
    if own.group_sampling != capped.group_sampling:
        exceeded.append("group_sampling.tokens_per_hour")
    return exceeded[0] if exceeded else None
