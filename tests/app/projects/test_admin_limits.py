"""Limits of a project on requests other than chats and feedback, and of an address on credentials nobody has issued."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import jwt
import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from app.core.settings import Settings
from app.privacy import subjects
from app.projects.auth import database_with_long_timeout
from app.projects.scopes import required_scope
from app.projects.service import create_project
from tests.app.feedback.test_browser_tokens import secret, token
from tests.app.projects.test_endpoints import bearer, create_key
from tests.support.console import open_console
from tests.support.deployment import Harness

CHAT_ROUTE, ADMIN_ROUTE = "/v1/models", "/v1/keys"


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    return settings.replace({f"limits.{name}": value for name, value in getattr(request, "param", {}).items()})


@pytest.fixture
async def other_key(harness: Harness) -> str:
    """Return an admin key of another project."""
    async with harness.db.write() as session:
        return (await create_project(session, "second", "desk", harness.settings.model))[1]


def error_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def set_limit(harness: Harness, limit: int) -> None:
    body = {"limits": {"admin_requests_per_minute": limit}}
    assert (await harness.api.patch("/v1/project", json=body)).status_code == 200


async def test_admin_requests_of_all_keys_count_together(harness: Harness, other_key: str) -> None:
    second = (await create_key(harness))["key"]
    await set_limit(harness, 4)  # two are counted already
    answers = [await harness.api.get(ADMIN_ROUTE, headers=bearer(key)) for key in (harness.key, second, second)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert error_of(answers[-1]) == (429, "project_limit") and "admin_requests_per_minute" in answers[-1].text
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert (await harness.api.get(CHAT_ROUTE)).status_code == 200, "chats and feedback have limits of their own"
    assert (await harness.api.get(ADMIN_ROUTE, headers=bearer(other_key))).status_code == 200


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/v1/audit", "/v1/policies/shop/votes", "/console/"])
async def test_every_other_route_is_limited(harness: Harness, path: str) -> None:
    console = open_console(harness)
    assert (await console.sign_in(harness.key)).status_code == 303
    await set_limit(harness, 1)
    client = console.http if path.startswith("/console") else harness.api
    assert (await client.get(path)).status_code == 429


async def test_a_replay_of_a_request_counts_too(harness: Harness) -> None:
    async def create() -> httpx2.Response:
        headers = {"Idempotency-Key": "k"}
        return await harness.api.post("/v1/policies/shop/training/pause", json={}, headers=headers)

    assert (await create()).status_code == 200
    await set_limit(harness, 3)
    answers = [await create() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[0].headers["idempotent-replayed"] == "true"


class Gate:
    """Holds what comes to it until it is opened."""

    def __init__(self) -> None:
        self.arrived, self.opened = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.arrived.set()
        await self.opened.wait()


@pytest.fixture
async def held_export(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """Hold an export of the harness's project until the gate is opened."""
    gate, find_records = Gate(), subjects.find_records

    async def wait(*arguments: Any) -> Any:
        await gate.wait()
        return await find_records(*arguments)

    monkeypatch.setattr(subjects, "find_records", wait)
    request = asyncio.create_task(harness.api.get("/v1/subjects/ada/export"))
    await gate.arrived.wait()
    yield gate
    gate.opened.set()
    assert (await request).status_code == 404


@pytest.mark.parametrize("settings", [{"max_admin_concurrency": 1}], indirect=True)
async def test_concurrent_admin_requests_of_a_project(harness: Harness, held_export: Gate, other_key: str) -> None:
    refused = await harness.api.get(ADMIN_ROUTE)
    assert error_of(refused) == (429, "too_many_requests") and refused.headers["retry-after"] == "1"
    assert (await harness.api.get(CHAT_ROUTE)).status_code == 200
    assert (await harness.api.get(ADMIN_ROUTE, headers=bearer(other_key))).status_code == 200
    held_export.opened.set()
    async with asyncio.timeout(60):
        while (await harness.api.get(ADMIN_ROUTE)).status_code == 429:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("settings", [{"max_long_requests": 1}], indirect=True)
async def test_concurrent_exports_of_a_project(harness: Harness, held_export: Gate, other_key: str) -> None:
    """A project cannot take all of the few connections that exports, imports and erasures have."""
    for path in ("/v1/audit/verify", "/v1/exports/turns", "/v1/retention/preview"):
        assert error_of(await harness.api.get(path)) == (429, "too_many_requests")
        assert (await harness.api.get(path, headers=bearer(other_key))).status_code == 200
    assert (await harness.api.get("/v1/status")).status_code == 200


def test_long_running_routes_check_the_caller_first(harness: Harness) -> None:
    app = harness.api._transport.app  # type: ignore[attr-defined]
    checked = 0
    for context in iter_route_contexts(app.routes):
        route = context.route
        if not isinstance(route, APIRoute):
            continue
        calls = [dependency.call for dependency in route.dependant.dependencies]
        if database_with_long_timeout in calls:
            is_caller = [required_scope_of(dependency) for dependency in route.dependant.dependencies]
            assert True in is_caller[: calls.index(database_with_long_timeout)], route.path
            assert required_scope(route) is not None
            checked += 1
    assert checked >= 8


def required_scope_of(dependency: Any) -> bool:
    return getattr(dependency.call, "__name__", "") == "limited_as_admin" or any(
        required_scope_of(inner) for inner in dependency.dependencies
    )


async def send_token(harness: Harness, bearer_token: str, turn_id: str) -> httpx2.Response:
    body = {"completion_id": turn_id, "kind": "binary", "value": "up"}
    return await harness.api.post("/v1/feedback", json=body, headers=bearer(bearer_token))


@pytest.mark.parametrize("settings", [{"unknown_keys_per_minute": 5}], indirect=True)
async def test_forged_browser_tokens_are_throttled_and_known_tokens_are_not(harness: Harness) -> None:
    turn = await harness.turn()
    known, unused = await token(harness, turn.id), await token(harness, turn.id)
    assert (await send_token(harness, known, turn.id)).status_code == 201
    project_id, key = await secret(harness)
    claims = jwt.decode(known, key, algorithms=["HS256"], audience="attune.feedback")
    expired = jwt.encode(claims | {"exp": 1}, key, algorithm="HS256", headers={"kid": project_id})
    assert [error_of(await send_token(harness, expired, turn.id)) for _ in range(10)] == [(401, "token_expired")] * 10
    forged = [
        jwt.encode(claims | {"jti": str(number)}, "x" * 32, algorithm="HS256", headers={"kid": kid})
        for number, kid in enumerate([project_id, "proj-unknown"] * 3 + [project_id])
    ]
    answers = [error_of(await send_token(harness, one, turn.id)) for one in forged]
    assert answers == [(401, "invalid_token")] * 5 + [(429, "too_many_unknown_keys")] * 2
    assert (await send_token(harness, known, turn.id)).status_code == 201
    refused = await send_token(harness, unused, turn.id)
    assert error_of(refused) == (429, "too_many_unknown_keys") and refused.headers["retry-after"] == "60"
    assert (await harness.api.get(CHAT_ROUTE)).status_code == 200
    assert error_of(await harness.api.get(CHAT_ROUTE, headers=bearer("sk-unknown")))[0] == 429


@pytest.mark.parametrize("settings", [{"max_event_streams": 1}], indirect=True)
async def test_event_streams_of_a_project(harness: Harness, live_url: str, other_key: str) -> None:
    path = f"{live_url}/v1/events/stream"
    async with (
        httpx2.AsyncClient(timeout=60) as client,
        client.stream("GET", path, headers=bearer(harness.key)) as first,
    ):
        lines = first.aiter_lines()  # kept: the stream is closed with its iterator
        assert await anext(lines) == "retry: 1000"
        full = await client.get(path, headers=bearer(harness.key))
        assert error_of(full) == (429, "too_many_streams") and full.headers["retry-after"] == "1"
        async with client.stream("GET", path, headers=bearer(other_key)) as other:
            assert other.status_code == 200
