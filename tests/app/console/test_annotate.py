"""Labels of the console: a thumb, a rewritten reply, a comparison; whose they are, and what learning makes of them."""

import re
from typing import Any

import pytest

from app.models import Feedback, Reward
from tests.support.console import ConsoleClient, sign_in, to_text
from tests.support.deployment import Harness
from tests.support.settings import change_in_place
from workers.curate import curate

FIELD = re.compile(r'<input type="hidden" name="(once|turn|other|ids|original)" value="([^"]*)"')


async def read_item(client: ConsoleClient, query: str = "") -> dict[str, str]:
    """Return the hidden fields of the first form about the next reply."""
    page = (await client.get(f"annotate?policy=shop{query}")).text
    return dict(FIELD.findall(page))


async def label(client: ConsoleClient, kind: str = "single", **fields: Any) -> Any:
    item = {name: value for name, value in (await read_item(client, f"&kind={kind}")).items() if name != "original"}
    return await client.post("annotate", {"policy": "shop", "kind": kind, **item, **fields})


async def test_thumb_becomes_feedback_of_the_annotator_and_a_reward(harness: Harness) -> None:
    turn = await harness.turn()
    client = await sign_in(harness, "annotator")
    assert (await label(client, vote="up")).status_code == 303
    [row] = await harness.all(Feedback)
    assert (row.kind, row.value, row.turn_id, row.source_kind) == ("binary", 1.0, turn.id, "HUMAN")
    assert row.source_id.startswith("annotator:key-") and row.request_metadata == {"given_in": "console"}
    await curate(harness.db, harness.settings)
    [reward] = await harness.all(Reward)
    assert (reward.value, reward.rater) == (1.0, f"HUMAN/{row.source_id}")
    assert "Nothing is left here" in await client.text("annotate")


async def test_form_that_is_sent_twice_counts_once(harness: Harness) -> None:
    await harness.turn()
    client = await sign_in(harness, "annotator")
    form = {"policy": "shop", "kind": "single", **await read_item(client), "vote": "up"}
    form.pop("original")
    assert [(await client.post("annotate", form)).status_code for _ in range(2)] == [303, 303]
    assert len(await harness.all(Feedback)) == 1


async def test_rewritten_reply_becomes_a_preference_pair(harness: Harness) -> None:
    await harness.turn(own_messages=[{"role": "user", "content": "Open?"}])
    client = await sign_in(harness, "annotator")
    answer = await label(client, vote="down", correction="From nine to six.", original="hello", comment="too vague")
    assert answer.status_code == 303
    vote, correction = sorted(await harness.all(Feedback), key=lambda row: row.seq)
    assert (vote.kind, vote.value, vote.comment) == ("binary", -1.0, "too vague")
    assert (correction.kind, correction.raw_value) == ("correction", "From nine to six.")
    exported = await harness.api.get("/v1/exports/preferences", params={"policy": "shop"})
    assert exported.status_code == 200 and b"From nine to six." in exported.content


@pytest.mark.parametrize("correction", ["hello", " hello ", ""])
async def test_text_that_was_not_changed_is_no_correction(harness: Harness, correction: str) -> None:
    await harness.turn()
    client = await sign_in(harness, "annotator")
    answer = await label(client, vote="down", correction=correction, original="hello")
    assert answer.status_code == 400 and "Change the text first" in to_text(answer.text)
    assert await harness.all(Feedback) == []


async def test_page_says_whether_online_learning_uses_corrections(harness: Harness) -> None:
    await harness.turn()
    client = await sign_in(harness, "annotator")
    for correction, is_used in ((-0.5, True), (None, False)):
        rewards = {"sources": [{"type": "explicit", "correction": correction}]}
        assert (await harness.api.put("/v1/policies/shop/rewards", json=rewards)).status_code == 200
        text = await client.text("annotate")
        assert ("Online learning uses the vote alone" not in text) is is_used


@pytest.mark.parametrize("vote", ["first", "second", "equal"])
async def test_pair_is_shown_without_versions_and_becomes_a_comparison(harness: Harness, vote: str) -> None:
    one = await harness.turn(reply={"role": "assistant", "content": "the one"})
    await harness.turn(completion_id=one.id, choice_index=1, reply={"role": "assistant", "content": "the other"})
    client = await sign_in(harness, "annotator")
    text = await client.text("annotate?kind=pair")
    assert "the one" in text and "the other" in text and " v0 " not in text
    item = await read_item(client, "&kind=pair")
    assert (await label(client, "pair", vote=vote)).status_code == 303
    [row] = await harness.all(Feedback)
    names = [
        f"{choice['completion_id']}/{choice['choice_index']}"
        for choice in (row.raw_value[0] if vote == "equal" else row.raw_value)
    ]
    expected = [item["turn"], item["other"]]
    assert row.kind == "comparison" and names == (expected[::-1] if vote == "second" else expected)
    assert "Nothing is left here" in await client.text("annotate?kind=pair")


async def test_queue_of_disliked_replies_and_skipping(harness: Harness) -> None:
    good, bad = await harness.turn(), await harness.turn()
    await harness.vote(good.id, "up")
    await harness.vote(bad.id, "down")
    client = await sign_in(harness, "annotator")
    assert (await read_item(client, "&kind=down"))["turn"] == f"{bad.id}/0"
    first = (await read_item(client))["turn"].partition("/")[0]
    second = (await read_item(client, f"&skip={first}"))["turn"].partition("/")[0]
    assert {first, second} == {good.id, bad.id}
    assert await read_item(client, f"&skip={first},{second}") == {}


async def test_excluded_erased_and_unfinished_replies_are_not_in_the_queue(harness: Harness) -> None:
    await harness.turn(exclusion_reason="no consent to train")
    await harness.turn(state="failed")
    erased = await harness.turn()
    await harness.api.delete(f"/v1/chat/completions/{erased.id}")
    assert await read_item(await sign_in(harness, "annotator")) == {}


async def test_label_is_taken_back_by_its_author_alone(harness: Harness) -> None:
    turn = await harness.turn()
    client, other = await sign_in(harness, "annotator"), await sign_in(harness, "annotator")
    saved = await label(client, vote="down")
    ids = (await read_item(client, saved.headers["location"].partition("?policy=shop")[2]))["ids"]
    form = {"policy": "shop", "kind": "single", "ids": ids}
    assert (await other.post("annotate/undo", form)).status_code == 403
    assert (await client.post("annotate/undo", form)).status_code == 303
    views = (await harness.api.get("/v1/feedback", params={"completion_id": turn.id})).json()["data"]
    assert [view["withdrawn"] for view in views] == [True]


async def test_form_that_is_sent_again_after_it_was_taken_back_is_not_called_saved(harness: Harness) -> None:
    await harness.turn()
    client = await sign_in(harness, "annotator")
    label_form = {"policy": "shop", "kind": "single", **await read_item(client), "vote": "down"}
    label_form.pop("original")
    saved = await client.post("annotate", label_form)
    ids = (await read_item(client, saved.headers["location"].partition("?policy=shop")[2]))["ids"]
    await client.post("annotate/undo", {"policy": "shop", "kind": "single", "ids": ids})
    again = await client.post("annotate", label_form)
    assert "last=" not in again.headers["location"]
    assert "Not saved: this label was taken back before" in await client.text("annotate")
    assert [row.kind for row in await harness.all(Feedback)] == ["binary", "withdrawal"]


async def test_labels_are_trusted_when_an_operator_says_so(harness: Harness) -> None:
    change_in_place(harness.settings, {"raters__trust": True})
    client = await sign_in(harness, "operator")
    assert "whose standing is normal" in await client.text("annotate")
    assert (await client.post("annotate/trust", {"policy": "shop", "reason": "staff"})).status_code == 303
    assert "whose standing is trusted" in await client.text("annotate")
    annotator = await sign_in(harness, "annotator")
    assert (await annotator.post("annotate/trust", {"policy": "shop", "reason": "me"})).status_code == 403


async def test_annotator_begins_at_the_queue_and_sees_nothing_else(harness: Harness) -> None:
    client = await sign_in(harness, "annotator")
    page = (await client.get("annotate")).text
    assert re.findall(r'<a href="/console/(\w*)" data-key', page) == ["annotate"]
    for path in ("", "live", "versions", "release", "learning", "settings", "conversations/c", "find?id=x"):
        assert (await client.get(path)).status_code == 403, path


async def test_viewer_cannot_label(harness: Harness) -> None:
    await harness.turn()
    client = await sign_in(harness, "viewer")
    assert (await client.get("annotate")).status_code == 403
    form = {"policy": "shop", "kind": "single", "once": "x" * 12, "turn": "chatcmpl-1/0", "vote": "up"}
    assert (await client.post("annotate", form)).status_code == 403
    assert await harness.all(Feedback) == []


@pytest.mark.parametrize(
    "fields", [{"vote": "first"}, {"turn": "chatcmpl-1"}, {"turn": "chatcmpl-1/0"}, {"once": "x"}, {}]
)
async def test_wrong_form_is_refused_with_a_page(harness: Harness, fields: dict[str, str]) -> None:
    await harness.turn()
    answer = await label(await sign_in(harness, "annotator"), **fields)
    assert answer.status_code in (400, 404) and "<h1>" in answer.text
    assert await harness.all(Feedback) == []
