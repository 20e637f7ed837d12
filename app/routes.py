"""Every route of the API, in one list."""

from fastapi import APIRouter
from starlette.routing import BaseRoute

from app.chat.endpoints import router as chat
from app.chat.stored import router as stored_completions
from app.core.http import document_json_bodies
from app.datasets.endpoints import router as datasets
from app.deployments.endpoints import router as deployments
from app.deployments.pin_endpoints import router as pins
from app.feedback.endpoints import router as feedback
from app.ops.adapter_files import router as adapter_files
from app.ops.audit import router as audit
from app.ops.health import router as health
from app.ops.metrics import router as metrics
from app.ops.status import router as status
from app.policies.endpoints import router as policies
from app.privacy.endpoints import router as privacy
from app.privacy.lineage.endpoints import router as lineage
from app.projects.endpoints import router as projects
from app.raters.endpoints import router as raters
from app.responses.endpoints import router as responses
from app.training.endpoints import router as training
from app.training.reward_models.endpoints import router as reward_models
from app.training.rollouts.endpoints import router as rollouts

ROUTERS = (
    audit,
    training,
    deployments,
    lineage,
    pins,
    raters,
    reward_models,
    rollouts,
    privacy,
    chat,
    stored_completions,
    responses,
    feedback,
    policies,
    projects,
    datasets,
    status,
    health,
    metrics,
    adapter_files,
)


def _all_routes() -> list[BaseRoute]:
    router = APIRouter()
    for domain_router in ROUTERS:
        document_json_bodies(domain_router.routes)
        router.include_router(domain_router)
    return router.routes


ROUTES = _all_routes()  # FastAPI prepares them once, on first use, for every app of the process
