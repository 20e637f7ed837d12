"""The export of preference pairs, and its import as a dataset of the same pairs."""

from itertools import pairwise

import pytest

from app.datasets import preference_pairs
from app.models import DatasetRow, Turn
from tests.support.deployment import Harness
from tests.support.parquet_files import create_feedback, create_reply, import_file, read_rows

EXPORT = "/v1/exports/preferences"


def pair_texts(rows: list[dict[str, object]]) -> list[tuple[str, str]]:
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]  # type: ignore[index]


async def test_comparison_is_one_pair(harness: Harness) -> None:
    good, bad = await create_reply(harness, "Yes, till six."), await create_reply(harness, "No idea.")
    feedback = await create_feedback(harness, None, "comparison", ranks=[(good, 0), (bad, 1)])
    [row] = read_rows(await harness.api.get(EXPORT))
    assert row["prompt"] == [{"role": "user", "content": "Open?"}]
    assert row["chosen"] == [{"role": "assistant", "content": "Yes, till six."}]
    assert row["rejected"] == [{"role": "assistant", "content": "No idea."}]
    assert (row["feedback_id"], row["chosen_id"], row["rejected_id"]) == (feedback.id, good.id, bad.id)
    assert (row["source_kind"], row["created_at"]) == ("HUMAN", feedback.created_at)


async def test_ranking_is_all_its_strict_pairs(harness: Harness) -> None:
    a, b, c, d = [await create_reply(harness, text) for text in "abcd"]
    await create_feedback(harness, None, "ranking", ranks=[(d, 2), (b, 1), (a, 0), (c, 1)])
    pairs = pair_texts(read_rows(await harness.api.get(EXPORT)))
    assert sorted(pairs) == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]


async def test_replies_to_different_messages_are_not_paired(harness: Harness) -> None:
    a, b, c = (
        await create_reply(harness, "a"),
        await create_reply(harness, "b", "Closed?"),
        await create_reply(harness, "c"),
    )
    await create_feedback(harness, None, "ranking", ranks=[(a, 0), (b, 1), (c, 2)])
    assert pair_texts(read_rows(await harness.api.get(EXPORT))) == [("a", "c")]


async def test_correction_is_preferred_to_the_reply(harness: Harness) -> None:
    turn = await create_reply(harness, "No idea.")
    await create_feedback(harness, turn, "correction", raw_value="Till six.")
    [row] = read_rows(await harness.api.get(EXPORT))
    assert pair_texts([row]) == [("Till six.", "No idea.")]
    assert (row["chosen_id"], row["rejected_id"]) == (None, turn.id)


async def test_only_effective_feedback_makes_pairs(harness: Harness) -> None:
    a, b = await create_reply(harness, "a"), await create_reply(harness, "b")
    await create_feedback(harness, None, "comparison", ranks=[(a, 0), (b, 1)], source_id="ada")
    await create_feedback(harness, None, "comparison", ranks=[(b, 0), (a, 1)], source_id="ada")
    removed = await create_feedback(harness, a, "correction", raw_value="A!", source_id="bob")
    await create_feedback(harness, a, "withdrawal", source_id="bob", withdraws=removed.id)
    await create_feedback(harness, a, "binary", value=1.0)
    assert pair_texts(read_rows(await harness.api.get(EXPORT))) == [("b", "a")]


async def test_pairs_beyond_roles_and_text_are_left_out_and_counted(harness: Harness) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fine, same = await create_reply(harness, "fine"), await create_reply(harness, "fine")
    tool = await harness.turn(
        own_messages=fine.own_messages, reply={"role": "assistant", "content": None, "tool_calls": [call]}
    )
    removed = await harness.turn(own_messages=[], reply=None, deleted_at=1.0)
    await create_feedback(harness, None, "comparison", ranks=[(fine, 0), (tool, 1)], name="x")
    await create_feedback(harness, None, "comparison", ranks=[(fine, 0), (same, 1)], name="y")
    await create_feedback(harness, None, "comparison", ranks=[(fine, 0), (removed, 1)], name="z")
    await create_feedback(harness, fine, "correction", raw_value={"odd": 1})
    answer = await harness.api.get(EXPORT)
    assert read_rows(answer) == []
    assert answer.headers["x-rows-left-out"] == "3"


async def test_text_parts_are_joined_and_developer_becomes_system(harness: Harness) -> None:
    parts = [{"type": "text", "text": "Op"}, {"type": "text", "text": "en?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    turn = await harness.turn(own_messages=messages)
    await create_feedback(harness, turn, "correction", raw_value="Yes.")
    [row] = read_rows(await harness.api.get(EXPORT))
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open?"}]


async def test_export_in_pages_and_by_time(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_pairs, "PAGE_SIZE", 2)
    turns = [await create_reply(harness, f"bad {index}") for index in range(5)]
    for index, turn in enumerate(turns):
        await create_feedback(harness, turn, "correction", raw_value=f"good {index}", created_at=float(index))
    rows = read_rows(await harness.api.get(EXPORT))
    assert pair_texts(rows) == [(f"good {index}", f"bad {index}") for index in range(5)]
    selected = read_rows(await harness.api.get(EXPORT, params={"since": 1, "until": 3, "policy": "shop"}))
    assert pair_texts(selected) == [("good 1", "bad 1"), ("good 2", "bad 2")]


async def test_exported_pairs_are_imported_equal(harness: Harness) -> None:
    turns: list[Turn] = [await create_reply(harness, f"Ü {index} ☃\n") for index in range(4)]
    for better, worse in pairwise(turns):
        await create_feedback(harness, None, "comparison", ranks=[(better, 0), (worse, 1)])
    await create_feedback(harness, turns[0], "correction", raw_value="Better.")
    export = await harness.api.get(EXPORT)
    exported = read_rows(export)
    answer = await import_file(harness, export.content)
    assert (answer.status_code, answer.json()["num_rows"]) == (201, 4)
    rows = sorted(await harness.all(DatasetRow), key=lambda row: row.row_number)
    imported = [
        {"prompt": row.content["messages"], "chosen_id": None, **row.content, **row.content["details"]} for row in rows
    ]
    for row in imported:
        row.pop("messages"), row.pop("details")
    assert imported == exported
