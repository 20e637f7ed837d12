"""Retention: removes what a project no longer keeps, in steps of one short transaction each.

An expired turn becomes what the deletion of its completion leaves: ids, times, token counts and version stay, so that
lineage and all counts stay right, and so does the row of its sample. Expired feedback keeps its value, its time and a
pseudonym of its source. Whole rows go only from datasets and from the beginning of the audit log.

What is in use does not expire: see `_is_unused`. A turn whose messages begin the prompt of a later turn does not expire
before that turn, because the later turn quotes it. A conversation that has expired is removed from its end, up to STEP
turns in one transaction.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, literal, null, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased, load_only
from sqlalchemy.orm.util import AliasedClass

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
    Base,
    Batch,
    BatchState,
    Dataset,
    Feedback,
    FeedbackRank,
    Judgement,
    JudgementState,
    PlanState,
    Project,
    Reward,
    RewardModel,
    RewardModelState,
    RewardModelTurn,
    RolloutPlan,
    Sample,
    SampleState,
    Turn,
    TurnState,
    record_audit,
)
from app.raters import names
from app.training import unlearning

STEP = 200  # rows of one kind that one transaction removes
SECONDS_PER_DAY = 86_400.0
ACTOR = "retention"
WAITING = (SampleState.OPEN, SampleState.QUARANTINED, SampleState.BATCHED)
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


def _created_before(column: InstrumentedAttribute[float], days: float) -> ColumnElement[bool]:
    return column < now() - days * SECONDS_PER_DAY


def _has_row(table: type[Base] | AliasedClass[Base], *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a row exists, as a subquery that is evaluated for each row of the query around it.

    OFFSET 0 keeps PostgreSQL from joining whole tables instead: few rows are asked about, each by an index.
    """
    return select(literal(1)).select_from(table).where(*conditions).offset(0).exists()


def _is_in_use(turn: type[Turn]) -> ColumnElement[bool]:
    """Return the condition that something waits for this turn.

    It or feedback on it is not processed, its sample waits or is in an open batch, a judgement is open, or a reward
    model is being fitted on it.
    """
    is_of_episode = and_(Feedback.project_id == turn.project_id, Feedback.episode_id == turn.episode_id)
    is_of_conversation = and_(Feedback.project_id == turn.project_id, Feedback.conversation_id == turn.conversation_id)
    return or_(
        turn.state == TurnState.OPEN,
        ~turn.processed,
        _has_row(Sample, Sample.turn_id == turn.id, Sample.state.in_(WAITING)),
        _has_row(Judgement, Judgement.turn_id == turn.id, Judgement.state == JudgementState.OPEN),
        _has_row(Feedback, Feedback.turn_id == turn.id, ~Feedback.processed),
        _has_row(Feedback, is_of_conversation, ~Feedback.processed),
        _has_row(Feedback, is_of_episode, ~Feedback.processed),
        _has_row(
            FeedbackRank,
            FeedbackRank.turn_id == turn.id,
            _has_row(Feedback, Feedback.seq == FeedbackRank.feedback_seq, ~Feedback.processed),
        ),
        _has_row(
            RewardModelTurn,
            RewardModelTurn.turn_id == turn.id,
            _has_row(
                RewardModel,
                RewardModel.id == RewardModelTurn.reward_model_id,
                RewardModel.state == RewardModelState.OPEN,
            ),
        ),
    )


def _is_unused() -> ColumnElement[bool]:
    """Return the condition that nothing waits for the turn, for another reply to its prompt, or for a shadow reply."""
    reply, shadow = aliased(Turn), aliased(Turn)
    is_other = and_(reply.completion_id == Turn.completion_id, reply.id != Turn.id)
    return and_(
        ~_is_in_use(Turn),
        ~_has_row(reply, is_other, _is_in_use(reply)),
        ~_has_row(shadow, shadow.shadow_of_id == Turn.id, _is_in_use(shadow)),
    )


def _is_expired(turn: type[Turn], project_id: str, days: float) -> ColumnElement[bool]:
    return and_(turn.project_id == project_id, turn.deleted_at.is_(None), _created_before(turn.created_at, days))


def select_ends(project_id: str, days: float) -> Select[str]:
    """Return a query for the ids of the expired turns that no turn with content quotes, the oldest first.

    Each of them can be removed, so a step always makes progress, however many turns are in use.
    """
    later = aliased(Turn)
    is_quoted = _has_row(later, later.history_id == Turn.id, later.deleted_at.is_(None))
    conditions = (_is_expired(Turn, project_id, days), ~is_quoted, _is_unused())
    return select(Turn.id).where(*conditions).order_by(Turn.created_at, Turn.id)


def select_turns(project_id: str, days: float) -> Select[str]:
    """Return a query for the ids of all turns that can be removed. It reads every expired turn: too slow for a step."""
    later, history = aliased(Turn), aliased(Turn)
    is_expired = _is_expired(Turn, project_id, days)
    is_quoted = _has_row(
        later, later.history_id == Turn.id, later.deleted_at.is_(None), ~_created_before(later.created_at, days)
    )
    needed = select(Turn.id, Turn.history_id).where(is_expired, or_(is_quoted, ~_is_unused()))
    remaining = needed.cte("remaining", recursive=True)
    histories = select(history.id, history.history_id).join(remaining, history.id == remaining.c.history_id)
    remaining = remaining.union(histories)
    return select(Turn.id).where(is_expired, ~exists().where(remaining.c.id == Turn.id))


def select_feedback(project_id: str, days: float) -> Select[int]:
    """Return a query for the numbers of the expired feedback, the oldest first.

    Feedback on a turn, a conversation or an episode that is kept, or that an open batch learns from, is kept.
    """
    turn, ranked, of_conversation, of_episode = aliased(Turn), aliased(Turn), aliased(Turn), aliased(Turn)
    uses = (
        _has_row(turn, turn.id == Feedback.turn_id, turn.deleted_at.is_(None)),
        _has_row(
            FeedbackRank,
            FeedbackRank.feedback_seq == Feedback.seq,
            _has_row(ranked, ranked.id == FeedbackRank.turn_id, ranked.deleted_at.is_(None)),
        ),
        _has_row(
            of_conversation,
            of_conversation.project_id == Feedback.project_id,
            of_conversation.conversation_id == Feedback.conversation_id,
            of_conversation.deleted_at.is_(None),
        ),
        _has_row(of_episode, of_episode.episode_id == Feedback.episode_id, of_episode.deleted_at.is_(None)),
        _has_row(Batch, Batch.id == Feedback.batch_id, Batch.state == BatchState.OPEN),
    )
    conditions = (Feedback.project_id == project_id, Feedback.emptied_at.is_(None), Feedback.processed)
    query = select(Feedback.seq).where(*conditions, _created_before(Feedback.created_at, days))
    return query.where(*(~use for use in uses)).order_by(Feedback.created_at, Feedback.seq)


def select_datasets(project_id: str, days: float) -> Select[str]:
    """Return a query for the ids of the expired datasets that no rollout plan still reads."""
    is_read = exists().where(
        RolloutPlan.dataset_id == Dataset.id, RolloutPlan.state.in_((PlanState.RUNNING, PlanState.PAUSED))
    )
    is_visible = (Dataset.project_id == project_id, Dataset.importing_until.is_(None))
    conditions = (*is_visible, _created_before(Dataset.created_at, days))
    return select(Dataset.id).where(*conditions, ~is_read).order_by(Dataset.created_at, Dataset.id)


def select_audit(project_id: str, days: float) -> Select[int | None]:
    """Return a query for the places in the chain of the expired entries: a part from its beginning on, without gaps."""
    remaining = aliased(Audit)
    first_remaining = select(func.min(remaining.chain_number)).where(
        remaining.project_id == project_id,
        remaining.chain_number.is_not(None),
        ~_created_before(remaining.created_at, days),
    )
    is_before = or_(first_remaining.scalar_subquery().is_(None), Audit.chain_number < first_remaining.scalar_subquery())
    conditions = (Audit.project_id == project_id, Audit.chain_number.is_not(None))
    return (
        select(Audit.chain_number)
        .where(*conditions, _created_before(Audit.created_at, days), is_before)
        .order_by(Audit.chain_number)
    )


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
    chain = chain.union(histories.where(_is_expired(history, project_id, days)))
    # Both databases walk the chains level by level and stop at the limit, so the turns nearest to the ends come first.
    ids = list(await session.scalars(select(chain.c.id).limit(STEP)))
    return [turn.id for turn in await _exclude_quoted(session, ids, project_id, days)]


async def _exclude_quoted(session: AsyncSession, ids: Collection[str], project_id: str, days: float) -> list[Turn]:
    """Return those of the turns that are expired, unused, and quoted by none but the returned ones."""
    expired = select(Turn).where(Turn.id.in_(ids), _is_expired(Turn, project_id, days), _is_unused())
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
    is_expired = _created_before(Audit.created_at, days)
    for_a_day = _created_before(Audit.created_at, days + 1)
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
    is_recent = (Audit.details["kind"].as_string() == kind, ~_created_before(Audit.created_at, 1))
    return (
        await session.scalar(select(_has_row(Audit, Audit.project_id == project_id, *is_applied, *is_recent))) or False
    )
