"""Stored completions: get, list in pages, filter and update metadata, delete."""

from typing import Any

import pytest

from app.models import Sample, SampleState, Turn, TurnMetadata
from tests.app.chat.test_endpoints import ask
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

ROOT = "/v1/chat/completions"


async def test_completion_has_all_choices(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness, n=2, metadata={"ticket": "7"}, user="anna", seed=1)).json()
    response = await harness.api.get(f"{ROOT}/{body['id']}")
    stored = response.json()
    assert stored["choices"] == [choice | {"logprobs": None, "length_penalty": None} for choice in body["choices"]]
    assert (stored["usage"], stored["metadata"], stored["input_user"]) == (body["usage"], {"ticket": "7"}, "anna")
    assert (stored["status"], stored["seed"]) == ("done", 1)
    assert response.headers["x-completion-id"] == body["id"]


async def test_pages_are_complete_in_both_directions(harness: Harness, scripted: ScriptedEngine) -> None:
    ids = [(await ask(harness)).json()["id"] for _ in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        ids_on_pages: list[str] = []
        after: dict[str, Any] = {}
        while True:
            page = (await harness.api.get(ROOT, params={"limit": 2, "order": order, **after})).json()
            ids_on_pages += [row["id"] for row in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert ids_on_pages == expected


async def test_filter_by_metadata_and_replace_it(harness: Harness, scripted: ScriptedEngine) -> None:
    first = (await ask(harness, metadata={"ticket": "7", "team": "a"})).json()["id"]
    second = (await ask(harness, metadata={"ticket": "8", "team": "a"})).json()["id"]

    async def list_ids(**pairs: str) -> list[str]:
        params = {f"metadata[{key}]": value for key, value in pairs.items()}
        return [row["id"] for row in (await harness.api.get(ROOT, params=params)).json()["data"]]

    assert await list_ids(team="a") == [first, second]
    assert await list_ids(team="a", ticket="8") == [second]
    assert await list_ids(ticket="9") == []
    updated = await harness.api.post(f"{ROOT}/{first}", json={"metadata": {"ticket": "9"}})
    assert updated.json()["metadata"] == {"ticket": "9"}
    assert await list_ids(ticket="9") == [first] and await list_ids(team="a") == [second]


async def test_list_messages(harness: Harness, scripted: ScriptedEngine) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    id = (await ask(harness, messages=messages)).json()["id"]
    listed = (await harness.api.get(f"{ROOT}/{id}/messages")).json()
    assert [(row["role"], row["content"]) for row in listed["data"]] == [("system", "be brief"), ("user", "hi")]
    rest = (await harness.api.get(f"{ROOT}/{id}/messages", params={"after": listed["first_id"]})).json()
    assert [row["role"] for row in rest["data"]] == ["user"]
    assert (await harness.api.get(f"{ROOT}/{id}/messages", params={"after": "nobody"})).status_code == 404


async def test_filter_by_model_and_version(harness: Harness, scripted: ScriptedEngine) -> None:
    id = (await ask(harness)).json()["id"]
    for model in ("shop", "shop@v0", "shop@stable"):
        rows = (await harness.api.get(ROOT, params={"model": model})).json()["data"]
        assert [row["id"] for row in rows] == [id]
    assert (await harness.api.get(ROOT, params={"model": "nobody"})).status_code == 404


@pytest.mark.parametrize("frozen", [False, True])
async def test_deleted_completion_is_erased_and_excluded(
    harness: Harness, scripted: ScriptedEngine, frozen: bool
) -> None:
    id = (await ask(harness, metadata={"ticket": "7"}, user="anna")).json()["id"]
    await harness.vote(id)
    await curate(harness.db, harness.settings)
    if frozen:
        async with harness.db.write() as session:
            (await session.get_one(Sample, id)).state = SampleState.BATCHED
    response = await harness.api.delete(f"{ROOT}/{id}")
    assert response.json() == {"object": "chat.completion.deleted", "id": id, "deleted": True}
    turn = await harness.get(Turn, id)
    assert (turn.own_messages, turn.reply, turn.own_prompt_ids, turn.output_ids, turn.request_metadata) == (
        [],
        None,
        None,
        None,
        {},
    )
    assert await harness.all(TurnMetadata) == []
    assert (await harness.get(Sample, id)).state == SampleState.DROPPED
    unknown = await harness.api.get(f"{ROOT}/chatcmpl-nobody")
    for response in (await harness.api.get(f"{ROOT}/{id}"), await harness.api.delete(f"{ROOT}/{id}")):
        assert response.status_code == 404
        assert response.text.replace(id, "chatcmpl-nobody") == unknown.text
    assert (await harness.api.get(ROOT)).json()["data"] == []
    assert (await harness.vote(id, id="again")).status_code == 404
