"""connectors/openwebui: votes in Open WebUI become feedback; changed, deleted, missed and compared.

Open WebUI's two modules are replaced by a table of rows; `make test-openwebui` runs the real one.
"""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse

from app.main import create_app
from app.models import Feedback, Turn
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi, error_response
from tests.support.feedback_users import add_metadata
from tests.support.open_webui import PLUGIN, USER, OpenWebUI, load_plugin
from tests.support.scripted_engine import ScriptedEngine, serve


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """Return SQLite's alone: the plug-in cannot see which database the service has."""
    return sqlite_url


@pytest.fixture
def api(harness: Harness, scripted: ScriptedEngine) -> FaultyApi:
    return FaultyApi(create_app(harness.settings))


@pytest.fixture
def url(api: FaultyApi) -> Iterator[str]:
    with serve(api, lifespan="on") as url:
        yield url


@pytest.fixture
def open_webui() -> OpenWebUI:
    return OpenWebUI()


@pytest.fixture
def plugin(open_webui: OpenWebUI, url: str, harness: Harness, tmp_path: Path) -> Iterator[Any]:
    """Yield the function as Open WebUI loads it, with its settings."""
    open_webui.valves = {"url": f"{url}/v1", "api_key": harness.key, "seconds": 10}
    with load_plugin(open_webui, tmp_path) as loaded:
        function = loaded.Event()
        function.valves = function.Valves(**open_webui.valves)
        yield function


async def reply(harness: Harness, message_id: str) -> Turn:
    """Return a turn that was sent with the header lines of the docs."""
    turn = await harness.turn(conversation_id="chat-1")
    await add_metadata(harness, turn.id, **{"message-id": message_id})
    return turn


async def effective(harness: Harness) -> list[tuple[str, Any, str | None]]:
    """Return kind, value and source of the feedback that counts, by `GET /v1/feedback/search`."""
    rows = (await harness.api.get("/v1/feedback/search", params={"limit": 100})).json()["data"]
    views = [(await harness.api.get(f"/v1/feedback/{row['id']}")).json() for row in rows]
    counted = [(view["kind"], view["value"], view["source"]["id"]) for view in views if view["effective"]]
    return sorted(counted, key=repr)


SOURCE = f"openwebui:{USER}"


async def test_thumb_is_sent_changed_and_deleted(plugin: Any, open_webui: OpenWebUI, harness: Harness) -> None:
    turn = await reply(harness, "m-1")
    await plugin.event(open_webui.vote("f-1", "m-1", 1))
    assert await effective(harness) == [("binary", 1.0, SOURCE)]
    await plugin.event(
        open_webui.vote("f-1", "m-1", -1, reason="not_factually_correct", comment="No.", tags=["a", "b"])
    )
    assert await effective(harness) == [("binary", -1.0, SOURCE)]
    last = (await harness.all(Feedback))[-1]
    assert (last.turn_id, last.comment) == (turn.id, "No.")
    assert last.request_metadata == {"reason": "not_factually_correct", "tags": "a, b"}
    await plugin.event(open_webui.vote("f-1", "m-1", 1, details={"rating": 8}))
    assert await effective(harness) == [("rating", pytest.approx(5 / 9), SOURCE)]
    await plugin.event(open_webui.delete("f-1"))
    assert await effective(harness) == []


async def test_event_that_is_repeated_changes_nothing(plugin: Any, open_webui: OpenWebUI, harness: Harness) -> None:
    await reply(harness, "m-1")
    happened = open_webui.vote("f-1", "m-1", 1)
    for _ in range(3):
        await plugin.event(happened)
    assert await plugin.synchronize() == 0
    assert len(await harness.all(Feedback)) == 1


async def test_event_reads_its_own_row_alone(plugin: Any, open_webui: OpenWebUI, harness: Harness) -> None:
    for number in range(3):
        await reply(harness, f"m-{number}")
        await plugin.event(open_webui.vote(f"f-{number}", f"m-{number}", 1))
    await plugin.event(open_webui.delete("f-0"))
    assert open_webui.lists == 0 and len(await effective(harness)) == 2
    await plugin.event({"event": "feedback.deleted_all", "subject": None})
    assert open_webui.lists == 1


@pytest.mark.parametrize("fault", ["lose_response", error_response(503), error_response(429), error_response(401)])
async def test_what_the_server_missed_is_sent_later(
    plugin: Any, open_webui: OpenWebUI, harness: Harness, api: FaultyApi, fault: Any
) -> None:
    for number in range(3):
        await reply(harness, f"m-{number}")
    await plugin.event(open_webui.vote("f-0", "m-0", 1))
    api.faults = [fault] * 3
    await plugin.event(open_webui.vote("f-1", "m-1", -1))
    await plugin.event(open_webui.vote("f-2", "m-2", 1))
    await plugin.event(open_webui.delete("f-0"))
    assert not api.faults
    assert await plugin.synchronize() == 0
    assert await effective(harness) == [("binary", -1.0, SOURCE), ("binary", 1.0, SOURCE)]


@pytest.mark.parametrize("known", [False, True])
async def test_vote_is_withdrawn_even_if_the_answer_to_it_was_lost(
    plugin: Any, open_webui: OpenWebUI, harness: Harness, api: FaultyApi, known: bool
) -> None:
    await reply(harness, "m-1")
    if known:
        await plugin.event(open_webui.vote("f-1", "m-1", -1))
    api.faults = ["lose_response"]
    await plugin.event(open_webui.vote("f-1", "m-1", 1))
    assert await effective(harness) == [("binary", 1.0, SOURCE)]
    await plugin.event(open_webui.delete("f-1"))
    assert await plugin.synchronize() == 0
    assert await effective(harness) == []


async def test_vote_that_is_changed_in_the_same_second_is_sent_later(
    plugin: Any, open_webui: OpenWebUI, harness: Harness, api: FaultyApi
) -> None:
    await reply(harness, "m-1")
    await plugin.event(open_webui.vote("f-1", "m-1", 1))
    open_webui.seconds_per_change = 0
    api.faults = [error_response(503)]
    await plugin.event(open_webui.vote("f-1", "m-1", -1))
    assert await plugin.synchronize() == 0
    assert await effective(harness) == [("binary", -1.0, SOURCE)]


async def test_vote_that_the_server_could_not_take_in_time_is_withdrawn_when_it_is_deleted(
    plugin: Any, open_webui: OpenWebUI, harness: Harness, api: FaultyApi
) -> None:
    await reply(harness, "m-1")
    await plugin.event(open_webui.vote("f-1", "m-1", 1))
    busy = {"data": [{"index": 0, "status": 503, "error": {"message": "The row is locked."}}]}
    api.faults = [JSONResponse(busy)]
    await plugin.event(open_webui.vote("f-1", "m-1", -1))
    await plugin.event(open_webui.delete("f-1"))
    assert await plugin.synchronize() == 0
    assert await effective(harness) == []


async def test_everything_is_sent_again_without_the_file(plugin: Any, open_webui: OpenWebUI, harness: Harness) -> None:
    for number in range(120):
        await reply(harness, f"m-{number}")
        open_webui.vote(f"f-{number}", f"m-{number}", 1 if number % 3 else -1)
    assert await plugin.synchronize() == 0
    plugin.file.unlink()
    assert await plugin.synchronize() == 0
    assert len(await harness.all(Feedback)) == 120


async def test_votes_on_two_replies_to_one_prompt_are_also_compared(
    plugin: Any, open_webui: OpenWebUI, harness: Harness
) -> None:
    one, other = await reply(harness, "m-1"), await reply(harness, "m-2")
    await plugin.event(open_webui.vote("f-1", "m-1", 1, "m-2"))
    await plugin.event(open_webui.vote("f-2", "m-2", -1, "m-1"))
    comparison = (await harness.all(Feedback))[-1]
    assert (comparison.kind, comparison.raw_value) == ("comparison", [one.id, other.id])
    await plugin.event(open_webui.vote("f-1", "m-1", -1, "m-2"))
    assert [kind for kind, *_ in await effective(harness)] == ["binary", "binary"]
    await plugin.event(open_webui.vote("f-2", "m-2", 1, "m-1"))
    assert (await harness.all(Feedback))[-1].raw_value == [other.id, one.id]
    await plugin.event(open_webui.delete("f-2"))
    assert await effective(harness) == [("binary", -1.0, SOURCE)]


async def test_votes_on_other_models_are_not_sent(plugin: Any, open_webui: OpenWebUI, harness: Harness) -> None:
    await plugin.event(open_webui.vote("f-1", "m-unknown", 1))
    assert await plugin.synchronize() == 0
    plugin.valves = plugin.Valves(**open_webui.valves, models="shop*, tutor")
    await reply(harness, "m-1")
    await reply(harness, "m-2")
    await plugin.event(open_webui.vote("f-2", "m-1", 1, model_id="gpt-9"))
    await plugin.event(open_webui.vote("f-3", "m-2", 1, model_id="shop@v3"))
    assert await effective(harness) == [("binary", 1.0, SOURCE)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"rating": "1"}, [("binary", 1.0, SOURCE)]),
        ({"rating": None}, []),
        ({"rating": None, "comment": "slow"}, [("comment", None, SOURCE)]),
        ({"rating": 1, "details": None, "tags": None}, [("binary", 1.0, SOURCE)]),
        ({"rating": 1, "details": {"rating": 11}}, [("binary", 1.0, SOURCE)]),
        ({"rating": -1, "details": {"rating": 1}}, [("rating", -1.0, SOURCE)]),
    ],
)
async def test_rows_as_they_come(
    plugin: Any, open_webui: OpenWebUI, harness: Harness, data: dict[str, Any], expected: list[Any]
) -> None:
    await reply(harness, "m-1")
    rating = data.pop("rating")
    await plugin.event(open_webui.vote("f-1", "m-1", rating, **data))
    assert await effective(harness) == expected
    assert await plugin.synchronize() == 0


async def test_reconciler_runs_once_in_a_process_and_ends_with_the_function(
    plugin: Any, open_webui: OpenWebUI, harness: Harness
) -> None:
    await reply(harness, "m-1")
    app = SimpleNamespace(state=SimpleNamespace())
    open_webui.vote("f-1", "m-1", 1)  # the event of this vote was lost
    await plugin.event({"event": "system.startup.completed"}, "attune_openwebui", app)
    _, task = app.state.attune_openwebui_reconciler
    await plugin.event({"event": "chat.created"}, "attune_openwebui", app)
    assert app.state.attune_openwebui_reconciler[1] is task
    async with asyncio.timeout(20):
        while not await effective(harness):
            await asyncio.sleep(0.02)
    updated = type(plugin)()
    await updated.event({"event": "function.updated"}, "attune_openwebui", app)
    with pytest.raises(asyncio.CancelledError):
        await task
    open_webui.is_active = False
    _, newer = app.state.attune_openwebui_reconciler
    newer.cancel()


def test_plugin_needs_nothing_that_open_webui_lacks() -> None:
    imports = re.findall(r"^(?:from|import) (\w+)", PLUGIN.read_text(), re.MULTILINE)
    assert set(imports) - sys.stdlib_module_names == {"httpx", "open_webui", "pydantic"}
