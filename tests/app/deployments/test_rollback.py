"""Rollback: the deployment changes, nothing is reloaded, and training continues from the older version."""

import pytest

from app.deployments import service
from app.models import Audit, Deployment, Engine, Policy, Version, VersionState
from tests.support.deployment import Harness


async def publish(harness: Harness, *, loaded: bool = True) -> Version:
    version = await harness.version(VersionState.VERIFIED)
    async with harness.db.write() as session:
        policy = await session.get_one(Policy, version.policy_id)
        row = await session.get_one(Version, version.id)
        if loaded:
            engine = await session.get_one(Engine, "engine-0")
            engine.loaded = [*engine.loaded, row.adapter_name]
        await service.set_live(session, policy, row, actor="test", reason="test")
    return version


async def test_rollback_returns_to_the_parent_and_training_continues_there(harness: Harness) -> None:
    first, second = await publish(harness), await publish(harness)
    answer = await harness.api.post("/v1/policies/shop/rollback", json={"reason": "rude"})
    assert (answer.status_code, answer.json()["rolled_back"], answer.json()["serving"]) == (200, "shop@v2", "shop@v1")
    assert (await harness.serving()).id == first.id
    assert (await harness.policy()).head_version_id == first.id
    rolled_back = await harness.get(Version, second.id)
    assert (rolled_back.state, rolled_back.reason) == (VersionState.ROLLED_BACK, "rude")
    deployment = await harness.get(Deployment, (await harness.policy()).id)
    assert (deployment.previous_version_id, deployment.epoch) == (second.id, 3)
    assert [row.action for row in await harness.all(Audit)] == [
        "deployment.deployed",
        "deployment.deployed",
        "deployment.rolled_back",
    ]


async def test_rollback_to_a_number_is_idempotent(harness: Harness) -> None:
    await publish(harness)
    await publish(harness)
    for _ in range(2):
        answer = await harness.api.post("/v1/policies/shop/rollback", json={"version": 0})
        assert (answer.status_code, answer.json()["serving"]) == (200, "shop@v0")
    assert (await harness.serving()).number == 0


async def test_rollback_needs_no_body(harness: Harness) -> None:
    await publish(harness)
    answer = await harness.api.post("/v1/policies/shop/rollback")
    assert answer.json()["serving"] == "shop@v0"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"version": 99}, 404),
        ({"version": -1}, 400),
        ({"version": "x"}, 400),
        ({"to": 1}, 400),
        ({"from_version": 99}, 404),
        ({"from_version": -1}, 400),
        ({"from_version": 0, "version": 0}, 400),
    ],
)
async def test_rollback_to_unknown_version_is_refused(harness: Harness, body: dict[str, object], status: int) -> None:
    answer = await harness.api.post("/v1/policies/shop/rollback", json=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_first_version_cannot_be_rolled_back(harness: Harness) -> None:
    answer = await harness.api.post("/v1/policies/shop/rollback", json={})
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"


async def test_rollback_to_unloaded_version_is_refused(harness: Harness) -> None:
    await publish(harness, loaded=False)
    await publish(harness)
    answer = await harness.api.post("/v1/policies/shop/rollback", json={"version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_not_loaded")
    assert (await harness.serving()).number == 2


async def test_rollback_to_rejected_version_is_refused(harness: Harness) -> None:
    await publish(harness)
    rejected = await harness.version(VersionState.REJECTED)
    answer = await harness.api.post("/v1/policies/shop/rollback", json={"version": rejected.number})
    assert answer.status_code == 404


async def test_rollback_from_a_version_is_idempotent(harness: Harness) -> None:
    first, _ = await publish(harness), await publish(harness)
    answers = [await harness.api.post("/v1/policies/shop/rollback", json={"from_version": 2}) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert {(answer.json()["rolled_back"], answer.json()["serving"]) for answer in answers} == {("shop@v2", "shop@v1")}
    assert (await harness.serving()).id == first.id
    assert [row.action for row in await harness.all(Audit)] == [
        "deployment.deployed",
        "deployment.deployed",
        "deployment.rolled_back",
    ]


async def test_rollback_from_a_version_that_no_longer_serves_is_refused(harness: Harness) -> None:
    await publish(harness)
    await publish(harness)
    answer = await harness.api.post("/v1/policies/shop/rollback", json={"from_version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_serving")
    assert "shop@v1 does not serve: shop@v2 serves now" in answer.json()["error"]["message"]
    assert (await harness.serving()).number == 2


@pytest.fixture
async def canary(harness: Harness) -> Version:
    """The third version as a canary with a share of 0.2; the second version serves."""
    await publish(harness)
    await publish(harness)
    third = await publish(harness)
    for body in ({"version": 2}, {"version": third.number, "share": 0.2}):
        answer = await harness.api.post("/v1/policies/shop/deploy", json=body)
        assert answer.status_code == 200, answer.text
    return third


async def test_rollback_from_a_canary_is_idempotent(harness: Harness, canary: Version) -> None:
    for _ in range(2):
        answer = await harness.api.post("/v1/policies/shop/rollback", json={"from_version": canary.number})
        assert (answer.json()["rolled_back"], answer.json()["serving"]) == ("shop@v3", "shop@v2")


async def test_rollback_from_the_serving_version_aborts_its_canary(harness: Harness, canary: Version) -> None:
    answer = await harness.api.post("/v1/policies/shop/rollback", json={"from_version": 2})
    assert (answer.json()["rolled_back"], answer.json()["serving"]) == ("shop@v2", "shop@v1")
    deployment = await harness.get(Deployment, (await harness.policy()).id)
    assert deployment.canary_version_id is None
