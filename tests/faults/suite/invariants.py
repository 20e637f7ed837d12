"""Check what must hold in the database and on disk after any number of faults."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session

from alignment.artifacts.manifest import verify
from alignment.errors import DamagedAdapter
from app.core.database import Database
from app.core.settings import Settings
from app.feedback.vote_counts import count_votes
from app.models import (
    SERVER_LOST,
    VOTE_KINDS,
    Batch,
    BatchState,
    BatchTurn,
    Deployment,
    Feedback,
    Policy,
    Sample,
    SampleState,
    Turn,
    Version,
    VersionState,
)
from app.privacy.retention_files import WITHOUT_STATE


@dataclass
class Report:
    """Counts, and a sentence for each violation."""

    acknowledged: int
    lost: int
    duplicated: int
    used: int
    used_twice: int
    votes: int
    unaccounted: int
    versions: int
    half_published: int
    closed_later: int  # turns whose end was not recorded, and which the reconciler closed
    quarantined: int
    errors: list[str]

    def table(self) -> dict[str, int]:
        """Return the counts that are shown for every run."""
        return {
            "acknowledged": self.acknowledged,
            "lost": self.lost,
            "used": self.used,
            "used twice": self.used_twice,
            "votes": self.votes,
            "unaccounted": self.unaccounted,
            "versions": self.versions,
            "half-published": self.half_published,
            "turns closed later": self.closed_later,
        }


def check(settings: Settings, acknowledged: Mapping[str, str], chats: Iterable[str]) -> Report:
    """Check the deployment. `acknowledged` is the turn of each acknowledged feedback, `chats` the answered turns."""
    engine = create_engine(settings.database_url.replace("+aiosqlite", ""))
    with Session(engine) as session:
        row_counts = Counter(session.scalars(select(Feedback.idempotency_key)))
        turn_of = dict(session.execute(select(Feedback.idempotency_key, Feedback.turn_id)).tuples().all())
        turns = set(session.scalars(select(Turn.id)))
        closed_later = session.scalar(select(func.count()).where(Turn.finish_reason == SERVER_LOST))
        samples = list(session.scalars(select(Sample)))
        batch_turns = list(session.scalars(select(BatchTurn)))
        batches = {batch.id: batch for batch in session.scalars(select(Batch))}
        versions = list(session.scalars(select(Version).order_by(Version.number)))
        deployments = list(session.scalars(select(Deployment)))
        policies = list(session.scalars(select(Policy)))
    engine.dispose()

    errors: list[str] = []
    lost = [id for id, turn in acknowledged.items() if row_counts[id] < 1 or turn_of[id] != turn]
    duplicated = [id for id, count in row_counts.items() if count > 1]
    errors += [f"acknowledged feedback {id} is not stored" for id in lost]
    errors += [f"feedback {id} is stored {row_counts[id]} times" for id in duplicated]
    errors += [f"the answered chat {id} is not stored" for id in set(chats) - turns]

    num_votes, num_accounted = asyncio.run(_count_votes(settings))
    if num_votes != num_accounted:
        errors.append(f"of {num_votes} votes {num_accounted} are learned from, waiting or not learned from")
    used_twice = _check_used_twice(samples, batch_turns, batches, versions, errors)
    half_published = _check_versions(versions, deployments, policies, errors)
    return Report(
        acknowledged=len(acknowledged),
        lost=len(lost),
        duplicated=len(duplicated),
        used=sum(sample.state == SampleState.TRAINED for sample in samples),
        used_twice=used_twice,
        votes=num_votes,
        unaccounted=abs(num_votes - num_accounted),
        versions=len(versions) - len(policies),
        half_published=half_published,
        closed_later=closed_later or 0,
        quarantined=sum(batch.state == BatchState.QUARANTINED for batch in batches.values()),
        errors=errors,
    )


async def _count_votes(settings: Settings) -> tuple[int, int]:
    """Return how many votes are stored, and the sum of the votes with each outcome."""
    async with Database(settings.database_url, seconds=None) as db, db.read_snapshot() as session:
        policies = list(await session.scalars(select(Policy)))
        counts = [
            count.num_votes
            for project_id in {policy.project_id for policy in policies}
            for count in await count_votes(
                session, project_id, [policy.id for policy in policies if policy.project_id == project_id]
            )
        ]
        num_votes = await session.scalar(select(func.count()).where(Feedback.kind.in_(VOTE_KINDS)))
    return int(num_votes or 0), sum(counts)


def _check_used_twice(
    samples: list[Sample],
    batch_turns: list[BatchTurn],
    batches: dict[str, Batch],
    versions: list[Version],
    errors: list[str],
) -> int:
    """Check by the rows, and by the turns that are stored with each version. Return how much was used twice."""
    version_of = {version.batch_id: version for version in versions if version.batch_id is not None}
    used_twice = 0
    for batch_id, count in Counter(version.batch_id for version in versions if version.batch_id).items():
        if count > 1:
            used_twice += 1
            errors.append(f"batch {batch_id} became {count} versions")
    for id, batch in batches.items():
        is_trained = batch.state == BatchState.TRAINED
        if is_trained != (id in version_of) or (is_trained and version_of[id].id != batch.version_id):
            errors.append(f"batch {id} is {batch.state}, but its version is {batch.version_id}")
        num_turns = sum(row.batch_id == id for row in batch_turns)
        # A person's vote opens a sample again whose automated reward a batch has learned from.
        num_voted = sum(sample.automated_batch_id == id for sample in samples)
        members = [sample for sample in samples if sample.batch_id == id]
        if is_trained and num_turns != batch.num_samples:
            errors.append(f"batch {id} was frozen with {batch.num_samples} samples and has {num_turns} turns")
        # All samples leave together when the version is rejected or undone.
        is_whole = len(members) + num_voted in (0, num_turns)
        if is_trained and not (is_whole and all(sample.state == SampleState.TRAINED for sample in members)):
            errors.append(f"batch {id} was trained on {num_turns} samples and has {len(members)}")
    for sample in samples:
        if sample.state == SampleState.TRAINED and (
            sample.batch_id is None or batches[sample.batch_id].state != BatchState.TRAINED
        ):
            errors.append(f"sample {sample.turn_id} is trained, but its batch {sample.batch_id} is not")
    by_id = {version.id: version for version in versions}
    may_come_twice = {sample.turn_id for sample in samples if sample.automated_batch_id is not None}
    for version in versions:
        if version.adapter_path is None or not Path(version.adapter_path).exists():
            continue
        if version.adapter_path.endswith(WITHOUT_STATE):
            continue  # retention has removed the state of an old version
        learned = Counter(read_trained_turns(Path(version.adapter_path)))
        expected = Counter(_expected_turns(version, by_id, batch_turns))
        used_twice += sum(count > 1 + (turn in may_come_twice) for turn, count in learned.items())
        if learned != expected:
            extra, missing = learned - expected, expected - learned
            errors.append(f"v{version.number} was trained on {extra} in excess, and not on {missing}")
    return used_twice


def read_trained_turns(directory: Path) -> list[str]:
    """Return the turns that a version and its ancestors learned from, as the fake trainer stores them."""
    state = json.loads((directory / "trainer" / "state.json").read_text())
    turns: list[str] = state["algorithm"]["turns"]
    return turns


def _expected_turns(version: Version, by_id: dict[str, Version], batch_turns: list[BatchTurn]) -> list[str]:
    """Return the turns of all batches from the base model to this version."""
    batch_ids = set()
    ancestor: Version | None = version
    while ancestor is not None:
        if ancestor.batch_id is not None:
            batch_ids.add(ancestor.batch_id)
        ancestor = by_id.get(ancestor.parent_id or "")
    return [row.turn_id for row in batch_turns if row.batch_id in batch_ids]


def _check_versions(
    versions: list[Version], deployments: list[Deployment], policies: list[Policy], errors: list[str]
) -> int:
    """Check the files of every version, and that one version is live. Return how many versions are half-published."""
    by_id = {version.id: version for version in versions}
    half_published = 0
    for version in versions:
        if version.adapter_path is None:
            continue
        try:
            assert version.manifest_sha256 is not None
            lineage = verify(Path(version.adapter_path), version.manifest_sha256)
            if lineage["batch"] != version.batch_id or lineage["parent"] != version.parent_id:
                raise DamagedAdapter("its lineage differs from the database row")
        except DamagedAdapter as damage:
            half_published += 1
            errors.append(f"v{version.number} ({version.state}) is incomplete: {damage}")
    for deployment in deployments:
        if by_id[deployment.version_id].state != VersionState.LIVE:
            errors.append(f"the deployment names a version that is {by_id[deployment.version_id].state}, not live")
    for policy in policies:
        live = [version for version in versions if version.state == VersionState.LIVE]
        if len(live) != 1:
            errors.append(f"{len(live)} versions of {policy.name} are live")
    return half_published
