"""Erasing a subject: in parts, each one transaction that leaves nothing half done; asking again goes on where it ended.

A part holds at most CHUNK turns and CHUNK words, the latest turns first: what goes on from a turn goes before it, so
that whatever is left can still be found by name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from app.core.database import Database
from app.core.settings import Settings
from app.models import Turn, record_audit
from app.privacy import repository, row_deletion, secure_delete
from app.privacy.identities import Names
from app.privacy.lineage import repository as lineage
from app.privacy.repository import ERASED, Found
from app.training import unlearning
from app.training.reward_models import erasure as reward_models

CHUNK = 200


@dataclass
class Erased:
    """What went, and the versions that had learned from it themselves. `scrubbed`: also from the database's files."""

    turns: int = 0
    feedback: int = 0
    rewards: int = 0
    pins: int = 0
    batches: list[str] = field(default_factory=list)
    version_ids: set[str] = field(default_factory=set)
    reward_models: set[str] = field(default_factory=set)
    scrubbed: bool = True

    def add(self, part: "Erased") -> None:
        self.turns += part.turns
        self.feedback += part.feedback
        self.rewards += part.rewards
        self.pins += part.pins
        self.batches += part.batches
        self.version_ids |= part.version_ids
        self.reward_models |= part.reward_models


async def erase(db: Database, names: Names, settings: Settings, *, actor: str) -> Erased | None:
    """None when nothing is on record, and nothing was erased under this name before."""
    done = Erased()
    async with db.read() as session:
        found = await repository.found(session, names)
        known = await repository.on_record(session, names)
        before = await repository.erased_at(session, names)
    if not found and not known and before is None:
        return None
    parts = list(_parts(found)) or ([Found([], [])] if known else [])
    while parts:
        for part in parts:

            async def one(session: AsyncSession, part: Found = part) -> Erased:
                return await _part(session, names, part, settings, actor)

            done.add(await db.retry_on_deadlock(one))
        async with db.read() as session:
            parts = list(_parts(await repository.found(session, names)))
    done.scrubbed = await secure_delete.scrub(db)
    return done


def _parts(found: Found) -> Iterator[Found]:
    turns = [found.turns[start : start + CHUNK] for start in range(0, len(found.turns), CHUNK)]
    words = [found.words[start : start + CHUNK] for start in range(0, len(found.words), CHUNK)]
    for some, said in zip_longest(turns, words):
        yield Found(some or [], said or [])


async def _part(session: AsyncSession, names: Names, part: Found, settings: Settings, actor: str) -> Erased:
    """One transaction. The order of locks is that of assembling, training and curating: policies, feedback,
    rewards, raters, batches, samples."""
    await unlearning.lock(session, names.project_id, part.turns)
    said = await repository.words(session, names, part.turns, part.words)
    own = await _turns(session, part.turns)
    ids = {turn.id for turn in own}
    kinds = await lineage.teaching(session, names.project_id, settings)
    heard = await lineage.judged_by(session, [row for row in said if row.kind in kinds])
    learned = {**heard, **dict.fromkeys(ids, 0.0)}  # their own turns taught whenever they were trained on
    touched = learned.keys() - ids
    echoes = await lineage.echoes(session, learned.keys(), settings) - learned.keys()
    gone = Erased(turns=len(own), feedback=len(said))
    gone.rewards = await row_deletion.rewards(session, names, ids, touched)
    await row_deletion.judgements(session, ids, {turn.parent_id for turn in own if turn.parent_id} - ids)
    await row_deletion.words(session, names.project_id, said, touched)
    over = await row_deletion.over(session, names.project_id, own)
    await row_deletion.raters(session, names, own, over)
    gone.pins = await row_deletion.pins(session, names, over)
    gone.batches = await unlearning.forget(session, ids, touched | echoes)
    gone.version_ids = await lineage.learned_from(session, {**learned, **dict.fromkeys(echoes, 0.0)})
    await unlearning.mark(session, gone.version_ids)
    gone.reward_models = set(await reward_models.forget(session, learned, settings))
    await row_deletion.turns(session, names.project_id, own)
    await row_deletion.mentions(session, names, touched)
    _tell(session, names, gone, actor)
    return gone


async def _turns(session: AsyncSession, ids: Sequence[str]) -> list[Turn]:
    columns = load_only(Turn.id, Turn.project_id, Turn.state, Turn.parent_id, Turn.conversation_id)
    return list(await session.scalars(select(Turn).where(Turn.id.in_(ids), Turn.deleted_at.is_(None)).options(columns)))


def _tell(session: AsyncSession, names: Names, gone: Erased, actor: str) -> None:
    told: dict[str, Any] = {"turns": gone.turns, "feedback": gone.feedback, "rewards": gone.rewards}
    told |= {"pins": gone.pins, "batches": gone.batches, "versions": sorted(gone.version_ids)}
    told |= {"reward_models": sorted(gone.reward_models)}
    record_audit(session, actor, ERASED, names.sha256, project_id=names.project_id, **told)
