"""Consent: a turn without it is neither judged nor trained on."""

from typing import Any

import pytest

from app.models import Batch, Judgement, Reward, Sample, SampleState, Turn
from tests.app.chat.test_endpoints import ask
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate
from workers.training.assemble import assemble

REWARDS = {"sources": [{"type": "explicit"}, {"type": "rule", "name": "tools", "function": "tool_outcome"}]}


async def chat_without_consent(harness: Harness, by: str) -> None:
    """Create four turns without consent, each with feedback."""
    headers: dict[str, str] = {}
    fields: dict[str, Any] = {}
    if by == "project":
        assert (await harness.api.patch("/v1/project", json={"train": False})).status_code == 200
    elif by == "key":
        key = (await harness.api.post("/v1/keys", json={"train": False})).json()["key"]
        headers = {"authorization": f"Bearer {key}"}
    else:
        fields = {"metadata": {"attune_train": "false"}}
    for number in range(4):
        body = {"model": "shop", "messages": [{"role": "user", "content": f"hi {number}"}], **fields}
        answer = await harness.api.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        await harness.vote(answer.json()["id"], "up" if number % 2 else "down", source={"id": f"u{number}"})


@pytest.mark.parametrize("by", ["project", "key", "request"])
async def test_turns_without_consent_are_neither_judged_nor_trained_on(
    harness: Harness, scripted: ScriptedEngine, by: str
) -> None:
    assert (await harness.api.put("/v1/policies/shop/rewards", json=REWARDS)).status_code == 200
    await chat_without_consent(harness, by)
    settings = harness.settings.replace(
        {"trainer.batch_size": 2, "trainer.max_batch_size": 2, "raters.max_rater_share": 1.0}
    )
    await curate(harness.db, settings)
    assert await assemble(harness.db, settings) == 0
    assert await harness.all(Judgement) == await harness.all(Batch) == []
    assert {row.exclusion_reason for row in await harness.all(Turn)} == {"no consent to train"}
    samples = await harness.all(Sample)
    assert {(row.state, row.reason) for row in samples} == {(SampleState.DROPPED, "no consent to train")}
    assert len(await harness.all(Reward)) == len(samples) == 4  # the feedback is recorded all the same


async def test_turns_with_consent_are_judged_and_trained_on(harness: Harness, scripted: ScriptedEngine) -> None:
    await harness.api.put("/v1/policies/shop/rewards", json=REWARDS)
    for number in range(4):
        id = (await ask(harness, messages=[{"role": "user", "content": f"hi {number}"}])).json()["id"]
        await harness.vote(id, "up" if number % 2 else "down", source={"id": f"u{number}"})
    settings = harness.settings.replace(
        {
            "trainer.batch_size": 2,
            "trainer.max_batch_size": 2,
            "raters.max_rater_share": 1.0,
            "raters.max_cluster_share": 1.0,
            "raters.max_conversation_share": 1.0,
        }
    )
    await curate(harness.db, settings)
    assert len(await harness.all(Judgement)) == 4
    assert await assemble(harness.db, settings) == 1


async def test_consent_withdrawn_before_a_batch_is_frozen_excludes_the_turn(
    harness: Harness, scripted: ScriptedEngine
) -> None:
    id = (await ask(harness)).json()["id"]
    await harness.vote(id)
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, id)).state == SampleState.OPEN
    await harness.api.post(f"/v1/chat/completions/{id}", json={"metadata": {"attune_train": "false"}})
    await harness.vote(id, "down", source={"id": "bob"})
    await curate(harness.db, harness.settings)
    assert (await harness.get(Sample, id)).state == SampleState.DROPPED
