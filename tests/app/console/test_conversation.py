"""A conversation's page: what was said, by which version, what people thought of it, and what became of that."""

from app.models import Origin
from tests.support.console import sign_in, to_text
from tests.support.deployment import Harness
from tests.support.feedback_users import create_other_project_key
from tests.support.trained_versions import publish
from workers.curate import curate

SCRIPT = '<script>alert(1)</script><img src=x onerror="alert(2)">'


async def test_turns_are_shown_in_order_with_their_votes_and_what_became_of_them(harness: Harness) -> None:
    first = await harness.turn(conversation_id="c-1", own_messages=[{"role": "user", "content": "Open?"}])
    version = await publish(harness)
    history = [{"role": "user", "content": "Open?"}, first.reply, {"role": "user", "content": "And on Sunday?"}]
    second = await harness.turn(version, conversation_id="c-1", own_messages=history)
    await harness.vote(first.id, "up", source={"id": "ann"})
    await harness.vote(second.id, "down", comment="too short")
    await curate(harness.db, harness.settings)
    text = await (await sign_in(harness, "operator")).text("conversations/c-1")
    assert text.count("Open?") == 1, "the history is shown once"
    assert text.index("Open?") < text.index("v0") < text.index("And on Sunday?") < text.index("v1")
    assert "▲ up by HUMAN/ann" in text and "▼ down" in text and "too short" in text
    assert text.count("It is ready and waits for the next batch.") == 2
    assert "explicit 1" in text and "explicit -1" in text


async def test_messages_are_shown_as_text_and_never_run(harness: Harness) -> None:
    turn = await harness.turn(
        conversation_id="c-1",
        end_user=SCRIPT,
        own_messages=[
            {"role": "user", "content": SCRIPT},
            {"role": "user", "content": [{"type": "text", "text": SCRIPT}]},
        ],
        reply={"role": "assistant", "content": SCRIPT},
        exclusion_reason=SCRIPT,
    )
    await harness.vote(turn.id, comment=SCRIPT, source={"id": SCRIPT[:40]})
    await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "correction", "value": SCRIPT})
    client = await sign_in(harness)
    for path in ("conversations/c-1", f"replies/{turn.id}", f"find?id={SCRIPT}"):
        page = (await client.get(path)).text
        assert "&lt;script&gt;alert(1)" in page, path
        assert "<script>" not in page and "<img" not in page, path


async def test_every_id_leads_to_its_reply(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c/1 ü")
    alone = await harness.turn()
    rollout = await harness.turn(conversation_id="c/1 ü", origin=Origin.GROUP_SAMPLE)
    vote = (await harness.vote(turn.id)).json()["id"]
    client = await sign_in(harness)
    place = f"/console/conversations/c%2F1%20%C3%BC#{turn.id}"
    for id, expected in {
        turn.id: place,
        turn.id.replace("chatcmpl-", "req-"): place,
        vote: place,
        "c/1 ü": "/console/conversations/c%2F1%20%C3%BC",
        alone.id: f"/console/replies/{alone.id}",
        rollout.id: f"/console/replies/{rollout.id}",
        "v3": "/console/versions/3",
        "shop@v3": "/console/versions/3?policy=shop",
    }.items():
        answer = await client.get("find", params={"id": id})
        assert (answer.status_code, answer.headers["location"]) == (303, expected)
    assert (await client.get("conversations/c%2F1%20%C3%BC")).status_code == 200
    for path in (f"replies/{alone.id}", f"replies/{rollout.id}"):
        assert "hello" in await client.text(path)
    answer = await client.get("find", params={"id": "nothing"})
    assert answer.status_code == 404 and "chatcmpl-" in to_text(answer.text)


async def test_erased_and_excluded_replies_say_so(harness: Harness) -> None:
    erased = await harness.turn(conversation_id="c-1")
    await harness.turn(conversation_id="c-1", exclusion_reason="no consent to train")
    await harness.api.delete(f"/v1/chat/completions/{erased.id}")
    text = await (await sign_in(harness)).text("conversations/c-1")
    assert "was erased" in text and "must not be trained on: no consent to train" in text


async def test_choices_of_one_completion_share_their_prompt(harness: Harness) -> None:
    one = await harness.turn(conversation_id="c-1", own_messages=[{"role": "user", "content": "Which one?"}])
    await harness.turn(
        conversation_id="c-1",
        completion_id=one.id,
        choice_index=1,
        own_messages=[{"role": "user", "content": "Which one?"}],
        reply={"role": "assistant", "content": "the other"},
    )
    text = await (await sign_in(harness)).text("conversations/c-1")
    assert text.count("Which one?") == 1 and "the other" in text


async def test_other_projects_conversations_are_unknown(harness: Harness) -> None:
    turn = await harness.turn(conversation_id="c-1")
    key = (await create_other_project_key(harness))["authorization"].removeprefix("Bearer ")
    client = await sign_in(harness)
    await client.sign_in(key)
    for path in ("conversations/c-1", f"replies/{turn.id}", f"find?id={turn.id}", "find?id=c-1"):
        assert (await client.get(path)).status_code == 404
