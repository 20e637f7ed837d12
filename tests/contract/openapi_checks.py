"""The OpenAPI document, and the checks that each response to a generated case must pass."""

import os
import re
import zlib
from pathlib import Path
from typing import Any

import orjson
import schemathesis
from schemathesis.core.failures import Failure
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.core.settings import Settings
from app.main import create_app
from tests.contract.harness import BASE_URL, KNOWN_NAMES, ContractHarness, find_body_error

EXAMPLES = int(os.environ.get("ATTUNE_FUZZ_EXAMPLES", "10"))
document = create_app(Settings(home=Path("/nowhere"))).openapi()
ENDLESS = ("/v1/events/stream",)  # tests/app/ops/test_event_stream.py reads it
finite = {path: operations for path, operations in document["paths"].items() if path not in ENDLESS}
schema = schemathesis.openapi.from_dict(document | {"paths": finite})
# Replaced by `valid_data_is_accepted`, which knows the rules that no schema can state.
EXCLUDED_CHECKS: Any = [positive_data_acceptance]

# What a schema cannot state or the document does not: rules across fields, and limits of a deployment.
RULES_BEYOND_THE_SCHEMA = re.compile(
    "|".join(
        (
            "This (Idempotency-Key|id) was used|name different keys",
            "[Gg]ive (either |one of )?['`]",
            "Input should be a valid integer",  # 1.0 is an integer of JSON Schema, and none of ours
            "exceeded maximum size",  # integers of more than 4,300 digits
            "NUL character",
            "this name is not allowed here: String should match pattern",  # names of a map
            "not a Parquet file",
            "it must be an https URL",
            r"The body holds \d+ invalid values",
            "content is missing|top_logprobs needs",
            "tool_choice (names|requires)|two tools have the same name|tool_calls: List should have at most 128",
            "value: (a comparison takes|a ranking takes|a completion is named twice|.* is not between)",
            "scale: the first number must be lower|outcome: an episode that ends as",
            "only the deployment's own settings",
            "is in force; only the operator|more than the deployment's|a key is sent only to the address",
            "known rules are|a learned source cannot|is not one of the sources",
            r"\btype: Field required",  # the document has a default for the type of an alternative
            "the pattern is invalid",
            "must not be empty, and their names must be unique",
            r"the last message must not be|one that is not the system's is needed|may have at most \d+ characters",
            "There is no response '|turn: 1 is the first reply|'choice_index' requires|'sent_at' requires",
            "a trace id has 32 hexadecimal digits",  # that are not all zero
            "is not a setting|cannot differ between policies|names no version: write|name its 'policy' too",
            "could run in shadow|feedback must be kept at least as long as turns",
        )
    )
)


class InvalidErrorBody(Failure):
    """An error body that does not have the form of its route."""


class RefusedValidData(Failure):
    """A 400 for what the schema allows, without a rule across fields."""


@schemathesis.check
def error_has_four_keys(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400 and (reason := find_body_error(response.content, case.path)):
        raise InvalidErrorBody(operation=case.operation.label, title="Not an error of the route's form", message=reason)


@schemathesis.check
def valid_data_is_accepted(ctx: Any, response: Any, case: Any) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in (400, 413, 422):
        return
    message = orjson.loads(response.content)["error"]["message"]
    if not RULES_BEYOND_THE_SCHEMA.search(message):
        raise RefusedValidData(operation=case.operation.label, title="Valid data was refused", message=message)


@schemathesis.serializer("application/vnd.apache.parquet")
def send_bytes(ctx: Any, value: Any) -> bytes:
    """Send the value as bytes, mostly not a valid file: tests of the Parquet reader cover files."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def use_known_names(case: Any) -> None:
    """Use existing names, so that a case gets further than a 404: random names are all unknown."""
    for part in (case.path_parameters, case.query, case.body):
        if isinstance(part, dict):
            part.update(
                {name: value for name, value in KNOWN_NAMES.items() if name in part and isinstance(part[name], str)}
            )


def prepare(case: Any, harness: ContractHarness, *, known_names: bool = True) -> dict[str, Any]:
    """Return the arguments of a call. With `known_names`, use existing names in two of three valid cases."""
    has_invalid_key = False
    if case.meta is not None:
        content = repr((case.path_parameters, case.query, case.body)).encode("utf-8", "replace")
        if known_names and case.meta.generation.mode.is_positive and zlib.crc32(content) % 3:
            use_known_names(case)
        part = case.meta.components.get(ParameterLocation.HEADER)
        has_invalid_key = part is not None and part.mode.is_negative
    return {"base_url": BASE_URL, "headers": {} if has_invalid_key else {"Authorization": f"Bearer {harness.key}"}}


def call_and_validate(case: Any, harness: ContractHarness) -> Any:
    """Send the case and check the response. Return it."""
    return case.call_and_validate(**prepare(case, harness), excluded_checks=EXCLUDED_CHECKS)
