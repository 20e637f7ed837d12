"""A full or broken disk, and kill -9, at every call that publishing a version makes: `disk FOLDER ENOSPC,EIO,SIGKILL`.

Run under LD_PRELOAD=shim.so. For every N: the N-th call under the versions folder fails (ENOSPC, EIO) or the process
is killed in its midst (a write is torn). Then: the old version or the whole new one, and the next attempt goes through.
Prints one JSON line.
"""

import gc
import importlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, select, update
from sqlalchemy.orm import Session

from alignment.artifacts import verify
from alignment.errors import DamagedAdapter
from app.cli.up import prepare_database
from app.core.settings import Settings
from app.models import Batch, BatchState, Policy, Sample, SampleState, Version, new_id
from tests.faults.suite import invariants
from tests.faults.suite.attempt import HIT, PASSED, attempt, fork
from tests.faults.suite.deployment import small
from tests.faults.suite.learner import StandIn
from tests.support.turns import make_turn
from workers.training import ranks


def main() -> None:
    folder, faults = Path(sys.argv[1]), sys.argv[2].split(",")
    settings = small(folder / "home", lease_seconds=60.0, trackers=[])
    prepare_database(settings, lambda said: None)
    importlib.import_module("aiosqlite")  # once, and not in every fork
    ranks.Trainer = StandIn  # type: ignore[assignment,misc]
    os.environ["FAULTS_UPDATE_SECONDS"] = "0"
    gc.freeze()
    loop = Loop(settings)
    for fault in faults:
        loop.run(fault)
    loop.wrong += invariants.check(settings, {}, ()).wrong
    print(json.dumps({"counts": loop.counts, "calls": loop.calls, "wrong": loop.wrong}))


class Loop:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = create_engine(settings.database.replace("+aiosqlite", ""))
        patient(self.database)
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.calls: dict[str, Counter[str]] = {}

    def run(self, fault: str) -> None:
        calls = self.calls[fault] = Counter()
        nth = 0
        while True:
            nth += 1
            batch_id = self.freeze(f"{fault}-{nth}")
            self.database.dispose()  # nothing of it is shared with a fork
            ended, told = fork(lambda nth=nth: attempt(self.settings, fault, nth))
            if ended == PASSED and told == "":
                self.whole(batch_id, f"{fault} was never reached at {nth}")
                self.counts[f"{fault} calls"] = nth - 1
                return
            calls[told] += 1
            self.counts["faults"] += 1
            where = f"{fault} at call {nth} ({told or 'unknown'})"
            if ended != (-signal.SIGKILL if fault == "SIGKILL" else HIT):
                self.wrong.append(f"{where}: the process ended with {ended}")
            self.old_or_new(where)
            if fault == "SIGKILL":
                self.expire()
                self.database.dispose()
                fork(lambda: attempt(self.settings, fault, 0))
            self.whole(batch_id, where)

    def freeze(self, name: str) -> str:
        """A batch on the head, of four turns nobody has used."""
        with Session(self.database) as session, session.begin():
            policy = session.scalars(select(Policy)).one()
            batch = Batch(
                id=new_id("bat"),
                policy_id=policy.id,
                parent_id=policy.head_version_id,
                state=BatchState.OPEN,
                num_samples=4,
            )
            session.add(batch)
            session.flush()
            head = session.get_one(Version, policy.head_version_id)
            for number in range(4):
                id = f"{name}-{number}"
                messages = [{"role": "user", "content": id}]
                turn = make_turn(policy, head, id, messages=messages, finished_at=None)
                session.add(turn)
                session.flush()
                session.add(
                    Sample(
                        turn_id=turn.id,
                        policy_id=policy.id,
                        version_id=head.id,
                        reward=float(number % 2),
                        state=SampleState.BATCHED,
                        batch_id=batch.id,
                        ready_at=0.0,
                    )
                )
            return batch.id

    def old_or_new(self, where: str) -> None:
        """What has the name of a version is a whole one, and what the database names is there."""
        for path in self.settings.versions_dir.iterdir():
            if not path.name.startswith("."):
                try:
                    verify(path)
                except DamagedAdapter as damage:
                    self.wrong.append(f"{where}: {damage}")
        with Session(self.database) as session:
            for version in session.scalars(select(Version).where(Version.adapter_path.is_not(None))):
                try:
                    verify(Path(version.adapter_path), version.manifest_sha256)
                except DamagedAdapter as damage:
                    self.wrong.append(f"{where}: {damage}")

    def expire(self) -> None:
        """A minute passes."""
        with Session(self.database) as session, session.begin():
            session.execute(update(Batch).where(Batch.state == BatchState.OPEN).values(lease_until=0.0))

    def whole(self, batch_id: str, where: str) -> None:
        """Learning has gone on: the batch is a version, one, and whole."""
        with Session(self.database) as session:
            batch = session.get_one(Batch, batch_id)
            versions = list(session.scalars(select(Version).where(Version.batch_id == batch_id)))
            if batch.state != BatchState.TRAINED or len(versions) != 1:
                self.wrong.append(f"{where}: then the batch is {batch.state}, with {len(versions)} versions")
            else:
                self.counts["went on"] += 1
        self.old_or_new(where)


def patient(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.execute("PRAGMA busy_timeout=15000")


if __name__ == "__main__":
    main()
