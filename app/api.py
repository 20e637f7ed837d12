"""Every route, in one list."""

from fastapi import FastAPI

from app.chat.endpoints import router as chat
from app.chat.stored import router as stored
from app.feedback.endpoints import router as feedback
from app.health.endpoints import router as health
from app.policies.endpoints import router as policies
from app.status.endpoints import router as status


def install(api: FastAPI) -> None:
    for router in (chat, stored, feedback, policies, status, health):
        api.include_router(router)
