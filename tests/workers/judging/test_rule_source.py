"""Rules in the judge stage: a failing rule fails its own judgement only, and a rule may wait for the next message."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from alignment.config.rewards import RewardsConfig
from alignment.signals.rules import RuleInput
from app.models import Judgement, JudgementState, Policy
from tests.support.deployment import Harness
from tests.support.judgements import make_judgements_due, run_judging, settings_with_sources
from workers.judging.judge import judge
from workers.judging.sources import dispatch

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

    def judge_it(facts: RuleInput) -> float:
        inputs.append(facts)
        return 0.25

    shop.judge_it = judge_it  # type: ignore[attr-defined]
    await harness.turn(request_metadata={"plan": "gold"})
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("shop_rules:judge_it")))
    assert judgement.value == 0.25
    [facts] = inputs
    assert facts.details == {"plan": "gold"} and facts.reply == {"role": "assistant", "content": "hello"}
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
    monkeypatch.setattr(dispatch, "RULE_SECONDS", 0.2)
    end = threading.Event()
    shop.hang = lambda facts: end.wait(60)  # type: ignore[attr-defined]
    await harness.turn()
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("shop_rules:hang")))
    end.set()
    assert (judgement.state, judgement.reason) == (JudgementState.FAILED, "the rule took more than 0.2 s")


async def test_an_unknown_rule_is_named_in_the_reason(harness: Harness) -> None:
    await harness.turn()
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("nobody")))
    assert judgement.state == JudgementState.FAILED and "There is no rule 'nobody'" in judgement.reason


async def test_the_rewards_of_a_policy_cannot_import_modules(harness: Harness, shop: ModuleType) -> None:
    shop.always = lambda facts: 1.0  # type: ignore[attr-defined]
    config = RewardsConfig.model_validate({"sources": [rule("shop_rules:always")]})
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
    await harness.turn()
    [judgement] = await run_judging(harness, harness.settings)
    assert judgement.state == JudgementState.FAILED and "cannot name a module" in judgement.reason


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
    messages = [*turn.messages, {**CALLING, "content": ""}, answer]
    await harness.turn(parent_id=turn.id, messages=messages)
    await make_judgements_due(harness)
    rows = {row.turn_id: row for row in await run_judging(harness, settings)}
    assert (rows[turn.id].state, rows[turn.id].value) == (JudgementState.DONE, -1.0)


async def test_a_tool_call_without_an_answer_is_skipped_after_the_window(harness: Harness) -> None:
    await harness.turn(reply=CALLING, finish_reason="tool_calls", finished_at=1.0)
    [judgement] = await run_judging(harness, settings_with_sources(harness, rule("tool_outcome", window_seconds=600)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the tools have not answered yet")
