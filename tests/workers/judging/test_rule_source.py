"""Rules at the judging station: their failures are theirs alone, and they wait for what is still to come."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from alignment.config.rewards import RewardsConfig
from alignment.signals.rules import Facts
from app.models import Judgement, JudgementState, Policy
from tests.support.deployment import Harness
from tests.support.judgements import due, judged, listening
from workers.judging.judge import judge
from workers.judging.sources import dispatch

CALL = {"id": "c", "type": "function", "function": {"name": "order", "arguments": '{"id": 7}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def rule(function: str, **fields: Any) -> dict[str, Any]:
    return {"type": "rule", "name": "mine", "function": function, **fields}


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of somebody's own."""
    module = ModuleType("shop_rules")
    monkeypatch.setitem(sys.modules, "shop_rules", module)
    return module


async def test_a_reply_that_was_cut_is_worth_little(harness: Harness) -> None:
    await harness.turn(finish_reason="length")
    [judgement] = await judged(harness, listening(harness, rule("ended")))
    assert (judgement.state, judgement.value) == (JudgementState.DONE, -1.0)


async def test_the_range_of_length_is_the_deployments(harness: Harness) -> None:
    await harness.turn(num_output_tokens=105)
    [judgement] = await judged(harness, listening(harness, rule("length"), length_range=(30, 80)))
    assert judgement.value == -0.25


async def test_a_function_of_your_own_gets_the_facts(harness: Harness, shop: ModuleType) -> None:
    seen: list[Facts] = []

    def judge_it(facts: Facts) -> float:
        seen.append(facts)
        return 0.25

    shop.judge_it = judge_it  # type: ignore[attr-defined]
    await harness.turn(request_metadata={"plan": "gold"})
    [judgement] = await judged(harness, listening(harness, rule("shop_rules:judge_it")))
    assert judgement.value == 0.25
    [facts] = seen
    assert facts.request_metadata == {"plan": "gold"} and facts.reply == {"role": "assistant", "content": "hello"}
    assert (facts.state, facts.finish_reason, facts.num_output_tokens, facts.next_message) == ("done", "stop", 2, None)


def failing(error: BaseException) -> Any:
    def fail(facts: Facts) -> float:
        raise error

    return fail


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (failing(KeyError("plan")), "KeyError: 'plan'"),
        (failing(SystemExit(1)), "SystemExit: 1"),
        (failing(RecursionError("too deep")), "RecursionError: too deep"),
        (lambda facts: 2.0, "2.0 does not lie between -1 and 1"),
        (lambda facts: float("nan"), "nan does not lie between -1 and 1"),
        (lambda facts: "good", "'good' is no number"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_rule_that_fails_is_a_failed_judgement_and_no_more(
    harness: Harness, shop: ModuleType, function: Any, reason: str
) -> None:
    shop.fail = function  # type: ignore[attr-defined]
    await harness.turn()
    rows = await judged(harness, listening(harness, rule("shop_rules:fail"), rule("ended") | {"name": "other"}))
    found = {row.source: row for row in rows}
    assert (found["mine"].state, found["mine"].reason) == (JudgementState.FAILED, reason)
    assert found["other"].state == JudgementState.SKIPPED


async def test_a_rule_that_hangs_is_left_behind(
    harness: Harness, shop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "RULE_SECONDS", 0.2)
    over = threading.Event()
    shop.hang = lambda facts: over.wait(60)  # type: ignore[attr-defined]
    await harness.turn()
    [judgement] = await judged(harness, listening(harness, rule("shop_rules:hang")))
    over.set()
    assert (judgement.state, judgement.reason) == (JudgementState.FAILED, "the rule took more than 0.2 s")


async def test_an_unknown_rule_is_named(harness: Harness) -> None:
    await harness.turn()
    [judgement] = await judged(harness, listening(harness, rule("nobody")))
    assert judgement.state == JudgementState.FAILED and "There is no rule 'nobody'" in judgement.reason


async def test_a_policys_own_rewards_import_nothing(harness: Harness, shop: ModuleType) -> None:
    shop.always = lambda facts: 1.0  # type: ignore[attr-defined]
    config = RewardsConfig.model_validate({"sources": [rule("shop_rules:always")]})
    async with harness.db.write() as session:
        (await session.get_one(Policy, (await harness.policy()).id)).rewards = config.model_dump(mode="json")
    await harness.turn()
    [judgement] = await judged(harness, harness.settings)
    assert judgement.state == JudgementState.FAILED and "cannot name a module" in judgement.reason


async def test_a_tool_call_waits_for_its_tool_within_the_window(harness: Harness) -> None:
    settings = listening(harness, rule("tool_outcome", window_seconds=600))
    turn = await harness.turn(reply=CALLING, finish_reason="tool_calls")
    [judgement] = await judged(harness, settings)
    assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 0)
    for _ in range(5):
        await due(harness)
        await judge(harness.db, settings, "me")
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.attempt) == (JudgementState.OPEN, 0), "waiting is no attempt"
    answer = {"role": "tool", "tool_call_id": "c", "content": '{"error": "no such order"}'}
    messages = [*turn.messages, {**CALLING, "content": ""}, answer]
    await harness.turn(parent_id=turn.id, messages=messages)
    await due(harness)
    rows = {row.turn_id: row for row in await judged(harness, settings)}
    assert (rows[turn.id].state, rows[turn.id].value) == (JudgementState.DONE, -1.0)


async def test_a_tool_call_that_nobody_answered_says_nothing_in_the_end(harness: Harness) -> None:
    await harness.turn(reply=CALLING, finish_reason="tool_calls", finished_at=1.0)
    [judgement] = await judged(harness, listening(harness, rule("tool_outcome", window_seconds=600)))
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, "the tools have not answered")
