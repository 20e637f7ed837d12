"""Releases from the console: canary, rollback with its preview, pins, and who may do it."""

import re
from typing import Any

import pytest

from app.models import Audit, Deployment, Pin
from tests.support.console import ConsoleClient, sign_in, to_text
from tests.support.deployment import Harness
from tests.support.trained_versions import publish
from tests.support.updates import deploy, rate

EPOCH = re.compile(r'name="epoch" value="(\d+)"')


async def read_epoch(client: ConsoleClient) -> str:
    found = EPOCH.search((await client.get("release")).text)
    assert found is not None
    return found[1]


async def act(client: ConsoleClient, path: str, **fields: Any) -> Any:
    form = {"policy": "shop", "reason": "because", "epoch": await read_epoch(client), **fields}
    return await client.post(f"release/{path}", form)


async def served(harness: Harness) -> int:
    return (await harness.serving()).number


async def test_rollback_is_previewed_confirmed_and_audited(harness: Harness) -> None:
    await rate(harness, "+++-")
    await publish(harness)
    await publish(harness)
    client = await sign_in(harness, "operator")
    preview = await client.text("release/rollback?to=0")
    assert "Roll back to v0?" in preview and "Serves now v2" in preview and "75 % 30–95" in preview
    assert "1 of 1 ready engines have shop@v0 loaded" in preview
    assert "cannot be compared with shop@v2: there are no votes on shop@v2" in preview
    assert "Training goes on from shop@v0 instead of shop@v2. The line of training loses shop@v" in preview
    assert await served(harness) == 2, "a preview changes nothing"
    for typed in ("", "v1", "0"):
        answer = await act(client, "rollback", version=0, typed=typed)
        assert answer.status_code == 400 and await served(harness) == 2
    answer = await act(client, "rollback", version=0, typed="v0", reason="v2 is rude")
    assert answer.headers["location"] == "/console/release?policy=shop" and await served(harness) == 0
    assert "shop@v0 serves. Training goes on from it." in await client.text("release")
    assert "Training goes on from it." not in await client.text("release"), "said once"
    [entry] = [row for row in await harness.all(Audit) if row.action == "deployment.rolled_back"]
    assert entry.reason == "v2 is rude" and entry.actor.startswith("sk-attune-")


async def test_act_on_figures_that_no_longer_hold_is_refused(harness: Harness) -> None:
    await publish(harness)
    await publish(harness)
    client = await sign_in(harness, "operator")
    epoch = await read_epoch(client)
    await deploy(harness, 1)
    answer = await act(client, "rollback", version=0, typed="v0", epoch=epoch)
    assert answer.status_code == 409 and "has changed since this page was loaded" in answer.text
    assert await served(harness) == 1


async def test_canary_begins_is_promoted_and_ends(harness: Harness) -> None:
    await publish(harness)
    await publish(harness)
    client = await sign_in(harness, "operator")
    assert (await act(client, "deploy", version=1, share=20)).status_code == 303
    page = await client.text("release")
    assert "v1 against v2" in page and "20 % of the conversations" in page and "Undecided." in page
    assert (await act(client, "abort")).status_code == 303
    assert (await act(client, "abort")).status_code == 409
    await act(client, "deploy", version=1, share=20)
    assert (await act(client, "promote")).status_code == 303 and await served(harness) == 1
    assert (await act(client, "deploy", version=2)).status_code == 303 and await served(harness) == 2


async def test_pin_is_set_and_removed(harness: Harness) -> None:
    await publish(harness)
    client = await sign_in(harness, "operator")
    assert (await act(client, "pin", kind="user", subject="bob", version=0)).status_code == 303
    [pin] = await harness.all(Pin)
    assert (pin.subject, pin.reason) == ("bob", "because")
    assert "user bob v0" in await client.text("release")
    assert "bob" not in await (await sign_in(harness, "viewer")).text("release"), "a viewer sees no people"
    assert (await act(client, "unpin", pin=pin.id)).status_code == 303
    assert await harness.all(Pin) == []


async def test_reason_is_required(harness: Harness) -> None:
    await publish(harness)
    answer = await act(await sign_in(harness, "operator"), "rollback", version=0, typed="v0", reason=" ")
    assert answer.status_code == 400 and "reason" in answer.text and await served(harness) == 1


@pytest.mark.parametrize("role", ["viewer", "viewer:content"])
async def test_others_see_releases_and_cannot_make_them(harness: Harness, role: str) -> None:
    await publish(harness)
    client = await sign_in(harness, role)
    page = (await client.get("release")).text
    assert "Everybody gets" in page and '<h2 id="h-back">' not in page and 'action="/console/release' not in page
    [deployment] = await harness.all(Deployment)
    fields = {"policy": "shop", "reason": "x", "epoch": deployment.epoch}
    for path in ("rollback", "deploy", "promote", "abort", "pin", "unpin"):
        answer = await client.post(f"release/{path}", fields | {"version": 0, "typed": "v0"})
        assert answer.status_code == 403 and f"signed in as {role}" in to_text(answer.text)
    assert (await client.get("release/rollback?to=0")).status_code == 403
    assert await served(harness) == 1


async def test_versions_are_compared(harness: Harness) -> None:
    await rate(harness, "++++----")
    version = await publish(harness)
    await rate(harness, "++++++++", version)
    text = await (await sign_in(harness, "viewer")).text("versions/compare?a=0&b=1")
    assert "shop@v1 is better than shop@v0" in text and "8 / 8" in text and "4 / 8" in text
