"""What `make bench-swap` does to the versions while users chat: releases, rollbacks, and swaps of other systems."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import httpx2
from sqlalchemy import select

from app.core.database import Database
from app.core.settings import DEMO_MODEL
from app.engines.fleet import is_loaded
from app.inference.keys import load_engine_keys
from app.models import Engine, Version, VersionState
from tests.benchmarks.deployment import POLICY
from tests.benchmarks.swap_deployment import SwapDeployment
from tests.benchmarks.swap_report import Spans
from tests.benchmarks.swap_users import ReplyRecord, Users
from tests.benchmarks.swap_versions import UnpublishedVersion, publish

TIMEOUT_SECONDS = 300.0


async def publish_all(
    deployment: SwapDeployment, versions: Sequence[UnpublishedVersion], spans: Spans, *, pause: float, quiet: float
) -> None:
    """Publish all versions, `pause` seconds apart, with an idle period of `quiet` seconds after every tenth."""
    for number, unpublished in enumerate(versions, 1):
        start = time.perf_counter()
        version_id = await publish(deployment.db, deployment.settings, deployment.policy_id, unpublished)
        version, is_verified_everywhere = await wait_until_live(deployment.db, version_id)
        ended = time.perf_counter()
        spans.releases.append((start, ended))
        spans.verified_everywhere += is_verified_everywhere
        await wait_until_loaded(deployment.db, version)
        spans.loaded_everywhere.append(1000 * (time.perf_counter() - ended))
        await asyncio.sleep(pause)
        if number % 10 == 0:
            print(f"{number} of {len(versions)} published", flush=True)
            await asyncio.sleep(
                3 * deployment.settings.workers.reconcile_seconds
            )  # old versions are unloaded meanwhile
            start = time.perf_counter()
            await asyncio.sleep(quiet)
            spans.idle.append((start, time.perf_counter()))


async def wait_until_live(db: Database, version_id: str) -> tuple[Version, bool]:
    """Wait until the version is live with all its timings.

    Return it, and whether every replica had verified it when it went live. A version goes live when half of the
    replicas have verified it and the others have had a second more; its timings are those of these replicas.
    """
    is_verified_everywhere: bool | None = None
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            async with db.read_snapshot() as session:
                version = await session.get_one(Version, version_id)
                engines = list(await session.scalars(select(Engine)))
            assert version.state != VersionState.REJECTED, version.reason
            if version.state == VersionState.LIVE and is_verified_everywhere is None:
                is_verified_everywhere = all(is_loaded(engine, version) for engine in engines)
            if is_verified_everywhere is not None and "trained_to_served" in version.timings:
                return version, is_verified_everywhere
            await asyncio.sleep(0.02)


async def wait_until_loaded(db: Database, version: Version, *, by: Callable[[Iterable[bool]], bool] = all) -> None:
    """Wait until every replica has loaded the version; with `by=any`, until one has."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            async with db.read() as session:
                if by(is_loaded(engine, version) for engine in await session.scalars(select(Engine))):
                    return
            await asyncio.sleep(0.02)


async def roll_back_and_deploy(deployment: SwapDeployment, moves: int) -> tuple[list[float], list[float]]:
    """Alternate between rollback by one version and deploy.

    Return the milliseconds of each call, and the milliseconds until a replica has the requested version.
    """
    call_times, load_times = list[float](), list[float]()
    headers = {"authorization": f"Bearer {deployment.key}"}
    async with httpx2.AsyncClient(base_url=deployment.urls[0], headers=headers, timeout=30, trust_env=False) as api:
        serving = (await api.get(f"/v1/policies/{POLICY}")).json()["serving"]
        newest = int(serving.rpartition("v")[2])
        for number in range(moves):
            body = {"version": newest if number % 2 else newest - 1}
            start = time.perf_counter()
            response = await api.post(f"/v1/policies/{POLICY}/{'deploy' if number % 2 else 'rollback'}", json=body)
            call_times.append(1000 * (time.perf_counter() - start))
            assert response.status_code == 200, response.text
            async with deployment.db.read() as session:
                statement = select(Version).where(Version.number == body["version"])
                version = (await session.scalars(statement)).one()
            await wait_until_loaded(deployment.db, version, by=any)
            load_times.append(1000 * (time.perf_counter() - start))
            await asyncio.sleep(0.5)
    return call_times, load_times


async def pause_reload_resume(
    deployment: SwapDeployment, times: int, mode: str, replies: list[ReplyRecord]
) -> list[float]:
    """Swap weights as other systems do, on one replica that users access directly. Return the seconds of each swap."""
    keys, url = load_engine_keys(deployment.settings), deployment.engines[0]
    users = Users([url], keys.api, "default", 4, replies=replies)
    chat_task = asyncio.create_task(users.chat(99))
    durations = []
    headers = {"authorization": f"Bearer {keys.admin}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as engine:
        for _ in range(times):
            await asyncio.sleep(1.0)
            start = time.perf_counter()
            reload = {"model_path": str(DEMO_MODEL), "flush_cache": True}
            for path, body in (
                ("/pause_generation", {"mode": mode}),
                ("/update_weights_from_disk", reload),
                ("/continue_generation", {"torch_empty_cache": False}),
            ):
                response = await engine.post(path, json=body)
                assert response.status_code == 200, f"{path}: {response.text}"
            durations.append(time.perf_counter() - start)
    users.stopped = True
    await chat_task
    return durations
