"""/metrics: what Prometheus scrapes."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from app.core.errors import DOCUMENTED
from app.core.services import services_of, settings_of
from app.core.telemetry import Telemetry
from app.ops import prometheus
from app.ops.policy_metrics import standings
from app.projects.auth import BEARER, DatabaseDep, identify
from app.training.rollouts.repository import counts

router = APIRouter(tags=["metrics"], responses=DOCUMENTED)
PAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}


async def project_shown(request: Request, db: DatabaseDep, _: Any = BEARER) -> str | None:
    """Whose figures the caller may read: an admin's own project's, or, where the page is open, everybody's (None)."""
    if settings_of(request).metrics_open:
        return None
    return (await identify(request, db, "admin")).project_id


@router.get("/metrics", response_class=Response, responses=PAGE)
async def metrics(
    request: Request, db: DatabaseDep, project_id: Annotated[str | None, Depends(project_shown)]
) -> Response:
    """This process's counters, and the newest trained version's metrics of each policy."""
    found, rolled = await db.run_read(lambda connection: (standings(connection, project_id), counts(connection)))
    return Response(
        prometheus.render(services_of(request).get(Telemetry), found, rolled), media_type=CONTENT_TYPE_PLAIN_0_0_4
    )
