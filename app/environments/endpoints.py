"""/v1/environments/runs: create or join a planned run, claim its attempts, and report how they went."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from app.core.errors import ERROR_RESPONSES
from app.core.http import json_body, services_of
from app.core.settings import Settings
from app.environments import attempt_views, claims, service, tries
from app.environments.schemas import (
    AttemptList,
    AttemptView,
    ClaimRequest,
    ClaimView,
    FinishRequest,
    ReleaseRequest,
    RenewalView,
    RenewRequest,
    RunList,
    RunRequest,
    RunView,
    StartRequest,
)
from app.episodes.episode_ends import may_report_outcome, require_outcome_scope
from app.episodes.schemas import NewEpisodeView
from app.episodes.views import show_with_key
from app.feedback.feedback_writer import FeedbackWriter
from app.models import EndReason
from app.projects.auth import ChatCaller, DatabaseDep, sent_credential
from app.projects.idempotency import SHOWS_SECRET

router = APIRouter(prefix="/v1/environments/runs", tags=["environments"], responses=ERROR_RESPONSES)
Run = Annotated[str, Path(min_length=1, max_length=63, description="its name")]
Attempt = Annotated[str, Path(min_length=1, max_length=48)]
JOINED: dict[int | str, dict[str, Any]] = {200: {"model": RunView, "description": "a run of this name exists"}}
STARTED: dict[int | str, dict[str, Any]] = {
    200: {"model": NewEpisodeView, "description": "a replay: it was begun before"}
}


@router.post("", status_code=201, responses=JOINED)
async def create_or_join_run(
    request: Request,
    response: Response,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[RunRequest, json_body(RunRequest)],
) -> RunView:
    """Create a run, or join the one of this name, which must have the same plan."""
    async with db.write() as session:
        run, is_new = await service.create_or_join(session, caller.project_id, body)
        view = await service.view_run(session, services_of(request).get(Settings), run)
    if not is_new:
        response.status_code = 200
    return view


@router.get("")
async def list_runs(
    request: Request,
    caller: ChatCaller,
    db: DatabaseDep,
    after: Annotated[str | None, Query(min_length=1, max_length=63, description="the name of a run")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "asc",
) -> RunList:
    """List runs by creation time."""
    settings = services_of(request).get(Settings)
    async with db.read() as session:
        views = await service.list_page(
            session, settings, caller.project_id, after=after, limit=limit, newest_first=order == "desc"
        )
    return RunList.from_rows(views, limit, id="name")


@router.get("/{run}")
async def get_run(request: Request, run: Run, caller: ChatCaller, db: DatabaseDep) -> RunView:
    """Return a run, with its attempts by state."""
    async with db.read() as session:
        row = await service.get_run(session, caller.project_id, run)
        return await service.view_run(session, services_of(request).get(Settings), row)


@router.post("/{run}/cancel")
async def cancel_run(request: Request, run: Run, caller: ChatCaller, db: DatabaseDep) -> RunView:
    """Cancel a run: no attempt of it begins any more. Those under way go on, and count."""
    async with db.write() as session:
        row = await service.cancel(session, caller.project_id, run)
        return await service.view_run(session, services_of(request).get(Settings), row)


@router.get("/{run}/attempts")
async def list_attempts(
    run: Run,
    caller: ChatCaller,
    db: DatabaseDep,
    after: Annotated[str | None, Query(min_length=1, max_length=48, description="the id of an attempt")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "asc",
) -> AttemptList:
    """List the attempts that were claimed at least once, in the order of tasks."""
    async with db.read() as session:
        row = await service.get_run(session, caller.project_id, run)
        views = await attempt_views.list_page(session, row, after=after, limit=limit, newest_first=order == "desc")
    return AttemptList.from_rows(views, limit)


@router.post("/{run}/claim")
async def claim_attempt(
    request: Request,
    run: Run,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[ClaimRequest, json_body(ClaimRequest)],
) -> ClaimView:
    """Claim the next attempt, the first of the earliest task. What dead processes held is claimed again."""
    settings = services_of(request).get(Settings)
    async with db.write() as session:
        attempt, is_complete = await claims.claim(session, settings, caller.project_id, run, body.owner, body.num_tasks)
        view = None
        if attempt is not None:
            view = await attempt_views.view_attempt(session, caller.project_id, run, attempt.id)
    return ClaimView(attempt=view, is_complete=is_complete, lease_seconds=settings.workers.lease_seconds)


@router.post("/{run}/renew")
async def renew_leases(
    request: Request,
    run: Run,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[RenewRequest, json_body(RenewRequest)],
) -> RenewalView:
    """Renew the leases of attempts that are under way."""
    fences = {lease.id: lease.fence for lease in body.leases}
    async with db.write() as session:
        lost = await claims.renew(session, services_of(request).get(Settings), caller.project_id, run, fences)
    return RenewalView(lost=lost)


@router.post("/{run}/attempts/{attempt_id}/start", status_code=201, dependencies=[SHOWS_SECRET], responses=STARTED)
async def start_attempt(
    request: Request,
    response: Response,
    run: Run,
    attempt_id: Attempt,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[StartRequest, json_body(StartRequest)],
) -> NewEpisodeView:
    """Create the episode of a claimed attempt, with its group, its limits and its metadata."""
    settings = services_of(request).get(Settings)
    async with db.write() as session:
        view, key, is_replay = await tries.start(
            session, settings, caller, sent_credential(request), run, attempt_id, body
        )
    return show_with_key(request, response, view, key, is_replay=is_replay)


@router.post("/{run}/attempts/{attempt_id}/finish")
async def finish_attempt(
    request: Request,
    run: Run,
    attempt_id: Attempt,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[FinishRequest, json_body(FinishRequest)],
) -> AttemptView:
    """End the episode of a claimed attempt, and record whether it is done. A lost one is repeated once.

    409 `lease_lost` if the attempt was claimed again since: then nothing is recorded.
    """
    failure_outcome: float | None = None
    if body.outcome is not None:
        require_outcome_scope(caller)
    elif body.reason == EndReason.FAILED.value and may_report_outcome(caller):
        async with db.read() as session:
            settings = services_of(request).get(Settings)
            failure_outcome = await service.read_failure_outcome(session, settings, caller.project_id, run)
    limits = services_of(request).get(FeedbackWriter).limits
    async with db.write() as session:
        episode_id = await tries.finish(session, limits, caller.project_id, run, attempt_id, body, failure_outcome)
    async with db.read() as session:
        return await attempt_views.view_attempt(session, caller.project_id, run, attempt_id, episode_id)


@router.post("/{run}/attempts/{attempt_id}/release")
async def release_attempt(
    run: Run,
    attempt_id: Attempt,
    caller: ChatCaller,
    db: DatabaseDep,
    body: Annotated[ReleaseRequest, json_body(ReleaseRequest)],
) -> AttemptView:
    """Give a claimed attempt back, to be played again. Its episode ends as abandoned, and the try does not count."""
    async with db.write() as session:
        await tries.release(session, caller.project_id, run, attempt_id, body.fence)
        return await attempt_views.view_attempt(session, caller.project_id, run, attempt_id)
