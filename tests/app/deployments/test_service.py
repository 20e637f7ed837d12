"""Deploying, canaries and rollback: the deployment changes, nothing is reloaded, and training continues from there."""

from typing import Any

import pytest

from app.models import Audit, Deployment, Engine, Version, VersionState
from tests.support.deployment import Harness
from tests.support.trained_versions import publish

ROOT = "/v1/policies/shop"


async def test_rollback_returns_to_the_parent_and_training_continues_there(harness: Harness) -> None:
    first, second = await publish(harness), await publish(harness)
    answer = await harness.api.post(f"{ROOT}/rollback", json={"reason": "rude"})
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
        answer = await harness.api.post(f"{ROOT}/rollback", json={"version": 0})
        assert (answer.status_code, answer.json()["serving"]) == (200, "shop@v0")
    assert (await harness.serving()).number == 0


async def test_rollback_needs_no_body(harness: Harness) -> None:
    await publish(harness)
    answer = await harness.api.post(f"{ROOT}/rollback")
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
    answer = await harness.api.post(f"{ROOT}/rollback", json=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_first_version_cannot_be_rolled_back(harness: Harness) -> None:
    answer = await harness.api.post(f"{ROOT}/rollback", json={})
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"


async def test_rollback_to_unloaded_version_is_refused(harness: Harness) -> None:
    await publish(harness, loaded=False)
    await publish(harness)
    answer = await harness.api.post(f"{ROOT}/rollback", json={"version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "version_not_loaded")
    assert (await harness.serving()).number == 2


async def test_rollback_to_rejected_version_is_refused(harness: Harness) -> None:
    await publish(harness)
    rejected = await harness.version(VersionState.REJECTED)
    answer = await harness.api.post(f"{ROOT}/rollback", json={"version": rejected.number})
    assert answer.status_code == 404


async def test_rollback_from_a_version_is_idempotent(harness: Harness) -> None:
    first, _ = await publish(harness), await publish(harness)
    answers = [await harness.api.post(f"{ROOT}/rollback", json={"from_version": 2}) for _ in range(3)]
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
    answer = await harness.api.post(f"{ROOT}/rollback", json={"from_version": 1})
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
        answer = await harness.api.post(f"{ROOT}/deploy", json=body)
        assert answer.status_code == 200, answer.text
    return third


async def test_rollback_from_a_canary_is_idempotent(harness: Harness, canary: Version) -> None:
    for _ in range(2):
        answer = await harness.api.post(f"{ROOT}/rollback", json={"from_version": canary.number})
        assert (answer.json()["rolled_back"], answer.json()["serving"]) == ("shop@v3", "shop@v2")


async def test_rollback_from_the_serving_version_aborts_its_canary(harness: Harness, canary: Version) -> None:
    answer = await harness.api.post(f"{ROOT}/rollback", json={"from_version": 2})
    assert (answer.json()["rolled_back"], answer.json()["serving"]) == ("shop@v2", "shop@v1")
    deployment = await harness.get(Deployment, (await harness.policy()).id)
    assert deployment.canary_version_id is None


@pytest.fixture
async def versions(harness: Harness) -> list[Version]:
    """Three versions, published one after the other and loaded on the engine; the third one serves."""
    return [await publish(harness) for _ in range(3)]


async def test_canary_is_promoted(harness: Harness, versions: list[Version]) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.1})
    answer = await harness.api.post(f"{ROOT}/canary/promote", json={"reason": "looks well"})
    assert (answer.json()["serving"], answer.json()["canary"]) == ("shop@v1", None)
    assert (await harness.get(Version, versions[0].id)).state == VersionState.LIVE
    assert (await harness.get(Version, versions[2].id)).state == VersionState.SUPERSEDED
    assert (await harness.policy()).head_version_id == versions[0].id, "training continues from the version that serves"
    assert [row.action for row in await harness.all(Audit)][-2:] == ["canary.began", "deployment.deployed"]


async def test_rollback_to_a_number_aborts_the_canary(harness: Harness, versions: list[Version]) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.9})
    answer = await harness.api.post(f"{ROOT}/rollback", json={"version": 2})
    assert answer.json()["serving"] == "shop@v2"
    assert (await harness.api.get(f"{ROOT}/deployment")).json()["canary"] is None


async def test_rollback_to_the_serving_version_aborts_the_canary_and_to_the_canary_is_refused(
    harness: Harness, versions: list[Version]
) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.9})
    refused = await harness.api.post(f"{ROOT}/rollback", json={"version": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "canary_active")
    answer = await harness.api.post(f"{ROOT}/rollback", json={"version": 3, "reason": "rude"})
    assert (answer.json()["rolled_back"], answer.json()["serving"]) == ("shop@v1", "shop@v3")
    assert (await harness.get(Version, versions[0].id)).state == VersionState.ROLLED_BACK
    again = await harness.api.post(f"{ROOT}/deploy", json={"version": 1})
    assert again.json()["serving"] == "shop@v1"
    promoted = await harness.get(Version, versions[0].id)
    assert (promoted.state, promoted.reason) == (VersionState.LIVE, None)


async def test_deploy_is_idempotent(harness: Harness, versions: list[Version]) -> None:
    for _ in range(2):
        answer = await harness.api.post(f"{ROOT}/deploy", json={"version": 1})
        assert (answer.json()["serving"], answer.json()["previous"], answer.json()["epoch"]) == (
            "shop@v1",
            "shop@v3",
            4,
        )
    assert (await harness.policy()).head_version_id == versions[0].id
    assert (await harness.get(Version, versions[2].id)).state == VersionState.SUPERSEDED, "it was not rolled back"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"version": 99}, 404, "model_not_found"),
        ({"version": 99, "share": 0.5}, 404, "model_not_found"),
        ({"version": 3, "share": 0.5}, 409, "already_serving"),
        ({"version": 1, "share": 0.0}, 400, "invalid_value"),
        ({"version": 1, "share": 1.0}, 400, "invalid_value"),
        ({"share": 0.1}, 400, "invalid_value"),
        ({"version": 1, "shares": 0.1}, 400, "unknown_parameter"),
    ],
)
async def test_deploy_of_unservable_version_is_refused(
    harness: Harness, versions: list[Version], body: dict[str, Any], status: int, code: str
) -> None:
    answer = await harness.api.post(f"{ROOT}/deploy", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert (await harness.serving()).number == 3


async def test_one_canary_at_a_time_and_it_must_be_loaded(harness: Harness, versions: list[Version]) -> None:
    await harness.api.post(f"{ROOT}/deploy", json={"version": 1, "share": 0.1})
    second = await harness.api.post(f"{ROOT}/deploy", json={"version": 2, "share": 0.1})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "canary_active")
    async with harness.db.write() as session:
        (await session.get_one(Engine, "engine-0")).loaded = ["shop-v1", "shop-v3"]
    for body in ({"version": 2}, {"version": 0, "share": 0.1}):
        answer = await harness.api.post(f"{ROOT}/deploy", json=body)
        assert answer.status_code == 409, answer.text


async def test_delivery_settings_are_set_and_reset(harness: Harness) -> None:
    updated = await harness.api.put(f"{ROOT}/delivery", json={"canary": {"share": 0.2}})
    assert (updated.json()["canary_overridden"], updated.json()["canary_config"]["share"]) == (True, 0.2)
    reset = await harness.api.put(f"{ROOT}/delivery", json={})
    assert (reset.json()["canary_overridden"], reset.json()["canary_config"]) == (False, None)
    assert [row.action for row in await harness.all(Audit)] == ["delivery.updated", "delivery.updated"]


@pytest.mark.parametrize("act", ["deploy", "canary", "shadow", "pin", "rollback", "rollback to the parent"])
async def test_version_that_learned_from_erased_data_is_refused(harness: Harness, act: str) -> None:
    versions = [await publish(harness) for _ in range(4)]
    async with harness.db.write() as session:
        # The child was trained after the erasure: it has inherited the data, and no time of its own.
        (await session.get_one(Version, versions[1].id)).tainted_at = 1.0
        if act == "shadow":
            (await session.get_one(Version, versions[3].id)).state = VersionState.SUPERSEDED
    if act == "shadow":
        await harness.version(VersionState.SHADOW, shadow_since=1.0, parent_id=versions[2].id)
    policy = "/v1/policies/shop"
    answer = await {
        "deploy": lambda: harness.api.post(f"{policy}/deploy", json={"version": 3}),
        "canary": lambda: harness.api.post(f"{policy}/deploy", json={"version": 3, "share": 0.1}),
        "shadow": lambda: harness.api.post(f"{policy}/shadow/promote", json={}),
        "pin": lambda: harness.api.put(f"{policy}/pins", json={"kind": "user", "subject": "bob", "version": 3}),
        "rollback": lambda: harness.api.post(f"{policy}/rollback", json={"version": 2}),
        "rollback to the parent": lambda: harness.api.post(f"{policy}/rollback", json={}),
    }[act]()
    assert answer.status_code == 409, answer.text
    assert answer.json()["error"]["code"] == "version_tainted"
    assert "shop@v1" in answer.json()["error"]["message"]
    assert (await harness.serving()).id == versions[3].id
    assert (await harness.api.post(f"{policy}/rollback", json={"version": 1})).status_code == 200
