"""Whatever bytes arrive at a route that reads a body: no 5xx, and every refusal in OpenAI's shape."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.settings import Settings
from app.main import create_app
from tests.contract.deployment_rows import House, exclusion_reason, homely
from tests.contract.hostile import bodies
from tests.contract.test_openapi import EXAMPLES

document = create_app(Settings(home=Path("/nowhere"))).openapi()
ROUTES = [
    (method.upper(), path)
    for path, item in document["paths"].items()
    for method in item
    if method in ("post", "put", "patch")
]
TYPES = ("application/json", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "")


def fields(method: str, path: str) -> tuple[str, ...]:
    """The names that a route's body may hold, as OpenAPI tells them."""
    asked = document["paths"][path][method.lower()].get("requestBody", {}).get("content", {})
    schema = asked.get("application/json", {}).get("schema", {})
    options = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return tuple(sorted({name for option in options for name in option.get("properties", ())}))


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_body_breaks_a_route(small_house: House, method: str, path: str) -> None:
    known = fields(method, path) or ("model", "messages", "completion_id", "kind", "value")

    @settings(
        max_examples=EXAMPLES * 8, deadline=None, derandomize=EXAMPLES <= 50, suppress_health_check=list(HealthCheck)
    )
    @given(body=bodies(known), kind=st.sampled_from(TYPES))
    def holds(body: bytes, kind: str) -> None:
        answer = small_house.ask(method, homely(path), body, {"content-type": kind, "content-length": str(len(body))})
        assert answer.status < 500, answer.content[:300]
        if answer.status >= 400:
            assert exclusion_reason(answer.content) is None, exclusion_reason(answer.content)

    holds()
