"""What must hold in the database and on disk after any number of faults. Each returns sentences about what does not."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from alignment.artifacts import verify
from alignment.errors import DamagedAdapter
from app.core.settings import Settings
from app.models import Batch, BatchState, Deployment, Feedback, Policy, Sample, SampleState, Turn, Version, VersionState


@dataclass
class Found:
    """Counts for the table, and what is wrong."""

    acked: int
    lost: int
    doubled: int
    used: int
    used_twice: int
    versions: int
    halves: int
    quarantined: int
    wrong: list[str]

    def table(self) -> dict[str, int]:
        """What is counted of every storm."""
        return {
            "acked": self.acked,
            "lost": self.lost,
            "used": self.used,
            "used twice": self.used_twice,
            "versions": self.versions,
            "halves": self.halves,
        }


def check(settings: Settings, acked: Mapping[str, str], chats: Iterable[str]) -> Found:
    engine = create_engine(settings.database.replace("+aiosqlite", ""))
    with Session(engine) as session:
        rows = Counter(session.scalars(select(Feedback.idempotency_key)))
        about = dict(session.execute(select(Feedback.idempotency_key, Feedback.turn_id)).tuples().all())
        turns = set(session.scalars(select(Turn.id)))
        samples = list(session.scalars(select(Sample)))
        batches = {batch.id: batch for batch in session.scalars(select(Batch))}
        versions = list(session.scalars(select(Version).order_by(Version.number)))
        pointers = list(session.scalars(select(Deployment)))
        policies = list(session.scalars(select(Policy)))
    engine.dispose()

    wrong: list[str] = []
    lost = [id for id, turn in acked.items() if rows[id] < 1 or about[id] != turn]
    doubled = [id for id, count in rows.items() if count > 1]
    wrong += [f"acknowledged feedback {id} is not on record" for id in lost]
    wrong += [f"feedback {id} is on record {rows[id]} times" for id in doubled]
    wrong += [f"the answered chat {id} is not on record" for id in set(chats) - turns]

    twice = _used_twice(samples, batches, versions, wrong)
    halves = _halves(versions, pointers, policies, wrong)
    return Found(
        acked=len(acked),
        lost=len(lost),
        doubled=len(doubled),
        used=sum(sample.state == SampleState.TRAINED for sample in samples),
        used_twice=twice,
        versions=len(versions) - len(policies),
        halves=halves,
        quarantined=sum(batch.state == BatchState.QUARANTINED for batch in batches.values()),
        wrong=wrong,
    )


def _used_twice(samples: list[Sample], batches: dict[str, Batch], versions: list[Version], wrong: list[str]) -> int:
    """By the rows, and by what the weights themselves remember to have learned from."""
    of = {version.batch_id: version for version in versions if version.batch_id is not None}
    twice = 0
    for batch_id, count in Counter(version.batch_id for version in versions if version.batch_id).items():
        if count > 1:
            twice += 1
            wrong.append(f"batch {batch_id} became {count} versions")
    for id, batch in batches.items():
        trained = batch.state == BatchState.TRAINED
        if trained != (id in of) or (trained and of[id].id != batch.version_id):
            wrong.append(f"batch {id} is {batch.state}, but its version is {batch.version_id}")
        members = [sample for sample in samples if sample.batch_id == id]
        if trained and (
            len(members) != batch.num_samples or any(sample.state != SampleState.TRAINED for sample in members)
        ):
            wrong.append(f"batch {id} was frozen with {batch.num_samples} samples and has {len(members)}")
    for sample in samples:
        if sample.state == SampleState.TRAINED and (
            sample.batch_id is None or batches[sample.batch_id].state != BatchState.TRAINED
        ):
            wrong.append(f"sample {sample.turn_id} is trained, but its batch {sample.batch_id} is not")
    by_id = {version.id: version for version in versions}
    for version in versions:
        if version.adapter_path is None or not Path(version.adapter_path).exists():
            continue
        learned = Counter(remembered(Path(version.adapter_path)))
        meant = Counter(_meant(version, by_id, samples))
        twice += sum(count > 1 for count in learned.values())
        if learned != meant:
            wrong.append(f"v{version.number} has learned from {learned - meant} too much, {meant - learned} too little")
    return twice


def remembered(directory: Path) -> list[str]:
    state = json.loads((directory / "trainer" / "state.json").read_text())
    turns: list[str] = state["algorithm"]["turns"]
    return turns


def _meant(version: Version, by_id: dict[str, Version], samples: list[Sample]) -> list[str]:
    """The turns of all batches from the base model to this version."""
    line = set()
    step: Version | None = version
    while step is not None:
        if step.batch_id is not None:
            line.add(step.batch_id)
        step = by_id.get(step.parent_id or "")
    return [sample.turn_id for sample in samples if sample.batch_id in line]


def _halves(versions: list[Version], pointers: list[Deployment], policies: list[Policy], wrong: list[str]) -> int:
    by_id = {version.id: version for version in versions}
    halves = 0
    for version in versions:
        if version.adapter_path is None:
            continue
        try:
            assert version.manifest_sha256 is not None
            lineage = verify(Path(version.adapter_path), version.manifest_sha256)
            if lineage["batch"] != version.batch_id or lineage["parent"] != version.parent_id:
                raise DamagedAdapter("its lineage is not the row's")
        except DamagedAdapter as damage:
            halves += 1
            wrong.append(f"v{version.number} ({version.state}) is not whole: {damage}")
    for pointer in pointers:
        if by_id[pointer.version_id].state != VersionState.LIVE:
            wrong.append(f"the pointer names a version that is {by_id[pointer.version_id].state}")
    for policy in policies:
        live = [version for version in versions if version.state == VersionState.LIVE]
        if len(live) != 1:
            wrong.append(f"{len(live)} versions of {policy.name} are live")
    return halves
