"""What OpenAPI says is what the service does: every operation, on cases that schemathesis makes up from it."""

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
from tests.contract.deployment_rows import HOME, Door, House, exclusion_reason

EXAMPLES = int(os.environ.get("ATTUNE_FUZZ_EXAMPLES", "10"))
# A rule across fields ("one of these two", "no empty stop string") makes a 400 of what each field's schema allows.
ACROSS_FIELDS = [positive_data_acceptance]
document = create_app(Settings(home=Path("/nowhere"))).openapi()
schema = schemathesis.openapi.from_dict(document)


class AnotherShape(Failure):
    """An error that is not in OpenAI's shape."""


@schemathesis.check
def error_has_four_keys(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400 and (told := exclusion_reason(response.content)):
        raise AnotherShape(operation=case.operation.label, title="Not OpenAI's error", message=told)


@pytest.fixture(scope="module", autouse=True)
def door(small_house: House) -> Iterator[None]:
    """Some checks ask again by themselves, with a session of their own: that too goes to the house."""
    door = Door(small_house)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests.Session, "get_adapter", lambda session, url: door)
        yield


@schemathesis.serializer("application/vnd.apache.parquet")
def as_it_is(ctx: Any, value: Any) -> bytes:
    """A file that is none, mostly: what a file may hold is tested where files are read."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def spoils_the_key(case: Any) -> bool:
    part = case.meta.components.get(ParameterLocation.HEADER)
    return part is not None and part.mode.is_negative


def at_home(case: Any) -> None:
    """Names made up at random are all unknown: name what there is, so that a case gets further than a 404."""
    for part in (case.path_parameters, case.query, case.body):
        if isinstance(part, dict):
            part.update({name: value for name, value in HOME.items() if name in part and isinstance(part[name], str)})


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 50, suppress_health_check=list(HealthCheck))
def test_every_operation_keeps_its_word(case: Any, small_house: House) -> None:
    made_of = repr((case.path_parameters, case.query, case.body))
    if case.meta.generation.mode.is_positive and zlib.crc32(made_of.encode("utf-8", "replace")) % 3:
        at_home(case)
    headers = {} if spoils_the_key(case) else {"Authorization": f"Bearer {small_house.key}"}
    case.call_and_validate(base_url="http://attune", headers=headers, excluded_checks=ACROSS_FIELDS)
