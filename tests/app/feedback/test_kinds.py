"""The eight kinds of feedback: accepted values, stored values and refusals."""

from typing import Any

import pytest

from app.core.errors import BadRequest
from app.feedback import feedback_writer, kinds
from app.models import Feedback, FeedbackRank
from tests.support.deployment import Harness
from tests.support.feedback_users import error_shape
from workers.curate import curate


@pytest.mark.parametrize(
    ("kind", "value", "number"),
    [
        ("binary", True, 1.0),
        ("binary", "down", -1.0),
        ("score", -0.25, -0.25),
        ("score", 1, 1.0),
        ("rating", 4, 0.5),
        ("rating", 1, -1.0),
        ("correction", "We open at nine.", None),
        ("comment", "thanks", None),
        ("categorical", "off-topic", None),
    ],
)
async def test_raw_value_and_number_are_stored(harness: Harness, kind: str, value: Any, number: float | None) -> None:
    turn = await harness.turn()
    response = await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": kind, "value": value})
    assert response.status_code == 201, response.text
    assert (response.json()["value"], response.json()["raw_value"]) == (number, value)
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.target, row.value, row.raw_value) == (turn.id, turn.id, number, value)


async def test_rating_is_position_on_scale(harness: Harness) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "rating", "value": 2.5, "scale": [0, 10]}
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.json()["value"] == -0.5  # a quarter of the way from -1 to 1
    assert response.json()["raw_value"] == {"value": 2.5, "scale": [0, 10]}


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "rating", "value": 0.4, "scale": [0.1, 0.7]},  # 2.2e-16 above the middle
        {"kind": "rating", "value": 0.35, "scale": [0.1, 0.6]},
        {"kind": "score", "value": 0.1 + 0.2 - 0.3},
        {"kind": "score", "value": -5.6e-17},
    ],
)
async def test_value_that_is_zero_but_for_rounding_is_no_vote(harness: Harness, body: dict[str, Any]) -> None:
    turn = await harness.turn()
    response = await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "source": "ada", **body})
    assert response.status_code == 201 and response.json()["value"] == 0.0
    await curate(harness.db, harness.settings)
    [version] = (await harness.api.get("/v1/policies/shop/versions")).json()["data"]
    assert version["rated"] == 0


async def test_ranking_stores_ranks_and_ties(harness: Harness) -> None:
    a, b, c = [await harness.turn() for _ in range(3)]
    second = await harness.turn(completion_id=a.id, choice_index=1)
    value = [c.id, [a.id, {"completion_id": a.id, "choice_index": 1}], b.id]
    response = await harness.api.post("/v1/feedback", json={"kind": "ranking", "value": value})
    assert response.status_code == 201, response.text
    assert response.json()["raw_value"] == value
    assert {row.turn_id: row.rank for row in await harness.all(FeedbackRank)} == {
        c.id: 0,
        a.id: 1,
        second.id: 1,
        b.id: 2,
    }
    [row] = await harness.all(Feedback)
    assert (row.turn_id, row.value, row.processed) == (None, None, False)


async def test_same_set_of_turns_has_same_target(harness: Harness) -> None:
    a, b = [await harness.turn() for _ in range(2)]
    for value in ([a.id, b.id], [b.id, a.id], [[a.id, b.id]]):
        assert (await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": value})).status_code == 201
    rows = await harness.all(Feedback)
    assert len({row.target for row in rows}) == 1
    assert rows[0].target.startswith("ranking:")


async def test_ranking_with_unknown_turn_is_404_and_writes_nothing(harness: Harness) -> None:
    turn = await harness.turn()
    response = await harness.api.post(
        "/v1/feedback", json={"kind": "comparison", "value": [turn.id, "chatcmpl-nobody"]}
    )
    assert response.status_code == 404
    assert await harness.all(Feedback) == await harness.all(FeedbackRank) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "stars", "value": 1}, "kind"),
        ({"kind": ["binary"], "value": True}, "kind"),
        ({"value": True}, "kind"),
        ({"kind": "binary", "value": 2}, "value"),
        ({"kind": "binary", "value": 0}, "value"),
        ({"kind": "binary", "value": 0.5}, "value"),
        ({"kind": "binary", "value": None}, "value"),
        ({"kind": "binary", "value": ["up"]}, "value"),
        ({"kind": "binary", "value": "yes"}, "value"),
        ({"kind": "rating", "value": 6}, None),
        ({"kind": "rating", "value": 3, "scale": [5, 1]}, None),
        ({"kind": "rating", "value": 3, "scale": [1, 1e300]}, "scale.1"),
        ({"kind": "rating", "value": True}, "value"),
        ({"kind": "score", "value": 0, "scale": [0, 1]}, "scale"),
        ({"kind": "correction", "value": ""}, "value"),
        ({"kind": "correction", "value": "x" * 100_001}, "value"),
        ({"kind": "comment"}, "value"),
        ({"kind": "categorical", "value": "x" * 256}, "value"),
        ({"kind": "categorical", "value": ["a"]}, "value"),
        ({"kind": "comparison", "value": ["a", "b"]}, "completion_id"),  # its value names the turns
    ],
)
def test_invalid_feedback_names_the_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        kinds.parse_feedback({"completion_id": "chatcmpl-1", **body})
    assert caught.value.param == param
    assert "~" not in caught.value.message


@pytest.mark.parametrize("value", [4, "4", "good", None])
def test_another_value_than_a_thumb_is_told_of_the_thumbs_and_of_ratings(value: Any) -> None:
    with pytest.raises(
        BadRequest, match="true, false, 'up', 'down', 1 or -1; a number on a scale is of the kind 'rating'"
    ):
        kinds.parse_feedback({"completion_id": "chatcmpl-1", "kind": "binary", "value": value})


def test_missing_kind_is_told_with_those_that_exist() -> None:
    for body, beginning in (({}, "'kind' is required: "), ({"kind": "thumb"}, "There is no such 'kind': ")):
        with pytest.raises(BadRequest) as caught:
            kinds.parse_feedback({"completion_id": "chatcmpl-1", "value": True, **body})
        assert caught.value.message.startswith(beginning + "binary, rating, score, comparison, ")


@pytest.mark.parametrize(("value", "reward"), [(1, 1.0), (-1, -1.0), (1.0, 1.0)])
def test_one_is_a_thumb_up_and_minus_one_down(value: float, reward: float) -> None:
    body = {"completion_id": "chatcmpl-1", "kind": "binary", "value": value, "source": "user-7"}
    request = kinds.parse_feedback(body)
    assert request.reward_value() == reward
    assert (request.source.kind, request.source.id) == ("HUMAN", "user-7")


@pytest.mark.parametrize(
    "value",
    [
        [],
        ["a"],
        [["a"]],
        ["a", "a"],
        ["a", {"completion_id": "a", "choice_index": 0}],
        ["a", ["b", "a"]],
        [f"c{number}" for number in range(17)],
        ["a", [["b", "c"]]],
        ["a", {"completion_id": "b", "rank": 1}],
        ["a", 7],
        "a",
    ],
)
def test_invalid_ranking_is_refused(value: Any) -> None:
    with pytest.raises(BadRequest):
        kinds.parse_feedback({"kind": "ranking", "value": value})


@pytest.mark.parametrize("value", [["a", "b", "c"], ["a", ["b", "c"]], [["a", "b", "c"]]])
def test_comparison_takes_two_completions(value: Any) -> None:
    with pytest.raises(BadRequest, match="two completions"):
        kinds.parse_feedback({"kind": "comparison", "value": value})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"completion_id": "a", "target": {"completion_id": "a"}},
        {"target": {}},
        {"target": {"completion_id": "a", "conversation_id": "c"}},
        {"target": {"conversation_id": "c", "choice_index": 0}},
        {"target": {"metadata": {}}},
        {"target": {"metadata": {f"k{number}": "v" for number in range(17)}}},
        {"target": {"metadata": {"k": 1}}},
        {"target": {"metadata": {"k" * 65: "v"}}},
        {"target": "a"},
        {"choice_index": 1, "target": {"completion_id": "a"}},
        {"completion_id": "a", "request_id": "req-a"},
        {"target": {"conversation_id": "c", "turn": 0}},
        {"target": {"conversation_id": "c", "turn": -2}},
        {"completion_id": "a", "choice_index": -1},
        {"completion_id": "a", "choice_index": 128},
        {"completion_id": "a", "choice_index": "0"},
        {"completion_id": "a", "choice_index": True},
    ],
)
def test_invalid_target_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        kinds.parse_feedback({"kind": "binary", "value": True, **fields})


def test_fingerprint_of_binary_feedback_is_stable() -> None:
    """A retry today must match the rows that the first release wrote."""
    body = {"completion_id": "chatcmpl-1", "kind": "binary", "value": "up", "id": "k"}
    submission = feedback_writer.build_submission("proj-1", kinds.parse_feedback(body), body)
    assert submission.fingerprint == "f1ad811cf470d47628aca25d81bbd7a2d47d0dd248fd7ea45aabc1f393ea162b"


@pytest.mark.parametrize(
    "other",
    [
        {"name": "default", "comment": None, "metadata": {}, "source": {"kind": "HUMAN"}},
        {"choice_index": 0},
        {"completion_id": None, "target": {"completion_id": "a"}},
        {"scale": [1, 5]},
    ],
)
def test_explicit_default_has_same_fingerprint(other: dict[str, Any]) -> None:
    body = {"completion_id": "a", "kind": "rating", "value": 4}
    explicit = body | other
    assert (
        feedback_writer.build_submission("p", kinds.parse_feedback(body), body).fingerprint
        == feedback_writer.build_submission("p", kinds.parse_feedback(explicit), explicit).fingerprint
    )


def test_openapi_kinds_equal_parsed_kinds() -> None:
    assert set(kinds.KINDS) == set(kinds.FeedbackRequest.model_json_schema()["discriminator"]["mapping"])


async def test_every_error_has_four_keys(harness: Harness) -> None:
    response = await harness.api.post(
        "/v1/feedback", json={"kind": "ranking", "value": ["a", ["b", {"completion_id": 7}]]}
    )
    assert error_shape(response) == (400, {"message", "type", "param", "code"})
    assert response.json()["error"]["param"] == "value.1.1.completion_id"
