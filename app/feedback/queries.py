"""Read feedback by id, by completion, by conversation or by episode, with what became of it."""

from collections.abc import Sequence

from sqlalchemy import select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.errors import NotFound, require_row
from app.core.pagination import apply_keyset
from app.core.rows import AnySelect
from app.feedback.feedback_rows import FeedbackBody, FeedbackPageBody, FeedbackRow, feedback_view, to_feedback_row
from app.feedback.outcomes import EffectiveOutcome, read_outcomes
from app.feedback.repository import FEEDBACK
from app.feedback.schemas import WITHDRAWAL
from app.models import REQUESTED, Episode, Feedback, FeedbackRank, Turn


def select_all_feedback() -> AnySelect:
    """Return the query of feedback of all projects, with the choice that it is about; withdrawals are left out."""
    return (
        select(*FEEDBACK.c, Turn.completion_id, Turn.choice_index)
        .outerjoin(Turn, Turn.id == Feedback.turn_id)
        .where(Feedback.kind != WITHDRAWAL)
    )


async def get_feedback(session: AsyncSession, project_id: str, feedback_id: str) -> FeedbackRow:
    """Return one row. Raises NotFound, also for feedback of another project."""
    query = select_all_feedback().where(Feedback.id == feedback_id, Feedback.project_id == project_id)
    row = (await session.execute(query)).mappings().one_or_none()
    return to_feedback_row(require_row(row, f"There is no feedback '{feedback_id}'.", param="feedback_id"))


async def read_views(session: AsyncSession, project_id: str, rows: Sequence[FeedbackRow]) -> list[FeedbackBody]:
    """Return the views of the rows, with `effective`, `withdrawn` and `outcome`."""
    outcomes = await read_outcomes(session, project_id, [row["seq"] for row in rows])
    return [_read_view(row, outcomes[row["seq"]]) for row in rows]


def _read_view(row: FeedbackRow, outcome: EffectiveOutcome) -> FeedbackBody:
    return {
        **feedback_view(row),
        "effective": outcome.effective,
        "withdrawn": outcome.withdrawn,
        "outcome": outcome.outcome,
    }


async def select_feedback(
    session: AsyncSession,
    project_id: str,
    completion_id: str | None,
    choice_index: int | None,
    conversation_id: str | None,
    episode_id: str | None = None,
) -> AnySelect:
    """Return the query of all feedback about a completion, or about a conversation or an episode and its turns.

    Comparisons and rankings are included. Raises NotFound.
    """
    turns = select(Turn.id).where(Turn.project_id == project_id, Turn.deleted_at.is_(None))
    about_whole = []
    if completion_id is not None:
        turns = turns.where(Turn.completion_id == completion_id, Turn.origin.in_(REQUESTED))
        if choice_index is not None:
            turns = turns.where(Turn.choice_index == choice_index)
    elif episode_id is not None:
        turns = turns.where(Turn.episode_id == episode_id)
        in_episode = (Feedback.project_id == project_id, Feedback.episode_id == episode_id)
        about_whole = [select(Feedback.seq).where(*in_episode)]
    else:
        turns = turns.where(Turn.conversation_id == conversation_id)
        in_conversation = (Feedback.project_id == project_id, Feedback.conversation_id == conversation_id)
        about_whole = [select(Feedback.seq).where(*in_conversation)]
    if episode_id is not None:
        is_episode = select(Episode.id).where(Episode.project_id == project_id, Episode.id == episode_id)
        require_row(await session.scalar(is_episode), f"There is no episode '{episode_id}'.", param="episode_id")
    elif await session.scalar(turns.limit(1)) is None:
        name = "conversation" if completion_id is None else "completion"
        raise NotFound(f"There is no {name} '{completion_id or conversation_id}'.", param=f"{name}_id")
    about_turn = select(Feedback.seq).where(Feedback.turn_id.in_(turns))
    in_ranking = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(turns))
    # A union lets each part use its own index; an OR would read the whole table.
    return select_all_feedback().where(Feedback.seq.in_(union_all(about_turn, in_ranking, *about_whole)))


def select_feedback_on_turn(turn: Turn) -> AnySelect:
    """Return the query of the feedback about a turn, its place in a ranking, its whole conversation and its episode."""
    about_turn = select(Feedback.seq).where(Feedback.turn_id == turn.id)
    in_ranking = select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id == turn.id)
    about_conversation = select(Feedback.seq).where(
        Feedback.project_id == turn.project_id,
        Feedback.conversation_id == turn.conversation_id,
        Feedback.turn_id.is_(None),
    )
    about_episode = select(Feedback.seq).where(
        Feedback.project_id == turn.project_id, Feedback.episode_id == turn.episode_id
    )
    parts = (about_turn, in_ranking, about_conversation, about_episode)
    return select_all_feedback().where(Feedback.seq.in_(union_all(*parts)))


async def list_page(
    session: AsyncSession, project_id: str, query: AnySelect, *, after: str | None, limit: int, newest_first: bool
) -> FeedbackPageBody:
    """Return a FeedbackPage in order of arrival, as a dict. Raises NotFound."""
    last = None if after is None else ((await get_feedback(session, project_id, after))["seq"],)
    query = apply_keyset(query, (Feedback.seq,), last, limit, descending=newest_first)
    rows = [to_feedback_row(row) for row in (await session.execute(query)).mappings()]
    views = await read_views(session, project_id, rows[:limit])
    return {
        "object": "list",
        "data": views,
        "first_id": views[0]["id"] if views else None,
        "last_id": views[-1]["id"] if views else None,
        "has_more": len(rows) > limit,
    }
