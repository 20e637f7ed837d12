"""Episodes for tests: created over the API, with chats in them."""

from typing import Any

import httpx2

from tests.support.deployment import Harness

MESSAGES = [{"role": "user", "content": "Guess a number."}]


async def create(harness: Harness, **fields: Any) -> dict[str, Any]:
    response = await harness.api.post("/v1/episodes", json={"policy": "shop", **fields})
    assert response.status_code == 201, response.text
    body: dict[str, Any] = response.json()
    return body


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(
    harness: Harness, episode: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any
) -> httpx2.Response:
    """Chat with the episode's own key and base URL."""
    body = {"model": "shop", "messages": MESSAGES, **fields}
    url = episode["base_url"].removeprefix("http://attune") + "/chat/completions"
    return await harness.api.post(url, json=body, headers=auth(episode["api_key"]) | (headers or {}))


async def end(harness: Harness, id: str, **report: Any) -> httpx2.Response:
    return await harness.api.post(f"/v1/episodes/{id}/end", json=report)
