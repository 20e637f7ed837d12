"""Replies out of the length range: their penalty is that of the trainer, and it is stored, shown and counted."""

from typing import Any

import pytest

from alignment.signals.rules import length_penalty
from app.core.telemetry import LengthWindow, Telemetry
from app.models import Turn
from tests.app.chat.test_endpoints import ask, chunks
from tests.support.deployment import Harness
from tests.support.metrics_requests import page, serve_with_settings
from tests.support.parquet_files import read_rows
from tests.support.scripted_engine import ScriptedEngine

SHOP = {"project": "default", "policy": "shop"}
WORDS = "one two three four five six seven eight nine ten eleven"  # twelve tokens with the end of the turn


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_that_is_too_long_is_stored_with_its_penalty(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.reply_text = WORDS
    async with serve_with_settings(harness, length_range=(4, 8)) as range_harness:
        answer = await ask(range_harness, stream=stream)
        id = chunks(answer)[0]["id"] if stream else answer.json()["id"]
        stored = (await range_harness.api.get(f"/v1/chat/completions/{id}")).json()
        [row] = read_rows(await range_harness.api.get("/v1/exports/turns"))
    turn: Turn = await harness.get(Turn, id)
    assert turn.num_output_tokens == 12
    assert turn.length_penalty == length_penalty(12, 4, 8) == -1.0
    assert stored["choices"][0]["length_penalty"] == row["length_penalty"] == -1.0


async def test_each_choice_has_its_own_penalty_and_none_in_range(harness: Harness, scripted: ScriptedEngine) -> None:
    async with serve_with_settings(harness, length_range=(2, 6)) as range_harness:
        await ask(range_harness, n=2)  # eight tokens each: (2 / 4)²
        await ask(range_harness, max_tokens=5)
    penalties = sorted(turn.length_penalty for turn in await harness.all(Turn))
    assert penalties == [-0.25, -0.25, 0.0]


async def test_without_a_range_there_is_no_penalty(harness: Harness, scripted: ScriptedEngine) -> None:
    id = (await ask(harness)).json()["id"]
    assert (await harness.get(Turn, id)).length_penalty is None
    assert (await harness.api.get(f"/v1/chat/completions/{id}")).json()["choices"][0]["length_penalty"] is None
    samples = await page(harness)
    names = ("attune_length_penalty_mean", "attune_response_length_p95", "attune_replies_out_of_range_total")
    assert [samples.by_name(name) for name in names] == [{}, {}, {}]


async def test_unfinished_reply_has_no_penalty(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.drop_after_tokens = 1
    async with serve_with_settings(harness, length_range=(4, 8)) as range_harness:
        await ask(range_harness, stream=True)
        samples = await page(range_harness)
    [turn] = await harness.all(Turn)
    assert (turn.state, turn.length_penalty) == ("failed", None)
    assert samples.by_name("attune_length_penalty_mean") == {}


async def test_length_metrics_are_those_of_the_replies(harness: Harness, scripted: ScriptedEngine) -> None:
    async with serve_with_settings(harness, length_range=(2, 6)) as range_harness:
        for reply in ("a b c", "a b c d e f g", "a b c d e f g h i"):  # 4, 8 and 10 tokens: 0, (2 / 4)² and (4 / 4)²
            scripted.reply_text = reply
            await ask(range_harness)
        await harness.version(metrics={"reward_shaping/ratio": 0.1})
        samples = await page(range_harness)
    assert samples("attune_length_penalty_mean", **SHOP) == pytest.approx((0 + 0.25 + 1) / 3)
    assert samples("attune_response_length_p95", **SHOP) == 10
    assert samples("attune_replies_out_of_range_total", **SHOP) == 2
    assert samples("attune_reward_shaping_ratio", **SHOP) == 0.1


def test_window_holds_the_last_thousand_replies_and_the_count_all() -> None:
    telemetry = Telemetry()
    for _ in range(10):
        telemetry.record_turn("pol-1", "done", 500, -1.0)
    for length in range(1, 1001):
        telemetry.record_turn("pol-1", "done", length, 0.0)
    lengths = telemetry.lengths["pol-1"]
    assert (lengths.mean_penalty, lengths.p95, lengths.out_of_range) == (0.0, 950, 10)
    assert str(lengths.mean_penalty) == "0.0", "0.0, not -0.0"


@pytest.mark.parametrize(("lengths", "p95"), [([7], 7), ([1, 2], 2), ([*range(1, 21)], 19), ([5] * 19 + [90], 5)])
def test_p95_is_the_shortest_length_that_95_percent_do_not_exceed(lengths: list[int], p95: int) -> None:
    window = LengthWindow()
    for length in lengths:
        window.add(length, 0.0)
    assert window.p95 == p95


async def test_policies_are_measured_separately(harness: Harness) -> None:
    telemetry = Telemetry()
    turns: list[tuple[str, Any]] = [("pol-1", -0.5), ("pol-2", 0.0), ("pol-1", -0.1)]
    for policy, penalty in turns:
        telemetry.record_turn(policy, "done", 10, penalty)
    assert telemetry.lengths["pol-1"].mean_penalty == pytest.approx(0.3)
    assert telemetry.lengths["pol-2"].mean_penalty == 0
