"""/v1/subjects/{id}: what is stored of a data subject, its export, and its erasure."""

from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response, StreamingResponse

from app.core.errors import ERROR_RESPONSES, NotFound
from app.core.http import settings_of
from app.models import AuditAction, record_audit
from app.policies import repository as policies
from app.policies.references import version_name
from app.privacy import erasure, lineage, subjects
from app.privacy.lineage import TrainedVersionView
from app.privacy.subjects import SubjectNames, SubjectRecords
from app.projects.auth import AdminCaller, LongRunningDatabaseDep

router = APIRouter(prefix="/v1/subjects", tags=["subjects"], responses=ERROR_RESPONSES)
SubjectId = Annotated[str, Path(min_length=1, max_length=512, description='an end user, or a source: "HUMAN/user-7"')]
NDJSON = "application/x-ndjson"
NDJSON_RESPONSE: dict[int | str, dict[str, object]] = {
    200: {"description": "One JSON object per line", "content": {NDJSON: {"schema": {"type": "string"}}}}
}


class SubjectView(BaseModel):
    object: Literal["subject"] = "subject"
    id: str
    turns: int = Field(description="turns that name the subject as end user, or continue one that does")
    feedback: int = Field(description="feedback by the subject, and on the subject's turns")
    rewards: int
    judgements: int
    samples: int
    pins: int = Field(description="pins of the subject and of the subject's conversations")
    raters: list[str] = Field(description="the names under which the subject's feedback is weighted")
    versions: list[TrainedVersionView] = Field(description="versions that learned from it, with their descendants")


class RollbackTarget(BaseModel):
    """The last version without erased data: POST /v1/policies/{policy}/rollback {"version": number}."""

    policy: str
    serving: str
    untainted_ancestor: str
    version: int


class SubjectErased(BaseModel):
    object: Literal["subject.erased"] = "subject.erased"
    id: str
    turns: int
    feedback: int
    rewards: int
    pins: int = Field(description="pins of the subject, and of conversations of which no turn is left")
    batches: list[str] = Field(description="batches with the subject's samples: refused, their other samples reopened")
    versions: list[TrainedVersionView] = Field(description="versions that had learned from it, with their descendants")
    reward_models: list[str] = Field(description="reward models that had learned from it; none of them serves any more")
    rollback: list[RollbackTarget] = Field(description="for policies whose serving version learned from erased data")
    purged: bool = Field(description="false: the database's files still contain copies; repeat the request")


@router.get("/{id:path}/export", response_class=Response, responses=NDJSON_RESPONSE)
async def export_subject(id: SubjectId, caller: AdminCaller, db: LongRunningDatabaseDep) -> Response:
    """Return everything stored of the subject, and the feedback on the subject's turns."""
    names = SubjectNames.of(caller.project_id, id)
    async with db.read() as session:
        records = await _get_records(session, names)
    async with db.write() as session:
        action = AuditAction.SUBJECT_EXPORTED
        record_audit(session, caller.key_prefix, action, names.sha256, project_id=caller.project_id)
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(id, safe='')}.ndjson"}
    return StreamingResponse(subjects.export_lines(db, records), headers=headers, media_type=NDJSON)


@router.get("/{id:path}")
async def get_subject(request: Request, id: SubjectId, caller: AdminCaller, db: LongRunningDatabaseDep) -> SubjectView:
    """Return how much is stored of the subject, and which versions learned from it."""
    names = SubjectNames.of(caller.project_id, id)
    async with db.read() as session:
        records = await _get_records(session, names)
        direct = await lineage.versions_trained_on_turns(session, dict.fromkeys(records.turns, 0.0))
        kinds = await lineage.list_reward_kinds(session, caller.project_id, settings_of(request))
        direct |= await lineage.versions_trained_on_feedback(session, kinds, records.feedback)
        return SubjectView(
            id=id,
            turns=len(records.turns),
            pins=len(records.pins),
            **await subjects.count_rows(session, names),
            raters=[rater.name for rater in records.raters],
            versions=await lineage.list_trained_versions(session, direct),
        )


@router.delete("/{id:path}")
async def erase_subject(
    request: Request, id: SubjectId, caller: AdminCaller, db: LongRunningDatabaseDep
) -> SubjectErased:
    """Erase the subject: nothing of it can be read or trained on any more.

    Versions that have learned from it are marked; `rollback` names the versions to return to.
    """
    names = SubjectNames.of(caller.project_id, id)
    result = await erasure.erase_subject(db, names, settings_of(request), actor=caller.key_prefix)
    if result is None:
        raise _not_found(id)
    purged = await erasure.purge_deleted(db)
    async with db.read() as session:
        versions = await lineage.list_trained_versions(session, result.versions)
        targets = await _list_rollback_targets(session, caller.project_id)
    learned = {"versions": versions, "reward_models": sorted(set(result.reward_models))}
    return SubjectErased(**{**vars(result), **learned}, id=id, rollback=targets, purged=purged)


async def _get_records(session: AsyncSession, names: SubjectNames) -> SubjectRecords:
    """Return what is stored of the subject. Raises NotFound if that is nothing."""
    records = await subjects.find_records(session, names)
    if not records:
        raise _not_found(names.id)
    return records


def _not_found(id: str) -> NotFound:
    return NotFound(f"Nothing is stored of '{id}'.", param="id")


async def _list_rollback_targets(session: AsyncSession, project_id: str) -> list[RollbackTarget]:
    """Return, for each policy whose serving version learned from erased data, the last version that did not."""
    targets = []
    for policy in await policies.list_policies(session, project_id):
        deployment = await policies.get_deployment(session, policy.id)
        serving = await policies.get_version(session, deployment.version_id)
        target = await policies.find_untainted_ancestor(session, policy.id, serving)
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
