"""Every route, in one list."""

from fastapi import FastAPI

from app.chat.endpoints import router as chat
from app.chat.stored import router as stored
from app.exchange.endpoints import router as exchange
from app.feedback.endpoints import router as feedback
from app.health.endpoints import router as health
from app.metrics.endpoints import router as metrics
from app.policies.endpoints import router as policies
from app.projects.endpoints import router as projects
from app.responses.endpoints import router as responses
from app.status.endpoints import router as status


def install(api: FastAPI) -> None:
    for router in (chat, stored, responses, feedback, policies, projects, exchange, status, health, metrics):
        api.include_router(router)
