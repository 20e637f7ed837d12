"""Policies and versions as the API and the console show them."""

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound
from app.core.http import RowView
from app.models import Policy, Version
from app.policies import repository
from app.policies.references import version_name
from app.policies.version_statistics import read_statistics


class VersionView(RowView):
    object: Literal["version"] = "version"
    id: str
    name: str
    number: int
    parent: int | None
    state: str
    serving: bool
    reason: str | None
    created_at: float
    live_at: float | None
    pruned_at: float | None = Field(description="when its files were deleted: it cannot be deployed any more")
    turns: int = Field(description="replies; of the newest 10,000, as all statistics")
    rated: int = Field(description="votes: what one person said about one reply; the last word counts")
    approval: float | None = Field(description="the share of the votes that are up")
    approval_low: float | None = Field(description="Wilson's 95 % interval of the approval")
    approval_high: float | None
    mean_length: float
    alignment_delay: float | None
    metrics: dict[str, Any]
    timings: dict[str, Any]
    tainted_at: float | None = Field(
        description="when data that the version or one of its ancestors learned from was erased"
    )
    untainted_ancestor: str | None = Field(
        description="the version to roll back to if this one learned from erased data"
    )


class StepView(BaseModel):
    """How the last update was fitted to the KL target."""

    kl: float = Field(description="KL(parent ‖ new version) in nats per token, on replies that are not in the batch")
    scale: float = Field(description="the update was scaled with this factor to fit; 1 if it fitted as it was")
    lr_scale: float = Field(description="factor of the learning rate from now on")


class TrafficView(BaseModel):
    """A share of the end users and conversations that ask for another policy."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    from_: str = Field(alias="from", min_length=1, max_length=128, description="a policy of the project")
    share: float = Field(gt=0, le=1)


class PolicyView(RowView):
    object: Literal["policy"] = "policy"
    id: str
    name: str
    base_model: str
    state: str = Field(description="active, paused (it answers and is not trained) or archived (it answers no chats)")
    state_reason: str | None
    state_since: float | None
    traffic: TrafficView | None = Field(description="the share of another policy's requests that it answers")
    serving: str
    previous: str | None
    canary: str | None = Field(description="the version that serves a share of the conversations")
    canary_share: float
    shadow: str | None = Field(description="the version whose replies to live prompts are judged but never returned")
    head: str = Field(description="the version that the next update starts from")
    epoch: int
    created_at: float
    mode: str = Field(description="of learning: asynchronous, synchronous (after an alarm of the KL guard) or halted")
    mode_reason: str | None
    mode_since: float | None
    kl_alarms: int = Field(description="alarms of the KL guard in a row")
    feedback_share: float | None = Field(
        description="share of the newest replies that people gave feedback on; null before there are 200 of them"
    )
    sparse_feedback: bool = Field(
        description="few replies get feedback: with ATTUNE_FEEDBACK=auto a reward model scores the others"
    )
    last_step: StepView | None = Field(description="the update that made the head; null before the first")
    untainted_ancestor: str | None = Field(
        description="the version to roll back to if the serving one learned from erased data"
    )


class VersionPage(NamedTuple):
    """Versions by number, and whether there are older ones."""

    versions: list[VersionView]
    has_more: bool


async def view_versions(session: AsyncSession, policy: Policy, limit: int, before: int | None = None) -> VersionPage:
    """Return the newest versions with their statistics; with `before` those with lower numbers."""
    serving_id = (await repository.get_deployment(session, policy.id)).version_id
    page = await repository.list_newest_versions(session, policy.id, limit, before)
    listed = page[:limit][::-1]
    any_tainted = await repository.has_tainted_versions(session, policy.id)
    versions = await repository.list_versions(session, policy.id) if any_tainted else listed
    stats = await read_statistics(session, listed)
    parents = await repository.find_numbers(session, [version.parent_id for version in listed])
    tainted = repository.tainted_since(versions)

    def view(version: Version) -> VersionView:
        untainted = repository.last_untainted_ancestor(version, versions, tainted)
        return VersionView.from_row(
            version,
            name=version_name(policy, version),
            parent=parents.get(version.parent_id or ""),
            serving=version.id == serving_id,
            tainted_at=tainted.get(version.id),
            untainted_ancestor=version_name(policy, untainted) if untainted else None,
            **stats[version.id]._asdict(),
        )

    return VersionPage([view(version) for version in listed], has_more=len(page) > limit)


async def view_version(session: AsyncSession, policy: Policy, number: int) -> VersionView:
    """Return one version. Raises NotFound."""
    page = await view_versions(session, policy, 1, before=number + 1)
    if not page.versions or page.versions[0].number != number:
        raise NotFound(f"Policy '{policy.name}' has no version v{number}.")
    return page.versions[0]


async def view_policy(session: AsyncSession, policy: Policy) -> PolicyView:
    """Return the policy with the versions that serve and the update that made its head."""
    deployment = await repository.get_deployment(session, policy.id)
    serving = await repository.get_version(session, deployment.version_id)
    shadow = await repository.find_shadow_version(session, policy.id)
    untainted = await repository.find_untainted_ancestor(session, policy.id, serving)
    head = await repository.get_version(session, policy.head_version_id or serving.id)
    source = await session.get(Policy, policy.traffic_from_id) if policy.traffic_from_id else None
    return PolicyView.from_row(
        policy,
        traffic=TrafficView(from_=source.name, share=policy.traffic_share or 0.0) if source else None,
        serving=version_name(policy, serving),
        previous=await repository.find_version_name(session, policy, deployment.previous_version_id),
        canary=await repository.find_version_name(session, policy, deployment.canary_version_id),
        canary_share=deployment.canary_share,
        shadow=version_name(policy, shadow) if shadow else None,
        head=version_name(policy, head),
        last_step=_view_step(head),
        epoch=deployment.epoch,
        untainted_ancestor=version_name(policy, untainted) if untainted else None,
    )


def _view_step(version: Version) -> StepView | None:
    values = [version.metrics.get(name) for name in ("guard/kl", "actor/step_scale", "actor/lr_scale")]
    return None if None in values else StepView(kl=values[0], scale=values[1], lr_scale=values[2])
