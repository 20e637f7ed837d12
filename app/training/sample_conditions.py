"""Conditions on samples, as SQL expressions: which ones training may use, which the algorithm can learn from."""

from sqlalchemy import ColumnElement, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.tolerance import TOLERANCE
from app.core.database import now
from app.core.settings import Settings
from app.models import (
    ApiKey,
    LearningMode,
    Origin,
    Policy,
    Project,
    Sample,
    Turn,
)
from app.policies import repository
from app.training.batch_samples import WAITS_FOR_NEW
from app.training.sample_columns import consenting_samples, is_open


async def usable_samples(session: AsyncSession, policy: Policy, settings: Settings) -> ColumnElement[bool]:
    """Return the condition that training may use a ready sample and the algorithm can, as a SQL expression."""
    is_allowed = await allowed_samples(session, policy, settings)
    return and_(is_allowed, is_learnable(policy, is_allowed, settings))


async def allowed_samples(
    session: AsyncSession, policy: Policy, settings: Settings, sample: type[Sample] = Sample
) -> ColumnElement[bool]:
    """Return the condition that training may use a `sample`: its consent, and the version that generated it.

    Any version by default, because the update corrects for its distance. In the synchronous mode the head alone, and
    with `max_staleness` the head and that many of its ancestors.
    """
    is_consenting = await consenting_samples(session, policy.project_id, sample)
    steps = 0 if policy.mode == LearningMode.SYNCHRONOUS else settings.trainer.max_staleness
    if steps is None:
        return is_consenting
    line = await repository.list_ancestors(session, policy.head_version_id or "", steps)
    return and_(sample.version_id.in_([version.id for version in line]), is_consenting)


def is_learnable(
    policy: Policy, is_allowed: ColumnElement[bool], settings: Settings, until: float | None = None
) -> ColumnElement[bool]:
    """Return the condition that the algorithm can learn from a ready sample; with `until`, from one ready by then.

    If it learns from groups alone, another ready sample must answer the same prompt, or be of another episode of its
    group. Replies to a prompt set are taken
    without one: no other reply will come, and the plan waits until they have been in a batch. Corrected replies need
    none.
    """
    if not settings.algorithm.needs_groups:
        return true()
    # An episode of many turns is one attempt.
    compared = func.coalesce(Sample.episode_id, Sample.turn_id)
    has_others = is_in_group(policy.id, is_allowed, func.min(compared) < func.max(compared), until)
    return or_(has_others, is_planned(), Sample.is_corrected)


def is_consenting() -> ColumnElement[bool]:
    """Return the condition that an API key, or else the project, consents to training now.

    The statement joins Project, and ApiKey by an outer join. `projects.service.has_training_consent` is the same rule
    for one turn.
    """
    return func.coalesce(ApiKey.train, Project.train).is_(True)


def has_consent() -> ColumnElement[bool]:
    """Return the condition that a Sample's API key, or else its project, consents to training now."""
    consenting = (
        select(Turn.id)
        .join(Project, Project.id == Turn.project_id)
        .outerjoin(ApiKey, ApiKey.id == Turn.key_id)
        .where(Turn.id == Sample.turn_id, is_consenting())
    )
    return consenting.correlate(Sample).exists()


def group_key() -> ColumnElement[str]:
    """Return the key of a Sample's group, which is equal for replies to one prompt."""
    return func.coalesce(Sample.group_id, Sample.turn_id)


def is_in_group(
    policy_id: str, condition: ColumnElement[bool], having: ColumnElement[bool], until: float | None = None
) -> ColumnElement[bool]:
    """Return the condition that a Sample's group, of ready samples with this condition, fulfils `having`.

    With `until` (of `ready_at`) the group has those alone that are ready by then.
    """
    ready = (Sample.policy_id == policy_id, is_open(), Sample.ready_at <= (now() if until is None else until))
    groups = select(group_key()).where(*ready, condition).group_by(group_key()).having(having)
    return group_key().in_(groups.correlate(None))


def rewards_differ(min_contrast: float) -> ColumnElement[bool]:
    """Return the condition on a group of Samples that two of its rewards differ by more than `min_contrast`."""
    return func.max(compared_reward()) - func.min(compared_reward()) > min_contrast + TOLERANCE


def compared_reward(sample: type[Sample] = Sample) -> ColumnElement[float]:
    """Return what a `sample` is compared with others of its group by: in a group of episodes the reward of its episode.

    The returns of one episode differ by the discount, which is no contrast.
    """
    return func.coalesce(sample.episode_reward, sample.reward)


def waits_for_new() -> ColumnElement[bool]:
    """Return the condition that a batch has a Sample only together with as many others."""
    return func.coalesce(Sample.reason, "").in_(WAITS_FOR_NEW)


def is_planned() -> ColumnElement[bool]:
    """Return the condition that a Sample's prompt comes from a prompt set."""
    return func.coalesce(Sample.origin, "") == Origin.PROMPT_SET
