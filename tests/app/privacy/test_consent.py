"""Consent: without it nobody is asked about a turn, and nothing is learned from it, whatever is said of it."""

from typing import Any

import pytest

from app.models import Batch, Judgement, Reward, Sample, SampleState, Turn
from tests.app.chat.test_endpoints import ask
from tests.support.deployment import Ring
from tests.support.scripted_engine import ScriptedEngine
from workers.feedback.curate import curate
from workers.training.assemble import assemble

REWARDS = {"sources": [{"type": "explicit"}, {"type": "rule", "name": "tools", "function": "tool_outcome"}]}


async def refused(ring: Ring, by: str) -> None:
    """Four replies without consent, each liked or not."""
    headers: dict[str, str] = {}
    fields: dict[str, Any] = {}
    if by == "project":
        assert (await ring.api.patch("/v1/project", json={"train": False})).status_code == 200
    elif by == "key":
        key = (await ring.api.post("/v1/keys", json={"train": False})).json()["key"]
        headers = {"authorization": f"Bearer {key}"}
    else:
        fields = {"metadata": {"attune_train": "false"}}
    for number in range(4):
        body = {"model": "shop", "messages": [{"role": "user", "content": f"hi {number}"}], **fields}
        answer = await ring.api.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        await ring.thumb(answer.json()["id"], "up" if number % 2 else "down", source={"id": f"u{number}"})


@pytest.mark.parametrize("by", ["project", "key", "request"])
async def test_what_was_refused_is_neither_judged_nor_learned_from(
    ring: Ring, scripted: ScriptedEngine, by: str
) -> None:
    assert (await ring.api.put("/v1/policies/shop/rewards", json=REWARDS)).status_code == 200
    await refused(ring, by)
    settings = ring.settings.model_copy(update={"batch_size": 2, "max_rater_share": 1.0})
    await curate(ring.db, settings)
    assert await assemble(ring.db, settings) == 0
    assert await ring.all(Judgement) == await ring.all(Batch) == []
    assert {row.flaw for row in await ring.all(Turn)} == {"no consent to train"}
    samples = await ring.all(Sample)
    assert {(row.state, row.reason) for row in samples} == {(SampleState.DROPPED, "no consent to train")}
    assert len(await ring.all(Reward)) == len(samples) == 4  # what people said is on record all the same


async def test_the_same_turns_with_consent_are_judged_and_learned_from(ring: Ring, scripted: ScriptedEngine) -> None:
    await ring.api.put("/v1/policies/shop/rewards", json=REWARDS)
    for number in range(4):
        id = (await ask(ring, messages=[{"role": "user", "content": f"hi {number}"}])).json()["id"]
        await ring.thumb(id, "up" if number % 2 else "down", source={"id": f"u{number}"})
    settings = ring.settings.model_copy(
        update={"batch_size": 2, "max_rater_share": 1.0, "max_cluster_share": 1.0, "max_conversation_share": 1.0}
    )
    await curate(ring.db, settings)
    assert len(await ring.all(Judgement)) == 4
    assert await assemble(ring.db, settings) == 1


async def test_consent_that_is_taken_back_before_a_batch_is_frozen_holds(ring: Ring, scripted: ScriptedEngine) -> None:
    id = (await ask(ring)).json()["id"]
    await ring.thumb(id)
    await curate(ring.db, ring.settings)
    assert (await ring.get(Sample, id)).state == SampleState.OPEN
    await ring.api.post(f"/v1/chat/completions/{id}", json={"metadata": {"attune_train": "false"}})
    await ring.thumb(id, "down", source={"id": "bob"})
    await curate(ring.db, ring.settings)
    assert (await ring.get(Sample, id)).state == SampleState.DROPPED
