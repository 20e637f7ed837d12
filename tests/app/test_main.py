"""The API process: its lifetime, its routes, and CORS."""

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from fastapi import APIRouter

from app.core.database import Database
from app.core.settings import Settings
from app.main import CORS_RESPONSE_HEADERS, create_app, serve
from tests.support.deployment import Harness

SHOP = "https://shop.example"
CORS_HEADERS = ["access-control-allow-origin", "access-control-expose-headers", "access-control-allow-methods"]


async def test_app_is_freed_after_its_lifespan(settings: Settings) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        assert app.services.get(Database)
    database = weakref.ref(app.services.get(Database))
    del app
    gc.collect()
    assert database() is None


def test_apps_share_routes_but_not_added_ones(settings: Settings) -> None:
    one, other = create_app(settings), create_app(settings)
    assert len(one.routes) == len(other.routes)
    assert one.openapi()["paths"].keys() == other.openapi()["paths"].keys()
    one.add_api_route("/of-its-own", lambda: None)
    assert "/of-its-own" not in create_app(settings).openapi()["paths"]


async def test_openapi_is_built_before_the_server_accepts_requests(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building it takes most of a second, during which the event loop would stand still."""
    monkeypatch.setattr("app.main.get_settings", lambda: settings)
    monkeypatch.setattr("app.main.gc.freeze", lambda: None)
    app = serve()

    def build(**options: object) -> dict[str, object]:
        raise AssertionError("the document is built by a request")

    monkeypatch.setattr("fastapi.applications.get_openapi", build)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://a") as api:
        document, wrong_method = await api.get("/openapi.json"), await api.delete("/v1/chat/completions")
    assert document.json()["paths"] and wrong_method.status_code == 405
    assert wrong_method.headers["allow"] == "GET, POST"


@asynccontextmanager
async def serve_with_origins(settings: Settings, origins: list[str]) -> AsyncIterator[httpx2.AsyncClient]:
    app = create_app(settings.replace({"server.cors_origins": origins}))
    broken = APIRouter()

    @broken.get("/broken")
    async def raise_error() -> None:
        raise RuntimeError("a bug")

    app.include_router(broken)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url="http://a") as api:
        yield api


def preflight(origin: str, headers: str = "authorization,content-type", method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": headers,
    }


async def test_allowed_origin_may_send_and_read(harness: Harness) -> None:
    sent = "authorization, content-type, idempotency-key, x-stainless-lang, x-stainless-retry-count"
    sent += ", x-attune-user, x-attune-task, x-attune-episode, x-attune-agent, x-attune-state-key"
    async with serve_with_origins(harness.settings, [SHOP]) as api:
        preflight_response = await api.options("/v1/feedback", headers=preflight(SHOP, sent))
        assert (preflight_response.status_code, preflight_response.headers["access-control-allow-origin"]) == (
            200,
            SHOP,
        )
        assert "POST" in preflight_response.headers["access-control-allow-methods"]
        answer = await api.get("/v1/models", headers={"origin": SHOP, "authorization": f"Bearer {harness.key}"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SHOP)
    assert answer.headers["access-control-expose-headers"].split(", ") == CORS_RESPONSE_HEADERS
    assert "Origin" in answer.headers["vary"] and "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 401), ("/nowhere", 404), ("/livez?x=%00", 400), ("/readyz", 200), ("/broken", 500)],
)
async def test_errors_are_readable_and_have_one_request_id(harness: Harness, path: str, status: int) -> None:
    async with serve_with_origins(harness.settings, [SHOP]) as api:
        answer = await api.get(path, headers={"origin": SHOP})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, SHOP)
    assert len(answer.headers.get_list("x-request-id")) == 1
    if status >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_other_origins_are_refused(harness: Harness) -> None:
    async with serve_with_origins(harness.settings, [SHOP]) as api:
        preflight_response = await api.options("/v1/feedback", headers=preflight("https://evil.example"))
        answer = await api.get("/livez", headers={"origin": "https://evil.example"})
        header = await api.options("/v1/feedback", headers=preflight(SHOP, "x-other"))
        methods = [await api.options("/v1/project", headers=preflight(SHOP, method=name)) for name in ("PUT", "PATCH")]
    assert {one.status_code for one in (preflight_response, header, *methods)} == {400}
    assert "access-control-allow-origin" not in preflight_response.headers | answer.headers


async def test_all_origins_can_be_allowed(harness: Harness) -> None:
    async with serve_with_origins(harness.settings, ["*"]) as api:
        preflight_response = await api.options("/v1/feedback", headers=preflight("https://any.example"))
        answer = await api.get("/livez", headers={"origin": "https://any.example"})
    assert (
        preflight_response.headers["access-control-allow-origin"]
        == answer.headers["access-control-allow-origin"]
        == "*"
    )


async def test_without_origins_there_are_no_cors_headers(harness: Harness) -> None:
    preflight_response = await harness.api.options("/v1/feedback", headers=preflight(SHOP))
    answer = await harness.api.get("/livez", headers={"origin": SHOP})
    assert preflight_response.status_code == 405 and answer.status_code == 200
    assert not any(name in preflight_response.headers or name in answer.headers for name in CORS_HEADERS)


async def test_unknown_route_names_its_path_and_what_exists(harness: Harness) -> None:
    for method, path, hint in (
        ("POST", "/v1/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/embeddings", "generates text only"),
        ("GET", "/v2/chat%00"[:8], "/openapi.json"),
        ("PUT", "/caf%C3%A9/" + "x" * 500, "/openapi.json"),
    ):
        response = await harness.api.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "http_404") and len(error["message"]) < 400
        assert f"'{method} /" in error["message"] and hint in error["message"]


async def test_health_routes_answer_head(harness: Harness) -> None:
    assert [(await harness.api.head(path)).status_code for path in ("/livez", "/readyz")] == [200, 200]
    assert (await harness.api.delete("/livez")).status_code == 405
