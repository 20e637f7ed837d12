"""Signing in to the console: cookies, expiry, revocation, forms of other sites, one-time links, and headers."""

from typing import Any

import pytest
from sqlalchemy import update

from app.console import sessions
from app.core.database import now
from app.models import ApiKey, Audit, ConsoleLink, ConsoleSession
from app.projects.service import digest_key
from tests.support.console import ConsoleClient, create_key, open_console, sign_in, to_text
from tests.support.deployment import Harness
from tests.support.settings import change_in_place


async def set_session(harness: Harness, **values: Any) -> None:
    async with harness.db.write() as session:
        await session.execute(update(ConsoleSession).values(**values))


async def is_signed_in(client: ConsoleClient) -> bool:
    answer = await client.get()
    assert answer.status_code in (200, 303)
    return answer.status_code == 200


async def test_key_opens_a_session_and_only_its_hash_is_stored(harness: Harness) -> None:
    client = open_console(harness)
    answer = await client.get()
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/sign-in")
    answer = await client.sign_in(harness.key)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("attune=") and "httponly" in cookie and "samesite=lax" in cookie and "path=/" in cookie
    token = client.http.cookies["attune"]
    [row] = await harness.all(ConsoleSession)
    assert row.token_sha256 == digest_key(token) and token not in str(vars(row))
    assert await is_signed_in(client)


async def test_cookie_is_bound_to_the_host_over_https(harness: Harness) -> None:
    client = open_console(harness, "https://attune.example")
    answer = await client.send("sign-in", {"key": harness.key}, origin="https://attune.example")
    assert answer.headers["set-cookie"].startswith("__Host-attune=")
    assert "Secure" in answer.headers["set-cookie"] and "Domain" not in answer.headers["set-cookie"]


async def test_nobody_signs_in_over_plain_http_from_another_machine(harness: Harness) -> None:
    client = open_console(harness, "http://attune.example")
    answer = await client.send("sign-in", {"key": harness.key}, origin="http://attune.example")
    assert answer.status_code == 403 and "SSH tunnel" in answer.text
    assert await harness.all(ConsoleSession) == []


async def test_page_is_returned_to_after_signing_in_and_other_sites_are_not(harness: Harness) -> None:
    client = open_console(harness)
    answer = await client.get("?policy=shop")
    assert answer.headers["location"] == "/console/sign-in?next=%2Fconsole%2F%3Fpolicy%3Dshop"
    for target, expected in {
        "/console/learning?policy=shop": "/console/learning?policy=shop",
        "//evil.example/console/": "/console/",
        "https://evil.example/": "/console/",
        "/console/\\evil.example": "/console/",
        "/v1/keys": "/console/",
    }.items():
        answer = await client.send("sign-in", {"key": harness.key, "next": target})
        assert answer.headers["location"] == expected


@pytest.mark.parametrize("key", ["", "sk-attune-unknown", "no key"])
async def test_wrong_key_is_refused_with_what_to_do(harness: Harness, key: str) -> None:
    client = open_console(harness)
    answer = await client.sign_in(key)
    assert answer.status_code in (400, 401)
    assert "API key" in answer.text and "set-cookie" not in answer.headers


async def test_wrong_keys_and_links_cannot_be_tried_without_limit(harness: Harness) -> None:
    change_in_place(harness.settings, {"unknown_keys_per_minute": 2})
    client = open_console(harness)
    assert (await client.sign_in("sk-attune-wrong")).status_code == 401
    assert (await client.send("sign-in", {"link": "wrong"})).status_code == 401
    assert (await client.send("sign-in", {"link": "wrong"})).status_code == 429
    assert (await client.sign_in("sk-attune-wrong")).status_code == 429


async def test_key_of_an_application_cannot_sign_in(harness: Harness) -> None:
    _, key = await create_key(harness, ["chat", "feedback"])
    answer = await open_console(harness).sign_in(key)
    assert answer.status_code == 403 and "'viewer', 'annotator', 'operator' or 'admin'" in to_text(answer.text)


async def test_session_ends_when_its_key_is_revoked(harness: Harness) -> None:
    client = await sign_in(harness, "admin")
    assert await is_signed_in(client)
    async with harness.db.write() as session:
        await session.execute(update(ApiKey).where(ApiKey.sha256 != digest_key(harness.key)).values(revoked_at=now()))
    assert not await is_signed_in(client)


async def test_session_ends_when_its_key_expires(harness: Harness) -> None:
    client = await sign_in(harness, "admin")
    async with harness.db.write() as session:
        await session.execute(update(ApiKey).values(expires_at=now() - 1))
    assert not await is_signed_in(client)


async def test_session_ends_after_twelve_hours_and_after_an_hour_without_use(harness: Harness) -> None:
    client = await sign_in(harness)
    await set_session(harness, last_seen_at=now() - sessions.IDLE_SECONDS + 60)
    assert await is_signed_in(client)
    [row] = await harness.all(ConsoleSession)
    await set_session(harness, last_seen_at=row.last_seen_at - sessions.IDLE_SECONDS + 60)
    assert await is_signed_in(client), "using it did not prolong it"
    await set_session(harness, last_seen_at=now() - sessions.IDLE_SECONDS - 1)
    assert not await is_signed_in(client)
    client = await sign_in(harness)
    await set_session(harness, expires_at=now() - 1)
    assert not await is_signed_in(client)


async def test_rights_are_those_of_the_key_at_the_time_of_the_request(harness: Harness) -> None:
    client = await sign_in(harness, "operator")
    async with harness.db.write() as session:
        await session.execute(update(ApiKey).where(ApiKey.sha256 != digest_key(harness.key)).values(scopes=["chat"]))
    assert (await client.get()).status_code == 403


async def test_signing_out_ends_the_session_for_every_copy_of_its_cookie(harness: Harness) -> None:
    client = await sign_in(harness)
    thief = open_console(harness)
    thief.http.cookies.set("attune", client.http.cookies["attune"], domain="127.0.0.1")
    assert await is_signed_in(thief), "the cookie is the session"
    assert (await client.post("sign-out")).headers["location"] == "/console/sign-in"
    assert not await is_signed_in(thief)
    assert await harness.all(ConsoleSession) == []


async def test_guessed_and_changed_cookies_open_nothing(harness: Harness) -> None:
    client = await sign_in(harness)
    [row] = await harness.all(ConsoleSession)
    for guess in ("", "x" * 43, row.token_sha256, client.http.cookies["attune"][:-1] + "~"):
        other = open_console(harness)
        other.http.cookies.set("attune", guess, domain="127.0.0.1")
        assert not await is_signed_in(other)


async def test_cookie_opens_no_route_of_the_api(harness: Harness) -> None:
    client = await sign_in(harness)
    assert (await client.http.get("/v1/status")).status_code == 401
    assert (await client.http.get("/v1/keys")).status_code == 401


async def test_form_needs_the_token_of_its_own_session(harness: Harness) -> None:
    client, other = await sign_in(harness), await sign_in(harness)
    for form in ({}, {"csrf": ""}, {"csrf": "wrong"}, {"csrf": await other.csrf()}):
        answer = await client.send("sign-out", form)
        assert answer.status_code == 403 and "another session" in answer.text
    assert await is_signed_in(client)


async def test_form_of_another_site_is_refused(harness: Harness) -> None:
    client = await sign_in(harness)
    form = {"csrf": await client.csrf()}
    for origin in ("https://evil.example", "null", None):
        assert (await client.send("sign-out", form, origin=origin)).status_code == 403
    headers = {"origin": "http://127.0.0.1:8700", "sec-fetch-site": "cross-site"}
    assert (await client.http.post("/console/sign-out", data=form, headers=headers)).status_code == 403
    headers["sec-fetch-site"] = "same-site"
    assert (await client.http.post("/console/sign-out", data=form, headers=headers)).status_code == 403
    assert await is_signed_in(client)
    answer = await open_console(harness).send("sign-in", {"key": harness.key}, origin="https://evil.example")
    assert answer.status_code == 403 and "set-cookie" not in answer.headers


async def test_link_signs_in_once_as_the_key_that_made_it(harness: Harness) -> None:
    answer = await harness.api.post("/v1/console/links")
    assert answer.status_code == 201
    url, _, token = answer.json()["url"].partition("#link=")
    assert url == "http://attune/console/sign-in" and token
    assert token not in str([vars(row) for row in await harness.all(ConsoleLink)])
    client = open_console(harness)
    assert (await client.send("sign-in", {"link": token})).status_code == 303
    assert await is_signed_in(client)
    answer = await open_console(harness).send("sign-in", {"link": token})
    assert answer.status_code == 401 and "used before" in answer.text


async def test_link_expires_and_ends_with_its_key(harness: Harness) -> None:
    _, key = await create_key(harness, ["viewer"])
    headers = {"authorization": f"Bearer {key}"}
    tokens = []
    for _ in range(2):
        answer = await harness.api.post("/v1/console/links", headers=headers)
        tokens.append(answer.json()["url"].partition("#link=")[2])
    async with harness.db.write() as session:
        is_first = ConsoleLink.token_sha256 == digest_key(tokens[0])
        await session.execute(update(ConsoleLink).where(is_first).values(expires_at=now() - 1))
        await session.execute(update(ApiKey).where(ApiKey.sha256 == digest_key(key)).values(revoked_at=now()))
    for token in tokens:
        assert (await open_console(harness).send("sign-in", {"link": token})).status_code == 401


async def test_application_keys_make_no_links(harness: Harness) -> None:
    _, key = await create_key(harness, ["chat"])
    answer = await harness.api.post("/v1/console/links", headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")


async def test_signing_in_and_out_is_audited(harness: Harness) -> None:
    client = await sign_in(harness)
    await client.post("sign-out")
    await harness.api.post("/v1/console/links")
    rows = [row for row in await harness.all(Audit) if row.action.startswith("console.")]
    assert [row.action for row in rows] == ["console.signed_in", "console.signed_out", "console.link_created"]
    assert rows[0].details == {"how": "key"} and rows[0].actor.startswith("sk-attune-")
    assert len(rows[0].actor) == 16


async def test_every_response_forbids_frames_inline_scripts_and_sniffing(harness: Harness) -> None:
    client = await sign_in(harness)
    for path in ("", "sign-in", "no-such-page", "static/console.css", "static/no-such-file"):
        headers = (await client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "script-src 'self';" in policy, path
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
    assert (await client.get()).headers["cache-control"] == "no-store"
    assert (await client.get("no-such-page")).headers["cache-control"] == "no-store"
    assert "immutable" in (await client.get("static/console.css")).headers["cache-control"]


async def test_pages_hold_no_inline_script_and_no_inline_style(harness: Harness) -> None:
    client = await sign_in(harness)
    for path in ("", "sign-in"):
        page = (await client.get(path)).text
        assert "style=" not in page and " onclick=" not in page
        assert page.count("<script") == page.count("<script defer src=")


async def test_error_is_a_page_that_says_what_to_do(harness: Harness) -> None:
    client = await sign_in(harness)
    answer = await client.get("no-such-page")
    assert answer.status_code == 404 and "text/html" in answer.headers["content-type"]
    assert "There is no such page. Check the address" in to_text(answer.text)
    answer = await client.get("?policy=other")
    assert answer.status_code == 404 and "it has shop" in answer.text


async def test_part_of_a_page_is_not_replaced_by_the_sign_in_page(harness: Harness) -> None:
    answer = await open_console(harness).get("", headers={"hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/console/sign-in")
    assert answer.text == ""


async def test_console_can_be_off(harness: Harness) -> None:
    change_in_place(harness.settings, {"console": False})
    answer = await harness.api.post("/v1/console/links")
    assert answer.status_code == 404 and "ATTUNE_SERVER__CONSOLE" in answer.text


async def test_forms_are_bounded(harness: Harness) -> None:
    client = await sign_in(harness)
    assert (await client.post("sign-out", {"x": "x" * 600_000})).status_code == 413
    assert (await client.post("sign-out", {f"f{index}": "x" for index in range(120)})).status_code == 400
    assert (await client.post("sign-out", {"x": "\x00"})).status_code == 400
    assert await is_signed_in(client)
