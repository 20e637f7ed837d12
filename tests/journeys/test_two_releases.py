"""Two releases serve side by side while the schema moves up and down: no request is refused, and nothing is lost.

The older release is this tree. The newer one is a copy of it with one more migration and the column of its model, so it
exists in every checkout.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from app.core.database import Database
from app.core.settings import REPOSITORY, Settings
from app.models import Engine, EngineState, Feedback, Turn, TurnState
from app.projects.service import bootstrap
from tests.migrations.extra import TEMPLATE, head_revision
from tests.support.balanced_load import Load
from tests.support.processes import Processes, processes
from tests.support.scripted_engine import ScriptedEngine, serve

NEWER = "newer_release"
ROUNDS = 2
COLUMNS_OF_TURNS = "SELECT column_name FROM information_schema.columns WHERE table_name = 'turns'"
COLUMN = '    topic: Mapped[str | None] = mapped_column(String(20), default="newer")\n'
UPGRADE = """op.add_column("turns", sa.Column("topic", sa.String(20), nullable=True))
    op.add_column("feedback", sa.Column("topic", sa.String(20), nullable=False, server_default="none"))
    online.backfill("turns", "topic = 'older'", "topic IS NULL", batch_rows=50)
    online.create_index("ix_turns_topic", "turns", ["topic"])"""
DOWNGRADE = """online.drop_index("ix_turns_topic", "turns")
    op.drop_column("feedback", "topic")
    op.drop_column("turns", "topic")"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True),
]


@dataclass(frozen=True)
class NewerRelease:
    """A copy of this tree with one more migration."""

    folder: Path
    settings: Settings

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Python imports the copy. The default model is a path in this tree."""
        return {"PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1", "ATTUNE_MODEL": self.settings.model}

    def run(self, *arguments: str) -> None:
        """Run `attune` of this release on the deployment's database."""
        environment = {**os.environ, **self.environment, "ATTUNE_DATABASE__URL": self.settings.database_url}
        environment["ATTUNE_HOME"] = str(self.settings.home)
        command = [sys.executable, "-m", "app.cli.main", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr


@pytest.fixture
def newer_release(settings: Settings, tmp_path: Path) -> NewerRelease:
    folder = tmp_path / "newer"
    for package in ("app", "alignment", "migrations", "workers"):
        shutil.copytree(REPOSITORY / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    content = TEMPLATE.format(revision=NEWER, parent=head_revision(), header="", upgrade=UPGRADE, downgrade=DOWNGRADE)
    (folder / "migrations" / "versions" / f"{NEWER}.py").write_text(content)
    model = folder / "app" / "models" / "turn.py"
    class_line = '    __tablename__ = "turns"\n'
    assert class_line in model.read_text()
    model.write_text(model.read_text().replace(class_line, class_line + COLUMN))
    return NewerRelease(folder, settings)


@pytest.fixture
def apis(settings: Settings) -> Iterator[tuple[Processes, Processes]]:
    """Yield two API processes, stopped: of the older and of the newer release."""
    settings = settings.replace({"server.shutdown_delay_seconds": 1.0})
    with processes(settings) as older, processes(settings) as newer:
        for each in (older, newer):
            each.environment |= {
                "ATTUNE_SERVER__SHUTDOWN_DELAY_SECONDS": "1.0",
                "ATTUNE_SERVER__SHUTDOWN_SECONDS": "60",
            }
            each.children["api"].stop_timeout = 60
        yield older, newer


async def test_two_releases_under_load_while_the_schema_moves_both_ways(
    settings: Settings, db: Database, apis: tuple[Processes, Processes], newer_release: NewerRelease
) -> None:
    older, newer = apis
    newer.environment |= newer_release.environment
    async with db.write() as session:
        key = await bootstrap(session, settings.policy, settings.model)
        assert key is not None
    with serve(ScriptedEngine(seconds_per_token=0.05, record_requests=False)) as url:
        async with db.write() as session:
            session.add(Engine(name="engine-0", url=url, state=EngineState.READY, incarnation=1, loaded=[]))
        await asyncio.to_thread(older.start, "api")
        load = Load([older.settings.local_url, newer.settings.local_url], key, votes=True)
        topics: set[str | None] = set()
        async with load.run():
            for _ in range(ROUNDS):
                await load.wait_for_replies()
                await asyncio.to_thread(newer_release.run, "db", "upgrade")
                await load.wait_for_replies()
                await asyncio.to_thread(newer.start, "api")
                await load.wait_for_ready(2)
                for each in apis:
                    await load.wait_for_replies(url=each.settings.local_url)
                await asyncio.to_thread(older.children["api"].stop)  # it starts on the newer schema, too
                await load.wait_for_replies(url=newer.settings.local_url)
                await asyncio.to_thread(older.start, "api")
                await load.wait_for_ready(2)
                async with db.read() as session:
                    topics |= set(await session.scalars(sa.text("SELECT DISTINCT topic FROM turns")))
                await asyncio.to_thread(newer.children["api"].stop)
                await load.wait_for_replies(url=older.settings.local_url)
                await asyncio.to_thread(newer_release.run, "db", "downgrade", head_revision())
                await load.wait_for_replies()
    async with db.read() as session:
        turn_ids = set(await session.scalars(sa.select(Turn.id).where(Turn.state == TurnState.DONE)))
        feedback_ids = set(await session.scalars(sa.select(Feedback.id)))
        columns = set(await session.scalars(sa.text(COLUMNS_OF_TURNS)))
    lost = len(load.completion_ids - turn_ids) + len(load.feedback_ids - feedback_ids)
    print(
        f"\n{len(load.completion_ids)} replies, {len(load.feedback_ids)} votes, {len(load.failures)} failures, "
        f"{lost} lost, longest {load.longest:.1f} s; {dict(load.replies)}"
    )
    assert load.failures == [] and lost == 0
    assert topics == {"older", "newer", None}, "both releases wrote turns on the newer schema"
    assert "topic" not in columns
