"""Every route needs one scope, the one that docs/scopes.md says, and keys with other scopes are refused."""

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from app.core.settings import Settings
from app.main import create_app
from app.projects.scopes import SCOPES, expand_scopes, required_scope
from tests.support.deployment import Harness

PAGE = Path(__file__).parents[3] / "docs" / "scopes.md"
WITHOUT_SCOPE = {"/livez", "/readyz"}  # and the engines' files, which take the engines' admin key
ENGINE_FILES = "/v1/engines/versions/{name}/files/{file}"
UNBOUNDED = "/stream"  # responses that do not end


def routes() -> dict[str, str]:
    """Return the scope that each route needs, by method and path."""
    found: dict[str, str] = {}
    for context in iter_route_contexts(create_app(Settings()).routes):
        route = context.original_route
        if isinstance(route, APIRoute) and route.path not in {*WITHOUT_SCOPE, ENGINE_FILES}:
            scope = required_scope(route)
            assert scope is not None, f"{route.path} needs no scope"
            found |= {f"{method} {route.path}": scope for method in sorted(set(route.methods or ()) - {"HEAD"})}
    return found


def test_documentation_lists_the_scope_of_every_route() -> None:
    listed = dict(re.findall(r"^\| `([A-Z]+ [^`]+)` \| `([a-z:]+)` \|$", PAGE.read_text(), re.MULTILINE))
    found = routes()
    missing = [f"| `{route}` | `{scope}` |" for route, scope in sorted(found.items()) if listed.get(route) != scope]
    assert not missing, "docs/scopes.md lacks or contradicts these lines:\n" + "\n".join(missing)
    assert set(listed) == set(found), f"docs/scopes.md lists routes that do not exist: {set(listed) - set(found)}"
    assert set(found.values()) <= set(SCOPES)


@pytest.mark.parametrize(
    ("scope", "included"),
    [
        ("chat", {"chat"}),
        ("feedback", {"feedback"}),
        ("feedback:programs", {"feedback:programs"}),
        ("viewer", {"viewer"}),
        ("viewer:content", {"viewer:content", "viewer"}),
        ("annotator", {"annotator", "feedback"}),
        ("operator", {"operator", "viewer", "viewer:content", "annotator", "feedback"}),
        ("admin", {"admin", "operator", "viewer", "viewer:content", "annotator", "feedback"}),
    ],
)
def test_scopes_include_others(scope: str, included: set[str]) -> None:
    assert expand_scopes((scope,)) == included


@pytest.mark.parametrize("scope", SCOPES)
async def test_key_may_do_what_its_scope_includes_and_nothing_else(harness: Harness, scope: str) -> None:
    created = await harness.api.post("/v1/keys", json={"scopes": [scope]})
    auth = {"authorization": f"Bearer {created.json()['key']}"}
    for route, required in routes().items():
        method, path = route.split(" ")
        is_allowed = required in expand_scopes((scope,))
        if is_allowed and path.endswith(UNBOUNDED):
            continue
        path = re.sub(r"\{[^}]+\}", "1", path.replace("{name}", "no-such-policy"))
        headers = auth | ({"idempotency-key": "one"} if method == "POST" else {})
        # A body that no route accepts: nothing is changed, and who may not is refused before it is read.
        answer = await harness.api.request(method, path, json={"no_such_field": 1}, headers=headers)
        error = answer.json()["error"] if answer.status_code >= 400 else {}
        code = error.get("code", error.get("type"))  # Anthropic's form has a type alone
        assert answer.status_code < 500, f"{route}: {answer.text}"
        is_refused = code in ("missing_scope", "permission_error")
        assert is_refused is not is_allowed, f"{scope} on {route}: {answer.status_code} {answer.text}"


async def test_stored_response_needs_the_scope_too(harness: Harness) -> None:
    headers = {"idempotency-key": "pause-1"}
    path = "/v1/policies/shop/training/pause"
    assert (await harness.api.post(path, json={}, headers=headers)).status_code == 200
    viewer = (await harness.api.post("/v1/keys", json={"scopes": ["viewer"]})).json()["key"]
    refused = await harness.api.post(path, json={}, headers=headers | {"authorization": f"Bearer {viewer}"})
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "missing_scope"
    operator = (await harness.api.post("/v1/keys", json={"scopes": ["operator"]})).json()["key"]
    replayed = await harness.api.post(path, json={}, headers=headers | {"authorization": f"Bearer {operator}"})
    assert replayed.status_code == 200 and replayed.headers["idempotent-replayed"] == "true"
