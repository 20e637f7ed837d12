"""Pages of other origins: let in by name, and then every reply can be read, the failed ones too."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from fastapi import APIRouter

from app.core.settings import Settings
from app.main import PAGES_MAY_READ, create_app
from tests.support.deployment import Harness

SHOP = "https://shop.example"
NAMES = ["access-control-allow-origin", "access-control-expose-headers", "access-control-allow-methods"]


@asynccontextmanager
async def calling(settings: Settings, origins: list[str]) -> AsyncIterator[httpx2.AsyncClient]:
    app = create_app(settings.model_copy(update={"cors_origins": origins}))
    broken = APIRouter()

    @broken.get("/broken")
    async def fails() -> None:
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


async def test_a_page_that_was_named_may_ask_and_read(harness: Harness) -> None:
    sent = "authorization, content-type, idempotency-key, x-stainless-lang, x-stainless-retry-count"
    async with calling(harness.settings, [SHOP]) as api:
        asked = await api.options("/v1/feedback", headers=preflight(SHOP, sent))
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, SHOP)
        assert "POST" in asked.headers["access-control-allow-methods"]
        answer = await api.get("/v1/models", headers={"origin": SHOP, "authorization": f"Bearer {harness.key}"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SHOP)
    assert answer.headers["access-control-expose-headers"].split(", ") == PAGES_MAY_READ
    assert "Origin" in answer.headers["vary"] and "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 401), ("/nowhere", 404), ("/livez?x=%00", 400), ("/readyz", 200), ("/broken", 500)],
)
async def test_failures_can_be_read_as_well_and_carry_one_request_id(harness: Harness, path: str, status: int) -> None:
    async with calling(harness.settings, [SHOP]) as api:
        answer = await api.get(path, headers={"origin": SHOP})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, SHOP)
    assert len(answer.headers.get_list("x-request-id")) == 1
    if status >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_another_page_is_refused(harness: Harness) -> None:
    async with calling(harness.settings, [SHOP]) as api:
        asked = await api.options("/v1/feedback", headers=preflight("https://evil.example"))
        answer = await api.get("/livez", headers={"origin": "https://evil.example"})
        header = await api.options("/v1/feedback", headers=preflight(SHOP, "x-other"))
        method = await api.options("/v1/feedback", headers=preflight(SHOP, method="PUT"))
    assert asked.status_code == header.status_code == method.status_code == 400
    assert "access-control-allow-origin" not in asked.headers | answer.headers


async def test_all_pages_can_be_let_in(harness: Harness) -> None:
    async with calling(harness.settings, ["*"]) as api:
        asked = await api.options("/v1/feedback", headers=preflight("https://any.example"))
        answer = await api.get("/livez", headers={"origin": "https://any.example"})
    assert asked.headers["access-control-allow-origin"] == answer.headers["access-control-allow-origin"] == "*"


async def test_with_no_page_named_there_is_no_word_of_cors(harness: Harness) -> None:
    asked = await harness.api.options("/v1/feedback", headers=preflight(SHOP))
    answer = await harness.api.get("/livez", headers={"origin": SHOP})
    assert asked.status_code == 405 and answer.status_code == 200
    assert not any(name in asked.headers or name in answer.headers for name in NAMES)
