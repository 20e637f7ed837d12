"""Queries between feedback and versions. All of them follow rows that are there anyway: nothing is kept twice."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import CTE, Executable, Select, and_, func, select, tuple_, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from alignment.config.rewards import EXPLICIT, ExplicitSource
from app.core.settings import Settings
from app.feedback.effective import is_effective
from app.feedback.kinds import NUMBERS, ORDERS
from app.feedback.schemas import WITHDRAWAL
from app.models import Batch, Feedback, FeedbackRank, Policy, Sample, SampleState, Turn, Version
from app.training.policy_rewards import rewards_of

AT_ONCE = 500
Kinds = tuple[str, ...]


class Learner(NamedTuple):
    """A version that learned from something; `direct` from its own batch, else from the versions it stands on."""

    version: Version
    policy: str
    direct: bool


async def teaching(session: AsyncSession, project_id: str, settings: Settings) -> Kinds:
    """The kinds of feedback that become rewards by what the project's policies listen to."""
    kinds = {*NUMBERS, *ORDERS}
    for policy in await session.scalars(select(Policy).where(Policy.project_id == project_id)):
        source = rewards_of(policy, settings).source(EXPLICIT)
        if isinstance(source, ExplicitSource):
            kinds |= {"correction"} if source.correction is not None else set()
            kinds |= {"categorical"} if source.labels else set()
    return tuple(sorted(kinds))


def taught(batch_id: str, kinds: Kinds, after: tuple[str, str], limit: int) -> Executable:
    """What a version's batch held, one statement: batch → samples → turns → feedback. Of feedback what counted when the
    batch was frozen; a sample that no feedback was given on has a row without."""
    words = _words(batch_id, kinds)
    spoke = aliased(Version)
    said = func.coalesce(Feedback.id, "")
    return (
        select(Sample, Turn, spoke.number, Feedback)
        .join(Batch, Batch.id == Sample.batch_id)
        .join(Turn, Turn.id == Sample.turn_id)
        .join(spoke, spoke.id == Turn.version_id)
        .outerjoin(words, words.c.turn_id == Turn.id)
        .outerjoin(Feedback, Feedback.seq == words.c.seq)
        .where(Batch.id == batch_id, Sample.state == SampleState.TRAINED)
        .where(tuple_(Turn.id, said) > after)
        .order_by(Turn.id, said)
        .limit(limit)
    )


def _words(batch_id: str, kinds: Kinds) -> CTE:
    return union_all(*[way.where(Batch.id == batch_id) for way in _ways(kinds)]).cte("words")


def _ways(kinds: Kinds) -> list[Select[Any]]:
    """Feedback that a trained sample carries: of its turn alone, in an order of several, of its whole conversation."""
    carried = select(Sample.turn_id, Feedback.seq, Batch.version_id).join(Batch, Batch.id == Sample.batch_id)
    alone = carried.join(Feedback, Feedback.turn_id == Sample.turn_id)
    among = carried.join(FeedbackRank, FeedbackRank.turn_id == Sample.turn_id).join(
        Feedback, Feedback.seq == FeedbackRank.feedback_seq
    )
    here = and_(Feedback.project_id == Turn.project_id, Feedback.conversation_id == Turn.conversation_id)
    whole = carried.join(Turn, Turn.id == Sample.turn_id).join(Feedback, here).where(Feedback.turn_id.is_(None))
    ways: list[Any] = [alone, among, whole]
    return [way.where(Sample.state == SampleState.TRAINED, is_effective(kinds, by=Batch.created_at)) for way in ways]


async def learned_from(session: AsyncSession, said: Mapping[str, float]) -> set[str]:
    """Ids of the versions whose own batch held these turns: frozen no sooner than what was said of them then."""
    rows = await session.execute(
        select(Sample.turn_id, Batch.version_id, Batch.created_at)
        .join(Batch, Batch.id == Sample.batch_id)
        .where(Sample.turn_id.in_(said), Sample.state == SampleState.TRAINED, Batch.version_id.is_not(None))
    )
    return {str(version_id) for turn_id, version_id, frozen in rows if said[turn_id] <= frozen}


async def taught_by(session: AsyncSession, kinds: Kinds, seqs: Sequence[int]) -> set[str]:
    """Ids of the versions whose own batch held a sample that this feedback counted for when it was frozen."""
    found: set[str] = set()
    for start in range(0, len(seqs), AT_ONCE):
        some = seqs[start : start + AT_ONCE]
        said = union_all(*[way.where(Feedback.seq.in_(some)) for way in _ways(kinds)]).subquery()
        asked = select(said.c.version_id).where(said.c.version_id.is_not(None)).distinct()
        found |= set(await session.scalars(asked))
    return found


async def echoes(session: AsyncSession, turn_ids: Collection[str], settings: Settings) -> set[str]:
    """Earlier turns of the same conversations that are credited with what is said of these; none without a discount."""
    policies = await session.scalars(
        select(Policy).join(Turn, Turn.policy_id == Policy.id).where(Turn.id.in_(turn_ids)).distinct()
    )
    credited = [policy.id for policy in policies if rewards_of(policy, settings).discount > 0]
    earlier = aliased(Turn)
    found = select(earlier.id).join(
        Turn,
        and_(
            earlier.project_id == Turn.project_id,
            earlier.conversation_id == Turn.conversation_id,
            earlier.created_at < Turn.created_at,
        ),
    )
    return set(await session.scalars(found.where(Turn.id.in_(turn_ids), earlier.policy_id.in_(credited))))


def line_of(ids: Collection[str]) -> CTE:
    """These versions and all that stand on them."""
    line = select(Version.id).where(Version.id.in_(ids)).cte("line", recursive=True)
    child = aliased(Version)
    return line.union(select(child.id).join(line, child.parent_id == line.c.id))


async def learners(session: AsyncSession, ids: Collection[str]) -> list[Learner]:
    """The versions and their descendants, by policy and number."""
    line = line_of(ids)
    rows = await session.execute(
        select(Version, Policy.name)
        .join(Policy, Policy.id == Version.policy_id)
        .where(Version.id.in_(select(line.c.id)))
        .order_by(Policy.name, Version.number)
    )
    return [Learner(version, name, version.id in ids) for version, name in rows]


async def judged_by(session: AsyncSession, rows: Sequence[Feedback]) -> dict[str, float]:
    """The turns that these words fall on, and since when: of a turn alone, in an order, of a whole conversation."""
    when = {row.seq: row.created_at for row in rows}
    said = [(row.turn_id, row.created_at) for row in rows if row.turn_id is not None]
    ranked = select(FeedbackRank.turn_id, FeedbackRank.feedback_seq).where(FeedbackRank.feedback_seq.in_(when))
    said += [(turn_id, when[seq]) for turn_id, seq in await session.execute(ranked)]
    latest_first = reversed([row for row in rows if row.turn_id is None])
    talks = {(row.project_id, row.conversation_id): row.created_at for row in latest_first}
    whole = select(Turn.id, Turn.project_id, Turn.conversation_id).where(
        tuple_(Turn.project_id, Turn.conversation_id).in_([pair for pair in talks if pair[1] is not None])
    )
    said += [(id, talks[project_id, talk]) for id, project_id, talk in await session.execute(whole)]
    since: dict[str, float] = {}
    for turn_id, at in said:
        since[turn_id] = min(at, since.get(turn_id, at))
    return since


async def word(session: AsyncSession, project_id: str, feedback_id: str) -> Feedback | None:
    found = select(Feedback).where(Feedback.id == feedback_id, Feedback.project_id == project_id)
    return await session.scalar(found.where(Feedback.kind != WITHDRAWAL))


async def choices(session: AsyncSession, project_id: str, completion_id: str) -> list[str]:
    found = select(Turn.id).where(Turn.completion_id == completion_id, Turn.project_id == project_id)
    return list(await session.scalars(found))
