"""From a correction to the pair in a batch: what a batch has of it, and what takes its text out again."""

from typing import Any

import pytest

from alignment.corrected_text import TextRule
from app.models import Batch, BatchState, Feedback, Sample, SampleState, Turn, Version
from tests.support.deployment import Harness
from tests.support.settings import by_path
from tests.support.updates import TRAINED, claim_next_batch, rate, release, roll_back, samples_by_turn, trained_without
from workers.curate import curate
from workers.training import batch_claims, batches
from workers.training.assemble import assemble

TEXT = "hello, and welcome"


async def correct(harness: Harness, turn: Turn, text: str = TEXT, rater: str | None = "ada", **fields: Any) -> str:
    """Send a correction of a reply, and return its id."""
    source = {} if rater is None else {"source": {"kind": "HUMAN", "id": rater}}
    body = {"completion_id": turn.id, "kind": "correction", "value": text, **source, **fields}
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def correct_many(harness: Harness, count: int, **values: Any) -> list[Turn]:
    """Create replies that are corrected, each by another person."""
    turns = [await harness.turn(**values) for _ in range(count)]
    for number, turn in enumerate(turns):
        await correct(harness, turn, f"{TEXT} {number}", rater=f"person-{number}")
    return turns


async def head_of(harness: Harness) -> Version:
    version: Version = await harness.get(Version, (await harness.policy()).head_version_id)
    return version


async def read_outcome(harness: Harness, id: str) -> dict[str, Any]:
    outcome: dict[str, Any] = (await harness.api.get(f"/v1/feedback/{id}")).json()["outcome"]
    return outcome


def pairs(claimed: batch_claims.ClaimedBatch) -> list[tuple[str, str, str]]:
    return sorted((one.sample.turn_id, one.reply, one.text) for one in claimed.batch.corrected)


async def test_a_batch_of_corrections_needs_no_contrast(harness: Harness) -> None:
    turns = await correct_many(harness, 4)
    claimed = await claim_next_batch(harness, trainer__batch_size=4)
    assert {sample.turn_id for sample in claimed.batch.samples} == {turn.id for turn in turns}
    assert pairs(claimed) == sorted((turn.id, "hello", f"{TEXT} {number}") for number, turn in enumerate(turns))
    [output_ids] = {one.sample.output_ids for one in claimed.batch.corrected}
    assert output_ids == (4, 5)


async def test_corrected_replies_are_compared_with_approved_ones(harness: Harness) -> None:
    approved = await rate(harness, "+++")
    [turn] = await correct_many(harness, 1)
    claimed = await claim_next_batch(harness, trainer__batch_size=4)
    rewards = {sample.turn_id: sample.reward for sample in claimed.batch.samples}
    assert rewards == dict.fromkeys(approved, 1.0) | {turn.id: -0.5}
    assert pairs(claimed) == [(turn.id, "hello", f"{TEXT} 0")]


async def test_without_contrast_corrected_replies_are_a_batch_alone(harness: Harness) -> None:
    for _ in range(4):  # rewards of -0.5, like those of corrected replies
        turn = await harness.turn()
        await harness.api.post("/v1/feedback", json={"completion_id": turn.id, "kind": "score", "value": -0.5})
    settings = harness.settings.replace(by_path({"trainer__batch_size": 3, "trainer__min_batch_size": 3}))
    turns = await correct_many(harness, 2)
    await curate(harness.db, settings)
    assert await assemble(harness.db, settings) == 0, "two corrections are too few for an update"
    turns += await correct_many(harness, 1)
    claimed = await claim_next_batch(harness, trainer__batch_size=3)
    assert {sample.turn_id for sample in claimed.batch.samples} == {turn.id for turn in turns}
    assert {one[0] for one in pairs(claimed)} == {turn.id for turn in turns}


async def test_a_reply_with_a_vote_as_well_keeps_the_reward_of_both(harness: Harness) -> None:
    await rate(harness, "+-+")
    turn = await harness.turn()
    await correct(harness, turn)
    await harness.vote(turn.id, "down", source={"id": "ada"})
    claimed = await claim_next_batch(harness, trainer__batch_size=4)
    [reward] = [sample.reward for sample in claimed.batch.samples if sample.turn_id == turn.id]
    assert reward == -0.75 and pairs(claimed) == [(turn.id, "hello", TEXT)]


async def test_algorithms_that_compare_replies_learn_from_a_single_corrected_reply(harness: Harness) -> None:
    dpo = {"algorithm": {"type": "dpo"}, "trainer.batch_size": 2, "trainer.max_wait_seconds": 0.0}
    harness.settings = harness.settings.replace(dpo)
    await correct_many(harness, 2)
    await rate(harness, "+-")  # they wait for other replies to their prompts
    claimed = await claim_next_batch(harness)
    assert len(claimed.batch.samples) == len(claimed.batch.corrected) == 2


async def test_the_latest_correction_of_a_person_replaces_the_earlier_ones(harness: Harness) -> None:
    turns = await correct_many(harness, 2)
    await correct(harness, turns[0], "hello there", rater="person-0")
    await correct(harness, turns[1], f"{TEXT} 1", rater="person-1")  # the same once more
    claimed = await claim_next_batch(harness, trainer__batch_size=2)
    assert pairs(claimed) == sorted([(turns[0].id, "hello", "hello there"), (turns[1].id, "hello", f"{TEXT} 1")])


async def test_several_people_correct_a_reply_and_weigh_at_most_as_much_as_one_sample(harness: Harness) -> None:
    turns = await correct_many(harness, 2)
    for number in range(6):
        await correct(harness, turns[0], f"{TEXT} from {number}", rater=f"more-{number}")
    claimed = await claim_next_batch(harness, trainer__batch_size=2)
    weights: dict[str, list[float]] = {}
    for one in claimed.batch.corrected:
        weights.setdefault(one.sample.turn_id, []).append(one.weight)
    assert len(weights[turns[0].id]) == 7 and sum(weights[turns[0].id]) == pytest.approx(1.0)
    assert len(weights[turns[1].id]) == 1 and weights[turns[1].id][0] <= 1.0


@pytest.mark.parametrize(
    ("text", "values", "rule"),
    [
        ("hello \n", {}, TextRule.SAME_TEXT),
        ("hello " * 200, {}, TextRule.TOO_LONG),
        ("hello you", {"reply": {"role": "assistant", "content": None, "tool_calls": [{}]}}, TextRule.NOT_TEXT),
    ],
)
async def test_a_text_that_cannot_be_used_counts_by_its_reward_and_says_so(
    harness: Harness, text: str, values: dict[str, Any], rule: TextRule
) -> None:
    await rate(harness, "+++")
    turn = await harness.turn(**values)
    id = await correct(harness, turn, text)
    claimed = await claim_next_batch(harness, trainer__batch_size=4)
    assert claimed.batch.corrected == () and len(claimed.batch.samples) == 4
    assert await batches.commit(harness.db, claimed, TRAINED)
    await release(harness, await head_of(harness))
    outcome = await read_outcome(harness, id)
    assert (outcome["state"], outcome["text_rule"]) == ("learned", rule)
    assert "Its text is not learned from" in outcome["sentence"]


async def test_a_correction_of_a_whole_conversation_says_that_its_text_is_not_used(harness: Harness) -> None:
    await harness.turn(conversation_id="c")
    body = {"target": {"conversation_id": "c"}, "kind": "correction", "value": TEXT}
    id = (await harness.api.post("/v1/feedback", json=body)).json()["id"]
    await curate(harness.db, harness.settings)
    assert (await read_outcome(harness, id))["text_rule"] == TextRule.WHOLE_CONVERSATION
    assert [sample.is_corrected for sample in await harness.all(Sample)] == [False]


@pytest.mark.parametrize("value", ["", "  \n"])
async def test_an_empty_correction_is_refused(harness: Harness, value: str) -> None:
    turn = await harness.turn()
    body = {"completion_id": turn.id, "kind": "correction", "value": value}
    response = await harness.api.post("/v1/feedback", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "value"


async def test_the_outcome_follows_the_pair_through_batch_release_and_rollback(harness: Harness) -> None:
    turns = await correct_many(harness, 2)
    id = (await harness.all(Feedback))[0].id
    assert (await read_outcome(harness, id))["waiting_for"] == "processing"
    claimed = await claim_next_batch(harness, trainer__batch_size=2)
    assert (await read_outcome(harness, id))["waiting_for"] == "training"
    assert await batches.commit(harness.db, claimed, TRAINED)
    assert (await read_outcome(harness, id))["waiting_for"] == "release"
    await release(harness, await head_of(harness))
    outcome = await read_outcome(harness, id)
    assert (outcome["state"], outcome["version"], outcome["text_rule"]) == ("learned", "shop@v1", None)
    votes = (await harness.api.get("/v1/policies/shop/votes")).json()
    assert votes["people"]["learned"] == 2
    await roll_back(harness, 0)
    await curate(harness.db, harness.settings)
    samples = await samples_by_turn(harness)
    assert [(samples[turn.id].state, samples[turn.id].is_corrected) for turn in turns] == [(SampleState.OPEN, True)] * 2


async def test_what_the_trainer_finds_unusable_is_recorded(harness: Harness) -> None:
    await correct_many(harness, 2)
    claimed = await claim_next_batch(harness, trainer__batch_size=2)
    unused = claimed.batch.corrected[0].id
    assert await batches.commit(harness.db, claimed, trained_without(unused_texts={unused: TextRule.OTHER_TOKENS}))
    assert (await read_outcome(harness, unused))["text_rule"] == TextRule.OTHER_TOKENS
    assert (await read_outcome(harness, claimed.batch.corrected[1].id))["text_rule"] is None


async def test_a_withdrawn_correction_is_not_in_a_batch(harness: Harness) -> None:
    turns = await correct_many(harness, 3)
    id = (await harness.all(Feedback))[0].id
    await curate(harness.db, harness.settings)
    assert [(await samples_by_turn(harness))[turn.id].is_corrected for turn in turns] == [True] * 3
    assert (await harness.api.delete(f"/v1/feedback/{id}")).status_code == 200
    await harness.vote(turns[0].id, "up", source={"id": "person-0"})
    claimed = await claim_next_batch(harness, trainer__batch_size=3)
    assert {one[0] for one in pairs(claimed)} == {turn.id for turn in turns[1:]}
    assert turns[0].id in {sample.turn_id for sample in claimed.batch.samples}


async def test_the_erasure_of_a_rater_takes_the_text_out_of_a_batch(harness: Harness) -> None:
    turns = await correct_many(harness, 3)
    claimed = await claim_next_batch(harness, trainer__batch_size=3)
    assert len(claimed.batch.corrected) == 3
    assert (await harness.api.delete("/v1/subjects/person-0")).status_code == 200
    assert (await harness.get(Batch, claimed.row.id)).state == BatchState.REFUSED
    again = await claim_next_batch(harness, trainer__batch_size=2)
    assert {one[0] for one in pairs(again)} == {turn.id for turn in turns[1:]}
    assert f"{TEXT} 0" not in repr(again.batch)


async def test_corrections_wait_without_consent(harness: Harness) -> None:
    await correct_many(harness, 2)
    assert (await harness.api.patch("/v1/project", json={"train": False})).status_code == 200
    await curate(harness.db, harness.settings)
    settings = harness.settings.replace(by_path({"trainer__batch_size": 2}))
    assert await assemble(harness.db, settings) == 0
    assert (await read_outcome(harness, (await harness.all(Feedback))[0].id))["waiting_for"] == "consent"


async def test_an_excluded_reply_gives_no_pair(harness: Harness) -> None:
    turn = await harness.turn(exclusion_reason="greedy sampling")
    id = await correct(harness, turn)
    await correct_many(harness, 2)
    claimed = await claim_next_batch(harness, trainer__batch_size=2)
    assert turn.id not in {one[0] for one in pairs(claimed)}
    assert (await read_outcome(harness, id))["rule"] == "excluded"


async def test_without_a_reward_for_corrections_nothing_is_learned(harness: Harness) -> None:
    config = {"sources": [{"type": "explicit", "correction": None}]}
    assert (await harness.api.put("/v1/policies/shop/rewards", json=config)).status_code == 200
    turn = await harness.turn()
    id = await correct(harness, turn)
    await curate(harness.db, harness.settings)
    assert (await read_outcome(harness, id))["rule"] == "no_reward" and await harness.all(Sample) == []


async def test_one_person_gives_no_more_corrections_to_a_batch_than_votes(harness: Harness) -> None:
    for _ in range(20):
        await correct(harness, await harness.turn(), rater="busy")
    await correct_many(harness, 7)
    sizes = {"trainer__batch_size": 8, "trainer__max_batch_size": 8, "raters__max_rater_share": 0.25}
    claimed = await claim_next_batch(harness, **sizes, raters__trust=False)
    mine = [one for one in claimed.batch.corrected if one.text == TEXT]
    assert (len(mine), len(claimed.batch.corrected)) == (2, 8)
