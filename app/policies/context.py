"""What the routes below /v1/policies/{name} share: the context of a request and the body of an act."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import Database
from app.core.http import StrictModel, json_body, settings_of
from app.core.settings import Settings
from app.models import Policy
from app.policies import service
from app.policies.locks import LockedPolicy, lock_policy
from app.policies.references import PolicyName
from app.policies.service import Attribution
from app.projects.auth import AdminCaller, Caller, ContentCaller, DatabaseDep, OperatingCaller, ViewingCaller


@dataclass(frozen=True)
class PolicyContext:
    """The policy that a request names, as a context manager of a transaction.

    Example: async with context.write() as locked: ...
    """

    name: str
    request: Request
    caller: Caller
    db: Database

    @property
    def actor(self) -> str:
        """What the audit log names: the prefix of the caller's API key."""
        return self.caller.key_prefix

    def attribute(self, reason: str | None) -> Attribution:
        """Return what the audit log keeps of a change that the caller makes."""
        return Attribution(self.actor, reason)

    @property
    def settings(self) -> Settings:
        return settings_of(self.request)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[tuple[AsyncSession, Policy]]:
        """Open a session for reading. Raises NotFound without such a policy."""
        async with self.db.read() as session:
            yield session, await service.get_policy(session, self.caller.project_id, self.name)

    @asynccontextmanager
    async def read_snapshot(self) -> AsyncIterator[tuple[AsyncSession, Policy]]:
        """Open a session whose statements all see one state of the database. Raises NotFound without such a policy."""
        async with self.db.read_snapshot() as session:
            yield session, await service.get_policy(session, self.caller.project_id, self.name)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[LockedPolicy]:
        """Open a write transaction with the policy locked. Raises NotFound without such a policy."""
        async with self.db.write() as session:
            policy = await service.get_policy(session, self.caller.project_id, self.name)
            yield await lock_policy(session, policy.id)


async def admin_context(name: PolicyName, request: Request, caller: AdminCaller, db: DatabaseDep) -> PolicyContext:
    return PolicyContext(name, request, caller, db)


async def operator_context(
    name: PolicyName, request: Request, caller: OperatingCaller, db: DatabaseDep
) -> PolicyContext:
    return PolicyContext(name, request, caller, db)


async def content_context(name: PolicyName, request: Request, caller: ContentCaller, db: DatabaseDep) -> PolicyContext:
    return PolicyContext(name, request, caller, db)


async def viewer_context(name: PolicyName, request: Request, caller: ViewingCaller, db: DatabaseDep) -> PolicyContext:
    return PolicyContext(name, request, caller, db)


PolicyDep = Annotated[PolicyContext, Depends(admin_context)]
OperatedPolicyDep = Annotated[PolicyContext, Depends(operator_context)]  # of acts on what is trained and released
PolicyContentDep = Annotated[PolicyContext, Depends(content_context)]  # of pages with what people wrote, or their names
ViewedPolicyDep = Annotated[PolicyContext, Depends(viewer_context)]


class Reason(StrictModel):
    reason: str | None = Field(None, min_length=1, max_length=2000, description="kept in the audit log")


ReasonBody = Annotated[Reason, json_body(Reason)]
