"""The versions that open episodes are pinned to: engines hold them, and their files are kept."""

from sqlalchemy import Select, select

from app.models import Episode, EpisodeState, Version, VersionRule, VersionState


def select_pinned_versions(policy_id: str) -> Select[str]:
    """Return a query of the ids of the versions that alone may answer an open episode, the newest first.

    One that was rolled back answers nobody.
    """
    is_pinned = (Episode.state == EpisodeState.OPEN, Episode.version_rule == VersionRule.PIN)
    pinned = select(Episode.start_version_id).where(Episode.policy_id == policy_id, *is_pinned)
    is_held = (Version.id.in_(pinned), Version.state != VersionState.ROLLED_BACK)
    return select(Version.id).where(*is_held).order_by(Version.number.desc(), Version.id)
