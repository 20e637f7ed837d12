"""The list of the newest replies with its filters, and the settings without their secrets."""

import re

import pytest

from tests.support.console import sign_in
from tests.support.deployment import Harness
from tests.support.trained_versions import publish


async def test_newest_replies_come_first_with_votes_and_routes(harness: Harness) -> None:
    await harness.turn(own_messages=[{"role": "user", "content": "the old one"}], created_at=1.0)
    new = await harness.turn(own_messages=[{"role": "user", "content": "the new one"}], route_reason="pinned")
    await harness.vote(new.id, "down", source={"id": "a"})
    await harness.vote(new.id, "up", source={"id": "b"})
    text = await (await sign_in(harness, "viewer:content")).text("live")
    assert text.index("the new one") < text.index("the old one")
    assert "v0 pinned the new one hello ▲ 1 ▼ 1" in text


async def test_filters_pages_and_the_part_that_is_polled(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.console.pages.live.PAGE_SIZE", 2)
    for number in range(3):
        await harness.turn(own_messages=[{"role": "user", "content": f"question {number}"}], created_at=float(number))
    version = await publish(harness)
    await harness.turn(version, own_messages=[{"role": "user", "content": "of v1"}], state="failed", created_at=9.0)
    client = await sign_in(harness)
    page = (await client.get("live")).text
    assert "of v1" in page and "question 2" in page and "question 1" not in page
    assert 'hx-trigger="every 3s"' in page and "hx-trigger" not in (await client.get("live?paused=true")).text
    older = re.findall(r"before=(chatcmpl-\w+)", page)[0]
    text = await client.text(f"live?before={older}")
    assert "question 1" in text and "question 0" in text and "of v1" not in text
    for query in ("version=1&state=", "version=v1", "state=failed&version="):
        text = await client.text(f"live?{query}")
        assert "of v1" in text and "question" not in text
        rows = (await client.get(f"live/rows?{query}")).text
        assert "of v1" in rows and "<html" not in rows
    assert (await client.get("live?version=9")).status_code == 404
    assert (await client.get("live?state=odd")).status_code == 400
    assert (await client.get("live?before=chatcmpl-0")).status_code == 404


async def test_list_is_empty_with_advice(harness: Harness) -> None:
    assert "No replies yet" in await (await sign_in(harness)).text("live")


async def test_settings_are_shown_with_their_sources_and_without_secrets(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_TRAINER__BATCH_SIZE", "8")
    secret, password = "s3cret-engine-key", "s3cret-password"
    url = f"redis://:{password}@127.0.0.1/0"
    changed = harness.settings.replace({"engine.api_key": secret, "broker.url": url, "secrets": {"judge": secret}})
    harness.settings.__dict__.update(changed.__dict__)
    client = await sign_in(harness)
    page = (await client.get("settings")).text
    assert secret not in page and password not in page and "redis://***@127.0.0.1/0" in page
    text = await client.text("settings")
    assert "batch_size 8 ATTUNE_TRAINER__BATCH_SIZE" in text and "[trainer]" in text


async def test_settings_say_when_the_next_start_would_fail(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await sign_in(harness)
    monkeypatch.setenv("ATTUNE_TRAINER__BATCH_SIZ", "8")
    assert "the next start would fail" in await client.text("settings")


@pytest.mark.parametrize("scope", ["viewer", "operator"])
async def test_settings_are_for_admins(harness: Harness, scope: str) -> None:
    assert (await (await sign_in(harness, scope)).get("settings")).status_code == 403


async def test_viewer_sees_no_replies(harness: Harness) -> None:
    client = await sign_in(harness, "viewer")
    for path in ("live", "live/rows", "conversations/c-1", "find?id=x"):
        assert (await client.get(path)).status_code == 403
