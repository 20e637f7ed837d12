"""Webhooks are signed, sent at least once and to allowed addresses only, retried, and given up after days."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import update
from standardwebhooks import Webhook, WebhookVerificationError

from app.core.database import now
from app.models import Audit, AuditAction, WebhookDelivery, WebhookEndpoint
from tests.support.deployment import Harness
from tests.support.webhooks import (
    Receiver,
    allow_private,
    create_deliveries,
    create_webhook,
    make_due,
    pause_training,
    send,
)
from tests.workers.test_reconcile import reconcile_and_list_tasks
from workers import webhooks
from workers.judging.http_client import NOT_PUBLIC
from workers.queue.leased_job import RUN_SECONDS, AttemptFailed
from workers.webhooks import RETRY_DELAYS, WebhookJob


async def delivery_of(harness: Harness) -> WebhookDelivery:
    [row] = await harness.all(WebhookDelivery)
    result: WebhookDelivery = row
    return result


async def test_delivery_is_verified_by_the_public_library(harness: Harness) -> None:
    allow_private(harness)
    receiver = Receiver()
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        await pause_training(harness)
        await create_deliveries(harness)
        assert await send(harness) == 1
    [(id, event)] = receiver.events(endpoint["secret"])
    row = await delivery_of(harness)
    assert (row.id, row.state, row.status_code, row.attempt) == (id, "done", 200, 1)
    [entry] = [one for one in await harness.all(Audit) if one.seq == row.audit_seq]
    assert event["type"] == "training.halted" and event["data"]["number"] == entry.seq
    assert event["data"]["subject"] == "shop" and "a secret prompt" not in str(event)
    with pytest.raises(WebhookVerificationError):
        receiver.events("whsec_" + "A" * 43 + "=")


async def test_receiver_that_fails_twice_gets_the_same_id_three_times(harness: Harness) -> None:
    allow_private(harness)
    receiver = Receiver(statuses=[500, 302], headers={"location": "http://127.0.0.1:1/elsewhere"})
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        await pause_training(harness)
        await create_deliveries(harness)
        for attempt in (1, 2):
            assert await send(harness) == 0
            row, stored = await delivery_of(harness), await harness.get(WebhookEndpoint, endpoint["id"])
            assert (row.state, row.attempt, row.status_code) == ("open", attempt, (500, 302)[attempt - 1])
            assert stored.failures == attempt and stored.retry_at is not None
            assert await send(harness) == 0 and len(receiver.received) == attempt  # it is not due yet
            await make_due(harness)
        assert await send(harness) == 1
    events = receiver.events(endpoint["secret"])
    assert len(events) == 3 and len({id for id, _ in events}) == 1 and len({body for _, body in receiver.received}) == 1
    stored = await harness.get(WebhookEndpoint, endpoint["id"])
    assert (stored.failures, stored.failing_since, stored.retry_at) == (0, None, None)


async def test_pauses_grow_as_standard_webhooks_has_them(harness: Harness) -> None:
    allow_private(harness)
    await create_webhook(harness, "http://127.0.0.1:9/hook")
    await pause_training(harness)
    await create_deliveries(harness)
    pauses = []
    for _ in range(4):
        await send(harness)
        row = await delivery_of(harness)
        pauses.append(row.due_at - (row.heartbeat_at or 0.0))
        await make_due(harness)
    assert pauses == pytest.approx(RETRY_DELAYS[:4], abs=3)
    assert 3 * 86_400 < sum(RETRY_DELAYS) < 4 * 86_400


async def test_deliveries_that_fail_together_are_one_failure(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = asyncio.Barrier(webhooks.MAX_RUNNING_PER_ENDPOINT)

    async def fail(*args: Any) -> int:
        async with asyncio.timeout(RUN_SECONDS):
            await everybody.wait()
        raise AttemptFailed("it answered 500")

    monkeypatch.setattr(WebhookJob, "_post", fail)
    endpoint = await create_webhook(harness, "https://hooks.example")
    for _ in range(webhooks.MAX_RUNNING_PER_ENDPOINT):
        await pause_training(harness)
    await create_deliveries(harness)
    await send(harness)
    stored = await harness.get(WebhookEndpoint, endpoint["id"])
    assert stored.failures == 1 and stored.retry_at - stored.failing_since == pytest.approx(RETRY_DELAYS[0])


async def test_kill_between_delivery_and_commit_sends_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_private(harness)
    receiver = Receiver()
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        await pause_training(harness)
        await create_deliveries(harness)

        async def die(*args: Any) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as killed:
            killed.setattr(WebhookJob, "record", die)
            with pytest.raises(asyncio.CancelledError):
                await send(harness)
        assert len(receiver.received) == 1 and (await delivery_of(harness)).state == "open"
        assert await send(harness) == 0  # its lease is in force
        async with harness.db.write() as session:
            await session.execute(update(WebhookDelivery).values(lease_until=0.0))
        assert await send(harness) == 1
    ids = [id for id, _ in receiver.events(endpoint["secret"])]
    assert len(ids) == 2 and ids[0] == ids[1]


async def test_hanging_receiver_is_left_after_the_time_out_and_others_get_theirs(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_private(harness)
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 5.0)  # enough for the others on a busy machine
    hanging, receiver = Receiver(hang=True), Receiver()
    with hanging.serve() as slow, receiver.serve() as url:
        first, second = await create_webhook(harness, slow), await create_webhook(harness, url)
        for _ in range(8):
            await pause_training(harness)
        await create_deliveries(harness)
        async with asyncio.timeout(RUN_SECONDS / 2):
            assert await send(harness) == 8
    assert len(receiver.events(second["secret"])) == 8
    assert len(hanging.received) <= webhooks.MAX_RUNNING_PER_ENDPOINT  # then it is left alone for a while
    rows = [row for row in await harness.all(WebhookDelivery) if row.endpoint_id == first["id"]]
    assert {row.state for row in rows} == {"open"} and any("no answer within" in (row.reason or "") for row in rows)


async def test_endpoint_that_fails_for_days_is_disabled_with_an_audit_entry(harness: Harness) -> None:
    allow_private(harness)
    receiver = Receiver(statuses=[503, 503])
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        for _ in range(2):
            await pause_training(harness)
        await create_deliveries(harness)
        await send(harness)
        async with harness.db.write() as session:
            since = WebhookEndpoint.failing_since - webhooks.DISABLE_SECONDS
            await session.execute(update(WebhookEndpoint).values(failing_since=since))
        await make_due(harness)
        receiver.statuses = [503]
        await send(harness)
        stored = await harness.get(WebhookEndpoint, endpoint["id"])
        assert stored.disabled_at is not None and "3 days" in stored.disabled_reason
        entries = [row for row in await harness.all(Audit) if row.action == AuditAction.WEBHOOK_DISABLED]
        assert [(entry.actor, entry.subject) for entry in entries] == [("webhook", endpoint["id"])]
        await make_due(harness)
        count = len(receiver.received)
        await send(harness)
        assert len(receiver.received) == count
        assert {row.state for row in await harness.all(WebhookDelivery)} == {"skipped"}


async def test_endpoint_that_is_gone_is_disabled_at_once(harness: Harness) -> None:
    allow_private(harness)
    with Receiver(statuses=[410]).serve() as url:
        endpoint = await create_webhook(harness, url)
        await pause_training(harness)
        await create_deliveries(harness)
        await send(harness)
    assert "410" in (await harness.get(WebhookEndpoint, endpoint["id"])).disabled_reason


async def test_last_attempt_ends_the_delivery_and_redeliver_sends_it_again(harness: Harness) -> None:
    allow_private(harness)
    receiver = Receiver(statuses=[500])
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        await pause_training(harness)
        await create_deliveries(harness)
        async with harness.db.write() as session:
            await session.execute(update(WebhookDelivery).values(attempt=len(RETRY_DELAYS)))
        assert await send(harness) == 1
        row = await delivery_of(harness)
        assert (row.state, row.reason, row.status_code) == ("failed", "it answered 500", 500)
        path = f"/v1/webhooks/{endpoint['id']}/deliveries/{row.id}/redeliver"
        again = (await harness.api.post(path)).json()
        assert (again["id"], again["state"], again["attempts"]) == (row.id, "open", 0)
        assert await send(harness) == 1
    assert [id for id, _ in receiver.events(endpoint["secret"])] == [row.id, row.id]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "2130706433"])
async def test_private_address_is_not_called(harness: Harness, host: str) -> None:
    receiver = Receiver()
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, "https://hooks.example")
        async with harness.db.write() as session:
            await session.execute(update(WebhookEndpoint).values(url=url.replace("127.0.0.1", host)))
        await pause_training(harness)
        await create_deliveries(harness)
        await send(harness)
    assert receiver.received == [] and (await delivery_of(harness)).reason == NOT_PUBLIC
    assert (await harness.get(WebhookEndpoint, endpoint["id"])).failures == 1


async def test_rotated_secret_signs_with_the_new_one_for_a_day(harness: Harness) -> None:
    allow_private(harness)
    receiver = Receiver()
    with receiver.serve() as url:
        endpoint = await create_webhook(harness, url)
        rotated = (await harness.api.post(f"/v1/webhooks/{endpoint['id']}/rotate-secret")).json()
        assert rotated["secret"] != endpoint["secret"]
        await pause_training(harness)
        await create_deliveries(harness)
        await send(harness)
        async with harness.db.write() as session:
            await session.execute(update(WebhookEndpoint).values(previous_secret_until=0.0))
        await pause_training(harness)
        await create_deliveries(harness)
        await send(harness)
    assert len(receiver.events(rotated["secret"])) == 2
    (headers, body), late = receiver.received[0], receiver.received[1]
    Webhook(endpoint["secret"]).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(endpoint["secret"]).verify(late[1], late[0])


async def test_reconciler_creates_deliveries_and_finds_them_without_a_message(harness: Harness) -> None:
    endpoint = await create_webhook(harness, "https://hooks.example")
    await pause_training(harness)
    assert await reconcile_and_list_tasks(harness) == ["webhook"]  # created, and its message
    assert await reconcile_and_list_tasks(harness) == ["webhook"]  # that message was lost
    async with harness.db.write() as session:
        await session.execute(update(WebhookEndpoint).values(retry_at=now() + 60))
    assert await reconcile_and_list_tasks(harness) == []  # the endpoint rests
    assert [row.endpoint_id for row in await harness.all(WebhookDelivery)] == [endpoint["id"]]
