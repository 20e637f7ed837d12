"""Attune and AsyncAttune: chats, every kind of feedback, retries and errors."""

from types import SimpleNamespace
from typing import Any

import pytest
from attune_client import (
    APIError,
    AsyncAttune,
    Attune,
    ConnectionFailed,
    FeedbackRecord,
    NotFound,
    RateLimited,
    ServerError,
    Unauthorized,
    Unprocessable,
    build,
    completion_id,
)
from attune_client.transport import RetryPolicy

from app.feedback.kinds import KINDS
from app.feedback.schemas import FeedbackView
from app.models import Feedback, Turn
from tests.support.deployment import Harness
from tests.support.faulty_api import FaultyApi, error_response
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trained_versions import publish


async def test_feedback_on_replies_and_streams(client: Attune, harness: Harness, url: str) -> None:
    reply = client.chat.create("When are you open?", model="shop", metadata={"thread": "7"})
    assert (reply.text, reply.version) == ("We are open from nine to six.", "shop@v0") and reply.conversation_id
    first = client.feedback.up(reply, source="ada", comment="thanks")
    assert first["completion_id"] == reply.completion_id and first["source"] == {"kind": "HUMAN", "id": "ada"}
    with client.chat.stream("When are you open?", model="shop") as stream:
        assert stream.completion_id and stream.version == "shop@v0", "known before the first piece"
        assert "".join(stream) == stream.text == reply.text and stream.finish_reason == "stop"
    client.feedback.down(stream)
    async with AsyncAttune(url, harness.key) as other:
        awaited = await other.chat.create([{"role": "user", "content": "Hello"}], model="shop")
        async with await other.chat.stream("Hello", model="shop") as pieces:
            assert "".join([piece async for piece in pieces]) == awaited.text
        await other.feedback.up(awaited)
        await other.feedback.score(pieces, -0.5)
        assert (await other.feedback.batch([build.comment(awaited, "good")]))[0]["status"] == 201
        assert len((await other.feedback.find(awaited))["data"]) == 2
    rows = {row.turn_id: row.value for row in await harness.all(Feedback) if row.value is not None}
    assert rows == {
        reply.completion_id: 1.0,
        stream.completion_id: -1.0,
        awaited.completion_id: 1.0,
        pieces.completion_id: -0.5,
    }


async def test_message_of_anthropics_client_names_its_reply(client: Attune, harness: Harness) -> None:
    turn = await harness.turn()
    message = SimpleNamespace(id=turn.id.replace("chatcmpl-", "msg_"), type="message")
    assert client.feedback.up(message)["completion_id"] == turn.id


async def test_every_kind_is_accepted(client: Attune, harness: Harness) -> None:
    one, two, three = [(await harness.turn()).id for _ in range(3)]
    both = client.chat.create("Hello", model="shop", n=2)
    feedback = client.feedback
    code: Any = {"kind": "CODE", "id": "tests"}
    records = [
        feedback.up(one),
        feedback.down(both, choice_index=1),
        feedback.score(one, 0.25, name="accuracy", metadata={"page": "cart"}, source=code),
        feedback.rate(one, 4),
        feedback.rate(one, 7, scale=(0, 10)),
        feedback.correct(one, "We open at nine."),
        feedback.label(one, "polite"),
        feedback.comment(one, "It was quick."),
        feedback.compare(one, two),
        feedback.compare(one, two, tie=True),
        feedback.rank([three, [one, two]]),
        feedback.up({"conversation_id": both.conversation_id}),
    ]
    assert [(record["kind"], record["value"]) for record in records] == [
        ("binary", 1.0),
        ("binary", -1.0),
        ("score", 0.25),
        ("rating", 0.5),
        ("rating", pytest.approx(0.4)),
        ("correction", None),
        ("categorical", None),
        ("comment", None),
        ("comparison", None),
        ("comparison", None),
        ("ranking", None),
        ("binary", 1.0),
    ]
    assert {record["kind"] for record in records} == set(KINDS)
    assert FeedbackRecord.__annotations__.keys() <= FeedbackView.model_fields.keys()
    assert records[1]["choice_index"] == 1 and records[2]["source"] == code and records[2]["name"] == "accuracy"
    assert records[8]["raw_value"] == [one, two] and records[9]["raw_value"] == [[one, two]]
    assert client.feedback.withdraw(records[4]["id"])["withdrawn"]
    assert client.feedback.get(records[4]["id"])["outcome"]


async def test_lost_response_counts_once(client: Attune, api: FaultyApi, harness: Harness) -> None:
    turn = await harness.turn()
    api.faults = ["lose_response", error_response(503)]
    client.feedback.up(turn.id)
    [row] = await harness.all(Feedback)
    assert row.turn_id == turn.id and len(api.bodies) == 3
    assert len(set(api.bodies)) == 1, "every try has the same id"


async def test_withdrawn_feedback_that_is_sent_again_is_told(client: Attune, harness: Harness) -> None:
    turn = await harness.turn()
    first = client.feedback.up(turn.id, id="mine")
    assert "withdrawn" not in first and client.feedback.up(turn.id, id="mine")["effective"]
    client.feedback.withdraw(first["id"])
    again = client.feedback.up(turn.id, id="mine")
    [result] = client.feedback.batch([build.up(turn.id, id="mine")])
    assert (result["status"], result["feedback"]) == (200, again)
    assert (again["withdrawn"], again["effective"], again["trainable"]) == (True, False, False)
    assert client.feedback.up(turn.id, id="another")["trainable"]


async def test_retried_chat_is_trained_on_once(client: Attune, api: FaultyApi, harness: Harness) -> None:
    api.faults = ["lose_response"]
    reply = client.chat.create("Hello", model="shop")
    turns = {turn.id: turn.exclusion_reason for turn in await harness.all(Turn)}
    assert len(turns) == 2 and turns.pop(reply.completion_id) is None
    assert all(turns.values()), "the reply that the client never saw is excluded"


async def test_retry_after_is_waited_for(
    client: Attune, api: FaultyApi, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = await harness.turn()
    api.faults = [error_response(429, retry_after="1.5")]
    waits: list[float] = []
    monkeypatch.setattr("attune_client.transport.time", SimpleNamespace(sleep=waits.append))
    client.feedback.up(turn.id)
    assert waits == [1.5]
    policy = RetryPolicy(max_retries=2)
    limited = RateLimited("slow down", status=429, retry_after=40, should_retry=True)
    assert policy.delay(0, limited) == 40 and policy.delay(2, limited) is None
    assert policy.delay(0, RateLimited("slow down", status=429, retry_after=3600, should_retry=True)) is None
    delays = [policy.delay(1, ServerError("no", status=503, should_retry=True)) or 0 for _ in range(100)]
    assert 0.5 <= min(delays) < max(delays) <= 1.0, "half to the whole of base · 2"


async def test_errors_carry_code_message_and_request_id(
    client: Attune, api: FaultyApi, harness: Harness, url: str
) -> None:
    with pytest.raises(NotFound) as unknown:
        client.feedback.up("chatcmpl-unknown")
    error = unknown.value
    assert (error.status, error.code, error.param) == (404, "not_found", "completion_id")
    assert "no completion 'chatcmpl-unknown'" in error.message and str(error.request_id).startswith("req")
    assert str(error.request_id) in str(error)
    turn = await harness.turn()
    client.feedback.up(turn.id, id="vote-1")
    with pytest.raises(Unprocessable) as reused:
        client.feedback.down(turn.id, id="vote-1")
    assert reused.value.code == "idempotency_key_reused" and not reused.value.should_retry
    with pytest.raises(Unauthorized, match="401"):
        Attune(url, "sk-attune-wrong").feedback.up(turn.id)
    api.faults, api.bodies = [error_response(500, x_should_retry="false")], []
    with pytest.raises(ServerError, match="The server answered 500"):
        client.feedback.up(turn.id)
    assert len(api.bodies) == 1
    with pytest.raises(ConnectionFailed):
        Attune("http://127.0.0.1:9", "sk-attune-x", max_retries=0).feedback.up(turn.id)
    with pytest.raises(ValueError, match="ATTUNE_API_KEY"):
        Attune(url)
    assert harness.key not in repr(vars(Attune(url, harness.key)))


def test_broken_stream_raises(client: Attune, scripted: ScriptedEngine) -> None:
    scripted.drop_after_tokens = 2
    stream = client.chat.stream("Hello", model="shop")
    with pytest.raises(APIError):
        list(stream)
    assert stream.completion_id and stream.text, "what came before stays"


async def test_batches_are_split(client: Attune, api: FaultyApi, harness: Harness) -> None:
    turns = [await harness.turn() for _ in range(5)]
    bodies = [build.comment(turns[number % 5].id, "good", source=f"user-{number}") for number in range(1005)]
    bodies[1002] = build.up("chatcmpl-unknown")
    api.faults = ["lose_response"]
    results = client.feedback.batch(bodies)
    assert [result["index"] for result in results] == list(range(1005))
    assert {result["status"] for result in results[:1000]} == {200}, "they were recorded by the lost request"
    assert [results[at]["status"] for at in (1001, 1002, 1003)] == [201, 404, 201]
    assert len(await harness.all(Feedback)) == 1004


async def test_browser_token(client: Attune, harness: Harness) -> None:
    turn = await harness.turn()
    token = client.feedback.create_token(turn.id, ["binary", "comment"], source_id="ada", expires_in=60)
    browser = Attune(token["url"].removesuffix("/v1/feedback"), token["token"])
    assert browser.feedback.up(turn.id)["source"] == {"kind": "HUMAN", "id": "ada"}


async def test_policies(client: Attune, harness: Harness) -> None:
    await publish(harness)
    policies = client.policies
    assert policies.rollback("shop", reason="worse")["serving"] == "shop@v0"
    assert policies.get("shop")["serving"] == policies.deployment("shop")["serving"] == "shop@v0"
    assert [version["number"] for version in policies.versions("shop")["data"]] == [0, 1]
    assert policies.deploy("shop", 1, reason="better")["serving"] == "shop@v1"
    pin = policies.pin("shop", "user", "ada", 0)
    assert [row["id"] for row in policies.pins("shop")["data"]] == [pin["id"]]
    policies.unpin("shop", pin["id"])
    with pytest.raises(NotFound):
        policies.get("un/known")


@pytest.mark.parametrize("value", [object(), "", None, [], {"id": 7}])
def test_objects_without_an_id_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no completion id"):
        completion_id(value)


async def test_feedback_by_key_is_replaced_and_withdrawn(client: Attune, harness: Harness, url: str) -> None:
    turn = await harness.turn()
    first = client.feedback.up(turn.id, key="f-1")
    second = client.feedback.down(turn.id, key="f-1")
    assert (first["id"] != second["id"], client.feedback.get(first["id"])["effective"]) == (True, False)
    with pytest.raises(APIError) as error:
        client.feedback.up(turn.id, key="f-1", sent_at=1.0)
    assert (error.value.status, error.value.code) == (409, "superseded")
    assert client.feedback.batch([build.down(turn.id, key="f-1")])[0]["status"] == 200
    assert client.feedback.withdraw_key("f-1")["withdrawn"] is True
    async with AsyncAttune(url, harness.key) as other:
        with pytest.raises(NotFound):
            await other.feedback.withdraw_key("f-2")
