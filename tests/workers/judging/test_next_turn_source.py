"""The user's next message as evidence: by rule, by the judge where no rule speaks, and never by mistake."""

from typing import Any

import pytest

from app.models import Judgement, JudgementState, Reward, Turn
from tests.support.deployment import Harness
from tests.support.judgements import Oracle, graded, judged, listening
from workers.judging.request import NO_NEXT_MESSAGE

HELLO = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
NEXT = {"type": "next_turn"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def followed(harness: Harness, *messages: dict[str, Any], **values: Any) -> tuple[Turn, Turn]:
    """A turn, and the one after it, with this prompt."""
    turn = await harness.turn()
    return turn, await harness.turn(parent_id=turn.id, messages=list(messages), **values)


@pytest.mark.parametrize(
    ("said", "value", "rule"),
    [
        ("Thanks a lot!", 1.0, "thanks"),
        ("No, I meant the blue one", -1.0, "correction"),
        ("That's wrong", -1.0, "complaint"),
    ],
)
async def test_what_the_user_says_next_is_the_reward_of_the_turn_before(
    harness: Harness, said: str, value: float, rule: str
) -> None:
    turn, _ = await followed(harness, HELLO, REPLY, user(said))
    [judgement] = await judged(harness, listening(harness, NEXT))
    assert (judgement.turn_id, judgement.state, judgement.value) == (turn.id, JudgementState.DONE, value)
    assert judgement.details["explanation"] == rule
    [reward] = await harness.all(Reward)
    assert (reward.turn_id, reward.origin, reward.value) == (turn.id, "next_turn", value)


async def test_the_same_question_again_is_against_the_reply(harness: Harness) -> None:
    question = user("When do you open on Sunday?")
    turn = await harness.turn(messages=[question])
    await harness.turn(parent_id=turn.id, messages=[question, REPLY, user("When do you open on Sunday, please?")])
    [judgement] = await judged(harness, listening(harness, NEXT))
    assert (judgement.value, judgement.details["explanation"]) == (-1.0, "repetition")


async def test_where_no_rule_speaks_there_is_silence_or_the_judge(harness: Harness) -> None:
    oracle = Oracle(lambda body: graded(2, "they ask for something else"))
    with oracle.at() as url:
        await followed(harness, HELLO, REPLY, user("And on Sunday?"))
        [judgement] = await judged(harness, listening(harness, NEXT))
        assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "it has nothing to say")
        judge = {"type": "judge", "url": url, "model": "wise", "share": 1.0}
        settings = listening(harness, {**NEXT, "judge": "judge"}, judge)
        turn, _ = await followed(harness, HELLO, REPLY, user("Can somebody else answer?"))
        rows = {(row.turn_id, row.source): row for row in await judged(harness, settings)}
    by_outcome = rows[turn.id, "next_turn"]
    assert (by_outcome.state, by_outcome.value) == (JudgementState.DONE, -0.5)
    asked = [body["messages"][1]["content"] for body in oracle.heard]
    assert sum('{"role": "next", "content": "Can somebody else answer?"}' in text for text in asked) == 1


async def test_a_judge_that_sees_no_evidence_either_is_silence(harness: Harness) -> None:
    with Oracle(lambda body: graded(3)).at() as url:
        settings = listening(harness, {**NEXT, "judge": "judge"}, {"type": "judge", "url": url, "model": "wise"})
        turn, _ = await followed(harness, HELLO, REPLY, user("And on Sunday?"))
        rows = {(row.turn_id, row.source): row for row in await judged(harness, settings)}
    assert rows[turn.id, "next_turn"].state == JudgementState.SKIPPED
    assert rows[turn.id, "judge"].value == 0.0, "as a grade a three is a number"


@pytest.mark.parametrize(
    "prompt",
    [
        [HELLO],  # a client's retry under the conversation's name
        [HELLO, REPLY, {"role": "tool", "tool_call_id": "c", "content": "Thanks!"}],  # an agent's own step
        [HELLO, {"role": "assistant", "content": "Good day"}, user("Thanks!")],  # said to somebody else's reply
    ],
)
async def test_what_is_not_the_users_answer_to_this_reply_is_no_evidence(harness: Harness, prompt: list[Any]) -> None:
    await followed(harness, *prompt)
    [judgement] = await judged(harness, listening(harness, NEXT))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, NO_NEXT_MESSAGE)


async def test_a_client_that_sends_only_what_is_fresh_is_understood(harness: Harness) -> None:
    await followed(harness, user("Thanks!"))
    [judgement] = await judged(harness, listening(harness, NEXT))
    assert judgement.value == 1.0


async def test_words_that_must_not_be_learned_from_are_no_evidence(harness: Harness) -> None:
    turn, after = await followed(harness, HELLO, REPLY, user("Thanks!"))
    async with harness.db.write() as session:
        session.add(Judgement(id="jdg-1", turn_id=turn.id, policy_id=turn.policy_id, source="next_turn", due_at=0.0))
        (await session.get_one(Turn, after.id)).exclusion_reason = "no consent to train"
    [judgement] = await judged(harness, listening(harness, NEXT))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, NO_NEXT_MESSAGE)


async def test_of_two_ways_on_the_first_counts(harness: Harness) -> None:
    turn, _ = await followed(harness, HELLO, REPLY, user("Thanks!"), created_at=1.0)
    await harness.turn(parent_id=turn.id, messages=[HELLO, REPLY, user("That's wrong")], created_at=2.0)
    [judgement] = await judged(harness, listening(harness, NEXT))
    assert judgement.value == 1.0
