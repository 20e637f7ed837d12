"""What says which of two answers is better leaves as pairs, and comes back as a dataset of the same pairs."""

from itertools import pairwise

import pytest

from app.datasets import preference_pairs
from app.models import DatasetRow, Turn
from tests.support.deployment import Ring
from tests.support.parquet_files import answered, bring, rows_of, say

EXPORT = "/v1/exports/preferences"


def told(rows: list[dict[str, object]]) -> list[tuple[str, str]]:
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]  # type: ignore[index]


async def test_a_comparison_is_one_pair(ring: Ring) -> None:
    good, bad = await answered(ring, "Yes, till six."), await answered(ring, "No idea.")
    feedback = await say(ring, None, "comparison", ranks=[(good, 0), (bad, 1)])
    [row] = rows_of(await ring.api.get(EXPORT))
    assert row["prompt"] == [{"role": "user", "content": "Open?"}]
    assert row["chosen"] == [{"role": "assistant", "content": "Yes, till six."}]
    assert row["rejected"] == [{"role": "assistant", "content": "No idea."}]
    assert (row["feedback_id"], row["chosen_id"], row["rejected_id"]) == (feedback.id, good.id, bad.id)
    assert (row["source_kind"], row["created_at"]) == ("HUMAN", feedback.created_at)


async def test_a_ranking_is_all_its_strict_pairs_and_ties_give_none(ring: Ring) -> None:
    a, b, c, d = [await answered(ring, text) for text in "abcd"]
    await say(ring, None, "ranking", ranks=[(d, 2), (b, 1), (a, 0), (c, 1)])
    pairs = told(rows_of(await ring.api.get(EXPORT)))
    assert sorted(pairs) == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]


async def test_turns_that_answered_other_messages_are_not_compared(ring: Ring) -> None:
    a, b, c = await answered(ring, "a"), await answered(ring, "b", "Closed?"), await answered(ring, "c")
    await say(ring, None, "ranking", ranks=[(a, 0), (b, 1), (c, 2)])
    assert told(rows_of(await ring.api.get(EXPORT))) == [("a", "c")]


async def test_a_correction_is_better_than_the_reply(ring: Ring) -> None:
    turn = await answered(ring, "No idea.")
    await say(ring, turn, "correction", said="Till six.")
    [row] = rows_of(await ring.api.get(EXPORT))
    assert told([row]) == [("Till six.", "No idea.")]
    assert (row["chosen_id"], row["rejected_id"]) == (None, turn.id)


async def test_only_feedback_that_counts_makes_pairs(ring: Ring) -> None:
    a, b = await answered(ring, "a"), await answered(ring, "b")
    await say(ring, None, "comparison", ranks=[(a, 0), (b, 1)], source_id="ada")
    await say(ring, None, "comparison", ranks=[(b, 0), (a, 1)], source_id="ada")
    gone = await say(ring, a, "correction", said="A!", source_id="bob")
    await say(ring, a, "withdrawal", source_id="bob", details={"withdraws": gone.id})
    await say(ring, a, "binary", value=1.0)
    assert told(rows_of(await ring.api.get(EXPORT))) == [("b", "a")]


async def test_what_roles_and_text_cannot_tell_is_left_out_and_counted(ring: Ring) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fine, same = await answered(ring, "fine"), await answered(ring, "fine")
    tool = await ring.turn(messages=fine.messages, reply={"role": "assistant", "content": None, "tool_calls": [call]})
    gone = await ring.turn(messages=[], reply=None, deleted_at=1.0)
    await say(ring, None, "comparison", ranks=[(fine, 0), (tool, 1)], name="x")
    await say(ring, None, "comparison", ranks=[(fine, 0), (same, 1)], name="y")
    await say(ring, None, "comparison", ranks=[(fine, 0), (gone, 1)], name="z")
    await say(ring, fine, "correction", said={"odd": 1})
    answer = await ring.api.get(EXPORT)
    assert rows_of(answer) == []
    assert answer.headers["x-rows-left-out"] == "3"


async def test_parts_of_text_are_joined_and_a_developer_speaks_as_the_system(ring: Ring) -> None:
    parts = [{"type": "text", "text": "Op"}, {"type": "text", "text": "en?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    turn = await ring.turn(messages=messages)
    await say(ring, turn, "correction", said="Yes.")
    [row] = rows_of(await ring.api.get(EXPORT))
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open?"}]


async def test_pages_and_times_choose(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_pairs, "PAGE", 2)
    turns = [await answered(ring, f"bad {index}") for index in range(5)]
    for index, turn in enumerate(turns):
        await say(ring, turn, "correction", said=f"good {index}", created_at=float(index))
    rows = rows_of(await ring.api.get(EXPORT))
    assert told(rows) == [(f"good {index}", f"bad {index}") for index in range(5)]
    some = rows_of(await ring.api.get(EXPORT, params={"since": 1, "until": 3, "policy": "shop"}))
    assert told(some) == [("good 1", "bad 1"), ("good 2", "bad 2")]


async def test_what_left_comes_back_equal(ring: Ring) -> None:
    turns: list[Turn] = [await answered(ring, f"Ü {index} ☃\n") for index in range(4)]
    for better, worse in pairwise(turns):
        await say(ring, None, "comparison", ranks=[(better, 0), (worse, 1)])
    await say(ring, turns[0], "correction", said="Better.")
    export = await ring.api.get(EXPORT)
    left = rows_of(export)
    answer = await bring(ring, export.content)
    assert (answer.status_code, answer.json()["num_rows"]) == (201, 4)
    kept = sorted(await ring.all(DatasetRow), key=lambda row: row.number)
    again = [
        {"prompt": row.content["messages"], "chosen_id": None, **row.content, **row.content["details"]} for row in kept
    ]
    for row in again:
        row.pop("messages"), row.pop("details")
    assert again == left
