"""Any request body gives a 2xx response or a 4xx response with an error object."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.deployment import Harness

WORDS = st.sampled_from(["chatcmpl-known", "chatcmpl-other", "c", "up", "", "k" * 300, "a\u0000b", "é\U0001f600"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(), inner, max_size=3)
)
PAIRS = st.dictionaries(WORDS, WORDS, max_size=3)
CHOICE = st.fixed_dictionaries({"completion_id": WORDS}, optional={"choice_index": st.integers(-1, 200) | ANYTHING})
PLACE = WORDS | CHOICE
TARGET = CHOICE | st.fixed_dictionaries({"conversation_id": WORDS}) | st.fixed_dictionaries({"metadata": PAIRS})
KIND = st.sampled_from(
    ["binary", "rating", "score", "comparison", "ranking", "correction", "comment", "categorical", "withdrawal"]
)
VALUE = st.lists(PLACE | st.lists(PLACE, max_size=3), max_size=4) | st.floats(-2, 6) | ANYTHING
BODY = st.fixed_dictionaries(
    {"kind": KIND | ANYTHING, "value": VALUE},
    optional={
        "completion_id": WORDS | ANYTHING,
        "choice_index": st.integers(-1, 3) | ANYTHING,
        "target": TARGET | ANYTHING,
        "id": st.text(max_size=5) | ANYTHING,
        "name": WORDS | ANYTHING,
        "comment": st.text() | ANYTHING,
        "scale": st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=3) | ANYTHING,
        "source": st.fixed_dictionaries({}, optional={"kind": WORDS, "id": WORDS}) | ANYTHING,
        "metadata": PAIRS | ANYTHING,
    },
)


@given(several=st.lists(BODY | ANYTHING, min_size=1, max_size=8))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
async def test_any_body_is_accepted_or_refused_without_server_error(harness: Harness, several: list[Any]) -> None:
    if (await harness.api.get("/v1/feedback?completion_id=chatcmpl-known")).status_code == 404:
        await harness.turn(id="chatcmpl-known", completion_id="chatcmpl-known", conversation_id="c")
    for body in several:
        response = await harness.api.post("/v1/feedback", json=body)
        assert 200 <= response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    response = await harness.api.post("/v1/feedback/batch", json={"items": several})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        assert all(one["status"] in (200, 201, 400, 404, 422) for one in response.json()["data"])
