"""Routes with a body never respond with 5xx, and every error has the form of its route."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.harness import ContractHarness, fill_path, find_body_error
from tests.contract.hostile_bodies import bodies
from tests.contract.openapi_checks import EXAMPLES, document

ROUTES = [
    (method.upper(), path)
    for path, item in document["paths"].items()
    for method in item
    if method in ("post", "put", "patch")
]
TYPES = ("application/json", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "")


def fields(method: str, path: str) -> tuple[str, ...]:
    """Return the names of a route's body fields from the OpenAPI document."""
    content = document["paths"][path][method.lower()].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    options = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return tuple(sorted({name for option in options for name in option.get("properties", ())}))


def bodies_of(method: str, path: str) -> st.SearchStrategy[bytes]:
    return bodies(fields(method, path) or ("model", "messages", "completion_id", "kind", "value"))


def check_body(harness: ContractHarness, method: str, path: str, body: bytes, kind: str) -> None:
    headers = {"content-type": kind, "content-length": str(len(body))}
    answer = harness.request(method, fill_path(path), body, headers)
    assert answer.status < 500, answer.content[:300]
    if answer.status >= 400:
        assert find_body_error(answer.content, path) is None, find_body_error(answer.content, path)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_body_causes_a_server_error(deployment: ContractHarness, method: str, path: str) -> None:
    @settings(
        max_examples=EXAMPLES * 8, deadline=None, derandomize=EXAMPLES <= 50, suppress_health_check=list(HealthCheck)
    )
    @given(body=bodies_of(method, path), kind=st.sampled_from(TYPES))
    def check(body: bytes, kind: str) -> None:
        check_body(deployment, method, path, body, kind)

    check()
