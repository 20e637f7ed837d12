"""Requests that curation computes rewards again, because samples have left the batch that they were frozen in."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import chunked, now
from app.core.rows import AnyRow, AnySelect
from app.models import Feedback, FeedbackRank, Sample, Turn
from app.raters.service import RECOMPUTE_DELAY_SECONDS
from app.training.vote_totals import reopen_votes


async def request_recomputation(session: AsyncSession, turn_ids: Collection[str]) -> None:
    """Let curation process again all feedback that may change the samples of these turns.

    That is feedback on the turn, on other replies of its completion and turns of its conversation and its episode, on
    the conversation or the episode as a whole, and rankings. Until then the samples are not ready, at most for
    RECOMPUTE_DELAY_SECONDS. Samples without any such feedback stay as they are.
    """
    rated: set[str] = set()
    seqs: set[int] = set()
    for chunk in chunked(turn_ids):
        columns = (Turn.id, Turn.completion_id, Turn.project_id, Turn.conversation_id, Turn.episode_id)
        of_projects: defaultdict[str, list[AnyRow]] = defaultdict(list)
        for row in await session.execute(select(*columns).where(Turn.id.in_(chunk)).order_by(Turn.id)):
            of_projects[row.project_id].append(row)
        for project_id, turns in of_projects.items():
            found: list[set[str]] = []  # the turns, completions, episodes and conversations with feedback
            for query in _select_feedback(project_id, turns):
                rows = (await session.execute(query)).all()
                seqs.update(seq for seq, _ in rows)
                found.append({about for _, about in rows})
            ranked, completions, *wholes = found
            rated |= {
                turn.id
                for turn in turns
                if turn.id in ranked
                or turn.completion_id in completions
                or any(turn.episode_id in one for one in wholes[:2])
                or any(turn.conversation_id in one for one in wholes[2:])
            }
    for chunk in chunked(sorted(rated)):
        ready_at = now() + RECOMPUTE_DELAY_SECONDS
        await session.execute(update(Sample).where(Sample.turn_id.in_(chunk)).values(ready_at=ready_at))
    for seq_chunk in chunked(sorted(seqs)):
        await reopen_votes(session, Feedback.seq.in_(seq_chunk))
        await session.execute(update(Feedback).where(Feedback.seq.in_(seq_chunk)).values(processed=False))


def _select_feedback(project_id: str, turns: Sequence[AnyRow]) -> list[AnySelect]:
    """Return queries for the number of each feedback event and what of these turns of a project it is about.

    That is a turn (of rankings), a completion, twice an episode, or twice a conversation. An event on a turn is read
    once for its conversation, and not once for each turn of it. SQLite uses no index for a condition on pairs of
    columns.
    """
    ids = [turn.id for turn in turns]
    completions = sorted({turn.completion_id for turn in turns if turn.completion_id is not None})
    conversations = sorted({turn.conversation_id for turn in turns if turn.conversation_id is not None})
    episodes = sorted({turn.episode_id for turn in turns if turn.episode_id is not None})
    on_episode = (Feedback.project_id == project_id, Feedback.episode_id.in_(episodes))
    of_episode = (Turn.project_id == project_id, Turn.episode_id.in_(episodes))
    of_conversation = (Turn.project_id == project_id, Turn.conversation_id.in_(conversations))
    on_conversation = (Feedback.project_id == project_id, Feedback.conversation_id.in_(conversations))
    is_about_turn = Feedback.turn_id == Turn.id
    has_no_turn = func.coalesce(Feedback.turn_id, "") == ""  # SQLite would read all feedback without a turn
    return [
        select(FeedbackRank.feedback_seq, FeedbackRank.turn_id).where(FeedbackRank.turn_id.in_(ids)),
        select(Feedback.seq, Turn.completion_id).join(Turn, is_about_turn).where(Turn.completion_id.in_(completions)),
        select(Feedback.seq, Feedback.episode_id).where(*on_episode),
        select(Feedback.seq, Turn.episode_id).join(Turn, is_about_turn).where(*of_episode),
        select(Feedback.seq, Turn.conversation_id).join(Turn, is_about_turn).where(*of_conversation),
        select(Feedback.seq, Feedback.conversation_id).where(*on_conversation, has_no_turn),
    ]
