"""What the page of metrics asks the database: who speaks, and what the last update of each policy measured."""

from typing import Any, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import aliased

from app.models import Deployment, Policy, Project, Version


class Standing(NamedTuple):
    """One policy. `metrics` are those of its newest trained version, `trained`; both are None before the first."""

    policy_id: str
    policy: str
    project_id: str
    project: str
    serving: int
    trained: int | None
    metrics: dict[str, Any] | None


Serving, Newest = aliased(Version), aliased(Version)
LAST = (
    select(func.max(Version.number))
    .where(Version.policy_id == Policy.id, Version.parent_id.is_not(None))
    .correlate(Policy)
    .scalar_subquery()
)
STANDINGS = (
    select(Policy.id, Policy.name, Project.id, Project.name, Serving.number, Newest.number, Newest.metrics)
    .join(Project, Project.id == Policy.project_id)
    .join(Deployment, Deployment.policy_id == Policy.id)
    .join(Serving, Serving.id == Deployment.version_id)
    .outerjoin(Newest, (Newest.policy_id == Policy.id) & (Newest.number == LAST))
    .order_by(Project.name, Policy.name)
)


def standings(connection: Connection, project_id: str | None) -> list[Standing]:
    """Of one project's policies, or of all."""
    wanted = STANDINGS if project_id is None else STANDINGS.where(Policy.project_id == project_id)
    return [Standing(*row) for row in connection.execute(wanted)]
