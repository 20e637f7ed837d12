"""Sources: rules and the user's next message. A failing rule fails only its own judgement, and a rule may wait."""

import sys
import threading
from types import ModuleType
from typing import Any
from unittest.mock import AsyncMock

import pytest

from alignment.config.rewards import RewardsConfig, RuleSource
from alignment.signals.rules import RuleInput
from app.models import Judgement, JudgementState, Policy, Reward, Turn
from tests.support.deployment import Harness
from tests.support.judgements import (
    ScriptedEndpoint,
    grade_response,
    make_judgements_due,
    run_judging,
    settings_with_sources,
)
from workers.judging import sources
from workers.judging.judge import judge
from workers.judging.request import NO_NEXT_MESSAGE, Usage, build_request

CALL = {"id": "c", "type": "function", "function": {"name": "order", "arguments": '{"id": 7}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def rule(function: str, **fields: Any) -> dict[str, Any]:
    return {"type": "rule", "name": "mine", "function": function, **fields}


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a user's own rules."""
    module = ModuleType("shop_rules")
    monkeypatch.setitem(sys.modules, "shop_rules", module)
    return module


async def test_a_truncated_reply_gets_a_negative_reward(harness: Harness) -> None:
    await harness.turn(finish_reason="length")
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("ended")))
    assert (judgement.state, judgement.value) == (JudgementState.DONE, -1.0)


async def test_the_length_range_is_a_setting_of_the_deployment(harness: Harness) -> None:
    await harness.turn(num_output_tokens=105)
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("length"), length_range=(30, 80)))
    assert judgement.value == -0.25


async def test_a_custom_rule_gets_the_turn(harness: Harness, shop: ModuleType) -> None:
    inputs: list[RuleInput] = []

    def score(facts: RuleInput) -> float:
        inputs.append(facts)
        return 0.25

    shop.score = score  # type: ignore[attr-defined]
    await harness.turn(request_metadata={"plan": "gold"})
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("shop_rules:score")))
    assert judgement.value == 0.25
    [facts] = inputs
    assert facts.metadata == {"plan": "gold"} and facts.reply == {"role": "assistant", "content": "hello"}
    assert (facts.state, facts.finish_reason, facts.num_output_tokens, facts.next_message) == ("done", "stop", 2, None)


def failing(error: BaseException) -> Any:
    def fail(facts: RuleInput) -> float:
        raise error

    return fail


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (failing(KeyError("plan")), "KeyError: 'plan'"),
        (failing(SystemExit(1)), "SystemExit: 1"),
        (failing(RecursionError("too deep")), "RecursionError: too deep"),
        (lambda facts: 2.0, "2.0 is not between -1 and 1"),
        (lambda facts: float("nan"), "nan is not between -1 and 1"),
        (lambda facts: "good", "'good' is not a number"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_failing_rule_fails_its_own_judgement_only(
    harness: Harness, shop: ModuleType, function: Any, reason: str
) -> None:
    shop.fail = function  # type: ignore[attr-defined]
    await harness.turn()
    rows = await run_judging(
        harness, settings_with_sources(harness, rule("shop_rules:fail"), rule("ended") | {"name": "other"})
    )
    judgements = {row.source: row for row in rows}
    assert (judgements["mine"].state, judgements["mine"].reason) == (JudgementState.FAILED, reason)
    assert judgements["other"].state == JudgementState.SKIPPED


async def test_a_rule_that_hangs_times_out(harness: Harness, shop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "RULE_SECONDS", 0.2)
    end = threading.Event()
    shop.hang = lambda facts: end.wait(60)  # type: ignore[attr-defined]
    await harness.turn()
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("shop_rules:hang")))
    end.set()
    assert (judgement.state, judgement.reason) == (JudgementState.FAILED, "the rule took more than 0.2 s")


async def test_an_unknown_rule_is_named_in_the_reason(harness: Harness) -> None:
    await harness.turn()
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("unknown")))
    assert judgement.state == JudgementState.FAILED and "There is no rule 'unknown'" in (judgement.reason or "")


async def test_the_rewards_of_a_policy_cannot_import_modules(harness: Harness, shop: ModuleType) -> None:
    shop.constant = lambda facts: 1.0  # type: ignore[attr-defined]
    config = RewardsConfig.model_validate({"sources": [rule("shop_rules:constant")]})
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
    await harness.turn()
    [judgement] = await run_judging(harness, harness.settings)
    assert judgement.state == JudgementState.FAILED and "cannot name a module" in (judgement.reason or "")


async def test_a_tool_call_waits_for_its_tool_within_the_window(harness: Harness) -> None:
    settings = settings_with_sources(harness, rule("tool_outcome", window_seconds=600))
    turn = await harness.turn(reply=CALLING, finish_reason="tool_calls")
    [judgement] = await run_judging(harness, settings)
    assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 0)
    for _ in range(5):
        await make_judgements_due(harness)
        await judge(harness.db, settings, "me")
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 0), "waiting does not count as an attempt"
    answer = {"role": "tool", "tool_call_id": "c", "content": '{"error": "no such order"}'}
    messages = [*turn.own_messages, {**CALLING, "content": ""}, answer]
    await harness.turn(parent_id=turn.id, own_messages=messages)
    await make_judgements_due(harness)
    rows = {row.turn_id: row for row in await run_judging(harness, settings)}
    assert (rows[turn.id].state, rows[turn.id].value) == (JudgementState.DONE, -1.0)


async def test_a_tool_call_without_a_result_is_skipped_after_the_window(harness: Harness) -> None:
    await harness.turn(reply=CALLING, finish_reason="tool_calls", finished_at=1.0)
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("tool_outcome", window_seconds=600)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the tools have not answered yet")


HELLO = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
NEXT = {"type": "next_turn"}


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def create_two_turns(harness: Harness, *messages: dict[str, Any], **values: Any) -> tuple[Turn, Turn]:
    """Create a turn and the one after it, which has this prompt."""
    turn = await harness.turn()
    return turn, await harness.turn(parent_id=turn.id, own_messages=list(messages), **values)


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
    turn = await harness.turn(own_messages=[question])
    await harness.turn(
        parent_id=turn.id, own_messages=[question, REPLY, user_message("When do you open on Sunday, please?")]
    )
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert (judgement.value, judgement.details["explanation"]) == (-1.0, "repetition")


async def test_the_judge_decides_where_no_rule_applies(harness: Harness) -> None:
    endpoint = ScriptedEndpoint(lambda body: grade_response(2, "they ask for something else"))
    with endpoint.serve() as url:
        await create_two_turns(harness, HELLO, REPLY, user_message("And on Sunday?"))
        [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
        assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the source has no opinion")
        judge = {"type": "judge", "url": url, "model": "judge-model", "share": 1.0}
        settings = settings_with_sources(harness, {**NEXT, "judge": "judge"}, judge)
        turn, _ = await create_two_turns(harness, HELLO, REPLY, user_message("Can somebody else answer?"))
        rows = {(row.turn_id, row.source): row for row in await run_judging(harness, settings)}
    judgement = rows[turn.id, "next_turn"]
    assert (judgement.state, judgement.value) == (JudgementState.DONE, -0.5)
    prompts = [body["messages"][1]["content"] for body in endpoint.requests]
    assert sum('{"role": "next", "content": "Can somebody else answer?"}' in text for text in prompts) == 1


async def test_a_judge_without_evidence_gives_no_reward(harness: Harness) -> None:
    with ScriptedEndpoint(lambda body: grade_response(3)).serve() as url:
        settings = settings_with_sources(
            harness, {**NEXT, "judge": "judge"}, {"type": "judge", "url": url, "model": "judge-model"}
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
    await harness.turn(parent_id=turn.id, own_messages=[HELLO, REPLY, user_message("That's wrong")], created_at=2.0)
    [judgement] = await run_judging(harness, settings_with_sources(harness, NEXT))
    assert judgement.value == 1.0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_source_of_an_unknown_type_is_an_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_by_type: dict[Any, Any] = sources.ANSWER_BY_TYPE
    monkeypatch.delitem(answer_by_type, RuleSource)
    turn = await harness.turn()
    settings = settings_with_sources(harness, rule("ended"))
    judgement = Judgement(id="jdg-1", turn_id=turn.id, policy_id=turn.policy_id, source="mine")
    async with harness.db.read() as session:
        request = await build_request(session, settings, (judgement,))
    with pytest.raises(TypeError, match=r"source 'mine': .* type 'rule'"):
        await sources.get_answers(request, AsyncMock(), settings, Usage())
