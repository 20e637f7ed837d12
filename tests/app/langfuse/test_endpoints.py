"""Langfuse's routes: thumbs of LibreChat and scores of the SDKs become feedback, are changed and deleted."""

import gzip
import itertools
from typing import Any

import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select

from app.core.errors import database_unavailable
from app.core.settings import Settings
from app.feedback import service as feedback
from app.feedback.effective import is_effective
from app.feedback.feedback_rows import BatchResultBody
from app.langfuse.endpoints import router
from app.main import create_app
from app.models import Audit, AuditAction, Feedback, Turn
from app.projects.scopes import required_scope
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.feedback_users import add_metadata, create_other_project_key
from tests.support.langfuse import basic, ingestion, librechat_score, post, sdk_score
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

HELLO = [{"role": "user", "content": "When are you open?"}]
LIBRECHAT_HEADERS = {
    "x-attune-metadata-message-id": "m-1",
    "x-conversation-id": "conv-1",
    "x-attune-user": "67a9",
}


async def effective(harness: Harness) -> list[tuple[str, Any]]:
    """Return the kind and the value of all feedback that counts."""
    query = select(Feedback.kind, Feedback.raw_value).where(is_effective()).order_by(Feedback.seq)
    async with harness.db.read() as session:
        return [(kind, value) for kind, value in await session.execute(query)]


async def unmatched(harness: Harness) -> dict[str, int]:
    rows = (await harness.api.get("/v1/status")).json()["unmatched_votes"]
    assert all(row["connector"] == "langfuse" and row["last_at"] > 1e9 for row in rows)
    return {row["reason"]: row["num_votes"] for row in rows}


async def chat(harness: Harness, **headers: str) -> Turn:
    body = {"model": "shop", "messages": HELLO}
    answer = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    turn: Turn = await harness.get(Turn, answer.json()["id"])
    return turn


async def test_thumb_of_librechat_is_learned_from_changed_and_deleted(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    turn = await chat(harness, **LIBRECHAT_HEADERS)
    up = librechat_score("m-1", "thumbsUp", "accurate_reliable", "Just right")
    answer = await post(harness, "scores", up)
    assert (answer.status_code, answer.json()) == (200, {"id": up["id"]})
    await curate(harness.db, harness.settings)
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.kind, row.raw_value, row.name) == (turn.id, "binary", True, "user-feedback")
    assert (row.source_kind, row.source_id) == ("HUMAN", "langfuse:67a9")
    assert row.comment == "accurate_reliable — Just right" and row.request_metadata["tag"] == "accurate_reliable"
    view = (await harness.api.get(f"/v1/feedback/{row.id}")).json()
    assert (view["outcome"]["state"], view["outcome"]["waiting_for"]) == ("waiting", "batch")

    assert (await post(harness, "scores", librechat_score("m-1", "thumbsDown"))).status_code == 200
    assert await effective(harness) == [("binary", False)]

    path = f"/api/public/scores/{up['id']}"
    deleted = await harness.api.delete(path, headers=basic(harness.key))
    assert deleted.status_code == 202
    assert await effective(harness) == []
    assert (await harness.api.delete(path, headers=basic(harness.key))).status_code == 202
    entries = [entry for entry in await harness.all(Audit) if entry.action == AuditAction.FEEDBACK_WITHDRAWN]
    assert len(entries) == 1

    assert (await post(harness, "scores", up)).status_code == 200
    assert await effective(harness) == [("binary", True)]
    assert await unmatched(harness) == {}


async def test_title_of_librechat_does_not_take_the_vote_of_its_reply(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    reply = await chat(harness, **LIBRECHAT_HEADERS)
    title = await chat(harness, **LIBRECHAT_HEADERS, **{"x-attune-task": "title_generation"})
    created = await harness.api.post("/v1/keys", json={"scopes": ["chat"], "train": False})
    untrained = await chat(harness, **LIBRECHAT_HEADERS, authorization=f"Bearer {created.json()['key']}")
    assert untrained.exclusion_reason == "no consent to train" and title.origin == "task"
    assert (await post(harness, "scores", librechat_score("m-1", "thumbsUp"))).status_code == 200
    assert [row.turn_id for row in await harness.all(Feedback)] == [reply.id]


@pytest.mark.parametrize("wire", ["ingestion", "array"])
async def test_batch_of_an_sdk(harness: Harness, wire: str) -> None:
    turns = [await harness.turn() for _ in range(3)]
    for number, turn in enumerate(turns):
        await add_metadata(harness, turn.id, **{"message-id": f"m-{number}"})
    scores = [
        sdk_score("s-0", metadata={"completion_id": turns[0].id}),
        sdk_score("s-1", value="wrong language", name="issue", dataType="CATEGORICAL", traceId=turns[1].id),
        sdk_score("s-2", value=4, name="quality", metadata={"message_id": "m-2"}, comment="good"),
        sdk_score("s-3", traceId="0" * 32),
        sdk_score("s-4", value=0.5, name="user-feedback", dataType="BOOLEAN", traceId=turns[0].id),
        {"name": "quality", "traceId": turns[0].id},
    ]
    if wire == "ingestion":
        body = ingestion(*scores)
        body["batch"].append({"id": "e-trace", "type": "trace-create", "timestamp": "x", "body": {"id": "t"}})
        answer = await post(harness, "ingestion", body)
        successes, errors = answer.json()["successes"], answer.json()["errors"]
        ids = [event["id"] for event in body["batch"]]
        assert [row["id"] for row in successes] == [ids[0], ids[1], ids[2], ids[3], "e-trace"]
        assert [(row["id"], row["status"], row["error"]) for row in errors] == [
            (ids[4], 400, "invalid_value"),
            (ids[5], 400, "invalid_value"),
        ]
    else:
        answer = await post(harness, "scores", scores)
        errors = answer.json()["errors"]
        assert (answer.json()["accepted"], answer.json()["rejected"], len(errors)) == (4, 2, 2)
    assert answer.status_code == 207
    assert "BOOLEAN" in errors[0]["message"] and "value" in errors[1]["message"]
    rows = await harness.all(Feedback)
    assert [(row.turn_id, row.kind, row.raw_value) for row in rows] == [
        (turns[0].id, "binary", True),
        (turns[1].id, "categorical", "wrong language"),
        (turns[2].id, "rating", {"value": 4.0, "scale": [1.0, 5.0]}),
    ]
    assert [row.source_kind for row in rows] == ["HUMAN", "CODE", "CODE"] and rows[2].value == 0.5
    assert [row.source_id for row in rows] == [None, "langfuse:issue", "langfuse:quality"]
    assert await unmatched(harness) == {"unknown_reply": 1}


async def test_array_without_a_fault(harness: Harness) -> None:
    turn = await harness.turn()
    answer = await post(harness, "scores", [sdk_score("s-1", traceId=turn.id), sdk_score("s-2", traceId="0" * 32)])
    assert (answer.status_code, answer.json()) == (202, {"message": "Accepted"})


async def test_every_order_of_arrival_ends_in_the_state_that_was_sent_last(harness: Harness) -> None:
    turn = await harness.turn()
    changes = [(1.0, "2026-11-20T10:00:00Z"), (0.0, "2026-11-20T10:00:01Z"), (1.0, "2026-11-20T12:00:02+02:00")]
    for number, order in enumerate(itertools.permutations(changes)):
        for value, timestamp in (*order, order[0]):
            score = sdk_score(f"s-{number}", value=value, traceId=turn.id, metadata={"userId": f"u-{number}"})
            answer = await post(harness, "ingestion", ingestion(score, timestamp=timestamp))
            assert (answer.status_code, answer.json()["errors"]) == (207, [])
        assert (await effective(harness))[number] == ("binary", True), order


async def test_score_that_arrives_after_its_deletion_stays_deleted(harness: Harness) -> None:
    turn = await harness.turn()
    assert (await harness.api.delete("/api/public/scores/s-1", headers=basic(harness.key))).status_code == 202
    answer = await post(harness, "ingestion", ingestion(sdk_score("s-1", traceId=turn.id)))
    assert answer.json()["errors"] == [] and await effective(harness) == []


async def test_unmatched_scores_are_taken_and_counted(harness: Harness) -> None:
    other = await create_other_project_key(harness)
    turn = await harness.turn(conversation_id="c-1")
    await add_metadata(harness, turn.id, **{"message-id": "m-1"})
    foreign = other["authorization"].removeprefix("Bearer ")
    for key, body in (
        (harness.key, sdk_score(traceId="f" * 32, sessionId="c-1")),
        (harness.key, sdk_score(datasetRunId="run-1")),
        (harness.key, sdk_score(sessionId="c-2")),
        (harness.key, sdk_score(sessionId="c" * 300)),
        (foreign, sdk_score(traceId=turn.id)),
        (foreign, librechat_score("m-1", "thumbsUp")),
        (foreign, sdk_score(sessionId="c-1")),
    ):
        assert (await post(harness, "scores", body, key)).status_code == 200
    assert await harness.all(Feedback) == []
    assert await unmatched(harness) == {"no_reply_named": 2, "unknown_conversation": 1, "unknown_reply": 1}
    theirs = (await harness.api.get("/v1/status", headers=other)).json()["unmatched_votes"]
    assert [(row["reason"], row["num_votes"]) for row in theirs] == [("unknown_conversation", 1), ("unknown_reply", 2)]
    page = (await harness.api.get("/metrics")).text
    assert (
        'attune_connector_unmatched_total{connector="langfuse",project="default",reason="no_reply_named"} 2.0' in page
    )


async def test_score_of_a_session_is_about_the_conversation(harness: Harness) -> None:
    await harness.turn(conversation_id="c-1")
    assert (await post(harness, "scores", sdk_score(sessionId="c-1"))).status_code == 200
    assert [(row.conversation_id, row.turn_id) for row in await harness.all(Feedback)] == [("c-1", None)]


async def test_score_of_a_trace_that_the_client_has_named(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await chat(harness, **{"x-attune-metadata-langfuse-trace-id": "a" * 32, **LIBRECHAT_HEADERS})
    assert (await post(harness, "scores", sdk_score(traceId="a" * 32))).status_code == 200
    assert [row.turn_id for row in await harness.all(Feedback)] == [turn.id]
    assert turn.request_metadata == {"langfuse-trace-id": "a" * 32, "message-id": "m-1"}


async def test_trace_is_found_by_its_message_alone(harness: Harness, scripted: ScriptedEngine) -> None:
    turn = await chat(harness, **LIBRECHAT_HEADERS)
    score = librechat_score("m-1", "thumbsUp")
    assert (await post(harness, "scores", sdk_score(traceId=score["traceId"]))).status_code == 200
    metadata = {"message-id": "m-2"}
    await harness.api.post(f"/v1/chat/completions/{turn.id}", json={"metadata": metadata})
    renamed = librechat_score("m-2", "thumbsDown")["traceId"]
    assert (await post(harness, "scores", sdk_score("s-2", value=0, traceId=renamed))).status_code == 200
    assert [row.turn_id for row in await harness.all(Feedback)] == [turn.id, turn.id]
    assert (await harness.get(Turn, turn.id)).request_metadata == metadata
    assert await unmatched(harness) == {}


async def test_trace_of_opentelemetry_is_found_by_the_header_of_its_chats(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    first, title = await chat(harness, **traced), await chat(harness, **traced, **{"x-attune-task": "title_generation"})
    assert title.trace_id == trace_id
    assert (await post(harness, "scores", sdk_score(traceId=trace_id))).status_code == 200
    one_of_them = sdk_score("s-2", traceId=trace_id, observationId="53995c3f42cd8ad8")
    assert (await post(harness, "scores", one_of_them)).status_code == 200
    assert [row.turn_id for row in await harness.all(Feedback)] == [first.id]
    assert await unmatched(harness) == {"unknown_reply": 1}


@pytest.mark.parametrize("kind", ["application/x-protobuf", "application/json"])
@pytest.mark.parametrize("encoding", ["gzip", None])
async def test_traces_are_taken_and_dropped(harness: Harness, kind: str, encoding: str | None) -> None:
    body = gzip.compress(b"no protobuf at all" * 100) if encoding else b"\x0a\xff no protobuf"
    headers = {**basic(harness.key), "content-type": kind} | ({"content-encoding": encoding} if encoding else {})
    answer = await harness.api.post("/api/public/otel/v1/traces", content=body, headers=headers)
    expected = b"{}" if kind == "application/json" else b""
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, expected, kind)


async def test_clients_check_their_keys_and_learn_the_project(harness: Harness) -> None:
    answer = await harness.api.get("/api/public/projects", headers=basic(harness.key))
    [project] = answer.json()["data"]
    assert project["id"] == (await harness.policy()).project_id and project["name"]
    assert set(project) == {"id", "name", "organization", "metadata"}


ROUTES = [
    (method, route.path.replace("{score_id}", "s-1"))
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods or ())
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_route_needs_a_key_with_the_scope_feedback(harness: Harness, method: str, path: str) -> None:
    created = await harness.api.post("/v1/keys", json={"scopes": ["chat"]})
    episode = await episodes.create(harness)
    for headers, status, code in (
        ({"authorization": ""}, 401, "invalid_api_key"),
        (basic(""), 401, "invalid_api_key"),
        (basic("sk-attune-unknown"), 401, "invalid_api_key"),
        ({"authorization": "Basic not-base64"}, 401, "http_401"),
        (basic(created.json()["key"]), 403, "missing_scope"),
        (basic(episode["api_key"]), 403, "episode_key"),
    ):
        answer = await harness.api.request(method, path, json={}, headers=headers)
        assert (answer.status_code, answer.json().get("error")) == (status, code), answer.text
        assert set(answer.json()) == {"message", "error"}


def test_all_routes_need_the_scope_feedback() -> None:
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) == 5 and {required_scope(route) for route in routes} == {"feedback"}


async def test_programs_need_their_scope(harness: Harness) -> None:
    turn = await harness.turn()
    key = (await harness.api.post("/v1/keys", json={"scopes": ["feedback"]})).json()["key"]
    judge = sdk_score("s-1", name="quality", value=4, traceId=turn.id)
    refused = await post(harness, "scores", judge, key)
    assert refused.status_code == 403 and "feedback:programs" in refused.json()["message"]
    answer = await post(harness, "ingestion", ingestion(judge, sdk_score("s-2", traceId=turn.id)), key)
    assert [row["status"] for row in answer.json()["errors"]] == [403] and len(answer.json()["successes"]) == 1
    assert await effective(harness) == [("binary", True)]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("scores", [], "1 to 1000"),
        ("scores", [{}] * 1001, "1 to 1000"),
        ("scores", "score", "an array of scores"),
        ("scores", {}, "name"),
        ("scores", {"name": "x", "value": None}, "value"),
        ("scores", {"name": "x", "value": 1, "traceId": 7}, "traceId"),
        ("scores", {"name": "x", "value": 1, "timestamp": "yesterday"}, "timestamp"),
        ("ingestion", {"batch": [{}] * 1001}, "batch"),
        ("ingestion", {}, "batch"),
        ("ingestion", [], "object"),
    ],
)
async def test_faulty_request_is_refused_in_langfuses_form(harness: Harness, path: str, body: Any, text: str) -> None:
    answer = await post(harness, path, body)
    assert answer.status_code == 400 and set(answer.json()) == {"message", "error"}, answer.text
    assert text in answer.json()["message"]


async def test_faulty_items_name_their_fields(harness: Harness) -> None:
    items = [7, {"name": "x"}, {"name": "x", "value": 1, "id": ""}]
    answer = await post(harness, "scores", items)
    assert answer.json()["rejected"] == 3
    events = [7, {"type": "score-create"}, {"type": "score-create", "id": "e", "body": {"name": "x"}}]
    answer = await post(harness, "ingestion", {"batch": events})
    assert (answer.status_code, len(answer.json()["errors"])) == (207, 3)
    assert [row["id"] for row in answer.json()["errors"]] == ["", "", "e"]


async def test_limits_of_feedback_hold(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.core.rate_limits.MINUTE", 1e10)  # none ends between two requests
    turn = await harness.turn()
    limits = {"limits": {"feedback_per_minute": 2}}
    assert (await harness.api.patch("/v1/project", json=limits)).status_code == 200
    scores = [sdk_score(f"s-{number}", traceId=turn.id) for number in range(3)]
    answer = await post(harness, "scores", scores)
    assert answer.status_code == 429 and answer.headers["retry-after"]
    assert (await post(harness, "scores", scores[:2])).status_code == 202
    assert (await post(harness, "scores", scores[2])).status_code == 429


@pytest.mark.parametrize("wire", ["score", "array", "ingestion"])
async def test_what_may_pass_is_an_error_that_clients_try_again_after(
    harness: Harness, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = await harness.turn()
    scores = [sdk_score(f"s-{number}", traceId=turn.id) for number in range(2)]
    submit = feedback.submit_batch

    async def fail_last(*arguments: Any) -> list[BatchResultBody]:
        """Record the feedback, and answer that the last item met a locked row."""
        *results, last = await submit(*arguments)
        return [*results, {"index": last["index"], "status": 503, "error": database_unavailable().body()["error"]}]

    monkeypatch.setattr(feedback, "submit_batch", fail_last)
    body = {"score": scores[0], "array": scores, "ingestion": ingestion(*scores)}[wire]
    answer = await post(harness, "ingestion" if wire == "ingestion" else "scores", body)
    if wire == "ingestion":
        assert [row["status"] for row in answer.json()["errors"]] == [503]
    else:
        assert (answer.status_code, answer.json()["error"]) == (503, "database_unavailable")


async def test_large_bodies_are_refused(harness: Harness) -> None:
    body = b"x" * (harness.settings.server.max_body_bytes + 1)
    for path in ("scores", "ingestion", "otel/v1/traces"):
        answer = await harness.api.post(f"/api/public/{path}", content=body, headers=basic(harness.key))
        assert answer.status_code == 413 and set(answer.json()) == {"message", "error"}


async def test_without_the_setting_there_are_no_routes(harness: Harness) -> None:
    app = create_app(Settings(home=harness.settings.home))
    assert not [path for path in app.openapi()["paths"] if path.startswith("/api/public")]
    assert ROUTES
