"""Which feedback and turns the curate stage takes next: the same share of each project, and no more than a short
transaction can process."""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from app.core.rows import AnyRow, AnySelect
from app.models import Episode, EpisodeState, Feedback, FeedbackRank, Origin, Turn, TurnState
from app.training.episode_groups import MAX_SERIES_TURNS
from workers.feedback import signals
from workers.feedback.signals import FinishedTurn

MAX_PAGE_CONVERSATIONS = 20  # each may have hundreds of turns
Target = tuple[str, str]  # project id and target


class PageSize(NamedTuple):
    """The most feedback events of a page, and the most rows that processing it reads: turns, and feedback on them.

    `with_groups`: feedback on an episode, or on a turn of it, also reads the other episodes of its group.
    """

    events: int
    rows: int
    with_groups: bool = False


class FeedbackPage(NamedTuple):
    """Unprocessed feedback by sequence number, and its turns in order of creation. `is_last`: nothing else waits."""

    seqs: list[int]
    turns: list[FinishedTurn]
    is_last: bool


async def read_page(session: AsyncSession, size: PageSize) -> FeedbackPage:
    """Return the oldest unprocessed feedback of each project, the same share of the page for each.

    Feedback about replies that still stream, and about open episodes, waits for their end. A page has one event at
    least, whatever it costs.
    """
    open_turn = aliased(Turn)
    ranks_open_turn = exists().where(
        FeedbackRank.feedback_seq == Feedback.seq,
        open_turn.id == FeedbackRank.turn_id,
        open_turn.state == TurnState.OPEN,
    )
    is_about_open_conversation = exists().where(
        Feedback.turn_id.is_(None),
        open_turn.project_id == Feedback.project_id,
        open_turn.conversation_id == Feedback.conversation_id,
        open_turn.state == TurnState.OPEN,
        open_turn.created_at <= Feedback.created_at,  # not the replies that began later
    )
    is_about_open_episode = or_(
        exists().where(Episode.id == Feedback.episode_id, Episode.state == EpisodeState.OPEN),
        exists().where(open_turn.episode_id == Feedback.episode_id, open_turn.state == TurnState.OPEN),
    )
    columns = (Feedback.seq, Feedback.turn_id, Feedback.project_id, Feedback.target)
    wholes = (Feedback.conversation_id, Feedback.episode_id)
    query = (
        select(*columns, *wholes, func.coalesce(Feedback.episode_id, Turn.episode_id).label("in_episode"))
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(~Feedback.processed, or_(Turn.id.is_(None), Turn.state != TurnState.OPEN))
        .where(~ranks_open_turn, ~is_about_open_conversation, ~is_about_open_episode)
        .order_by(Feedback.seq)
    )
    rows, is_cut = await read_in_turn(session, query, Feedback.project_id, ~Feedback.processed, size.events)
    num_rows = await _count_rows(session, rows)
    page = _cut(rows, num_rows, await _count_groups(session, rows) if size.with_groups else {}, size.rows)
    is_cut = is_cut or len(page) < len(rows)
    conversations = {
        (row.project_id, row.conversation_id) for row in page if row.turn_id is None and row.conversation_id is not None
    }
    episodes = {(row.project_id, row.episode_id) for row in page if row.episode_id is not None}
    targets = {(row.project_id, row.target) for row in page if row.turn_id is None}
    turn_ids = {row.turn_id for row in page if row.turn_id is not None}
    turn_ids |= await signals.read_ranked_turn_ids(session, targets)
    turns = await signals.read_finished_turns(session, turn_ids)
    turns += await signals.read_series(session, "conversation", conversations)
    turns += await signals.read_series(session, "episode", episodes)
    return FeedbackPage([row.seq for row in page], signals.in_order(turns), is_last=not is_cut)


def _is_about_whole(row: AnyRow) -> bool:
    """Whether the feedback is about a whole conversation or episode."""
    return row.turn_id is None and (row.conversation_id is not None or row.episode_id is not None)


def _cut(
    rows: Sequence[AnyRow], num_rows: Mapping[Target, int], groups: Mapping[str, "GroupRows"], limit: int
) -> list[AnyRow]:
    """Return the first events of each project, whose targets have few conversations, and at most `limit` rows together.

    The projects share the limits, and each has one event at least, however much is read for it.
    """
    by_project: dict[str, list[AnyRow]] = {}
    for row in rows:
        by_project.setdefault(row.project_id, []).append(row)
    page: list[AnyRow] = []
    for events in by_project.values():
        limits = (limit // len(by_project), MAX_PAGE_CONVERSATIONS // len(by_project))
        page += _cut_project(events, num_rows, groups, *limits)
    return page


def _cut_project(
    events: Sequence[AnyRow],
    num_rows: Mapping[Target, int],
    groups: Mapping[str, "GroupRows"],
    max_rows: int,
    max_conversations: int,
) -> list[AnyRow]:
    targets: set[Target] = set()
    in_page: set[str] = set()  # the groups whose episodes are read
    num_conversations = total = 0
    for index, event in enumerate(events):
        target = (event.project_id, event.target)
        if target in targets:
            continue
        targets.add(target)
        num_conversations += _is_about_whole(event)
        total += num_rows.get(target, 1)
        if (group := groups.get(event.in_episode)) is not None and group.name not in in_page:
            in_page.add(group.name)
            total += group.num_turns
        if index and (total > max_rows or num_conversations > max_conversations):
            return list(events[:index])
    return list(events)


async def _count_rows(session: AsyncSession, rows: Sequence[AnyRow]) -> dict[Target, int]:
    """Return how many rows are read for each target of these events: its feedback, and all turns of a whole."""
    columns = (Feedback.project_id, Feedback.target)
    about = tuple_(*columns).in_(sorted({(row.project_id, row.target) for row in rows}))
    feedback = await session.execute(select(*columns, func.count()).where(about).group_by(*columns))
    counts = {(project_id, target): count for project_id, target, count in feedback}
    for name, whole in (("conversation_id", Turn.conversation_id), ("episode_id", Turn.episode_id)):
        of_whole = [row for row in rows if row.turn_id is None and getattr(row, name) is not None]
        pairs = {(row.project_id, getattr(row, name)): row.target for row in of_whole}
        key = (Turn.project_id, whole)
        turns = select(*key, func.count()).where(tuple_(*key).in_(sorted(pairs)), Turn.origin == Origin.CHAT)
        for project_id, id, count in await session.execute(turns.group_by(*key)) if pairs else ():
            target = (project_id, pairs[project_id, id])
            counts[target] = counts.get(target, 0) + min(count, MAX_SERIES_TURNS)
    return counts


class GroupRows(NamedTuple):
    """A group of episodes, and how many turns they have."""

    name: str
    num_turns: int


async def _count_groups(session: AsyncSession, rows: Sequence[AnyRow]) -> dict[str, GroupRows]:
    """Return the groups of the episodes that these events are about, by episode."""
    ids = {row.in_episode for row in rows if row.in_episode is not None}
    grouped = select(Episode.id, Episode.project_id, Episode.group_id).order_by(Episode.id)
    episodes = (await session.execute(grouped.where(Episode.id.in_(ids), Episode.group_id.is_not(None)))).all()
    groups: dict[str, GroupRows] = {}
    for project_id in {row.project_id for row in episodes}:
        names = {row.id: row.group_id for row in episodes if row.project_id == project_id}
        is_chat = and_(Turn.episode_id == Episode.id, Turn.origin == Origin.CHAT)
        turns = select(Episode.group_id, func.count()).join(Turn, is_chat)
        turns = turns.where(Episode.project_id == project_id, Episode.group_id.in_(set(names.values())))
        counts = {name: count for name, count in await session.execute(turns.group_by(Episode.group_id))}
        groups |= {id: GroupRows(name, counts.get(name, 0)) for id, name in names.items()}
    return groups


async def read_in_turn(
    session: AsyncSession,
    query: AnySelect,
    project: InstrumentedAttribute[str],
    is_waiting: ColumnElement[bool],
    limit: int,
) -> tuple[list[AnyRow], bool]:
    """Return at most `limit` rows of a query, the same share of each project, and whether more rows may be left.

    So the backlog of one project delays no other one by more than a page.

    Args:
        project: The column of the project, with which a partial index begins whose condition is `is_waiting`.
    """
    projects = await list_projects(session, project, is_waiting)
    share = max(1, limit // max(1, len(projects)))
    rows: list[AnyRow] = []
    is_cut = False
    for project_id in random.sample(projects, len(projects)):
        if len(rows) == limit:
            return rows, True
        found = (await session.execute(query.where(project == project_id).limit(min(share, limit - len(rows))))).all()
        rows += found
        is_cut = is_cut or len(found) == share
    return rows, is_cut or len(rows) == limit


async def list_projects(
    session: AsyncSession, project: InstrumentedAttribute[str], is_waiting: ColumnElement[bool]
) -> list[str]:
    """Return the projects with waiting rows. Each is one step in the partial index that begins with `project`."""
    projects: list[str] = []
    last: str | None = ""
    while (last := await session.scalar(select(func.min(project)).where(is_waiting, project > last))) is not None:
        projects.append(last)
    return projects
