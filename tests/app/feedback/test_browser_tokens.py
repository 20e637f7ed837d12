"""Tokens for browsers: one reply, the named kinds, until they run out. And nothing else, however they are bent."""

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
from tests.support.feedback_users import shape, stranger


async def token(harness: Harness, completion_id: str, **fields: Any) -> str:
    body = {"completion_id": completion_id, "kinds": ["binary", "comment"], **fields}
    answer = await harness.api.post("/v1/feedback/tokens", json=body)
    assert answer.status_code == 201, answer.text
    made: str = answer.json()["token"]
    return made


async def post(harness: Harness, bearer: str, **body: Any) -> httpx2.Response:
    body = {"kind": "binary", "value": "up", **body}
    return await harness.api.post("/v1/feedback", json=body, headers={"authorization": f"Bearer {bearer}"})


async def secret(harness: Harness) -> tuple[str, str]:
    [project] = await harness.all(Project)
    return project.id, project.token_secret


async def test_a_browser_says_what_it_may_and_is_the_person_it_was_made_for(harness: Harness) -> None:
    turn = await harness.turn()
    before = time.time()
    made = (
        await harness.api.post(
            "/v1/feedback/tokens", json={"completion_id": turn.id, "kinds": ["binary"], "source_id": "ada"}
        )
    ).json()
    assert set(made) == {"object", "token", "expires_at", "url"}
    assert made["object"] == "feedback.token"
    assert abs(made["expires_at"] - before - harness.settings.feedback_token_seconds) < 5
    assert made["url"] == "http://attune/v1/feedback"
    answer = await post(harness, made["token"], completion_id=turn.id, source={"kind": "CODE", "id": "root"})
    assert answer.status_code == 201, answer.text
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.value, row.source_kind, row.source_id) == (turn.id, 1.0, "HUMAN", "ada")


async def test_what_a_token_does_not_name_it_does_not_allow(harness: Harness) -> None:
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
        assert shape(await post(harness, bearer, **body)) == (403, {"message", "type", "param", "code"}), body
    assert await harness.all(Feedback) == []
    assert (await post(harness, bearer, completion_id=turn.id, name="tone")).status_code == 201


async def test_a_token_reads_nothing_and_makes_nothing(harness: Harness) -> None:
    turn = await harness.turn()
    headers = {"authorization": f"Bearer {await token(harness, turn.id)}"}
    said = (await harness.thumb(turn.id)).json()["id"]
    for method, path, body in [
        ("GET", f"/v1/feedback?completion_id={turn.id}", None),
        ("GET", f"/v1/feedback/{said}", None),
        ("DELETE", f"/v1/feedback/{said}", None),
        ("POST", "/v1/feedback/batch", {"items": [{"completion_id": turn.id, "kind": "binary", "value": True}]}),
        ("POST", "/v1/feedback/tokens", {"completion_id": turn.id, "kinds": ["binary"]}),
        ("POST", "/v1/chat/completions", {"model": "shop", "messages": [{"role": "user", "content": "hi"}]}),
        ("GET", "/v1/models", None),
    ]:
        assert (await harness.api.request(method, path, json=body, headers=headers)).status_code == 401, path


async def test_a_token_is_exactly_once_too_and_its_ids_are_apart_from_the_keys_of_the_backend(harness: Harness) -> None:
    turn = await harness.turn()
    mine = await harness.thumb(turn.id, "down", id="k")
    bearer = await token(harness, turn.id, source_id="ada")
    first = await post(harness, bearer, completion_id=turn.id, id="k")
    again = await post(harness, await token(harness, turn.id, source_id="ada"), completion_id=turn.id, id="k")
    other = await post(harness, bearer, completion_id=turn.id, id="k", value="down")
    assert [answer.status_code for answer in (mine, first, again, other)] == [201, 201, 200, 422]
    assert again.json() == first.json()
    bob = await post(harness, await token(harness, turn.id, source_id="bob"), completion_id=turn.id, id="k")
    assert bob.status_code == 201
    assert len(await harness.all(Feedback)) == 3


async def test_forged_bent_and_expired_tokens_are_a_401(harness: Harness) -> None:
    turn = await harness.turn()
    good = await token(harness, turn.id)
    project_id, key = await secret(harness)
    claims = jwt.decode(good, key, algorithms=["HS256"], audience="attune.feedback")
    kid = {"kid": project_id}

    def signed(secret: str = key, header: dict[str, Any] = kid, algorithm: str = "HS256", **other: Any) -> str:
        said = {name: value for name, value in (claims | other).items() if value is not None}
        return jwt.encode(said, secret, algorithm=algorithm, headers=header)

    def raw(header: Any) -> str:
        parts = (base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (header, b"{}"))
        return ".".join(parts) + ".AAAA"

    assert (await post(harness, signed(), completion_id=turn.id)).status_code == 201
    bent = [
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
    for bearer in bent:
        answer = await post(harness, bearer, completion_id=turn.id)
        assert shape(answer) == (401, {"message", "type", "param", "code"}), bearer
    assert len(await harness.all(Feedback)) == 1


async def test_an_expired_token_says_so(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = await harness.turn()
    past = time.time() - 61
    monkeypatch.setattr("app.feedback.browser_tokens.time.time", lambda: past)
    bearer = await token(harness, turn.id, expires_in=60)
    monkeypatch.undo()
    answer = await post(harness, bearer, completion_id=turn.id)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "token_expired")


async def test_tokens_asked_for_at_once_share_the_secret_that_the_first_one_made(harness: Harness) -> None:
    turn = await harness.turn()
    made = await asyncio.gather(*[token(harness, turn.id) for _ in range(8)])
    assert len(set(made)) == 8
    for bearer in made:
        assert (await post(harness, bearer, completion_id=turn.id)).status_code == 201


async def test_tokens_are_for_ones_own_turns(harness: Harness) -> None:
    turn = await harness.turn()
    headers = await stranger(harness)
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
def test_a_wish_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse_body(TokenRequest, {"completion_id": "a", **fields})
