"""The limits of retention, and what the OpenAPI document says about them."""

import pytest
from pydantic import ValidationError

from app.core.retention_config import MAX_DAYS, RetentionConfig


@pytest.mark.parametrize("name", RetentionConfig.model_fields)
def test_zero_is_for_ever_and_the_document_allows_it(name: str) -> None:
    values = {"turns": None, "feedback": None} | {name: 0}
    assert getattr(RetentionConfig.model_validate(values), name) is None
    number, null = RetentionConfig.model_json_schema()["properties"][name]["anyOf"]
    assert number["minimum"] == 0 and "exclusiveMinimum" not in number and null == {"type": "null"}


@pytest.mark.parametrize("name", RetentionConfig.model_fields)
def test_document_and_config_have_the_same_maximum(name: str) -> None:
    number, _ = RetentionConfig.model_json_schema()["properties"][name]["anyOf"]
    values = {"turns": 1, "feedback": MAX_DAYS}
    assert RetentionConfig.model_validate(values | {name: number["maximum"]})
    for value in (number["maximum"] + 1, -1):
        with pytest.raises(ValidationError):
            RetentionConfig.model_validate(values | {name: value})
