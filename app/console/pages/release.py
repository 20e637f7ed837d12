"""Release: who gets which version now, what the canary shows, and going back.

Every form holds the deployment's epoch that its page showed. An act is refused (409) once the deployment has changed,
so that nobody acts on figures that no longer hold.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from app.console.access import Operator, Reader, Visit, form_body
from app.console.pages.overview import PolicyQuery, version_number
from app.console.rendering import redirect, render_page
from app.core.database import database_time
from app.core.errors import BadRequest, Conflict
from app.core.http import StrictModel, services_of
from app.deployments import pins, rollback_preview, service
from app.deployments.rollback_preview import RollbackPreview
from app.deployments.schemas import PinRequest, VersionNumber
from app.deployments.version_router import VersionRouter
from app.deployments.views import view_deployment, view_pins
from app.engines.adaptation import adaptation_of
from app.models import SERVED_TRAFFIC, Audit, AuditAction, Deployment, PinKind, Policy, Version
from app.policies import repository
from app.policies.locks import LockedPolicy
from app.policies.references import format_reference, version_name
from app.policies.service import Attribution
from app.policies.version_comparison import compare_versions
from app.policies.views import VersionView, view_version, view_versions
from app.projects.auth import limits_of

router = APIRouter()
PATH = "/console/release"
NUM_VERSIONS = 30  # that can be chosen
NUM_PINS = 50
NUM_CHANGES = 15
CHANGES = (
    *(AuditAction.DEPLOYMENT_DEPLOYED, AuditAction.DEPLOYMENT_ROLLED_BACK, AuditAction.DELIVERY_UPDATED),
    *(AuditAction.CANARY_BEGAN, AuditAction.CANARY_ENDED, AuditAction.SHADOW_BEGAN, AuditAction.SHADOW_PASSED),
)
STALE = "The deployment has changed since this page was loaded. Look at what holds now, and decide again."


class Act(StrictModel):
    policy: str
    epoch: int
    reason: Annotated[str, Field(max_length=2000)]


class RollbackAct(Act):
    version: VersionNumber
    typed: str


class DeployAct(Act):
    version: VersionNumber
    share: Annotated[float, Field(gt=0, le=100, description="in percent; 100 is everybody")] = 100.0


class PinAct(Act):
    kind: PinKind
    subject: str
    version: VersionNumber


class UnpinAct(Act):
    pin: str


@router.get("/release")
async def show_release(visit: Reader, policy: PolicyQuery = None) -> Response:
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        deployment = await view_deployment(session, chosen, visit.settings)
        pinned = await view_pins(session, chosen, NUM_PINS)
        versions = (await view_versions(session, chosen, NUM_VERSIONS)).versions[::-1]
        time = await database_time(session)
        is_change = (Audit.project_id == chosen.project_id, Audit.action.in_(CHANGES))
        of_policy = Audit.subject.in_([chosen.name, *(version.name for version in versions)])
        query = select(Audit).where(*is_change, of_policy).order_by(Audit.seq.desc()).limit(NUM_CHANGES)
        changes = list(await session.scalars(query))
    return await render_page(
        visit,
        "release.html",
        "Release",
        policy=chosen,
        policies=names,
        deployment=deployment,
        serving=next((version for version in versions if version.name == deployment.serving), None),
        versions=[version for version in versions if version.name != deployment.serving and can_serve(version)],
        pins=pinned,
        changes=changes,
        now=time,
    )


def can_serve(version: VersionView) -> bool:
    return version.state in SERVED_TRAFFIC and version.pruned_at is None and version.tainted_at is None


@router.get("/release/rollback")
async def preview_rollback(
    visit: Operator, to: Annotated[int, Query(ge=0, le=999_999_999)], policy: PolicyQuery = None
) -> Response:
    """Show what a rollback would change, before it is confirmed."""
    chosen, names = await visit.choose_policy(policy)
    async with visit.db.read() as session:
        deployment = await view_deployment(session, chosen, visit.settings)
        target = await view_version(session, chosen, to)
        serving = await view_version(session, chosen, version_number(deployment.serving))
    if target.number == serving.number:
        raise Conflict(f"{target.name} serves already.", code="already_serving")
    preview = await rollback_preview.preview_rollback(visit.context(chosen.name), to, from_version=None)
    async with visit.db.read_snapshot() as session:
        compared = await compare_versions(session, chosen.project_id, [serving.name, target.name])
    return await render_page(
        visit,
        "rollback.html",
        "Release",
        policy=chosen,
        policies=names,
        deployment=deployment,
        target=target,
        serving=serving,
        effects=list(describe_effects(preview)),
        comparison=compared.sentences[0],
    )


def describe_effects(preview: RollbackPreview) -> Iterator[str]:
    """Yield what a rollback would change, and what it would leave as it is, as sentences."""
    target, serving = preview.would_serve, preview.serving
    yield f"New replies come from {target} at once; replies that are being written finish on {serving}."
    yield f"{preview.engines_with_version} of {preview.engines} ready engines have {target} loaded."
    if preview.conversations:
        yield f"{preview.conversations} conversations that {preview.rolled_back} answered in the last day move on."
    if preview.pins:
        yield f"{preview.pins} pins on {preview.rolled_back} stay: it goes on answering them."
    if preview.aborted_canary is not None:
        yield f"The canary {preview.aborted_canary} ends, and is rolled back, too."
    yield f"Training goes on from {preview.head_after} instead of {preview.head}."
    if preview.leaving:
        yield f"The line of training loses {', '.join(preview.leaving)}."
    if preview.joining:
        yield f"It gains {', '.join(preview.joining)}."
    if preview.samples_returned or preview.samples_dropped:
        returned, dropped = preview.samples_returned, preview.samples_dropped
        yield f"{returned} rated replies can be learned from again; {dropped} cannot, as people judged their version."
    if preview.batches_failed:
        yield f"{preview.batches_failed} update that is being trained is given up; its rated replies return."


@asynccontextmanager
async def change(visit: Visit, act: Act) -> AsyncIterator[tuple[LockedPolicy, Deployment]]:
    """Open a write transaction with the policy locked, if the deployment is as the form's page showed it.

    Raises Conflict otherwise. The cached routes are dropped after the commit.
    """
    async with visit.context(act.policy).write() as locked:
        deployment = await repository.get_deployment(locked.session, locked.policy.id)
        if deployment.epoch != act.epoch:
            raise Conflict(STALE, code="deployment_changed")
        yield locked, deployment
    services_of(visit.request).get(VersionRouter).forget()


def _attribute(visit: Visit, act: Act) -> Attribution:
    return Attribution(visit.caller.key_prefix, act.reason)


async def _done(visit: Visit, act: Act, notice: str) -> Response:
    return await redirect(visit, f"{PATH}?policy={act.policy}", notice)


@router.post("/release/rollback")
async def roll_back(visit: Operator, act: Annotated[RollbackAct, form_body(RollbackAct)]) -> Response:
    if act.typed.strip() != f"v{act.version}":
        raise BadRequest(f"Type v{act.version} to confirm that this is the version to return to.", param="typed")
    async with change(visit, act) as (locked, _):
        await service.roll_back(locked, act.version, _attribute(visit, act))
    return await _done(visit, act, f"{format_reference(act.policy, act.version)} serves. Training goes on from it.")


@router.post("/release/deploy")
async def deploy(visit: Operator, act: Annotated[DeployAct, form_body(DeployAct)]) -> Response:
    name = format_reference(act.policy, act.version)
    if act.share >= 100:
        async with change(visit, act) as (locked, _):
            await service.deploy(locked, act.version, _attribute(visit, act))
        return await _done(visit, act, f"{name} serves everybody.")
    adaptation_of(visit.settings).require_several_versions("A canary")
    async with change(visit, act) as (locked, _):
        version = await service.get_served_version(*locked, act.version)
        await service.require_untainted(*locked, version)
        by = _attribute(visit, act)
        await service.start_canary(locked, version, act.share / 100, by, watched=True)
    return await _done(visit, act, f"{name} is the canary, for {act.share:g} % of the conversations.")


@router.post("/release/promote")
async def promote_canary(visit: Operator, act: Annotated[Act, form_body(Act)]) -> Response:
    async with change(visit, act) as (locked, deployment):
        version = await _get_canary(*locked, deployment)
        await service.deploy(locked, version.number, _attribute(visit, act))
        name = version_name(locked.policy, version)
    return await _done(visit, act, f"{name} serves everybody.")


@router.post("/release/abort")
async def abort_canary(visit: Operator, act: Annotated[Act, form_body(Act)]) -> Response:
    async with change(visit, act) as (locked, deployment):
        version = await _get_canary(*locked, deployment)
        await service.abort_canary(locked, _attribute(visit, act))
        name = version_name(locked.policy, version)
    return await _done(visit, act, f"{name} is no longer a canary; everybody gets the version that serves.")


async def _get_canary(session: AsyncSession, policy: Policy, deployment: Deployment) -> Version:
    if deployment.canary_version_id is None:
        raise Conflict(f"Policy '{policy.name}' has no canary.", code="no_canary")
    return await repository.get_version(session, deployment.canary_version_id)


@router.post("/release/pin")
async def set_pin(visit: Operator, act: Annotated[PinAct, form_body(PinAct)]) -> Response:
    adaptation_of(visit.settings).require_several_versions("A pin")
    request = PinRequest(kind=act.kind, subject=act.subject, version=act.version, reason=act.reason)
    limit = limits_of(visit.request, visit.caller).pins
    async with change(visit, act) as (locked, _):
        await pins.set_pin(locked, request, actor=visit.caller.key_prefix, limit=limit)
    return await _done(visit, act, f"{act.kind} {act.subject} is pinned to v{act.version}, from the next request on.")


@router.post("/release/unpin")
async def remove_pin(visit: Operator, act: Annotated[UnpinAct, form_body(UnpinAct)]) -> Response:
    async with change(visit, act) as (locked, _):
        await pins.remove_pin(locked, act.pin, actor=visit.caller.key_prefix)
    return await _done(visit, act, "The pin is removed.")
