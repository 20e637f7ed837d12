"""Consent to train: a refusal by the key, by the project or by the request is final."""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncSession

from app.models import ApiKey, Project, Turn

CONSENT = "attune_train"  # a key of the request's metadata
NO_CONSENT = "no consent to train"  # an exclusion reason


def withholds_consent(metadata: Mapping[str, str]) -> bool:
    """Return whether a request's metadata forbids training on its turns.

    Every value but "true" forbids it: a caller who writes "False" or "0" does not consent.
    """
    return metadata.get(CONSENT, "true") != "true"


async def has_training_consent(session: AsyncSession, turn: Turn) -> bool:
    """Return whether the turn may be trained on now: its key or project may have changed since it was recorded."""
    if turn.exclusion_reason == NO_CONSENT:
        return False
    key = await session.get(ApiKey, turn.key_id) if turn.key_id is not None else None
    if key is not None and key.train is not None:
        return key.train
    return (await session.get_one(Project, turn.project_id)).train
