"""The service behaves as its OpenAPI document says: every operation, on cases that schemathesis generates."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.core.failures import Failure
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.core.settings import Settings
from app.main import create_app
from tests.contract.harness import KNOWN_NAMES, ContractHarness, HarnessAdapter, find_body_error

EXAMPLES = int(os.environ.get("ATTUNE_FUZZ_EXAMPLES", "10"))
# A rule across fields ("one of these two", "no empty stop string") makes a 400 of what each field's schema allows.
ACROSS_FIELDS: Any = [positive_data_acceptance]
document = create_app(Settings(home=Path("/nowhere"))).openapi()
schema = schemathesis.openapi.from_dict(document)


class InvalidErrorBody(Failure):
    """An error body that does not have OpenAI's form."""


@schemathesis.check
def error_has_four_keys(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400 and (reason := find_body_error(response.content)):
        raise InvalidErrorBody(operation=case.operation.label, title="Not OpenAI's error", message=reason)


@pytest.fixture(scope="module", autouse=True)
def route_requests_to_harness(deployment: ContractHarness) -> Iterator[None]:
    """Send the requests of checks that open a session of their own to the harness, too."""
    adapter = HarnessAdapter(deployment)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests.Session, "get_adapter", lambda session, url: adapter)
        yield


@schemathesis.serializer("application/vnd.apache.parquet")
def send_bytes(ctx: Any, value: Any) -> bytes:
    """Send the value as bytes, mostly not a valid file: tests of the Parquet reader cover files."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def has_invalid_key(case: Any) -> bool:
    part = case.meta.components.get(ParameterLocation.HEADER)
    return part is not None and part.mode.is_negative


def use_known_names(case: Any) -> None:
    """Use existing names, so that a case gets further than a 404: random names are all unknown."""
    for part in (case.path_parameters, case.query, case.body):
        if isinstance(part, dict):
            part.update(
                {name: value for name, value in KNOWN_NAMES.items() if name in part and isinstance(part[name], str)}
            )


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 50, suppress_health_check=list(HealthCheck))
def test_every_operation_conforms_to_the_document(case: Any, deployment: ContractHarness) -> None:
    content = repr((case.path_parameters, case.query, case.body))
    if case.meta.generation.mode.is_positive and zlib.crc32(content.encode("utf-8", "replace")) % 3:
        use_known_names(case)
    headers = {} if has_invalid_key(case) else {"Authorization": f"Bearer {deployment.key}"}
    case.call_and_validate(base_url="http://attune", headers=headers, excluded_checks=ACROSS_FIELDS)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
def test_streams_conform_to_the_document(path: str, body: dict[str, Any], deployment: ContractHarness) -> None:
    request: Any = {"model": "shop", "stream": True} | body
    case = schema[path]["POST"].Case(body=request, media_type="application/json")
    response = case.call_and_validate(
        base_url="http://attune", headers={"Authorization": f"Bearer {deployment.key}"}, excluded_checks=ACROSS_FIELDS
    )
    assert response.status_code == 200 and response.headers["content-type"][0].startswith("text/event-stream")
