"""The service behaves as its OpenAPI document says: every operation, on cases that schemathesis generates."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.contract.harness import ContractHarness, requests_sent_to
from tests.contract.openapi_checks import EXAMPLES, call_and_validate, schema


@pytest.fixture(scope="module", autouse=True)
def route_requests_to_harness(deployment: ContractHarness) -> Iterator[None]:
    with requests_sent_to(deployment):
        yield


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 50, suppress_health_check=list(HealthCheck))
def test_every_operation_conforms_to_the_document(case: Any, deployment: ContractHarness) -> None:
    call_and_validate(case, deployment)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}),
    ],
)
def test_streams_conform_to_the_document(path: str, body: dict[str, Any], deployment: ContractHarness) -> None:
    request: Any = {"model": "shop", "stream": True} | body
    case = schema[path]["POST"].Case(body=request, media_type="application/json")
    response = call_and_validate(case, deployment)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"][0].startswith("text/event-stream")
