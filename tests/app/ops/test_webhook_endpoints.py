"""Webhook endpoints of a project: who may create them, what they accept, and which events they receive."""

from typing import Any, get_args

import pytest

from app.models import Audit, AuditAction, WebhookDelivery, WebhookEndpoint
from app.ops.webhook_endpoints import Event
from app.ops.webhook_events import EVENTS
from app.ops.webhook_signature import sign
from app.ops.webhooks import MAX_ENDPOINTS
from tests.support.deployment import Harness
from tests.support.feedback_users import create_other_project_key
from tests.support.trained_versions import publish
from tests.support.webhooks import create_deliveries, create_webhook, pause_training

URL = "https://hooks.example/attune"


def test_signature_of_the_specifications_example() -> None:
    """The example of the Standard Webhooks specification."""
    secret, id = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek"
    signature = sign(secret, id, 1614265330, '{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_events_of_the_schema_are_those_that_are_sent() -> None:
    assert list(get_args(Event)) == [str(event) for event in EVENTS] == sorted(EVENTS)


async def test_secret_is_shown_once(harness: Harness) -> None:
    created = await create_webhook(harness, URL, description="ops")
    assert created["secret"].startswith("whsec_") and created["events"] == [str(event) for event in EVENTS]
    shown = (await harness.api.get(f"/v1/webhooks/{created['id']}")).json()
    assert "secret" not in shown and "secret" not in str(
        (await harness.api.get("/v1/webhooks")).json()["data"][0].keys() - {"previous_secret_until"}
    )
    assert shown["description"] == "ops"


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example",
        "https://",
        "ftp://hooks.example",
        "https://me:pw@hooks.example",
        "https://h:0",
        "https://h:x",
        "https://h/#x",
        "/hook",
    ],
)
async def test_unsafe_url_is_refused(harness: Harness, url: str) -> None:
    created = await create_webhook(harness, URL)
    for method, path in (("POST", "/v1/webhooks"), ("PATCH", f"/v1/webhooks/{created['id']}")):
        answer = await harness.api.request(method, path, json={"url": url})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "url", answer.text


@pytest.mark.parametrize(
    "body", [{}, {"url": URL, "events": []}, {"url": URL, "events": ["turns.exported"]}, {"url": URL, "secret": "x"}]
)
async def test_malformed_request_is_refused(harness: Harness, body: dict[str, Any]) -> None:
    assert (await harness.api.post("/v1/webhooks", json=body)).status_code == 400


async def test_number_of_endpoints_is_limited(harness: Harness) -> None:
    for _ in range(MAX_ENDPOINTS):
        await create_webhook(harness, URL)
    answer = await harness.api.post("/v1/webhooks", json={"url": URL})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "too_many_webhooks")


async def test_each_event_becomes_one_delivery(harness: Harness) -> None:
    await pause_training(harness)  # before there is an endpoint
    endpoint = await create_webhook(harness, URL)
    other = await create_webhook(harness, URL, events=["deployment.deployed"])
    await pause_training(harness)
    await publish(harness)
    for _ in range(2):
        await create_deliveries(harness)
    rows = await harness.all(WebhookDelivery)
    assert sorted((row.endpoint_id, row.event) for row in rows) == sorted(
        [
            (endpoint["id"], "training.halted"),
            (endpoint["id"], "deployment.deployed"),
            (other["id"], "deployment.deployed"),
        ]
    )
    assert all("a secret prompt" not in row.body for row in rows)
    listed = (await harness.api.get(f"/v1/webhooks/{endpoint['id']}/deliveries")).json()["data"]
    assert {row["state"] for row in listed} == {"open"} and len(listed) == 2


async def test_event_of_a_rolled_back_transaction_is_not_sent_and_a_late_commit_is(harness: Harness) -> None:
    """The order is that of sealing: an entry with a lower number that commits later is not skipped."""
    endpoint = await create_webhook(harness, URL)
    project_id = (await harness.policy()).project_id
    await create_deliveries(harness)
    values = {"project_id": project_id, "actor": "test", "action": AuditAction.TRAINING_HALTED, "subject": "shop"}
    async with harness.db.write() as session:
        session.add(Audit(seq=5000, **values))
    await create_deliveries(harness)
    async with harness.db.write() as session:
        session.add(Audit(seq=4000, **values))
    await create_deliveries(harness)
    rows = await harness.all(WebhookDelivery)
    assert sorted(row.audit_seq for row in rows if row.endpoint_id == endpoint["id"]) == [4000, 5000]


async def test_disabled_endpoint_receives_nothing_from_that_time(harness: Harness) -> None:
    endpoint = await create_webhook(harness, URL)
    path = f"/v1/webhooks/{endpoint['id']}"
    disabled = (await harness.api.patch(path, json={"enabled": False})).json()
    assert disabled["disabled_at"] is not None and disabled["disabled_reason"]
    await pause_training(harness)
    await create_deliveries(harness)
    enabled = (await harness.api.patch(path, json={"enabled": True})).json()
    assert enabled["disabled_at"] is None
    await create_deliveries(harness)
    assert await harness.all(WebhookDelivery) == []
    await pause_training(harness)
    await create_deliveries(harness)
    assert len(await harness.all(WebhookDelivery)) == 1
    assert (await harness.api.delete(path)).status_code == 200
    assert await harness.all(WebhookDelivery) == [] == await harness.all(WebhookEndpoint)


async def test_another_projects_endpoint_gets_nothing_and_cannot_be_seen(harness: Harness) -> None:
    headers = await create_other_project_key(harness)
    other = (await harness.api.post("/v1/webhooks", json={"url": URL}, headers=headers)).json()
    await pause_training(harness)
    await create_deliveries(harness)
    assert await harness.all(WebhookDelivery) == []
    for method, path in (
        ("GET", ""),
        ("PATCH", ""),
        ("DELETE", ""),
        ("POST", "/rotate-secret"),
        ("GET", "/deliveries"),
        ("POST", "/deliveries/msg-1/redeliver"),
    ):
        body: dict[str, Any] = {"json": {}} if method in ("PATCH", "POST") else {}
        answers = [
            await harness.api.request(method, f"/v1/webhooks/{id}{path}", **body) for id in (other["id"], "whk-none")
        ]
        assert {answer.status_code for answer in answers} == {404}, (method, path)
    assert (await harness.api.get("/v1/webhooks")).json()["data"] == []
