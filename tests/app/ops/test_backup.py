"""A backup is one consistent set, is verified file by file, and is restored into an empty home only."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
from alembic import command
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine, func, make_url, select

from alignment.artifacts.manifest import verify as verify_sealed
from alignment.artifacts.specs import ADAPTER
from app.core.database import Database
from app.core.migrate import alembic_config, require_compatible_schema, upgrade
from app.core.settings import Settings
from app.models import (
    Base,
    Deployment,
    Engine,
    EngineState,
    Feedback,
    RewardModel,
    RewardModelState,
    Turn,
    Version,
    VersionState,
    WebhookEndpoint,
)
from app.ops import backup, backup_database, restore_database
from app.ops.backup_connections import closing_engine, run_program
from app.ops.backup_manifest import BACKUP_MANIFEST, BackupError, BackupManifest, Contents, Report, find_problems
from app.privacy.retention_files import copy_without_state
from tests.migrations.rows import insert_rows
from tests.support.backups import create_sealed_reward_model, create_sealed_version, empty_home, ignore_progress
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from tests.support.webhooks import create_webhook

CHAT = {"model": "shop@v0", "messages": [{"role": "user", "content": "When do you open?"}]}


@pytest.fixture
async def deployment(harness: Harness) -> Harness:
    """Return a deployment with two versions, of which the second serves, a reward model, chats and votes."""
    await create_sealed_version(harness, 1)
    await create_sealed_version(harness, 2, live=True)
    await create_sealed_reward_model(harness)
    for number in range(20):
        turn = await harness.turn(conversation_id=f"c-{number % 3}")
        assert (await harness.vote(turn.id)).status_code == 201
    return harness


async def create(harness: Harness, folder: Path, **options: Any) -> BackupManifest:
    return await asyncio.to_thread(backup.create_backup, harness.settings, folder, ignore_progress, **options)


async def restore(settings: Settings, folder: Path) -> BackupManifest:
    return await asyncio.to_thread(backup.restore_backup, settings, folder, ignore_progress)


async def reject(harness: Harness, number: int) -> Version:
    """Reject a version, so that nothing needs its files any more."""
    async with harness.db.write() as session:
        version = (await session.scalars(select(Version).where(Version.number == number))).one()
        version.state = VersionState.REJECTED
    return version


def problems_of(folder: Path) -> list[str]:
    return backup.verify_backup(folder, ignore_progress)[1]


async def count_rows(db: Database) -> dict[str, int]:
    async with db.read() as session:
        return {
            name: await session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }


async def wait_for_turns(db: Database, more_than: int) -> None:
    """Wait until there are more turns than that."""
    async with asyncio.timeout(60):
        while (await count_rows(db))["turns"] <= more_than:
            await asyncio.sleep(0.02)


async def write_until(harness: Harness, done: asyncio.Event) -> tuple[list[str], float]:
    """Chat and vote until `done`. Returns the ids of the chats that were answered, and the longest delay of one."""
    ids, longest, loop = [], 0.0, asyncio.get_running_loop()
    while not done.is_set():
        began = loop.time()
        answer = await harness.api.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        longest = max(longest, loop.time() - began)
        ids.append(answer.json()["id"])
        assert (await harness.vote(ids[-1])).status_code == 201
    return ids, longest


async def test_backup_during_chats_and_votes_is_restored_in_another_home(
    deployment: Harness, scripted: ScriptedEngine, tmp_path: Path
) -> None:
    before, done = await count_rows(deployment.db), asyncio.Event()
    writers = [asyncio.create_task(write_until(deployment, done)) for _ in range(3)]
    await wait_for_turns(deployment.db, before["turns"])
    manifest = await create(deployment, tmp_path / "backups" / "one")
    await wait_for_turns(deployment.db, manifest.contents.rows["turns"])
    done.set()
    written = {id for writer in writers for id in (await writer)[0]}
    assert problems_of(tmp_path / "backups" / "one") == []
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        await restore(settings, tmp_path / "backups" / "one")
        async with Database(settings.database_url) as db:
            restored = await count_rows(db)
            assert restored == {name: manifest.contents.rows[name] for name in restored}
            assert before["turns"] < restored["turns"] < before["turns"] + len(written)
            async with db.read() as session:
                turns = {turn.id: turn for turn in await session.scalars(select(Turn))}
                votes = list(await session.scalars(select(Feedback)))
                serving = (
                    await session.scalars(select(Version).join(Deployment, Deployment.version_id == Version.id))
                ).one()
                [model] = await session.scalars(select(RewardModel))
                [engine] = await session.scalars(select(Engine))
        assert all(vote.turn_id in turns for vote in votes) and len(votes) >= before["feedback"]
        assert serving.id == (await deployment.serving()).id
        for path, sha256 in ((serving.adapter_path, serving.manifest_sha256), (model.path, model.manifest_sha256)):
            assert path is not None and Path(path).is_relative_to(settings.home)
            verify_sealed(Path(path), sha256)
        assert (engine.state, engine.loaded) == (EngineState.DOWN, [])
        with pytest.raises(BackupError, match="empty"):
            await restore(settings, tmp_path / "backups" / "one")


async def test_backup_is_private(deployment: Harness, tmp_path: Path) -> None:
    await create(deployment, tmp_path / "backups" / "one")
    for path in (tmp_path / "backups", *(tmp_path / "backups").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        await restore(settings, tmp_path / "backups" / "one")
        assert all(not path.stat().st_mode & 0o077 for path in settings.home.rglob("*"))


async def test_damaged_missing_and_extra_files_are_found(deployment: Harness, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    manifest = await create(deployment, folder)
    adapter = folder / "versions" / "shop-v2.0a1b2c3d.1" / ADAPTER
    raw = adapter.read_bytes()
    adapter.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert problems_of(folder) == [
        f"versions/shop-v2.0a1b2c3d.1/{ADAPTER} is damaged: its hash or size differs from the manifest's"
    ]
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        with pytest.raises(BackupError, match="damaged"):
            await restore(settings, folder)
        assert not settings.home.exists()
    adapter.unlink()
    assert problems_of(folder) == [f"versions/shop-v2.0a1b2c3d.1/{ADAPTER} is missing"]
    adapter.write_bytes(raw)
    (folder / "versions" / "extra").write_text("not ours")
    assert problems_of(folder) == ["versions/extra is not part of the backup"]
    (folder / "versions" / "extra").unlink()
    assert problems_of(folder) == []
    database = folder / manifest.database_file
    database.write_bytes(database.read_bytes()[:-1])
    assert [problem.partition(" ")[0] for problem in problems_of(folder)] == [manifest.database_file]


async def test_changed_manifest_is_refused(deployment: Harness, tmp_path: Path) -> None:
    await create(deployment, tmp_path / "one")
    path = tmp_path / "one" / BACKUP_MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format":  1'))
    with pytest.raises(BackupError, match="sha256"):
        problems_of(tmp_path / "one")
    path.unlink()
    with pytest.raises(BackupError, match="no complete backup"):
        problems_of(tmp_path / "one")


async def test_version_without_its_files_is_found_by_verify(deployment: Harness, tmp_path: Path) -> None:
    """The manifest of the backup itself lists too little: the rows of the database decide."""
    await create(deployment, tmp_path / "one")
    manifest, _ = backup.verify_backup(tmp_path / "one", ignore_progress)
    shutil.rmtree(tmp_path / "one" / "versions" / "shop-v1.0a1b2c3d.1")
    files = {name: entry for name, entry in manifest.files.items() if "shop-v1" not in name}
    problems = list(find_problems(tmp_path / "one", manifest.model_copy(update={"files": files}), ignore_progress))
    assert len(problems) == 1 and problems[0].startswith("version shop-v1: ")


async def test_files_in_use_must_be_there_and_others_may_be_deleted(deployment: Harness, tmp_path: Path) -> None:
    unused = deployment.settings.versions_dir / "shop-v1.0a1b2c3d.1"
    await reject(deployment, 1)
    third = await create_sealed_version(deployment, 3, live=True)  # v2 served before it, and v1 is not in use
    shutil.rmtree(unused)
    manifest = await create(deployment, tmp_path / "one")
    assert manifest.absent.keys() == {"versions/shop-v1.0a1b2c3d.1"} and problems_of(tmp_path / "one") == []
    (Path(third.adapter_path or "") / ADAPTER).write_bytes(b"damaged")
    with pytest.raises(BackupError, match="shop-v3"):
        await create(deployment, tmp_path / "two")
    assert not (tmp_path / "two").exists() and [path.name for path in tmp_path.glob(".*")] == []
    manifest = await create(deployment, tmp_path / "two", incomplete=True)
    assert len(manifest.absent) == 2 and problems_of(tmp_path / "two") == []


async def test_version_that_is_replaced_and_deleted_meanwhile_costs_a_second_snapshot(
    deployment: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, snapshots = backup_database.copy_database, []
    first = await deployment.serving()

    def copy_and_replace(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
        snapshots.append(copy(url, folder, report))
        if len(snapshots) == 1:
            asyncio.run_coroutine_threadsafe(replace(), loop).result()
        return snapshots[-1]

    async def replace() -> None:
        for number in (3, 4):  # then the first one neither serves nor served last
            await create_sealed_version(deployment, number, live=True)
        shutil.rmtree(first.adapter_path or "")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(backup_database, "copy_database", copy_and_replace)
    manifest = await create(deployment, tmp_path / "one")
    assert len(snapshots) == 2 and problems_of(tmp_path / "one") == []
    assert [artifact.name for artifact in manifest.contents.artifacts if artifact.path in manifest.absent] == [
        "shop-v2"
    ]


async def test_version_whose_folder_moves_meanwhile_costs_a_second_snapshot(
    deployment: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected version loses its trainer state: it gets another folder, and its old one is deleted."""
    copy, snapshots = backup_database.copy_database, []
    version = await reject(deployment, 1)
    old = Path(version.adapter_path or "")

    def copy_and_move(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
        snapshots.append(copy(url, folder, report))
        if len(snapshots) == 1:
            asyncio.run_coroutine_threadsafe(move(), loop).result()
        return snapshots[-1]

    async def move() -> None:
        new, sha256 = copy_without_state(old)
        async with deployment.db.write() as session:
            row = await session.get_one(Version, version.id)
            row.adapter_path, row.manifest_sha256 = str(new), sha256
        shutil.rmtree(old)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(backup_database, "copy_database", copy_and_move)
    manifest = await create(deployment, tmp_path / "one")
    assert len(snapshots) == 2 and manifest.absent == {} and problems_of(tmp_path / "one") == []
    assert (tmp_path / "one" / "versions" / f"{old.name}.weights" / ADAPTER).is_file()


async def prune(harness: Harness, number: int) -> None:
    """Delete the files of a version, as retention does."""
    async with harness.db.write() as session:
        version = (await session.scalars(select(Version).where(Version.number == number))).one()
        version.pruned_at = 1.0
    shutil.rmtree(version.adapter_path or "")


async def test_version_that_is_pruned_meanwhile_costs_a_second_snapshot(
    deployment: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, snapshots = backup_database.copy_database, []
    await reject(deployment, 1)

    def copy_and_prune(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
        snapshots.append(copy(url, folder, report))
        if len(snapshots) == 1:
            asyncio.run_coroutine_threadsafe(prune(deployment, 1), loop).result()
        return snapshots[-1]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(backup_database, "copy_database", copy_and_prune)
    manifest = await create(deployment, tmp_path / "one")
    assert len(snapshots) == 2 and manifest.absent == {} and problems_of(tmp_path / "one") == []
    assert [artifact.name for artifact in manifest.contents.artifacts] == ["shop-v2", "rm-1"]


async def test_pruning_during_every_snapshot_does_not_fail_the_backup(
    deployment: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot counts. What it names and is absent counts as pruned in the restored copy."""
    copy, snapshots = backup_database.copy_database, []
    for number in (3, 4, 5):  # the last one is the head of training
        await create_sealed_version(deployment, number)
    for number in (1, 3, 4):
        await reject(deployment, number)

    def copy_and_prune(url: str, folder: Path, report: Report) -> tuple[str, Contents]:
        snapshots.append(copy(url, folder, report))
        number = (1, 3, 4)[len(snapshots) - 1]
        asyncio.run_coroutine_threadsafe(prune(deployment, number), loop).result()
        return snapshots[-1]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(backup_database, "copy_database", copy_and_prune)
    manifest = await create(deployment, tmp_path / "one")
    assert len(snapshots) == 3 and manifest.absent.keys() == {"versions/shop-v4.0a1b2c3d.1"}
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        await restore(settings, tmp_path / "one")
        async with Database(settings.database_url) as db, db.read() as session:
            pruned = await session.execute(select(Version.number, Version.pruned_at))
            assert {number for number, pruned_at in pruned if pruned_at is not None} == {1, 3, 4}
            for path in await session.scalars(select(Version.adapter_path).where(Version.pruned_at.is_(None))):
                assert path is None or Path(path).is_dir()


async def test_reward_model_without_files_has_no_path_in_the_restored_copy(deployment: Harness, tmp_path: Path) -> None:
    async with deployment.db.write() as session:
        [model] = await session.scalars(select(RewardModel))
        model.state = RewardModelState.RETIRED
    shutil.rmtree(model.path or "")
    manifest = await create(deployment, tmp_path / "one")
    assert len(manifest.absent) == 1
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        await restore(settings, tmp_path / "one")
        async with Database(settings.database_url) as db, db.read() as session:
            [model] = await session.scalars(select(RewardModel))
            assert model.path is None


async def test_version_that_waits_for_its_release_is_in_use(deployment: Harness, tmp_path: Path) -> None:
    shutil.rmtree(deployment.settings.versions_dir / "shop-v1.0a1b2c3d.1")
    with pytest.raises(BackupError, match="shop-v1"):
        await create(deployment, tmp_path / "one")


@pytest.mark.parametrize("revision", ["20261123_0400", "20261123_0600", "20261123_0700"])
async def test_schema_of_an_older_release_is_backed_up_and_restored(
    harness: Harness, tmp_path: Path, revision: str
) -> None:
    """The new release makes a backup before `attune db upgrade`. Versions have no column `pruned_at` yet."""
    with (
        empty_home(harness.settings, tmp_path / "old") as old,
        empty_home(harness.settings, tmp_path / "other") as other,
    ):
        old.home.mkdir()
        await asyncio.to_thread(command.upgrade, alembic_config(old.database_url), revision)
        engine = create_engine(old.database_url.replace("+aiosqlite", ""))
        with closing_engine(engine), engine.begin() as connection:
            insert_rows(connection, "old")
        folder = tmp_path / "one"
        manifest = await asyncio.to_thread(backup.create_backup, old, folder, ignore_progress, incomplete=True)
        assert manifest.contents.schema_revision == revision and problems_of(folder) == []
        assert {manifest.contents.rows[name] for name in ("versions", "turns", "feedback")} == {1}
        await restore(other, folder)
        with pytest.raises(ValueError, match="attune db upgrade"):
            await asyncio.to_thread(require_compatible_schema, other.database_url)
        await asyncio.to_thread(command.upgrade, alembic_config(other.database_url), "head")
        async with Database(other.database_url) as db, db.read() as session:
            [version] = await session.scalars(select(Version))
            assert Path(version.adapter_path or "").parent == other.versions_dir


async def test_webhooks_of_a_restored_copy_are_disabled(harness: Harness, tmp_path: Path) -> None:
    await create_webhook(harness, "https://hooks.example")
    await create(harness, tmp_path / "one")
    with empty_home(harness.settings, tmp_path / "other") as settings:
        await restore(settings, tmp_path / "one")
        async with Database(settings.database_url) as db, db.read() as session:
            [endpoint] = await session.scalars(select(WebhookEndpoint))
        assert endpoint.disabled_at is not None and "restored from a backup" in (endpoint.disabled_reason or "")


async def test_name_of_the_folder_may_hold_any_character(harness: Harness, tmp_path: Path) -> None:
    folder = tmp_path / ("a%41#?mode=rw&b" + "x" * 235)  # 250 characters
    await create(harness, folder)
    assert problems_of(folder) == []


async def test_restore_that_fails_is_refused_at_start_and_can_be_repeated(
    deployment: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("it went down")

    await create(deployment, tmp_path / "one")
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        with monkeypatch.context() as failing:
            failing.setattr(restore_database, "_adapt_rows", fail)
            with pytest.raises(BackupError, match=r"it went down.*restore again"):
                await restore(settings, tmp_path / "one")
        with pytest.raises(ValueError, match="no tables yet"):
            await asyncio.to_thread(require_compatible_schema, settings.database_url)
        mine = settings.versions_dir / "mine"
        mine.write_text("not from the backup")
        with pytest.raises(BackupError, match="versions is not empty"):
            await restore(settings, tmp_path / "one")
        mine.unlink()
        manifest = await restore(settings, tmp_path / "one")
        await asyncio.to_thread(require_compatible_schema, settings.database_url)
        async with Database(settings.database_url) as db:
            assert (await count_rows(db))["turns"] == manifest.contents.rows["turns"]
        with pytest.raises(BackupError, match="empty"):
            await restore(settings, tmp_path / "one")


@pytest.mark.postgres
async def test_restore_that_is_killed_has_no_schema_revision(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after pg_restore has committed."""

    def run_and_die(command: list[str], *args: Any) -> None:
        run_program(command, *args)
        if "pg_restore" in command[0]:
            raise KeyboardInterrupt

    source = Settings(home=tmp_path / "home", database={"url": postgres})
    await asyncio.to_thread(backup.create_backup, source, tmp_path / "one", ignore_progress)
    with empty_home(source, tmp_path / "other") as settings:
        with monkeypatch.context() as dying:
            dying.setattr(restore_database, "run_program", run_and_die)
            with pytest.raises(KeyboardInterrupt):
                backup.restore_backup(settings, tmp_path / "one", ignore_progress)
        with pytest.raises(ValueError, match="no tables yet"):
            await asyncio.to_thread(require_compatible_schema, settings.database_url)
        await restore(settings, tmp_path / "one")
        await asyncio.to_thread(require_compatible_schema, settings.database_url)


async def test_database_that_is_used_after_a_failed_restore_is_kept(
    deployment: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore may delete what another one has left, but nothing that a service has written since then."""

    def fail(*args: Any) -> None:
        raise BackupError("it went down")

    await create(deployment, tmp_path / "one")
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        with monkeypatch.context() as failing:
            failing.setattr(restore_database, "run_program", fail)
            failing.setattr(shutil, "copyfile", fail)
            with pytest.raises(BackupError, match="it went down"):
                await restore(settings, tmp_path / "one")
        await asyncio.to_thread(upgrade, settings.database_url)
        with pytest.raises(BackupError, match="empty"):
            await restore(settings, tmp_path / "one")
        await asyncio.to_thread(require_compatible_schema, settings.database_url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql+psycopg://me:secret@db/shop", {"user": "me", "host": "db", "dbname": "shop"}),
        ("postgresql+psycopg://me@db/shop?password=secret&port=5", {"user": "me", "port": "5"}),
        ("postgresql+psycopg://m%40e:secret@db/it's%20%3Dmine", {"user": "m@e", "dbname": "it's =mine"}),
        ("postgresql+psycopg://me:secret@/shop?host=a:5&host=b:6", {"host": "a,b", "port": "5,6"}),
    ],
)
def test_passwords_are_not_on_the_command_line(tmp_path: Path, url: str, expected: dict[str, str]) -> None:
    program, out = tmp_path / "program", tmp_path / "out"
    program.write_text(f'#!/bin/sh\necho "$PGPASSWORD" > {out}\nfor argument; do echo "$argument" >> {out}; done\n')
    program.chmod(0o700)
    run_program([str(program), "--flag"], make_url(url), lambda: None)
    password, *arguments = out.read_text().splitlines()
    assert password == "secret" and not any("secret" in argument for argument in arguments)
    assert arguments[0] == "--flag" and len(arguments) == 2
    connection = conninfo_to_dict(arguments[1].removeprefix("--dbname="))
    assert {name: connection[name] for name in expected} == expected


def test_password_of_a_tls_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="sslpassword"):
        run_program(["none"], make_url("postgresql+psycopg://db/shop?sslpassword=x"), lambda: None)


def test_error_of_a_client_program_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "pg_dump"
    program.write_text('#!/bin/sh\nprintf "pg_dump: error: aborting\\npg_dump: detail: too old\\n" >&2\nexit 1\n')
    program.chmod(0o700)
    with pytest.raises(BackupError) as failed:
        run_program([str(program)], make_url("postgresql+psycopg://db/shop"), lambda: None)
    assert "aborting pg_dump: detail: too old" in str(failed.value) and "\n" not in str(failed.value)


async def test_backup_of_another_schema_or_database_is_refused(deployment: Harness, tmp_path: Path) -> None:
    manifest = await create(deployment, tmp_path / "one")
    with pytest.raises(BackupError, match="exists"):
        await create(deployment, tmp_path / "one")
    with pytest.raises(BackupError, match="later release"):
        restore_database.require_known_revision("29990101_0000", deployment.settings.database_url)
    other = "sqlite+aiosqlite:///" if manifest.database == "postgresql" else "postgresql+psycopg://postgres@127.0.0.1/"
    settings = deployment.settings.replace({"home": tmp_path / "other", "database.url": f"{other}{tmp_path}/new.db"})
    with pytest.raises(BackupError, match="ATTUNE_DATABASE__URL"):
        await restore(settings, tmp_path / "one")


@pytest.mark.postgres
async def test_missing_client_programs_are_named(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings(home=tmp_path / "home", database={"url": postgres})
    with pytest.raises(BackupError, match="pg_dump is not installed"):
        await asyncio.to_thread(backup.create_backup, settings, tmp_path / "one", ignore_progress)


async def test_restored_copy_serves(deployment: Harness, scripted: ScriptedEngine, tmp_path: Path) -> None:
    """The API on the restored home accepts the same key, and answers by the same version."""
    from app.main import create_app

    serving = await deployment.serving()
    await create(deployment, tmp_path / "one")
    with empty_home(deployment.settings, tmp_path / "other") as settings:
        await restore(settings, tmp_path / "one")
        async with Database(settings.database_url) as db, db.write() as session:
            engine = await session.get_one(Engine, "engine-0")
            assert engine.state == EngineState.DOWN
            engine.state, engine.loaded = EngineState.READY, [serving.adapter_name or ""]
        scripted.adapters[serving.adapter_name or ""] = "loaded"
        app = create_app(settings)
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://attune") as api,
        ):
            headers = {"authorization": f"Bearer {deployment.key}"}
            answer = await api.post("/v1/chat/completions", json=CHAT | {"model": "shop"}, headers=headers)
        assert answer.status_code == 200 and answer.headers["x-policy-version"] == "shop@v2"
