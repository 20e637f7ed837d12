"""The user's next message as evidence: read by rules, or by the judge where no rule applies."""

from typing import Any

import pytest

from app.models import Judgement, JudgementState, Reward, Turn
from tests.support.deployment import Harness
from tests.support.judgements import ScriptedEndpoint, grade_response, run_judging, settings_with_sources
from workers.judging.request import NO_NEXT_MESSAGE

HELLO = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
NEXT = {"type": "next_turn"}


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def create_two_turns(harness: Harness, *messages: dict[str, Any], **values: Any) -> tuple[Turn, Turn]:
    """Create a turn and the one after it, which has this prompt."""
    turn = await harness.turn()
    return turn, await harness.turn(parent_id=turn.id, messages=list(messages), **values)


@pytest.mark.parametrize(
    ("message", "value", "rule"),
    [
        ("Thanks a lot!", 1.0, "thanks"),
        ("No, I meant the blue one", -1.0, "correction"),
        ("That's wrong", -1.0, "complaint"),
    ],
)
async def test_the_next_message_gives_the_reward_of_the_previous_turn(
    harness: Harness, message: str, value: float, rule: str
) -> None:
    turn, _ = await create_two_turns(harness, HELLO, REPLY, user_message(message))
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert (judgement.turn_id, judgement.state, judgement.value) == (turn.id, JudgementState.DONE, value)
    assert judgement.details["explanation"] == rule
    [reward] = await harness.all(Reward)
    assert (reward.turn_id, reward.reward_source, reward.value) == (turn.id, "next_turn", value)


async def test_a_repeated_question_is_a_negative_reward(harness: Harness) -> None:
    question = user_message("When do you open on Sunday?")
    turn = await harness.turn(messages=[question])
    await harness.turn(
        parent_id=turn.id, messages=[question, REPLY, user_message("When do you open on Sunday, please?")]
    )
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert (judgement.value, judgement.details["explanation"]) == (-1.0, "repetition")


async def test_where_no_rule_applies_the_judge_is_asked_if_there_is_one(harness: Harness) -> None:
    endpoint = ScriptedEndpoint(lambda body: grade_response(2, "they ask for something else"))
    with endpoint.serve() as url:
        await create_two_turns(harness, HELLO, REPLY, user_message("And on Sunday?"))
        [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
        assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the source has no opinion")
        judge = {"type": "judge", "url": url, "model": "wise", "share": 1.0}
        settings = settings_with_sources(harness, {**NEXT, "judge": "judge"}, judge)
        turn, _ = await create_two_turns(harness, HELLO, REPLY, user_message("Can somebody else answer?"))
        rows = {(row.turn_id, row.source): row for row in await run_judging(harness, settings)}
    by_outcome = rows[turn.id, "next_turn"]
    assert (by_outcome.state, by_outcome.value) == (JudgementState.DONE, -0.5)
    prompts = [body["messages"][1]["content"] for body in endpoint.requests]
    assert sum('{"role": "next", "content": "Can somebody else answer?"}' in text for text in prompts) == 1


async def test_a_judge_without_evidence_gives_no_reward(harness: Harness) -> None:
    with ScriptedEndpoint(lambda body: grade_response(3)).serve() as url:
        settings = settings_with_sources(
            harness, {**NEXT, "judge": "judge"}, {"type": "judge", "url": url, "model": "wise"}
        )
        turn, _ = await create_two_turns(harness, HELLO, REPLY, user_message("And on Sunday?"))
        rows = {(row.turn_id, row.source): row for row in await run_judging(harness, settings)}
    assert rows[turn.id, "next_turn"].state == JudgementState.SKIPPED
    assert rows[turn.id, "judge"].value == 0.0, "as a grade of a reply, 3 is a reward"


@pytest.mark.parametrize(
    "prompt",
    [
        [HELLO],  # a client's retry in the same conversation
        [HELLO, REPLY, {"role": "tool", "tool_call_id": "c", "content": "Thanks!"}],  # a step of an agent
        [HELLO, {"role": "assistant", "content": "Good day"}, user_message("Thanks!")],  # an answer to another reply
    ],
)
async def test_only_a_user_message_after_this_reply_is_evidence(harness: Harness, prompt: list[Any]) -> None:
    await create_two_turns(harness, *prompt)
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, NO_NEXT_MESSAGE)


async def test_a_prompt_with_only_the_new_message_is_read(harness: Harness) -> None:
    await create_two_turns(harness, user_message("Thanks!"))
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert judgement.value == 1.0


async def test_messages_without_consent_are_no_evidence(harness: Harness) -> None:
    turn, after = await create_two_turns(harness, HELLO, REPLY, user_message("Thanks!"))
    async with harness.db.write() as session:
        session.add(Judgement(id="jdg-1", turn_id=turn.id, policy_id=turn.policy_id, source="next_turn", due_at=0.0))
        (await session.get_one(Turn, after.id)).exclusion_reason = "no consent to train"
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, NO_NEXT_MESSAGE)


async def test_the_first_of_two_continuations_counts(harness: Harness) -> None:
    turn, _ = await create_two_turns(harness, HELLO, REPLY, user_message("Thanks!"), created_at=1.0)
    await harness.turn(parent_id=turn.id, messages=[HELLO, REPLY, user_message("That's wrong")], created_at=2.0)
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert judgement.value == 1.0
