"""/v1/subjects/{id}: what is stored of a data subject, its export, and its erasure."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response, StreamingResponse

from app.core.database import Database
from app.core.errors import ERROR_RESPONSES, NotFound
from app.core.services import settings_of
from app.policies import ancestry
from app.policies import repository as policies
from app.policies.references import version_name
from app.privacy import erasure, export, repository
from app.privacy.identities import SubjectNames
from app.privacy.lineage import repository as lineage
from app.privacy.lineage.schemas import TrainedVersionView
from app.privacy.schemas import RollbackTarget, SubjectErased, SubjectView
from app.projects.auth import AdminCaller, UnboundedDatabaseDep

router = APIRouter(prefix="/v1/subjects", tags=["subjects"], responses=ERROR_RESPONSES)
SubjectId = Annotated[str, Path(min_length=1, max_length=512, description='an end user, or a source: "HUMAN/user-7"')]
NDJSON = "application/x-ndjson"
NDJSON_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "One JSON object per line", "content": {NDJSON: {"schema": {"type": "string"}}}}
}


@router.get("/{id:path}/export", response_class=Response, responses=NDJSON_RESPONSE)
async def export_subject(id: SubjectId, caller: AdminCaller, db: UnboundedDatabaseDep) -> Response:
    """Return everything stored of the subject, and the feedback on the subject's turns."""
    names = SubjectNames.of(caller.project_id, id)
    await _require_records(db, names)
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(id, safe='')}.ndjson"}
    return StreamingResponse(export.export_lines(db, names), headers=headers, media_type=NDJSON)


@router.get("/{id:path}")
async def get_subject(request: Request, id: SubjectId, caller: AdminCaller, db: UnboundedDatabaseDep) -> SubjectView:
    """Return how much is stored of the subject, and which versions learned from it."""
    names = SubjectNames.of(caller.project_id, id)
    await _require_records(db, names)
    async with db.read() as session:
        counts = await repository.count_records(session, names)
        raters = [row.name for row in await repository.list_raters(session, names)]
        records = await repository.find_records(session, names)
        direct = await lineage.versions_trained_on_turns(session, dict.fromkeys(records.turns, 0.0))
        kinds = await lineage.list_reward_kinds(session, caller.project_id, settings_of(request))
        direct |= await lineage.versions_trained_on_feedback(session, kinds, records.feedback)
        versions = await lineage.list_trained_versions(session, direct)
    return SubjectView(id=id, **counts, raters=raters, versions=[TrainedVersionView.of(row) for row in versions])


@router.delete("/{id:path}")
async def erase_subject(
    request: Request, id: SubjectId, caller: AdminCaller, db: UnboundedDatabaseDep
) -> SubjectErased:
    """Erase the subject: nothing of it can be read or trained on any more.

    Versions that have learned from it are marked; `rollback` names the versions to return to.
    """
    names = SubjectNames.of(caller.project_id, id)
    result = await erasure.erase_subject(db, names, settings_of(request), actor=caller.key_prefix)
    if result is None:
        raise _not_found(id)
    async with db.read() as session:
        versions = await lineage.list_trained_versions(session, result.version_ids)
        targets = await _list_rollback_targets(session, caller.project_id)
    return SubjectErased(
        id=id,
        turns=result.turns,
        feedback=result.feedback,
        rewards=result.rewards,
        pins=result.pins,
        batches=result.batches,
        versions=[TrainedVersionView.of(row) for row in versions],
        reward_models=sorted(result.reward_models),
        rollback=targets,
        purged=result.purged,
    )


async def _require_records(db: Database, names: SubjectNames) -> None:
    async with db.read() as session:
        if not await repository.find_records(session, names) and not await repository.has_other_records(session, names):
            raise _not_found(names.id)


def _not_found(id: str) -> NotFound:
    return NotFound(f"Nothing is stored of '{id}'.", param="id")


async def _list_rollback_targets(session: AsyncSession, project_id: str) -> list[RollbackTarget]:
    """Return, for each policy whose serving version learned from erased data, the last version that did not."""
    targets = []
    for policy in await policies.list_policies(session, project_id):
        deployment = await policies.get_deployment(session, policy.id)
        serving = await policies.get_version(session, deployment.version_id)
        target = await ancestry.find_untainted_ancestor(session, policy.id, serving)
        if target is not None:
            targets.append(
                RollbackTarget(
                    policy=policy.name,
                    serving=version_name(policy, serving),
                    untainted_ancestor=version_name(policy, target),
                    version=target.number,
                )
            )
    return targets
