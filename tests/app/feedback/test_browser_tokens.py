"""Browser tokens: limited to one reply and the named kinds, and resistant to forgery."""

import asyncio
import base64
import json
import time
from typing import Any

import httpx2
import jwt
import pytest
from sqlalchemy import select

from app.core.errors import BadRequest
from app.core.http import parse_body
from app.feedback.browser_tokens import TokenRequest
from app.feedback.feedback_limits import FeedbackLimits
from app.feedback.feedback_writer import FeedbackWriter
from app.models import Feedback, Project
from tests.support.deployment import Harness
from tests.support.feedback_users import create_other_project_key, error_shape


async def token(harness: Harness, completion_id: str, **fields: Any) -> str:
    body = {"completion_id": completion_id, "kinds": ["binary", "comment"], **fields}
    response = await harness.api.post("/v1/feedback/tokens", json=body)
    assert response.status_code == 201, response.text
    new_token: str = response.json()["token"]
    return new_token


async def post(harness: Harness, bearer: str, **body: Any) -> httpx2.Response:
    body = {"kind": "binary", "value": "up", **body}
    return await harness.api.post("/v1/feedback", json=body, headers={"authorization": f"Bearer {bearer}"})


async def secret(harness: Harness) -> tuple[str, str]:
    [project] = await harness.all(Project)
    return project.id, project.token_secret


async def test_token_submits_feedback_as_its_user(harness: Harness) -> None:
    turn = await harness.turn()
    before = int(time.time())
    new_token = (
        await harness.api.post(
            "/v1/feedback/tokens", json={"completion_id": turn.id, "kinds": ["binary"], "source_id": "ada"}
        )
    ).json()
    assert set(new_token) == {"object", "token", "expires_at", "url"}
    assert new_token["object"] == "feedback.token"
    assert before <= new_token["expires_at"] - harness.settings.limits.feedback_token_seconds <= time.time()
    assert new_token["url"] == "http://attune/v1/feedback"
    response = await post(harness, new_token["token"], completion_id=turn.id, source={"kind": "CODE", "id": "root"})
    assert response.status_code == 201, response.text
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.value, row.source_kind, row.source_id) == (turn.id, 1.0, "HUMAN", "ada")


async def test_token_allows_only_its_claims(harness: Harness) -> None:
    turn, other = await harness.turn(conversation_id="c"), await harness.turn()
    await harness.turn(completion_id=turn.id, choice_index=1)
    bearer = await token(harness, turn.id, names=["tone"])
    for body in (
        {"completion_id": other.id, "name": "tone"},
        {"completion_id": "chatcmpl-nobody", "name": "tone"},
        {"completion_id": turn.id, "choice_index": 1, "name": "tone"},
        {"completion_id": turn.id},
        {"completion_id": turn.id, "name": "tone", "kind": "score", "value": 0},
        {"target": {"conversation_id": "c"}, "name": "tone"},
        {"target": {"metadata": {"k": "v"}}, "name": "tone"},
        {"kind": "comparison", "value": [turn.id, other.id], "name": "tone"},
    ):
        assert error_shape(await post(harness, bearer, **body)) == (403, {"message", "type", "param", "code"}), body
    refused = await post(harness, bearer, completion_id=turn.id, choice_index=1, name="tone")
    assert refused.json()["error"]["message"] == "This feedback token is for another choice of this completion: 0."
    assert await harness.all(Feedback) == []
    assert (await post(harness, bearer, completion_id=turn.id, name="tone")).status_code == 201


async def test_token_cannot_read_or_create_tokens(harness: Harness) -> None:
    turn = await harness.turn()
    headers = {"authorization": f"Bearer {await token(harness, turn.id)}"}
    feedback_id = (await harness.vote(turn.id)).json()["id"]
    for method, path, body in [
        ("GET", f"/v1/feedback?completion_id={turn.id}", None),
        ("GET", f"/v1/feedback/{feedback_id}", None),
        ("DELETE", f"/v1/feedback/{feedback_id}", None),
        ("POST", "/v1/feedback/batch", {"items": [{"completion_id": turn.id, "kind": "binary", "value": True}]}),
        ("POST", "/v1/feedback/tokens", {"completion_id": turn.id, "kinds": ["binary"]}),
        ("POST", "/v1/chat/completions", {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}),
        ("GET", "/v1/models", None),
    ]:
        assert (await harness.api.request(method, path, json=body, headers=headers)).status_code == 401, path


async def test_token_submissions_are_idempotent_in_their_own_namespace(harness: Harness) -> None:
    turn = await harness.turn()
    by_api_key = await harness.vote(turn.id, "down", id="k")
    bearer = await token(harness, turn.id, source_id="ada")
    first = await post(harness, bearer, completion_id=turn.id, id="k")
    again = await post(harness, await token(harness, turn.id, source_id="ada"), completion_id=turn.id, id="k")
    other = await post(harness, bearer, completion_id=turn.id, id="k", value="down")
    assert [response.status_code for response in (by_api_key, first, again, other)] == [201, 201, 200, 422]
    assert again.json() == first.json() | {"effective": True, "withdrawn": False}
    by_other_user = await post(harness, await token(harness, turn.id, source_id="bob"), completion_id=turn.id, id="k")
    assert by_other_user.status_code == 201
    assert len(await harness.all(Feedback)) == 3


async def test_forged_malformed_and_expired_tokens_are_401(harness: Harness) -> None:
    turn = await harness.turn()
    good = await token(harness, turn.id)
    project_id, key = await secret(harness)
    claims = jwt.decode(good, key, algorithms=["HS256"], audience="attune.feedback")
    kid = {"kid": project_id}

    def signed(secret: str = key, header: dict[str, Any] = kid, algorithm: str = "HS256", **other: Any) -> str:
        feedback_id = {name: value for name, value in (claims | other).items() if value is not None}
        return jwt.encode(feedback_id, secret, algorithm=algorithm, headers=header)

    def raw(header: Any) -> str:
        parts = (base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (header, b"{}"))
        return ".".join(parts) + ".AAAA"

    assert (await post(harness, signed(), completion_id=turn.id)).status_code == 201
    invalid = [
        signed(secret="0" * 64),
        signed(algorithm="HS512"),
        signed(secret="", algorithm="none"),
        signed(exp=int(time.time()) - 61),
        signed(exp=None),
        signed(aud="attune"),
        signed(aud=None),
        signed(iss="somebody"),
        signed(jti=None),
        signed(sub=None),
        signed(kinds="binary"),
        signed(header={"kid": "proj-nobody"}),
        signed(header={"kid": "a\x00b"}),
        signed(header={}),
        good[:-2],
        good + "x",
        good.replace(".", "..", 1),
        "..",
        "a.b.c",
        raw(b'{"alg":"HS256","kid":7}'),
        raw(b'{"alg":"HS256","kid":"\\ud800"}'),
        raw(b"[" * 180),
        raw(b"\xff\xfe"),
        raw(json.dumps({"alg": "none", "kid": project_id}).encode()),
        "x" * 300 + "." + "y" * 20_000 + ".z",
    ]
    for bearer in invalid:
        response = await post(harness, bearer, completion_id=turn.id)
        assert error_shape(response) == (401, {"message", "type", "param", "code"}), bearer
    assert len(await harness.all(Feedback)) == 1


async def test_expired_token_has_its_own_code(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = await harness.turn()
    past = time.time() - 121
    monkeypatch.setattr("app.feedback.browser_tokens.time.time", lambda: past)
    bearer = await token(harness, turn.id, expires_in=60)
    monkeypatch.undo()
    response = await post(harness, bearer, completion_id=turn.id)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "token_expired")


async def test_concurrent_token_requests_share_one_secret(harness: Harness) -> None:
    turn = await harness.turn()
    new_token = await asyncio.gather(*[token(harness, turn.id) for _ in range(8)])
    assert len(set(new_token)) == 8
    for bearer in new_token:
        assert (await post(harness, bearer, completion_id=turn.id)).status_code == 201


async def test_tokens_are_for_own_turns_only(harness: Harness) -> None:
    turn = await harness.turn()
    headers = await create_other_project_key(harness)
    foreign = await harness.api.post(
        "/v1/feedback/tokens", json={"completion_id": turn.id, "kinds": ["binary"]}, headers=headers
    )
    unknown = await harness.api.post(
        "/v1/feedback/tokens", json={"completion_id": "X", "kinds": ["binary"]}, headers=headers
    )
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text == unknown.text.replace("X", turn.id)


@pytest.mark.parametrize(
    "fields",
    [
        {"kinds": []},
        {"kinds": ["ranking"]},
        {"kinds": ["binary"], "expires_in": 59},
        {"kinds": ["binary"], "expires_in": 604_801},
        {"kinds": ["binary"], "expires_in": "60"},
        {"kinds": ["binary"], "names": []},
        {"kinds": ["binary"], "names": ["a b"]},
        {"kinds": ["binary"], "scope": "admin"},
    ],
)
def test_malformed_token_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse_body(TokenRequest, {"completion_id": "a", **fields})


def set_limits(harness: Harness, limits: FeedbackLimits) -> None:
    harness.api._transport.app.services.put(FeedbackWriter(harness.db, limits))  # type: ignore[attr-defined]


async def test_token_has_a_quota(harness: Harness) -> None:
    turn = await harness.turn()
    set_limits(harness, FeedbackLimits(per_target=5000, per_source=1000, per_token=3))
    bearer = await token(harness, turn.id, source_id="ada")
    first = {"completion_id": turn.id, "id": "k"}
    answers = [await post(harness, bearer, **first)]
    answers += [await post(harness, bearer, completion_id=turn.id) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 201, 403]
    assert answers[-1].json()["error"]["code"] == "token_quota"
    assert (await post(harness, bearer, **first)).status_code == 200  # a replay writes nothing
    other = await token(harness, turn.id, source_id="ada")
    assert (await post(harness, other, completion_id=turn.id)).status_code == 201
    assert len(await harness.all(Feedback)) == 4


async def test_token_ends_with_the_key_that_created_it(harness: Harness) -> None:
    turn = await harness.turn()
    key = (await harness.api.post("/v1/keys", json={"scopes": ["feedback"]})).json()
    body = {"completion_id": turn.id, "kinds": ["binary"]}
    answer = await harness.api.post("/v1/feedback/tokens", json=body, headers={"authorization": f"Bearer {key['key']}"})
    bearer, other = answer.json()["token"], await token(harness, turn.id)
    assert (await post(harness, bearer, completion_id=turn.id)).status_code == 201
    assert (await harness.api.delete(f"/v1/keys/{key['id']}")).status_code == 200
    response = await post(harness, bearer, completion_id=turn.id)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "token_revoked")
    assert (await post(harness, other, completion_id=turn.id)).status_code == 201


async def test_token_of_an_older_release_names_no_key_and_is_accepted(harness: Harness) -> None:
    turn = await harness.turn()
    bearer = await token(harness, turn.id)
    project_id, key = await secret(harness)
    claims = jwt.decode(bearer, key, algorithms=["HS256"], audience="attune.feedback")
    del claims["key_id"]
    old = jwt.encode(claims, key, algorithm="HS256", headers={"kid": project_id})
    assert (await post(harness, old, completion_id=turn.id)).status_code == 201


async def rotate(harness: Harness, **body: Any) -> dict[str, Any]:
    response = await harness.api.post("/v1/feedback/tokens/rotate-secret", json=body)
    assert response.status_code == 200, response.text
    view: dict[str, Any] = response.json()
    return view


async def test_tokens_outlive_a_rotation_of_the_secret(harness: Harness) -> None:
    turn = await harness.turn()
    before, (_, first_secret) = await token(harness, turn.id), await secret(harness)
    rotated_after = time.time()
    view = await rotate(harness)
    assert rotated_after <= view["previous_valid_until"] - 7 * 86400 <= time.time()
    after, (_, second_secret) = await token(harness, turn.id), await secret(harness)
    assert first_secret != second_secret
    jwt.decode(after, second_secret, algorithms=["HS256"], audience="attune.feedback")
    for bearer in (before, after):
        assert (await post(harness, bearer, completion_id=turn.id)).status_code == 201
    async with harness.db.write() as session:
        [project] = await session.scalars(select(Project))
        project.previous_token_secret_until = time.time() - 1
    statuses = [(await post(harness, bearer, completion_id=turn.id)).status_code for bearer in (before, after)]
    assert statuses == [401, 201]


async def test_rotation_can_end_all_tokens(harness: Harness) -> None:
    turn = await harness.turn()
    before = await token(harness, turn.id)
    assert (await rotate(harness, end_tokens=True))["previous_valid_until"] is None
    assert (await post(harness, before, completion_id=turn.id)).status_code == 401
    assert (await post(harness, await token(harness, turn.id), completion_id=turn.id)).status_code == 201


@pytest.mark.parametrize("offset, status", [(-50, 201), (-70, 401)])
async def test_clocks_of_hosts_may_differ_by_a_minute(harness: Harness, offset: int, status: int) -> None:
    turn = await harness.turn()
    bearer = await token(harness, turn.id)
    project_id, key = await secret(harness)
    claims = jwt.decode(bearer, key, algorithms=["HS256"], audience="attune.feedback")
    claims |= {"exp": int(time.time()) + offset, "iat": int(time.time()) - offset}
    shifted = jwt.encode(claims, key, algorithm="HS256", headers={"kid": project_id})
    assert (await post(harness, shifted, completion_id=turn.id)).status_code == status


async def test_source_has_a_limit_of_feedback_about_one_target(harness: Harness) -> None:
    turn, other = await harness.turn(), await harness.turn()
    set_limits(harness, FeedbackLimits(per_target=5000, per_source=2, per_token=100))
    ada: dict[str, Any] = {"source": {"kind": "HUMAN", "id": "ada"}}
    statuses = [(await harness.vote(turn.id, **ada)).status_code for _ in range(3)]
    assert statuses == [201, 201, 409]
    items = [{"completion_id": one.id, "kind": "binary", "value": True, **ada} for one in (turn, other, other, other)]
    answer = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert [item["status"] for item in answer.json()["data"]] == [409, 201, 201, 409]
    assert answer.json()["data"][0]["error"]["code"] == "source_quota"
    assert (await harness.vote(turn.id, source={"kind": "HUMAN", "id": "bob"})).status_code == 201


async def test_target_has_a_limit_of_feedback_of_all_sources(harness: Harness) -> None:
    """Whoever votes under a new name each time, as an API key can, does not make a reply ever slower to read."""
    turn, other = await harness.turn(), await harness.turn()
    set_limits(harness, FeedbackLimits(per_target=3, per_source=2, per_token=100))

    def vote_of(person: str) -> dict[str, Any]:
        return {"source": {"kind": "HUMAN", "id": person}}

    first = await harness.vote(turn.id, id="first", **vote_of("ada"))
    statuses = [(await harness.vote(turn.id, **vote_of(person))).status_code for person in ("bob", "eve", "zoe")]
    assert (first.status_code, statuses) == (201, [201, 201, 409])
    refused = await harness.vote(turn.id, **vote_of("ada"))
    assert refused.json()["error"]["code"] == "target_quota" and "MAX_TARGET_FEEDBACK" in refused.text
    assert refused.headers["x-should-retry"] == "false"
    assert (await harness.vote(turn.id, id="first", **vote_of("ada"))).status_code == 200  # a replay writes nothing
    items = [
        {"completion_id": one.id, "kind": "binary", "value": True, **vote_of(f"person-{number}")}
        for number, one in enumerate((turn, other, other, other, other))
    ]
    answer = await harness.api.post("/v1/feedback/batch", json={"items": items})
    assert [item["status"] for item in answer.json()["data"]] == [409, 201, 201, 201, 409]
    bearer = await token(harness, turn.id, source_id="mia")
    assert (await post(harness, bearer, completion_id=turn.id)).json()["error"]["code"] == "target_quota"


async def test_conversations_and_rankings_have_the_limit_too(harness: Harness) -> None:
    first, second = [await harness.turn(conversation_id="c-1") for _ in range(2)]
    set_limits(harness, FeedbackLimits(per_target=1, per_source=1, per_token=100))
    rating = {"target": {"conversation_id": "c-1"}, "kind": "rating", "value": 5}
    order = [{"completion_id": first.id}, {"completion_id": second.id}]
    for body in (rating, {"kind": "ranking", "value": order}):
        named = [{**body, "source": {"kind": "HUMAN", "id": person}} for person in ("ada", "bob")]
        answers = [await harness.api.post("/v1/feedback", json=one) for one in named]
        assert [answer.status_code for answer in answers] == [201, 409], answers[0].text
        assert answers[1].json()["error"]["code"] == "target_quota"
