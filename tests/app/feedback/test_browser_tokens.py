"""Browser tokens: limited to one reply and the named kinds, and resistant to forgery."""

import asyncio
import base64
import json
import time
from typing import Any

import httpx2
import jwt
import pytest

from app.core.errors import BadRequest
from app.core.http import parse_body
from app.feedback.browser_tokens import TokenRequest
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
    before = time.time()
    new_token = (
        await harness.api.post(
            "/v1/feedback/tokens", json={"completion_id": turn.id, "kinds": ["binary"], "source_id": "ada"}
        )
    ).json()
    assert set(new_token) == {"object", "token", "expires_at", "url"}
    assert new_token["object"] == "feedback.token"
    assert abs(new_token["expires_at"] - before - harness.settings.feedback_token_seconds) < 5
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
    assert again.json() == first.json()
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
        signed(exp=int(time.time()) - 1),
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
    past = time.time() - 61
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
