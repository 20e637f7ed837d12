"""Takes votes out of their totals when something changes what has become of them.

A vote whose outcome is settled (it was learned from, or will not be) is counted once, in a VoteTotal, by
`app.feedback.settled_votes`. Whatever changes the outcome of such a vote calls `reopen_votes` in its own transaction:
then the vote is counted by its rows again, until its new outcome is settled. So the totals and the other votes together
are exact.
"""

from collections import Counter
from collections.abc import Collection

from sqlalchemy import ColumnElement, and_, func, literal_column, select, union, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked
from app.models import Feedback, FeedbackRank, Turn, VoteTotal

# Votes that are in no total, as literals, so that the planner recognizes the condition of the index. SQLite chooses the
# index of all feedback instead of this small one unless a range of `seq` is named. It uses one lower bound alone, so a
# statement that has another one takes IS_UNCOUNTED_FROM_BOUND.
IS_UNCOUNTED_FROM_BOUND = and_(
    Feedback.vote_total_id.is_(None),
    Feedback.kind.not_in([literal_column("'comment'"), literal_column("'withdrawal'")]),
)
IS_UNCOUNTED_VOTE = and_(IS_UNCOUNTED_FROM_BOUND, Feedback.seq > literal_column("0"))


async def reopen_votes(session: AsyncSession, *conditions: ColumnElement[bool]) -> None:
    """Take the votes that meet the conditions out of their totals.

    All of them are locked, also those in no total: the transaction that counts a vote locks it before it reads the
    outcome, so either it reads what this transaction changes, or this one finds the vote counted.
    """
    feedback = select(Feedback.seq, Feedback.vote_total_id).where(*conditions).order_by(Feedback.seq)
    counted = [row for row in await session.execute(feedback.with_for_update()) if row.vote_total_id is not None]
    if not counted:
        return
    for chunk in chunked([row.seq for row in counted]):
        await session.execute(update(Feedback).where(Feedback.seq.in_(chunk)).values(vote_total_id=None))
    for id, count in sorted(Counter(row.vote_total_id for row in counted).items()):
        num_votes = VoteTotal.num_votes - count
        await session.execute(update(VoteTotal).where(VoteTotal.id == id).values(num_votes=num_votes))


async def reopen_votes_of_batches(session: AsyncSession, *batch_ids: str | None) -> None:
    """Take the votes that batches learned from out of their totals: their versions are released, undone or rejected."""
    known = [id for id in batch_ids if id is not None]
    if known:
        await reopen_votes(session, Feedback.batch_id.in_(known))


async def reopen_votes_on_turns(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Take the votes on these turns, on rankings with them, on their conversations and episodes out of their totals."""
    about_conversation = (
        (Feedback.project_id == Turn.project_id)
        & (Feedback.conversation_id == Turn.conversation_id)
        & Feedback.turn_id.is_(None)
    )
    about_episode = (Feedback.project_id == Turn.project_id) & (Feedback.episode_id == Turn.episode_id)
    for chunk in chunked(turn_ids):
        seqs = union(
            select(Feedback.seq).where(Feedback.turn_id.in_(chunk)),
            select(FeedbackRank.feedback_seq).where(FeedbackRank.turn_id.in_(chunk)),
            select(Feedback.seq).join(Turn, about_conversation).where(Turn.id.in_(chunk)),
            select(Feedback.seq).join(Turn, about_episode).where(Turn.id.in_(chunk)),
        )
        await reopen_votes(session, Feedback.seq.in_(seqs))


async def read_totals(session: AsyncSession, policy_ids: Collection[str]) -> list[tuple[str, str, bool, int]]:
    """Return (policy id, reason, whether they are of people, number of votes) of the votes that are counted."""
    columns = (VoteTotal.policy_id, VoteTotal.reason, VoteTotal.is_person, func.sum(VoteTotal.num_votes))
    query = select(*columns).where(VoteTotal.policy_id.in_(policy_ids)).group_by(*columns[:3]).order_by(*columns[:3])
    return [(row[0], row[1], row[2], int(row[3])) for row in await session.execute(query)]
