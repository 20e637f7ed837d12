"""A full or failing disk, and kill -9, at every system call of an export: `disk FOLDER ENOSPC,EIO,SIGKILL`.

Runs under LD_PRELOAD=shim.so. For every N, the N-th call in the versions folder fails (ENOSPC, EIO), or the process is
killed during it (half of a write is written). Afterwards there must be the old version or the complete new one, and the
next attempt must succeed. Prints one JSON line.
"""

import gc
import importlib
import json
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, select, update
from sqlalchemy.orm import Session

from alignment.artifacts.manifest import verify
from alignment.errors import DamagedAdapter
from app.cli.server import prepare_database
from app.core.settings import Settings
from app.models import Batch, BatchState, BatchTurn, Policy, Sample, SampleState, Version, new_id
from tests.faults.suite import invariants
from tests.faults.suite.attempt import FAILED, PASSED, attempt, fork
from tests.faults.suite.deployment import make_settings
from tests.faults.suite.fake_trainer import FakeTrainer
from tests.support.turns import make_turn
from workers.training import ranks


def main() -> None:
    folder, faults = Path(sys.argv[1]), sys.argv[2].split(",")
    settings = make_settings(folder / "home", lease_seconds=60.0, trackers=[])
    prepare_database(settings, lambda line: None)
    importlib.import_module("aiosqlite")  # imported here, so that no fork has to import it
    ranks.Trainer = FakeTrainer  # type: ignore[assignment, attr-defined]
    os.environ["FAULTS_UPDATE_SECONDS"] = "0"
    gc.freeze()
    runner = DiskFaultRunner(settings)
    for fault in faults:
        runner.run(fault)
    runner.errors += invariants.check(settings, {}, ()).errors
    print(json.dumps({"counts": runner.counts, "calls": runner.calls, "errors": runner.errors}))


class DiskFaultRunner:
    """Runs attempts with the fault at the first call, the second call, and so on, up to the last call of an export."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = create_engine(settings.database_url.replace("+aiosqlite", ""))
        set_busy_timeout(self.database)
        self.errors: list[str] = []
        self.counts: Counter[str] = Counter()
        self.calls: dict[str, Counter[str]] = {}

    def run(self, fault: str) -> None:
        calls = self.calls[fault] = Counter()
        nth = 0
        while True:
            nth += 1
            batch_id = self.create_batch(f"{fault}-{nth}")
            self.database.dispose()  # a fork must share no connection
            exit_code, failed_call = fork(partial(attempt, self.settings, fault, nth))
            if exit_code == PASSED and failed_call == "":
                self.check_trained(batch_id, f"{fault} was never reached at {nth}")
                self.counts[f"{fault} calls"] = nth - 1
                return
            calls[failed_call] += 1
            self.counts["faults"] += 1
            where = f"{fault} at call {nth} ({failed_call or 'unknown'})"
            if exit_code != (-signal.SIGKILL if fault == "SIGKILL" else FAILED):
                self.errors.append(f"{where}: the process ended with {exit_code}")
            self.check_versions(where)
            if fault == "SIGKILL":
                self.expire_lease()
                self.database.dispose()
                fork(partial(attempt, self.settings, fault, 0))
            self.check_trained(batch_id, where)

    def create_batch(self, name: str) -> str:
        """Create a batch of four new turns."""
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
                turn = make_turn(policy, head, id, own_messages=messages, finished_at=None)
                session.add(turn)
                session.flush()
                session.add(BatchTurn(batch_id=batch.id, turn_id=turn.id))
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

    def check_versions(self, where: str) -> None:
        """Check that every directory with a version's name is complete, and that every version has its directory."""
        for path in self.settings.versions_dir.iterdir():
            if not path.name.startswith("."):
                try:
                    verify(path)
                except DamagedAdapter as damage:
                    self.errors.append(f"{where}: {damage}")
        with Session(self.database) as session:
            exported = select(Version).where(Version.adapter_path.is_not(None)).order_by(Version.number, Version.id)
            for version in session.scalars(exported):
                assert version.adapter_path is not None
                try:
                    verify(Path(version.adapter_path), version.manifest_sha256)
                except DamagedAdapter as damage:
                    self.errors.append(f"{where}: {damage}")

    def expire_lease(self) -> None:
        with Session(self.database) as session, session.begin():
            session.execute(update(Batch).where(Batch.state == BatchState.OPEN).values(lease_until=0.0))

    def check_trained(self, batch_id: str, where: str) -> None:
        """Check that the batch is trained, and that it has one complete version."""
        with Session(self.database) as session:
            batch = session.get_one(Batch, batch_id)
            versions = list(session.scalars(select(Version).where(Version.batch_id == batch_id)))
            if batch.state != BatchState.TRAINED or len(versions) != 1:
                self.errors.append(f"{where}: afterwards the batch is {batch.state}, with {len(versions)} versions")
            else:
                self.counts["trained"] += 1
        self.check_versions(where)


def set_busy_timeout(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.execute("PRAGMA busy_timeout=15000")


if __name__ == "__main__":
    main()
