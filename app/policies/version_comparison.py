"""Versions side by side, also of several policies, each against the first one."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.signals.proportions import Verdict, newcombe_difference
from app.core.errors import BadRequest, NotFound
from app.core.planner import prefer_indexes
from app.models import Policy, Version
from app.policies import repository, service
from app.policies.references import SEPARATOR, ModelReference, parse_reference, version_name
from app.policies.version_statistics import (
    Replies,
    Votes,
    find_counted_turns,
    read_replies,
    read_reward_means,
    read_votes,
)
from app.raters.approval import approval_fields

MAX_VERSIONS = 10


class RewardMean(BaseModel):
    count: int
    mean: float


class DifferenceView(BaseModel):
    """The approval of a version less that of the first one, with Newcombe's 95 % interval."""

    value: float
    low: float
    high: float


class ComparedVersion(BaseModel):
    """Of the newest 10,000 replies to chats."""

    name: str
    state: str
    replies: int
    rated: int = Field(description="votes: what one person said about one reply; the last word counts")
    up: int
    raters: int = Field(description="people who voted")
    approval: float | None
    approval_low: float | None = Field(description="Wilson's 95 % interval of the approval")
    approval_high: float | None
    rewards: dict[str, RewardMean] = Field(
        description='by reward source; "explicit" is the feedback of people and programs'
    )
    prompt_tokens: int
    output_tokens: int
    mean_length: float = Field(description="output tokens a reply")
    difference: DifferenceView | None = Field(
        description="null for the first version, and where one of the two has no votes"
    )
    verdict: Verdict | None = Field(description="whether the interval of the difference leaves out 0; null as above")


class ComparedVersions(BaseModel):
    object: Literal["version_comparison"] = "version_comparison"
    data: list[ComparedVersion]
    sentences: list[str] = Field(description="the verdict on each version but the first")

    @classmethod
    def of(cls, versions: Sequence[ComparedVersion]) -> Self:
        return cls(data=list(versions), sentences=[_describe(version, versions[0]) for version in versions[1:]])


async def compare_versions(session: AsyncSession, project_id: str, references: Sequence[str]) -> ComparedVersions:
    """Compare the versions with the first one by people's votes, rewards and tokens.

    `session` reads a snapshot. Raises BadRequest, NotFound.
    """
    found = [await _find_version(session, project_id, reference) for reference in references]
    versions = [row for _, row in found]
    if len({row.id for row in versions}) != len(versions):
        raise BadRequest("Each version may be named once.", param="version", code="invalid_value")
    await prefer_indexes(session)
    counted = await find_counted_turns(session, versions)
    replies, votes = await read_replies(session, counted), await read_votes(session, counted)
    means = await read_reward_means(session, counted)
    first = votes.get(versions[0].id, Votes()).share

    def view(policy: Policy, row: Version) -> ComparedVersion:
        of_version, its_votes = replies.get(row.id, Replies()), votes.get(row.id, Votes())
        difference = newcombe_difference(its_votes.share, first) if row is not versions[0] else None
        return ComparedVersion(
            name=version_name(policy, row),
            state=row.state,
            replies=of_version.num_replies,
            up=its_votes.share.successes,
            raters=its_votes.raters,
            **approval_fields(its_votes.share)._asdict(),
            rewards={
                source: RewardMean(count=mean.num_rewards, mean=mean.mean)
                for source, mean in means.get(row.id, {}).items()
            },
            prompt_tokens=of_version.prompt_tokens,
            output_tokens=of_version.output_tokens,
            mean_length=of_version.mean_length,
            difference=DifferenceView(**difference._asdict()) if difference else None,
            verdict=difference.verdict if difference else None,
        )

    return ComparedVersions.of([view(policy, row) for policy, row in found])


async def _find_version(session: AsyncSession, project_id: str, text: str) -> tuple[Policy, Version]:
    """Return the version that a reference names. Raises BadRequest for one without a version, NotFound."""
    reference = _parse(text)
    policy = await service.get_policy(session, project_id, reference.policy)
    deployment = await repository.get_deployment(session, policy.id)
    ids = {
        "stable": deployment.version_id,
        "previous": deployment.previous_version_id,
        "canary": deployment.canary_version_id,
    }
    if reference.number is not None:
        version = await repository.find_version(session, policy.id, reference.number)
    else:
        id = ids.get(reference.alias or "")
        version = None if id is None else await repository.get_version(session, id)
    if version is None:
        message = f"Policy '{policy.name}' has no version '{reference.alias}'."
        raise NotFound(message, code="model_not_found", param="version")
    return policy, version


def _parse(text: str) -> ModelReference:
    """Example: "support@3" and "support@v3" -> ("support", "v3", 3)"""
    policy, separator, alias = text.partition(SEPARATOR)
    if alias.isascii() and alias.isdigit():
        text = f"{policy}{separator}v{alias}"
    reference = parse_reference(text)
    if not reference.names_version:
        raise BadRequest(
            f"'{text}' names no version: write {text}@v3, {text}@stable, {text}@previous or {text}@canary.",
            param="version",
            code="invalid_value",
        )
    return reference


def _describe(version: ComparedVersion, first: ComparedVersion) -> str:
    if version.difference is None:
        silent = [row.name for row in (version, first) if not row.rated]
        return f"{version.name} cannot be compared with {first.name}: there are no votes on {' and '.join(silent)}."
    low, high = 100 * version.difference.low, 100 * version.difference.high
    between = f"the difference in approval is between {low:+.1f} and {high:+.1f} points (95 %)"
    if version.verdict == "no difference shown":
        return f"No difference between {version.name} and {first.name} is shown: {between}."
    return f"{version.name} is {version.verdict} than {first.name}: {between}."
