"""People's own words about replies, as the rewards keep them: what a reward model learns, and is held to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, func, not_, or_, select

from alignment.config.rewards import EXPLICIT
from app.models import ApiKey, Policy, Project, Rater, RaterStanding, Reward, Turn

ORDERS = ("comparison/", "ranking/")
WHOLE = "conversation/"  # said of a whole conversation: of no reply in particular
MACHINES = ("CODE/", "LLM_JUDGE/")


class Word(NamedTuple):
    """`source` tells apart who said what; the same in an order of several turns."""

    turn_id: str
    source: str
    value: float
    weight: float
    rater: str

    @property
    def orders(self) -> bool:
        return self.source.startswith(ORDERS)


def words(policy: Policy) -> Select[Any]:
    """The newest first, of turns that may be learned from, by people who are neither held nor disbelieved."""
    columns: tuple[Any, ...] = (Reward.turn_id, Reward.source, Reward.value, Reward.weight, Reward.rater)
    rater = and_(Rater.project_id == Turn.project_id, Rater.name == Reward.rater)
    doubted = Rater.standing.in_((RaterStanding.QUARANTINED, RaterStanding.BLOCKED))
    asked: Select[Any] = (
        select(*columns)
        .join(Turn, Turn.id == Reward.turn_id)
        .join(Project, Project.id == Turn.project_id)
        .outerjoin(ApiKey, ApiKey.id == Turn.key_id)
        .outerjoin(Rater, rater)
        .where(
            Turn.project_id == policy.project_id,
            Turn.policy_id == policy.id,
            Turn.exclusion_reason.is_(None),
            Turn.deleted_at.is_(None),
            func.coalesce(ApiKey.train, Project.train).is_(True),
            Reward.reward_source == EXPLICIT,
            Reward.rater.is_not(None),
            *(not_(Reward.rater.startswith(kind)) for kind in MACHINES),
            not_(Reward.source.startswith(WHOLE)),
            Reward.weight > 0,
            or_(Rater.standing.is_(None), not_(doubted)),
        )
        .order_by(Reward.created_at.desc(), Reward.id)
    )
    return asked


def read(rows: Sequence[Any]) -> list[Word]:
    return [Word(*row) for row in rows]
