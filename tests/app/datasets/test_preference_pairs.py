"""What says which of two answers is better leaves as pairs, and comes back as a dataset of the same pairs."""

from itertools import pairwise

import pytest

from app.datasets import preference_pairs
from app.models import DatasetRow, Turn
from tests.support.deployment import Harness
from tests.support.parquet_files import answered, bring, rows_of, say

EXPORT = "/v1/exports/preferences"


def told(rows: list[dict[str, object]]) -> list[tuple[str, str]]:
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]  # type: ignore[index]


async def test_a_comparison_is_one_pair(harness: Harness) -> None:
    good, bad = await answered(harness, "Yes, till six."), await answered(harness, "No idea.")
    feedback = await say(harness, None, "comparison", ranks=[(good, 0), (bad, 1)])
    [row] = rows_of(await harness.api.get(EXPORT))
    assert row["prompt"] == [{"role": "user", "content": "Open?"}]
    assert row["chosen"] == [{"role": "assistant", "content": "Yes, till six."}]
    assert row["rejected"] == [{"role": "assistant", "content": "No idea."}]
    assert (row["feedback_id"], row["chosen_id"], row["rejected_id"]) == (feedback.id, good.id, bad.id)
    assert (row["source_kind"], row["created_at"]) == ("HUMAN", feedback.created_at)


async def test_a_ranking_is_all_its_strict_pairs_and_ties_give_none(harness: Harness) -> None:
    a, b, c, d = [await answered(harness, text) for text in "abcd"]
    await say(harness, None, "ranking", ranks=[(d, 2), (b, 1), (a, 0), (c, 1)])
    pairs = told(rows_of(await harness.api.get(EXPORT)))
    assert sorted(pairs) == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]


async def test_turns_that_answered_other_messages_are_not_compared(harness: Harness) -> None:
    a, b, c = await answered(harness, "a"), await answered(harness, "b", "Closed?"), await answered(harness, "c")
    await say(harness, None, "ranking", ranks=[(a, 0), (b, 1), (c, 2)])
    assert told(rows_of(await harness.api.get(EXPORT))) == [("a", "c")]


async def test_a_correction_is_better_than_the_reply(harness: Harness) -> None:
    turn = await answered(harness, "No idea.")
    await say(harness, turn, "correction", raw_value="Till six.")
    [row] = rows_of(await harness.api.get(EXPORT))
    assert told([row]) == [("Till six.", "No idea.")]
    assert (row["chosen_id"], row["rejected_id"]) == (None, turn.id)


async def test_only_feedback_that_counts_makes_pairs(harness: Harness) -> None:
    a, b = await answered(harness, "a"), await answered(harness, "b")
    await say(harness, None, "comparison", ranks=[(a, 0), (b, 1)], source_id="ada")
    await say(harness, None, "comparison", ranks=[(b, 0), (a, 1)], source_id="ada")
    gone = await say(harness, a, "correction", raw_value="A!", source_id="bob")
    await say(harness, a, "withdrawal", source_id="bob", request_metadata={"withdraws": gone.id})
    await say(harness, a, "binary", value=1.0)
    assert told(rows_of(await harness.api.get(EXPORT))) == [("b", "a")]


async def test_what_roles_and_text_cannot_tell_is_left_out_and_counted(harness: Harness) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fine, same = await answered(harness, "fine"), await answered(harness, "fine")
    tool = await harness.turn(
        messages=fine.messages, reply={"role": "assistant", "content": None, "tool_calls": [call]}
    )
    gone = await harness.turn(messages=[], reply=None, deleted_at=1.0)
    await say(harness, None, "comparison", ranks=[(fine, 0), (tool, 1)], name="x")
    await say(harness, None, "comparison", ranks=[(fine, 0), (same, 1)], name="y")
    await say(harness, None, "comparison", ranks=[(fine, 0), (gone, 1)], name="z")
    await say(harness, fine, "correction", raw_value={"odd": 1})
    answer = await harness.api.get(EXPORT)
    assert rows_of(answer) == []
    assert answer.headers["x-rows-left-out"] == "3"


async def test_parts_of_text_are_joined_and_a_developer_speaks_as_the_system(harness: Harness) -> None:
    parts = [{"type": "text", "text": "Op"}, {"type": "text", "text": "en?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    turn = await harness.turn(messages=messages)
    await say(harness, turn, "correction", raw_value="Yes.")
    [row] = rows_of(await harness.api.get(EXPORT))
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open?"}]


async def test_pages_and_times_choose(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_pairs, "PAGE", 2)
    turns = [await answered(harness, f"bad {index}") for index in range(5)]
    for index, turn in enumerate(turns):
        await say(harness, turn, "correction", raw_value=f"good {index}", created_at=float(index))
    rows = rows_of(await harness.api.get(EXPORT))
    assert told(rows) == [(f"good {index}", f"bad {index}") for index in range(5)]
    some = rows_of(await harness.api.get(EXPORT, params={"since": 1, "until": 3, "policy": "shop"}))
    assert told(some) == [("good 1", "bad 1"), ("good 2", "bad 2")]


async def test_what_left_comes_back_equal(harness: Harness) -> None:
    turns: list[Turn] = [await answered(harness, f"Ü {index} ☃\n") for index in range(4)]
    for better, worse in pairwise(turns):
        await say(harness, None, "comparison", ranks=[(better, 0), (worse, 1)])
    await say(harness, turns[0], "correction", raw_value="Better.")
    export = await harness.api.get(EXPORT)
    left = rows_of(export)
    answer = await bring(harness, export.content)
    assert (answer.status_code, answer.json()["num_rows"]) == (201, 4)
    kept = sorted(await harness.all(DatasetRow), key=lambda row: row.row_number)
    again = [
        {"prompt": row.content["messages"], "chosen_id": None, **row.content, **row.content["details"]} for row in kept
    ]
    for row in again:
        row.pop("messages"), row.pop("details")
    assert again == left
