"""The service without HTTP, and a completion with n choices: n engine requests and n turns."""

import asyncio
from typing import Any

import httpx2
import pytest

from app.chat.request_origin import RequestOrigin
from app.chat.schemas import ChatRequest
from app.chat.service import ChatService
from app.models import ApiKey, Turn, TurnState, new_id, to_completion_id
from app.projects.auth import Caller
from tests.app.chat.test_endpoints import MESSAGES, ask, chunks
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine

REQUEST = ChatRequest.model_validate({"model": "shop", "messages": MESSAGES})


async def find_service(harness: Harness) -> tuple[ChatService, Caller]:
    """Return the service of the application, and who asks it."""
    [key] = await harness.all(ApiKey)
    service: ChatService = harness.api._transport.app.services.get(ChatService)  # type: ignore[attr-defined]
    return service, Caller(key.project_id, key.id, key.prefix, ("chat",), train=True)


async def stay() -> None:
    await asyncio.Event().wait()


async def leave() -> None:
    """As a client that has left already."""


async def test_service_needs_no_http_request(harness: Harness, scripted: ScriptedEngine) -> None:
    service, caller = await find_service(harness)
    origin = RequestOrigin(new_id("req"), {"x-conversation-id": "talk-1"})
    reply = await service.complete(caller, REQUEST, origin, stay)
    turn = await harness.get(Turn, reply.content["id"])
    assert (turn.state, turn.conversation_id) == (TurnState.DONE, "talk-1")
    assert turn.id == to_completion_id(origin.request_id)
    streamed = await service.stream(caller, REQUEST, RequestOrigin(new_id("req")), stay)
    chunks = [chunk async for chunk in streamed.content]
    assert {chunk["id"] for chunk in chunks} == {streamed.headers["x-completion-id"]}
    assert (await harness.get(Turn, streamed.headers["x-completion-id"])).state == TurnState.DONE


async def test_reply_of_a_client_that_has_left_is_aborted(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.is_blocked = lambda reply: True
    service, caller = await find_service(harness)
    await service.complete(caller, REQUEST, RequestOrigin(new_id("req")), leave)
    [turn] = await harness.all(Turn)
    assert scripted.aborted == {turn.id}
    assert (turn.state, turn.finish_reason) == (TurnState.ABORTED, "client_disconnect")


async def test_each_choice_is_a_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness, n=3, seed=5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    turns = sorted(await harness.all(Turn), key=lambda turn: turn.choice_index)
    assert {turn.completion_id for turn in turns} == {turns[0].id} == {body["id"]}
    assert [engine_body["seed"] for engine_body in scripted.requests] == [5, 6, 7]
    assert {engine_body["n"] for engine_body in scripted.requests} == {1}
    assert all(turn.state == TurnState.DONE and turn.exclusion_reason is None for turn in turns)
    num_output = sum(len(turn.output_ids) for turn in turns)
    assert body["usage"]["completion_tokens"] == num_output
    assert body["usage"]["prompt_tokens"] == len(turns[0].own_prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_choices_of_a_refused_request_are_refused(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.refuse_status = 400
    assert (await ask(harness, n=3, stream=stream)).status_code == 400
    assert [turn.state for turn in await harness.all(Turn)] == [TurnState.REFUSED] * 3


@pytest.mark.parametrize(("seed", "second"), [(2**63 - 1, -(2**63)), (-(2**63), 1 - 2**63), (-1, 0)])
async def test_seeds_of_the_choices_stay_in_64_bits(
    harness: Harness, scripted: ScriptedEngine, seed: int, second: int
) -> None:
    assert (await ask(harness, n=2, seed=seed)).status_code == 200
    assert [engine_body["seed"] for engine_body in scripted.requests] == [seed, second]


async def test_fingerprint_says_that_a_seed_is_a_hint(harness: Harness, scripted: ScriptedEngine) -> None:
    body = (await ask(harness, seed=7)).json()
    assert body["system_fingerprint"] == "shop@v0;engine-0;seed=hint"
    parts = chunks(await ask(harness, seed=7, stream=True))
    assert {part["system_fingerprint"] for part in parts} == {body["system_fingerprint"]}


async def test_choices_stream_concurrently(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.seconds_per_token = 0.1  # much longer than any pause of a busy machine
    parts = chunks(await ask(harness, n=3, stream=True, stream_options={"include_usage": True}))
    text = {0: "", 1: "", 2: ""}
    finished = []
    for part in parts:
        for choice in part["choices"]:
            text[choice["index"]] += choice["delta"].get("content") or ""
            finished += [choice["index"]] if choice["finish_reason"] else []
    assert set(text.values()) == {scripted.reply_text} and sorted(finished) == [0, 1, 2]
    usages = [part["usage"] for part in parts if part.get("usage")]
    assert len(usages) == 1 and parts[-1]["choices"] == []
    turns = await harness.all(Turn)
    assert len(turns) == 3 and usages[0]["completion_tokens"] == sum(len(turn.output_ids) for turn in turns)
    order = [choice["index"] for part in parts for choice in part["choices"]]
    assert order != sorted(order), "the choices were streamed one after the other"


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_choice_fails_completion(harness: Harness, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.drop_after_tokens, scripted.seconds_per_token = 3, 0.002
    response = await ask(harness, n=2, stream=stream)
    if stream:
        assert chunks(response)[-1]["error"]["code"] == "engine_unavailable"
    else:
        assert response.status_code == 503
    turns = await harness.all(Turn)
    assert {turn.state for turn in turns} == {TurnState.FAILED} and all(turn.exclusion_reason for turn in turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_aborts_every_choice(
    harness: Harness, scripted: ScriptedEngine, live_url: str, stream: bool
) -> None:
    scripted.reply_text, scripted.seconds_per_token = "word " * 400, 0.02
    body: dict[str, Any] = {"model": "shop", "messages": MESSAGES, "stream": stream, "max_tokens": 500, "n": 3}
    headers = {"authorization": f"Bearer {harness.key}"}
    async with httpx2.AsyncClient(base_url=live_url, headers=headers, timeout=60) as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while len(scripted.running) < 3:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
    turns: list[Turn] = []
    async with asyncio.timeout(60):
        while {turn.state for turn in turns} != {TurnState.ABORTED}:
            await asyncio.sleep(0.05)
            turns = await harness.all(Turn)
    assert scripted.aborted == {turn.id for turn in turns} and len(turns) == 3
    assert {turn.finish_reason for turn in turns} == {"client_disconnect"}


async def test_grammar_is_sent_to_engine_and_excludes_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    body = (await ask(harness, response_format=schema)).json()
    turn = await harness.get(Turn, body["id"])
    assert scripted.requests[-1]["response_format"] == schema
    assert "grammar" in turn.exclusion_reason and turn.request_params["response_format"] == schema
    assert (
        await harness.get(Turn, (await ask(harness, response_format={"type": "text"})).json()["id"])
    ).exclusion_reason is None


async def test_logit_bias_is_sent_to_engine_and_excludes_turn(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await harness.get(Turn, (await ask(harness, logit_bias={"7": -100})).json()["id"])
    assert scripted.requests[-1]["logit_bias"] == {"7": -100} and "bias" in turn.exclusion_reason
