"""Learning in the console: the one sentence, the funnel, the controls."""

from typing import Any

import pytest

from app.models import Audit, LearningMode, RaterStanding, Sample
from app.raters.service import set_standing
from tests.support.console import sign_in
from tests.support.deployment import Harness
from tests.support.settings import change_in_place
from tests.support.updates import rate, release, train


async def test_sentence_names_what_is_missing_and_the_setting_that_decides_it(harness: Harness) -> None:
    client = await sign_in(harness, "viewer")
    text = await client.text("learning")
    assert "It cannot learn yet No vote has come in yet." in text
    await rate(harness, "+")
    text = await client.text("learning")
    assert "It has not learned yet 1 more ready samples. What would change it: trainer.min_batch_size" in text
    assert "ATTUNE_TRAINER__MIN_BATCH_SIZE" in text
    change_in_place(harness.settings, {"min_raters": 5, "batch_size": 4})
    await rate(harness, "-+")
    text = await client.text("learning")
    assert "2 more raters. What would change it: raters.min_raters , now 5" in text


async def test_every_vote_is_in_the_funnel(harness: Harness) -> None:
    await rate(harness, "++++----")
    version = await train(harness)
    turn = await harness.turn(exclusion_reason="no consent to train")
    await harness.vote(turn.id)
    await rate(harness, "+")
    client = await sign_in(harness)
    text = await client.text("learning")
    assert "10 votes 100 %" in text and "9 can be learned from 90 % 1 excluded" in text
    assert "8 in an update 80 %" in text and "0 in a released version 0 % 8 release" in text
    await release(harness, version)
    text = await client.text("learning")
    assert "8 in a released version 80 %" in text and "trained" in text


async def test_learning_is_paused_resumed_and_triggered_with_a_reason(harness: Harness) -> None:
    client = await sign_in(harness, "operator")

    async def control(name: str, **fields: Any) -> int:
        form = {"policy": "shop", "control": name, "reason": "an incident", **fields}
        return (await client.post("learning/control", form)).status_code

    assert await control("pause") == 303
    assert (await harness.policy()).mode == LearningMode.HALTED
    text = await client.text("learning")
    assert "Learning is halted an incident" in text and "Resume learning" in text
    assert "Learning is halted: an incident." in await client.text(), "the overview says it too"
    assert await control("trigger") == 409
    assert await control("resume") == 303 and await control("trigger") == 303
    assert await control("pause", reason="") == 400 and await control("stop") == 400
    actions = [row.action for row in await harness.all(Audit) if row.action.startswith("training.")]
    assert actions == ["training.halted", "training.asynchronous", "training.triggered"]


async def test_rater_in_quarantine_is_released_or_blocked(harness: Harness) -> None:
    await rate(harness, "++", rater="mallory")
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        await set_standing(session, project_id, "HUMAN/mallory", RaterStanding.QUARANTINED, "a flood", actor="test")
    client = await sign_in(harness, "operator")
    assert "HUMAN/mallory" in await client.text("learning")
    form = {"policy": "shop", "rater": "HUMAN/mallory", "standing": "blocked", "reason": "a flood"}
    await client.post("learning/rater", form)
    assert {sample.state for sample in await harness.all(Sample)} == {"dropped"}
    assert "HUMAN/mallory is blocked; 2 rated replies" in await client.text("learning")


@pytest.mark.parametrize("role", ["viewer", "viewer:content"])
async def test_others_cannot_control_learning(harness: Harness, role: str) -> None:
    client = await sign_in(harness, role)
    assert "Pause learning" not in await client.text("learning")
    form = {"policy": "shop", "control": "pause", "reason": "x"}
    assert (await client.post("learning/control", form)).status_code == 403
    assert (await harness.policy()).mode == LearningMode.ASYNCHRONOUS
