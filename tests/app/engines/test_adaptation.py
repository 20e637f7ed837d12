"""What adapters and full weights mean for engines: what a call names, and one kind a database."""

import pytest
from sqlalchemy import select

from app.engines.adaptation import Adapters, FullWeights, adaptation_of
from app.inference.engine import BASE_WEIGHTS
from app.inference.request import EngineTarget
from app.models import Version
from tests.support.deployment import Harness

BASE = Version(number=0, adapter_name=None, full_weights=False)
ADAPTER = Version(number=1, adapter_name="shop-v1", full_weights=False)
WEIGHTS = Version(number=1, adapter_name="shop-v1", full_weights=True)


def test_call_names_an_adapter_and_keeps_the_prefixes_of_base_models_apart() -> None:
    assert Adapters().target(BASE, "tiny", "shop@v0") == EngineTarget(prefix_key="tiny", label="shop@v0")
    expected = EngineTarget(adapter="shop-v1", prefix_key="tiny", label="shop@v1")
    assert Adapters().target(ADAPTER, "tiny", "shop@v1") == expected


def test_call_names_the_weights_that_must_answer_also_those_an_engine_started_with() -> None:
    expected = EngineTarget(weights=BASE_WEIGHTS, prefix_key="tiny", label="shop@v0")
    assert FullWeights().target(BASE, "tiny", "shop@v0") == expected
    expected = EngineTarget(weights="shop-v1", prefix_key="shop-v1", label="shop@v1")
    assert FullWeights().target(WEIGHTS, "tiny", "shop@v1") == expected


async def test_versions_are_named_by_the_database_as_by_their_rows(harness: Harness) -> None:
    await harness.version()
    await harness.version(full_weights=True)
    async with harness.db.read() as session:
        query = select(Version, Version.adapter, Version.weights).order_by(Version.number, Version.id)
        rows = await session.execute(query)
        named = [((version.adapter, version.weights), (adapter, weights)) for version, adapter, weights in rows]
    assert [by_row for by_row, _ in named] == [(None, None), ("shop-v1", None), (None, "shop-v2")]
    assert all(by_row == by_database for by_row, by_database in named)


async def test_database_has_one_kind_of_adaptation(harness: Harness) -> None:
    assert isinstance(adaptation_of(harness.settings), Adapters)
    version = await harness.version(full_weights=True)
    async with harness.db.write() as session:
        await FullWeights().check_versions(session)
        with pytest.raises(ValueError, match="shop-v1 is full weights, not an adapter"):
            await Adapters().check_versions(session)
        (await session.get_one(Version, version.id)).full_weights = False
        await session.flush()
        with pytest.raises(ValueError, match="shop-v1 is an adapter, not full weights"):
            await FullWeights().check_versions(session)
