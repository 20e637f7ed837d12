"""Every route, in one list."""

from fastapi import APIRouter
from starlette.routing import BaseRoute

from app.audit.endpoints import router as audit
from app.chat.endpoints import router as chat
from app.chat.stored import router as stored
from app.exchange.endpoints import router as exchange
from app.feedback.endpoints import router as feedback
from app.health.endpoints import router as health
from app.lineage.endpoints import router as lineage
from app.metrics.endpoints import router as metrics
from app.pins.endpoints import router as pins
from app.policies.control import router as control
from app.policies.delivery import router as delivery
from app.policies.endpoints import router as policies
from app.projects.endpoints import router as projects
from app.raters.endpoints import router as raters
from app.responses.endpoints import router as responses
from app.reward_models.endpoints import router as reward_models
from app.rollouts.endpoints import router as rollouts
from app.status.endpoints import router as status
from app.subjects.endpoints import router as subjects
from app.versions.endpoints import router as versions


def _everything() -> list[BaseRoute]:
    whole = APIRouter()
    for router in (audit, control, delivery, lineage, pins, raters, reward_models, rollouts, subjects):
        whole.include_router(router)
    for router in (chat, stored, responses, feedback, policies, projects, exchange, status, health, metrics, versions):
        whole.include_router(router)
    return whole.routes


ROUTES = _everything()  # FastAPI makes them ready once, on first use, and every app of the process shares that
