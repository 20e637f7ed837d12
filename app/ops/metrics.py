"""/metrics, for Prometheus."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from app.core.errors import ERROR_RESPONSES
from app.core.services import services_of, settings_of
from app.core.telemetry import Telemetry
from app.ops import prometheus
from app.projects.auth import BEARER, DatabaseDep, authenticate
from app.training.rollouts.repository import count_by_state

router = APIRouter(tags=["metrics"], responses=ERROR_RESPONSES)
METRICS_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}


async def visible_project(request: Request, db: DatabaseDep, _: Any = BEARER) -> str | None:
    """Return the project whose metrics the caller may read: an admin's own, or None (all) where the page is open."""
    if settings_of(request).metrics_open:
        return None
    return (await authenticate(request, db, "admin")).project_id


@router.get("/metrics", response_class=Response, responses=METRICS_RESPONSES)
async def metrics(
    request: Request, db: DatabaseDep, project_id: Annotated[str | None, Depends(visible_project)]
) -> Response:
    """The counters of this process, and the metrics of each policy's newest trained version."""
    policies, rollouts = await db.run_read(
        lambda connection: (prometheus.read_policy_metrics(connection, project_id), count_by_state(connection))
    )
    content = prometheus.render(services_of(request).get(Telemetry), policies, rollouts)
    return Response(content, media_type=CONTENT_TYPE_PLAIN_0_0_4)
