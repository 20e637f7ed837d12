"""/metrics as Prometheus sees it: the access to it, what it counts, and whose metrics it shows."""

import asyncio
import math
from typing import Any

import httpx2
import pytest

from app.models import VersionState
from app.projects import service
from tests.app.chat.test_endpoints import ask
from tests.support.deployment import Harness
from tests.support.metrics_requests import page, serve_with_settings
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish

SHOP = {"project": "default", "policy": "shop"}


async def test_only_an_admin_may_read_metrics(harness: Harness) -> None:
    key_response = await harness.api.post("/v1/keys", json={"scopes": ["chat", "feedback"]})
    responses = [
        await harness.api.get("/metrics", headers={"authorization": header})
        for header in ("", "Bearer sk-attune-x", f"Bearer {key_response.json()['key']}", f"Bearer {harness.key}")
    ]
    assert [answer.status_code for answer in responses] == [401, 401, 403, 200]


async def test_open_metrics_need_no_key(harness: Harness) -> None:
    async with serve_with_settings(harness, metrics_open=True) as open_harness:
        answer = await open_harness.api.get("/metrics", headers={"authorization": ""})
    assert answer.status_code == 200 and 'attune_version{policy="shop",project="default"} 0.0' in answer.text


async def test_replies_are_counted_by_state(harness: Harness, scripted: ScriptedEngine) -> None:
    assert (await page(harness)).by_name("attune_turns_total") == {}
    await ask(harness, n=2)
    await ask(harness, stream=True)
    scripted.drop_after_tokens = 2
    await ask(harness, stream=True)
    scripted.refuse_status = 400
    await ask(harness, stream=True)
    samples = await page(harness)
    assert samples("attune_turns_total", **SHOP, state="done") == 3
    assert samples("attune_turns_total", **SHOP, state="failed") == 1
    assert samples("attune_turns_total", **SHOP, state="refused") == 1
    assert len(samples.by_name("attune_turns_total")) == 3


async def test_disconnected_client_is_counted_once_as_aborted(
    harness: Harness, scripted: ScriptedEngine, live_url: str
) -> None:
    scripted.hang = True
    body = {"model": "shop", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not scripted.requests:
            await asyncio.sleep(0.02)
        scripted.hang = False
        request.cancel()
        await asyncio.wait([request])
        async with asyncio.timeout(60):
            while (await harness.wait_for_turn()).state != "aborted":
                await asyncio.sleep(0.02)
            live_harness = Harness(harness.settings, harness.db, harness.key, client)
            while not (samples := await page(live_harness)).by_name("attune_turns_total"):
                await asyncio.sleep(0.02)  # the turn is counted shortly after it is stored
    assert samples("attune_turns_total", **SHOP, state="aborted") == 1


async def test_repeated_feedback_is_counted_once(harness: Harness) -> None:
    turn = await harness.turn()
    for _ in range(3):
        await harness.vote(turn.id, id="vote-1")
    await harness.vote(turn.id, "down", id="vote-2")
    await harness.vote("chatcmpl-unknown")
    items = [
        {"id": "vote-2", "completion_id": turn.id, "kind": "binary", "value": "down"},
        {"id": "vote-3", "completion_id": turn.id, "kind": "rating", "value": 4},
        {"id": "vote-4", "completion_id": turn.id, "kind": "rating", "value": 99},
    ]
    response = (await harness.api.post("/v1/feedback/batch", json={"items": items})).json()
    assert [result["status"] for result in response["data"]] == [200, 201, 400]
    samples = await page(harness)
    assert samples("attune_feedback_total", project="default", kind="binary") == 2
    assert samples("attune_feedback_total", project="default", kind="rating") == 1


async def test_requests_are_timed_by_route_and_status_to_the_last_byte(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    scripted.seconds_per_token = 0.02  # eight tokens
    await ask(harness)
    await ask(harness, stream=True)
    await ask(harness, temperature=-1)
    await harness.vote("chatcmpl-unknown")
    await harness.api.get("/v1/models")
    await harness.api.get("/v1/chat/completions")
    samples = await page(harness)
    assert samples("attune_request_seconds_count", route="chat", status="2xx") == 2
    assert samples("attune_request_seconds_bucket", route="chat", status="2xx", le="+Inf") == 2
    assert samples("attune_request_seconds_bucket", route="chat", status="2xx", le="0.1") == 0, (
        "each request takes at least 160 ms"
    )
    assert (samples("attune_request_seconds_sum", route="chat", status="2xx") or 0) >= 0.32
    assert samples("attune_request_seconds_count", route="chat", status="4xx") == 1
    assert samples("attune_request_seconds_count", route="feedback", status="4xx") == 1
    assert len(samples.by_name("attune_request_seconds_count")) == 3, "other requests are not timed"


async def test_the_first_token_of_streamed_replies_is_timed_and_requests_in_flight_are_counted(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    before = await page(harness)
    assert before("attune_inflight", route="chat") == 0
    scripted.seconds_per_token = 0.05
    scripted.is_blocked = lambda reply: True
    pending = asyncio.create_task(ask(harness, stream=True))
    while (await page(harness))("attune_inflight", route="chat") != 1:
        assert not pending.done()
        await asyncio.sleep(0.01)
    scripted.is_blocked = lambda reply: False
    await pending
    await ask(harness)
    samples = await page(harness)
    assert samples("attune_inflight", route="chat") == 0
    assert samples("attune_ttft_seconds_count", route="chat") == 1, "only streamed replies have a first token"
    first, whole = (
        samples("attune_ttft_seconds_sum", route="chat"),
        samples("attune_request_seconds_sum", route="chat", status="2xx"),
    )
    assert first is not None and whole is not None and 0 < first < whole


async def test_the_page_names_the_process_and_its_connections(harness: Harness) -> None:
    samples = await page(harness)
    assert [dict(labels)["role"] for labels in samples.by_name("attune_build_info")] == ["api"]
    assert samples("attune_db_pool_in_use") is not None


async def test_before_the_first_update_only_the_version_is_shown(harness: Harness) -> None:
    samples = await page(harness)
    assert samples("attune_version", **SHOP) == 0
    assert samples.by_name("attune_trained_version") == {}


async def test_metrics_of_the_newest_trained_version_have_prometheus_names(harness: Harness) -> None:
    await publish(harness)
    await harness.version(metrics={"actor/ppo_kl": 0.5, "critic/score/mean": -0.25})
    newest = {"actor/ppo_kl": 0.125, "rollout_corr/kl": 2e-5, "reward_shaping/ratio": 0.08, "odd name/µ": 3, "no": "x"}
    await harness.version(VersionState.REJECTED, metrics=newest)
    samples = await page(harness)
    assert (samples("attune_version", **SHOP), samples("attune_trained_version", **SHOP)) == (1, 3)
    assert samples("attune_actor_ppo_kl", **SHOP) == 0.125
    assert math.isclose(samples("attune_rollout_corr_kl", **SHOP) or 0, 2e-5)
    assert samples("attune_reward_shaping_ratio", **SHOP) == 0.08
    assert samples("attune_odd_name__", **SHOP) == 3
    assert samples("attune_critic_score_mean", **SHOP) is None, "the metric belongs to an older version"
    assert samples("attune_no", **SHOP) is None, "the value is not a number"
    assert "actor/ppo_kl" in samples.families["attune_actor_ppo_kl"].documentation


@pytest.mark.parametrize(
    "metrics",
    [
        {"a/b_c": 1.0, "a_b/c": 2.0},
        {"version": 7.0, "turns": 1.0, "turns_total": 1.0, "request_seconds/count": 9.0, "feedback": 4.0},
        {"trained/version": 9.0, "length_penalty/mean": 0.5, "response_length/p95": 12.0},
    ],
)
async def test_colliding_names_do_not_break_the_page(harness: Harness, metrics: dict[str, Any]) -> None:
    await harness.version(metrics=metrics)
    await harness.api.post("/v1/feedback", json={})
    samples = await page(harness)  # raises for an invalid page
    assert samples("attune_trained_version", **SHOP) == 1
    assert samples("attune_a_b_c", **SHOP) == metrics.get("a/b_c")
    assert samples("attune_version", **SHOP) == 0


async def test_admin_sees_the_own_project_and_open_metrics_show_all(harness: Harness, scripted: ScriptedEngine) -> None:
    await harness.version(metrics={"actor/ppo_kl": 0.5})
    async with harness.db.write() as session:
        _, secret = await service.create_project(session, "bakery", "shop", harness.settings.model)
    async with serve_with_settings(harness, metrics_open=True) as open_harness:
        headers_of_bakery = {"authorization": f"Bearer {secret}"}
        reply = await open_harness.api.post("/v1/chat/completions", json=CHAT, headers=headers_of_bakery)
        feedback = {"completion_id": reply.json()["id"], "kind": "binary", "value": True}
        response = await open_harness.api.post("/v1/feedback", json=feedback, headers=headers_of_bakery)
        assert response.status_code == 201
        all_projects = await page(open_harness)
    assert all_projects("attune_turns_total", project="bakery", policy="shop", state="done") == 1
    assert all_projects("attune_feedback_total", project="bakery", kind="binary") == 1
    assert all_projects("attune_actor_ppo_kl", **SHOP) == 0.5
    assert len(all_projects.by_name("attune_version")) == 2, "policies of two projects may have the same name"

    own_project = await page(harness)
    assert {dict(labels)["project"] for labels in own_project.by_name("attune_version")} == {"default"}
    assert (await harness.api.post("/v1/chat/completions", json=CHAT, headers=headers_of_bakery)).status_code == 200
    assert (await page(harness)).by_name("attune_turns_total") == {}, "the reply belongs to another project"
    bakery_page = await harness.api.get("/metrics", headers=headers_of_bakery)
    assert "default" not in bakery_page.text and 'project="bakery"' in bakery_page.text


CHAT = {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}
