"""/v1/subjects/{id}: what is on record of a person, all of it as a file, and its erasure."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response, StreamingResponse

from app.core.database import Database
from app.core.errors import DOCUMENTED, NotFound
from app.core.services import settings_of
from app.policies import repository as policies
from app.policies import service, taint
from app.privacy import export, repository
from app.privacy.erasure import erase
from app.privacy.identities import Names
from app.privacy.lineage import repository as lineage
from app.privacy.lineage.schemas import LearnerView
from app.privacy.schemas import SubjectErased, SubjectView, WayBack
from app.projects.auth import AdminCaller, UnboundedDatabaseDep

router = APIRouter(prefix="/v1/subjects", tags=["subjects"], responses=DOCUMENTED)
SubjectId = Annotated[str, Path(min_length=1, max_length=512, description='an end user, or a source: "HUMAN/user-7"')]
NDJSON = "application/x-ndjson"
SENDS: dict[int | str, dict[str, Any]] = {
    200: {"description": "A line of JSON each", "content": {NDJSON: {"schema": {"type": "string"}}}}
}


@router.get("/{id:path}/export", response_class=Response, responses=SENDS)
async def export_subject(id: SubjectId, caller: AdminCaller, db: UnboundedDatabaseDep) -> Response:
    """Everything of theirs, and what was said about their turns."""
    names = Names.of(caller.project_id, id)
    await _known(db, names)
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(id, safe='')}.ndjson"}
    return StreamingResponse(export.lines(db, names), headers=headers, media_type=NDJSON)


@router.get("/{id:path}")
async def get_subject(request: Request, id: SubjectId, caller: AdminCaller, db: UnboundedDatabaseDep) -> SubjectView:
    names = Names.of(caller.project_id, id)
    await _known(db, names)
    async with db.read() as session:
        counts = await repository.counts(session, names)
        raters = [row.name for row in await repository.raters(session, names)]
        found = await repository.found(session, names)
        direct = await lineage.learned_from(session, dict.fromkeys(found.turns, 0.0))
        kinds = await lineage.teaching(session, caller.project_id, settings_of(request))
        direct |= await lineage.taught_by(session, kinds, found.words)
        learners = await lineage.learners(session, direct)
    return SubjectView(id=id, **counts, raters=raters, versions=[LearnerView.of(one) for one in learners])


@router.delete("/{id:path}")
async def erase_subject(
    request: Request, id: SubjectId, caller: AdminCaller, db: UnboundedDatabaseDep
) -> SubjectErased:
    """Nothing of it can be read or learned from any more. What has learned from it is marked; see `rollback`."""
    names = Names.of(caller.project_id, id)
    done = await erase(db, names, settings_of(request), actor=caller.key_prefix)
    if done is None:
        raise _nobody(id)
    async with db.read() as session:
        learners = await lineage.learners(session, done.version_ids)
        back = await ways_back(session, caller.project_id)
    return SubjectErased(
        id=id,
        turns=done.turns,
        feedback=done.feedback,
        rewards=done.rewards,
        pins=done.pins,
        batches=done.batches,
        versions=[LearnerView.of(one) for one in learners],
        reward_models=sorted(done.reward_models),
        rollback=back,
        scrubbed=done.scrubbed,
    )


async def _known(db: Database, names: Names) -> None:
    async with db.read() as session:
        if not await repository.found(session, names) and not await repository.on_record(session, names):
            raise _nobody(names.id)


def _nobody(id: str) -> NotFound:
    return NotFound(f"Nothing is on record of '{id}'.", param="id")


async def ways_back(session: AsyncSession, project_id: str) -> list[WayBack]:
    """For each policy whose serving version has learned from erased data, the last one that has not."""
    found = []
    for policy in await policies.policies_of(session, project_id):
        deployment = await policies.deployment_of(session, policy.id)
        serving = await policies.version(session, deployment.version_id)
        target = await taint.way_back(session, policy.id, serving)
        if target is not None:
            labels = {"serving": service.label(policy, serving), "clean": service.label(policy, target)}
            found.append(WayBack(policy=policy.name, version=target.number, **labels))
    return found
