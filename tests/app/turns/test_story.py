"""A turn's story: its conversation, feedback with raters and outcomes, rewards, sample, batches and versions."""

from typing import Any

from app.models import Judgement, JudgementState, Turn, VersionState, new_id
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version
from workers.curate import curate


async def read_story(harness: Harness, id: str) -> Any:
    response = await harness.api.get(f"/v1/turns/{id}/story")
    assert response.status_code == 200, response.text
    return response.json()


async def test_story_follows_a_turn_to_the_version_that_learned_from_it(harness: Harness) -> None:
    same: dict[str, Any] = {"conversation_id": "talk", "end_user": "eve"}
    first = await harness.turn(created_at=1.0, **same)
    turn = await harness.turn(created_at=2.0, parent_id=first.id, num_prompt_tokens=3, **same)
    await harness.turn(conversation_id="another")
    await harness.vote(turn.id, "down", source="ada", comment="wrong hours")
    await harness.vote(turn.id, "up")  # of eve, who is not named
    program = {"kind": "CODE", "id": "checkout"}
    await harness.vote(turn.id, "up", source=program)
    judged = {"kind": "score", "value": 0.9, "name": "talk", "source": "bob", "target": {"conversation_id": "talk"}}
    assert (await harness.api.post("/v1/feedback", json=judged)).status_code == 201
    await curate(harness.db, harness.settings)
    async with harness.db.write() as session:
        done = {"state": JudgementState.SKIPPED, "reason": "the budget is spent", "due_at": 3.0}
        judgement = Judgement(id=new_id("jud"), turn_id=turn.id, policy_id=turn.policy_id, source="judge", **done)
        session.add(judgement)
    version = await create_version(harness, turn, state=VersionState.REJECTED)

    story = await read_story(harness, turn.id)
    assert [row["id"] for row in story["conversation"]] == [first.id, turn.id]
    assert (story["version"], story["version_state"], story["engine"]) == ("shop@v0", "live", "engine-0")
    assert (story["messages"], story["reply"]["content"]) == ([{"role": "user", "content": "hi"}], "hello")
    assert story["tokens"] == {
        **{"num_prompt": 3, "num_output": 2, "num_output_ids": 2},
        **{"num_logprobs": 2, "has_prompt_ids": True},
    }
    assert story["exclusion"] is None
    assert [(row["rater"], row["comment"]) for row in story["feedback"]] == [
        ("HUMAN/ada", "wrong hours"),
        ("end-user/eve", None),
        ("CODE/checkout", None),
        ("HUMAN/bob", None),
    ]
    assert {row["standing"] for row in story["feedback"]} == {"normal"}
    assert all(row["outcome"]["sentence"] for row in story["feedback"])
    rewards = {row["rater"]: (row["value"], row["reward_source"]) for row in story["rewards"]}
    assert rewards["HUMAN/ada"] == (-1.0, "explicit") and rewards["CODE/checkout"] == (1.0, "explicit")
    assert {row["feedback_id"] for row in story["rewards"]} == {row["id"] for row in story["feedback"]}
    assert [(row["source"], row["state"], row["reason"]) for row in story["judgements"]] == [
        ("judge", "skipped", "the budget is spent")
    ]
    assert (story["sample"]["state"], story["sample"]["rule"]) == ("trained", None)
    [batch] = story["batches"]
    assert (batch["id"], batch["state"]) == (version.batch_id, "trained")
    assert (batch["version"], batch["version_state"]) == ("shop@v1", "rejected")
    assert (await read_story(harness, turn.id.replace("chatcmpl-", "req-")))["id"] == turn.id


async def test_excluded_and_deleted_turns_say_why(harness: Harness) -> None:
    greedy = await harness.turn(exclusion_reason="greedy decoding: the reply was not sampled")
    story = await read_story(harness, greedy.id)
    assert story["exclusion"] == {"code": "greedy", "reason": "greedy decoding: the reply was not sampled"}
    deleted = await harness.turn()
    assert (await harness.api.delete(f"/v1/chat/completions/{deleted.id}")).status_code == 200
    story = await read_story(harness, deleted.id)
    assert (story["exclusion"]["code"], story["messages"], story["reply"]) == ("deleted", [], None)
    assert story["deleted_at"] is not None and (await harness.get(Turn, deleted.id)).own_messages == []


async def test_unknown_turn_is_not_found(harness: Harness) -> None:
    answer = await harness.api.get("/v1/turns/chatcmpl-0/story")
    assert answer.status_code == 404 and answer.json()["error"]["message"] == "There is no turn 'chatcmpl-0'."
