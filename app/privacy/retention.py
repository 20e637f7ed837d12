"""Retention: removes what a project no longer keeps, in steps of one short transaction each.

An expired turn becomes what the deletion of its completion leaves: ids, times, token counts and version stay, so that
lineage and all counts stay right, and so does the row of its sample. Expired feedback keeps its value, its time and a
pseudonym of its source. Whole rows go only from datasets and from the beginning of the audit log.

What is in use does not expire (`app.privacy.expired_rows`). A turn whose messages begin the prompt of a later turn does
not expire before that turn, because the later turn quotes it. A conversation that has expired is removed from its end,
up to STEP turns in one transaction.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

from sqlalchemy import delete, null, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased, load_only

from app.chat import repository as chats
from app.core.database import Database, now
from app.core.planner import prefer_indexes
from app.core.retention_config import RetentionConfig
from app.core.settings import Settings
from app.datasets import removal
from app.models import (
    Audit,
    AuditAction,
    AuditChain,
    Dataset,
    Feedback,
    Project,
    Reward,
    Sample,
    Turn,
    record_audit,
)
from app.privacy.expired_rows import (
    created_before,
    has_row,
    is_expired_turn,
    is_unused,
    select_datasets,
    select_ends,
    select_feedback,
)
from app.raters import names
from app.training import unlearning

STEP = 200  # rows of one kind that one transaction removes
ACTOR = "retention"
Kind = str  # "turns", "feedback", "audit" or "datasets"
RECORDED_KINDS = ("turns", "feedback")


def own_retention(project: Project) -> dict[str, object]:
    """Return the project's own values. Fields of a newer release are left out: it may have run before this one."""
    return {name: value for name, value in (project.retention or {}).items() if name in RetentionConfig.model_fields}


def effective_retention(project: Project, settings: Settings) -> RetentionConfig:
    """Return what the project keeps: its own values, and the deployment's where it has none.

    Feedback is kept at least as long as turns, also if the deployment's values have changed since the project's were
    checked.
    """
    values = settings.privacy.retention.model_dump(exclude={"logs"}) | own_retention(project)
    turns, feedback = values["turns"] or None, values["feedback"] or None  # 0 is for ever, too
    if feedback is not None:
        values["feedback"] = None if turns is None else max(turns, feedback)
    return RetentionConfig.model_validate(values)


async def remove_turns(session: AsyncSession, project_id: str, days: float, ids: Collection[str]) -> int:
    """Empty those of the turns that are expired, with the group samples and shadow replies beside them.

    The rows are locked in the order of an erasure, and checked again under the locks. Returns their number.
    """
    await unlearning.lock_policies_and_turns(session, project_id, ids)
    turns = await _exclude_quoted(session, ids, project_id, days)
    if not turns:
        return 0
    await chats.erase(session, turns)
    emptied = await _find_emptied(session, turns)
    await session.execute(update(Turn).where(Turn.id.in_(emptied)).values(sampling={}))
    await session.execute(update(Sample).where(Sample.turn_id.in_(emptied)).values(rater=None, cluster=None))
    return len(turns)


async def find_turns(session: AsyncSession, project_id: str, days: float) -> Sequence[str]:
    """Return the ids of up to STEP turns that can be removed in one transaction.

    These are the ends of conversations, and if they are fewer than STEP, the turns that only they quote.
    """
    ends = list(await session.scalars(select_ends(project_id, days).limit(STEP)))
    if not 0 < len(ends) < STEP:
        return ends
    chain = select(Turn.id, Turn.history_id).where(Turn.id.in_(ends)).cte("chain", recursive=True)
    history = aliased(Turn)
    histories = select(history.id, history.history_id).join(chain, history.id == chain.c.history_id)
    chain = chain.union(histories.where(is_expired_turn(history, project_id, days)))
    # Both databases walk the chains level by level and stop at the limit, so the turns nearest to the ends come first.
    ids = list(await session.scalars(select(chain.c.id).limit(STEP)))
    return [turn.id for turn in await _exclude_quoted(session, ids, project_id, days)]


async def _exclude_quoted(session: AsyncSession, ids: Collection[str], project_id: str, days: float) -> list[Turn]:
    """Return those of the turns that are expired, unused, and quoted by none but the returned ones."""
    expired = select(Turn).where(Turn.id.in_(ids), is_expired_turn(Turn, project_id, days), is_unused())
    columns = (Turn.id, Turn.history_id, Turn.completion_id)
    rows = await session.scalars(expired.options(load_only(*columns)).execution_options(populate_existing=True))
    turns = {turn.id: turn for turn in rows}
    quotes = (Turn.history_id.in_(turns), Turn.id.not_in(turns), Turn.deleted_at.is_(None))
    quoted: list[str | None] = list(await session.scalars(select(Turn.history_id).where(*quotes).distinct()))
    while quoted:
        turn = turns.pop(quoted.pop() or "", None)
        if turn is not None:  # it is kept, and what it quotes is kept with it
            quoted.append(turn.history_id)
    return list(turns.values())


async def _find_emptied(session: AsyncSession, turns: Collection[Turn]) -> set[str]:
    """Return the ids of these turns and of the group samples and shadow replies that were emptied with them."""
    ids = {turn.id for turn in turns}
    completion_ids = {turn.completion_id for turn in turns} - {None}
    for is_emptied_too in (Turn.completion_id.in_(completion_ids), Turn.shadow_of_id.in_(ids)):
        ids |= set(await session.scalars(select(Turn.id).where(is_emptied_too, Turn.deleted_at.is_not(None))))
    return ids


async def find_feedback(session: AsyncSession, project_id: str, days: float) -> Sequence[int]:
    """Return the numbers of up to STEP expired feedback events."""
    return list(await session.scalars(select_feedback(project_id, days).limit(STEP)))


async def remove_feedback(session: AsyncSession, project_id: str, days: float, seqs: Collection[int]) -> int:
    """Empty those of the feedback events that are expired, and name their sources, also those of rewards, by a hash."""
    expired = select_feedback(project_id, days).where(Feedback.seq.in_(seqs))
    seqs = list(await session.scalars(expired))
    query = select(Feedback).where(Feedback.seq.in_(seqs), Feedback.emptied_at.is_(None)).order_by(Feedback.seq)
    rows = {row.seq: row for row in await session.scalars(query.with_for_update())}
    rewards = select(Reward).where(Reward.feedback_seq.in_(rows)).order_by(Reward.turn_id, Reward.source)
    for reward in await session.scalars(rewards.with_for_update()):
        _rename_source(reward, rows[reward.feedback_seq or 0])
    for row in rows.values():
        row.comment, row.request_metadata = None, {}
        if row.value is None:  # a correction or a label; numbers say nothing about the person
            row.raw_value = null()
        row.source_id, row.emptied_at = _pseudonym(row), now()
    return len(rows)


def _pseudonym(row: Feedback) -> str | None:
    """Return a name that equals that of other feedback of the source: its latest feedback stays the effective one."""
    return None if row.source_id is None else names.pseudonym(row.project_id, row.source_kind, row.source_id)


def _rename_source(reward: Reward, row: Feedback) -> None:
    """Give the reward the names that it would have if its feedback had come with the pseudonym."""
    if (pseudonym := _pseudonym(row)) is None:
        return
    if reward.source.endswith(f"/{row.source_id}"):
        reward.source = reward.source.removesuffix(row.source_id or "") + pseudonym
    if reward.rater == names.feedback_rater(row.source_kind, row.source_id):
        reward.rater = names.feedback_rater(row.source_kind, pseudonym)


async def find_datasets(session: AsyncSession, project_id: str, days: float) -> Sequence[str]:
    """Return the id of one expired dataset."""
    return list(await session.scalars(select_datasets(project_id, days).limit(1)))


async def remove_datasets(session: AsyncSession, project_id: str, days: float, ids: Collection[str]) -> int:
    """Hide one expired dataset, and name it in the audit log; return how many. Its rows are removed afterwards."""
    expired = select_datasets(project_id, days).where(Dataset.id.in_(ids)).limit(1)
    dataset = await session.scalar(select(Dataset).where(Dataset.id.in_(expired)).with_for_update())
    if dataset is None:
        return 0
    record_audit(
        session,
        ACTOR,
        AuditAction.DATASET_DELETED,
        dataset.id,
        project_id=project_id,
        name=dataset.name,
        kind=dataset.kind,
        rows=dataset.num_rows,
    )
    removal.hide(dataset)
    return 1


async def find_audit(session: AsyncSession, project_id: str, days: float) -> Sequence[int]:
    """Return the places of up to STEP expired entries, from the beginning of the project's chain on.

    The last of them becomes the checkpoint from which the chain is verified. An entry in the chain names it too. So
    that these entries do not become as many as those that expire, there are none until a full step or a day's worth of
    entries has expired.
    """
    chain = await session.get(AuditChain, project_id, populate_existing=True)
    if chain is None:
        return []
    in_chain = (Audit.project_id == project_id, Audit.chain_number > chain.start_number)
    is_expired = created_before(Audit.created_at, days)
    for_a_day = created_before(Audit.created_at, days + 1)
    first = select(Audit.chain_number, is_expired, for_a_day).where(*in_chain)
    rows = (await session.execute(first.order_by(Audit.chain_number).limit(STEP))).all()
    expired = list(takewhile(lambda row: row[1], rows))
    if len(expired) < STEP and not any(row[2] for row in expired):
        return []
    return [row.chain_number for row in expired]


async def remove_audit(session: AsyncSession, project_id: str, days: float, numbers: Sequence[int]) -> int:
    """Delete the entries at these places, the first of the project's chain; return how many."""
    chain = await session.get_one(AuditChain, project_id, with_for_update=True)
    if list(numbers) != await find_audit(session, project_id, days):
        return 0  # somebody else has removed them
    is_last = (Audit.project_id == project_id, Audit.chain_number == numbers[-1])
    chain.start_number = numbers[-1]
    chain.start_hash = await session.scalar(select(Audit.chain_hash).where(*is_last)) or ""
    await session.flush()  # the triggers allow the deletion of entries up to it
    last = Audit.chain_number <= chain.start_number
    await session.execute(delete(Audit).where(Audit.project_id == project_id, Audit.chain_number.is_not(None), last))
    record_audit(
        session,
        ACTOR,
        AuditAction.AUDIT_EXPIRED,
        project_id,
        project_id=project_id,
        number=chain.start_number,
        hash=chain.start_hash,
        entries=len(numbers),
    )
    return len(numbers)


Finder = Callable[[AsyncSession, str, float], Awaitable[Sequence[Any]]]
Remover = Callable[[AsyncSession, str, float, Sequence[Any]], Awaitable[int]]
STEPS: dict[Kind, tuple[Finder, Remover]] = {
    "turns": (find_turns, remove_turns),
    "feedback": (find_feedback, remove_feedback),
    "datasets": (find_datasets, remove_datasets),
    "audit": (find_audit, remove_audit),
}


async def remove_expired(db: Database, project_id: str, kind: Kind, days: float, actor: str = ACTOR) -> int:
    """Remove one step of one kind, with an audit entry, and return the number of rows.

    What has expired is looked for before the transaction that removes it: nobody waits for that.

    Each step of an operator is recorded. Those in the background are recorded once a day for each kind, since the log
    would grow by an entry for every few rows. Removed datasets and audit entries have entries of their own.
    """
    find, remove = STEPS[kind]
    async with db.read() as session:
        await prefer_indexes(session)
        found = await find(session, project_id, days)
    if not found:
        return 0

    async def remove_found(session: AsyncSession) -> int:
        await prefer_indexes(session)
        count = await remove(session, project_id, days, found)
        if not count or kind not in RECORDED_KINDS:
            return count
        details = {"days": days} if actor == ACTOR else {"rows": count}
        if actor != ACTOR or not await _was_recorded_today(session, project_id, kind):
            action = AuditAction.RETENTION_APPLIED
            record_audit(session, actor, action, project_id, None, project_id=project_id, kind=kind, **details)
        return count

    return await db.retry_on_deadlock(remove_found)


async def _was_recorded_today(session: AsyncSession, project_id: str, kind: Kind) -> bool:
    """Return whether a step of this kind in the background has an entry of the last 24 hours."""
    is_applied = (Audit.action == AuditAction.RETENTION_APPLIED, Audit.subject == project_id, Audit.actor == ACTOR)
    is_recent = (Audit.details["kind"].as_string() == kind, ~created_before(Audit.created_at, 1))
    return (
        await session.scalar(select(has_row(Audit, Audit.project_id == project_id, *is_applied, *is_recent))) or False
    )
