"""What beat exposes of the database: what waits, how policies learn, engines, canaries and webhooks."""

from prometheus_client import CollectorRegistry, generate_latest

from app.core.settings import Settings
from app.models import Deployment, EngineState, LearningMode, VersionState
from tests.support.deployment import Harness
from tests.support.metrics_requests import Page
from tests.support.updates import rate
from workers.database_metrics import DatabaseMetrics, read_metrics

SHOP = {"project": "default", "policy": "shop"}


async def read(harness: Harness) -> Page:
    async with harness.db.read() as session:
        metrics = await read_metrics(session, harness.settings)

    class Fixed:
        def collect(self) -> list[object]:
            return list(metrics)

    registry = CollectorRegistry()
    registry.register(Fixed())  # type: ignore[arg-type]
    return Page(generate_latest(registry).decode())


async def test_waiting_samples_and_the_learning_mode(harness: Harness) -> None:
    await rate(harness, "+-+")
    async with harness.db.write() as session:
        policy = await session.get_one(type(await harness.policy()), (await harness.policy()).id)
        policy.mode, policy.kl_alarms = LearningMode.HALTED, 2
    page = await read(harness)
    assert page("attune_samples", **SHOP, state="open") == 3
    assert page("attune_samples", **SHOP, state="quarantined") == 0
    modes = {mode: page("attune_learning_mode", **SHOP, mode=mode) for mode in LearningMode}
    assert modes == {"asynchronous": 0, "synchronous": 0, "halted": 1}
    assert page("attune_kl_alarms", **SHOP) == 2


async def test_the_age_of_the_oldest_work_of_each_stage(harness: Harness) -> None:
    before = await read(harness)
    assert {stage: value for stage, value in before.by_name("attune_queue_oldest_seconds").items() if value} == {}
    turn = await harness.turn()
    await harness.vote(turn.id)
    version = await harness.version(VersionState.TRAINED)
    async with harness.db.write() as session:
        (await session.get_one(type(version), version.id)).created_at -= 500.0
    page = await read(harness)
    assert (page("attune_queue_oldest_seconds", stage="curate") or 0) > 0
    assert 500 < (page("attune_queue_oldest_seconds", stage="evaluate") or 0) < 900
    assert page("attune_queue_oldest_seconds", stage="publish") == 0
    assert page("attune_batch_age_seconds") == 0


async def test_engines_by_state_and_what_each_holds(harness: Harness) -> None:
    page = await read(harness)
    assert {state: page("attune_engines", state=state) for state in EngineState} == {
        "starting": 0,
        "ready": 1,
        "down": 0,
    }
    assert page("attune_engine_loaded", engine="engine-0") == 0
    assert page("attune_webhook_pending") == 0 and page("attune_webhook_failing") == 0


async def test_the_evidence_of_a_watched_canary_is_relative_to_what_decides(harness: Harness) -> None:
    assert (await read(harness)).by_name("attune_canary_evidence") == {}
    serving = await harness.serving()
    candidate = await harness.version(VersionState.CANARY)
    async with harness.db.write() as session:
        deployment = await session.get_one(Deployment, serving.policy_id)
        deployment.canary_version_id, deployment.canary_since, deployment.canary_watched = candidate.id, 1.0, True
    page = await read(harness)
    tests = ("less_approval", "no_worse", "more_failures")
    assert {test: page("attune_canary_evidence", **SHOP, test=test) for test in tests} == dict.fromkeys(tests, 0.0)


def test_a_database_that_cannot_be_read_is_shown_as_down(tmp_path: object) -> None:
    settings = Settings().replace({"database.url": f"sqlite+aiosqlite:///{tmp_path}/missing/attune.db"})
    registry = CollectorRegistry()
    registry.register(DatabaseMetrics(settings))
    page = Page(generate_latest(registry).decode())
    assert page("attune_database_up") == 0 and set(page.families) == {"attune_database_up"}
