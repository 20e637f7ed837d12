"""Replies out of the range that was set: measured as the trainer measures them, kept, shown and counted."""

from typing import Any

import pytest

from alignment.signals.length_penalty import length_penalty
from app.core.telemetry import Lengths, Telemetry
from app.models import Turn
from tests.app.chat.test_endpoints import ask, chunks
from tests.support.deployment import Harness
from tests.support.metrics_requests import calling, page
from tests.support.parquet_files import rows_of
from tests.support.scripted_engine import ScriptedEngine

SHOP = {"project": "default", "policy": "shop"}
WORDS = "one two three four five six seven eight nine ten eleven"  # and the end of the turn: twelve tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_is_too_long_is_kept_with_what_it_costs(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.say = WORDS
    async with calling(harness, length_range=(4, 8)) as told:
        answer = await ask(told, stream=stream)
        id = chunks(answer)[0]["id"] if stream else answer.json()["id"]
        stored = (await told.api.get(f"/v1/chat/completions/{id}")).json()
        [row] = rows_of(await told.api.get("/v1/exports/turns"))
    turn: Turn = await harness.get(Turn, id)
    assert turn.num_output_tokens == 12
    assert turn.length_penalty == length_penalty(12, 4, 8) == -1.0
    assert stored["choices"][0]["length_penalty"] == row["length_penalty"] == -1.0


async def test_each_choice_has_its_own_and_a_reply_in_range_costs_nothing(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    async with calling(harness, length_range=(2, 6)) as told:
        await ask(told, n=2)  # eight tokens each: (2 / 4)²
        await ask(told, max_tokens=5)
    penalties = sorted(turn.length_penalty for turn in await harness.all(Turn))
    assert penalties == [-0.25, -0.25, 0.0]


async def test_without_a_range_nothing_is_said_of_length(harness: Harness, scripted: ScriptedEngine) -> None:
    id = (await ask(harness)).json()["id"]
    assert (await harness.get(Turn, id)).length_penalty is None
    assert (await harness.api.get(f"/v1/chat/completions/{id}")).json()["choices"][0]["length_penalty"] is None
    found = await page(harness)
    names = ("attune_length_penalty_mean", "attune_response_length_p95", "attune_replies_out_of_range_total")
    assert [found.named(name) for name in names] == [{}, {}, {}]


async def test_a_reply_that_broke_off_has_no_length_to_judge(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.die_after = 1
    async with calling(harness, length_range=(4, 8)) as told:
        await ask(told, stream=True)
        found = await page(told)
    [turn] = await harness.all(Turn)
    assert (turn.state, turn.length_penalty) == ("failed", None)
    assert found.named("attune_length_penalty_mean") == {}


async def test_the_three_figures_are_those_of_the_replies(harness: Harness, scripted: ScriptedEngine) -> None:
    async with calling(harness, length_range=(2, 6)) as told:
        for words in ("a b c", "a b c d e f g", "a b c d e f g h i"):  # 4, 8 and 10 tokens: 0, (2 / 4)² and (4 / 4)²
            scripted.say = words
            await ask(told)
        await harness.version(metrics={"reward_shaping/ratio": 0.1})
        found = await page(told)
    assert found("attune_length_penalty_mean", **SHOP) == pytest.approx((0 + 0.25 + 1) / 3)
    assert found("attune_response_length_p95", **SHOP) == 10
    assert found("attune_replies_out_of_range_total", **SHOP) == 2
    assert found("attune_reward_shaping_ratio", **SHOP) == 0.1


def test_the_window_is_the_last_thousand_and_the_count_is_of_all() -> None:
    telemetry = Telemetry()
    for _ in range(10):
        telemetry.ended("pol-1", "done", 500, -1.0)
    for length in range(1, 1001):
        telemetry.ended("pol-1", "done", length, 0.0)
    lengths = telemetry.lengths["pol-1"]
    assert (lengths.mean_penalty, lengths.p95, lengths.out_of_range) == (0.0, 950, 10)
    assert str(lengths.mean_penalty) == "0.0", "and not -0.0"


@pytest.mark.parametrize(("lengths", "p95"), [([7], 7), ([1, 2], 2), ([*range(1, 21)], 19), ([5] * 19 + [90], 5)])
def test_p95_is_the_shortest_length_that_95_of_100_do_not_exceed(lengths: list[int], p95: int) -> None:
    window = Lengths()
    for length in lengths:
        window.add(length, 0.0)
    assert window.p95 == p95


async def test_two_policies_are_measured_apart(harness: Harness) -> None:
    telemetry = Telemetry()
    told: list[tuple[str, Any]] = [("pol-1", -0.5), ("pol-2", 0.0), ("pol-1", -0.1)]
    for policy, penalty in told:
        telemetry.ended(policy, "done", 10, penalty)
    assert telemetry.lengths["pol-1"].mean_penalty == pytest.approx(0.3)
    assert telemetry.lengths["pol-2"].mean_penalty == 0
