"""From turn to sample: what a reward model makes of replies that nobody has judged, with a trainer in this process."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment.reward_model.dataset import PreferenceDataset
from app.models import (
    ApiKey,
    Judgement,
    JudgementState,
    Reward,
    RewardModel,
    RewardModelState,
    Sample,
    SampleState,
    Turn,
)
from tests.support.deployment import Harness
from tests.support.human_feedback import DISPLEASES, PLEASES, learning, model, said, spoken
from tests.support.judgements import due
from tests.workers.training.test_loop import Rank
from workers.context import WorkerContext
from workers.feedback.curate import curate
from workers.judging.judge import judge
from workers.judging.sources import reward_model
from workers.reconcile import reconcile
from workers.training import batches, loop
from workers.training.ranks import Broken, Group


@pytest.fixture
async def rank(harness: Harness) -> AsyncIterator[Rank]:
    settings = learning(harness, window_seconds=3600, refit_after=1000)
    with ThreadPoolExecutor(1) as thread:
        group = await asyncio.get_running_loop().run_in_executor(thread, Group, settings)
        rank = Rank(WorkerContext(settings), group, thread)
        yield rank
        thread.submit(lambda: rank.house.run(rank.house.db.close())).result()


async def replied(harness: Harness, end: int, **values: Any) -> Turn:
    return await harness.turn(prompt_ids=[310, 320, 330], output_ids=[340, end], **values)


def answering(rank: Rank, value: float = 0.8) -> list[int]:
    """Scores that a model would give, without one; and how many replies were asked about each time."""
    asked: list[int] = []

    def lead(order: dict[str, Any]) -> dict[str, Any]:
        count = len(PreferenceDataset.from_bytes(order["replies"]).replies)
        asked.append(count)
        return {"values": [value] * count}

    rank.group.lead = lead  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_from_words_to_a_model_to_rewards_to_samples_to_silence(harness: Harness, rank: Rank) -> None:
    settings = rank.house.settings
    await spoken(harness, 160)
    await reconcile(harness.db, settings)
    assert await rank.work() == 1
    [row] = await harness.all(RewardModel)
    assert (row.state, row.reason) == ("serving", None)
    assert row.metrics["agreement"] > 0.8 and row.metrics["num_thumbs"] == 160
    directory = Path(row.path)
    assert directory.parent.parent == settings.reward_models_dir and directory.name == "rm-1.1"

    good, bad = await replied(harness, PLEASES), await replied(harness, DISPLEASES)
    await curate(harness.db, settings)
    assert await judge(harness.db, settings, "judge") == 0, "the judges leave it to the trainer"
    assert await rank.work() == 1 + (reward_model.AT_ONCE < 160) * 2  # the turns that people judged are scored as well
    told = {one.turn_id: one for one in await harness.all(Judgement)}
    assert told[good.id].state == told[bad.id].state == JudgementState.DONE
    assert told[good.id].value > 0 > told[bad.id].value
    assert told[good.id].details["reward_model"] == row.id
    rewards = {one.turn_id: one for one in await harness.all(Reward) if one.origin == "learned"}
    assert rewards[good.id].value == told[good.id].value and rewards[good.id].rater is None
    samples = {one.turn_id: one for one in await harness.all(Sample)}
    assert samples[good.id].reward == told[good.id].value and samples[good.id].state == SampleState.OPEN
    assert samples[good.id].ready_at < told[good.id].settled_at + 5, "every source has spoken: it need not wait"

    # Tastes change: people now say the contrary of what it learned.
    turns = [await replied(harness, PLEASES if number % 2 else DISPLEASES) for number in range(40)]
    await curate(harness.db, settings)
    await rank.work()
    for number, turn in enumerate(turns):
        await said(harness, turn, -1.0 if number % 2 else 1.0, f"later-{number}")
    await reconcile(harness.db, settings)
    states = {one.number: one.state for one in await harness.all(RewardModel)}
    assert states == {1: "disabled", 2: "open"}
    last = await replied(harness, PLEASES)
    await curate(harness.db, settings)
    await rank.work()
    told = {one.turn_id: one for one in await harness.all(Judgement)}
    assert told[last.id].state == JudgementState.SKIPPED or told[last.id].details["number"] == 2


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_batch_does_not_wait_for_a_fit(harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    await spoken(harness, 160)
    await reconcile(harness.db, rank.house.settings)
    heard: list[str] = []
    obey, batch = rank.group.obey, SimpleNamespace(adapter_name="shop-v1")

    def obeyed(order: dict[str, Any]) -> dict[str, Any]:
        heard.append(order["do"])
        return obey(order)

    async def claim(*given: Any) -> Any:  # a batch comes when the fit has made its first steps
        return batch if heard.count("advance") == 1 and "batch" not in heard else None

    monkeypatch.setattr(rank.group, "obey", obeyed)
    monkeypatch.setattr(batches, "claim", claim)
    monkeypatch.setattr(loop, "train", lambda *given: heard.append("batch"))
    assert await rank.work() == 1
    assert heard[:4] == ["begin", "advance", "batch", "advance"] and heard[-1] == "finish"
    assert [row.state for row in await harness.all(RewardModel)] == ["serving"]


async def test_without_one_that_serves_nobody_waits(harness: Harness, rank: Rank) -> None:
    turn = await replied(harness, PLEASES)
    await curate(harness.db, rank.house.settings)
    assert await rank.work() == 1
    [told] = await harness.all(Judgement)
    assert (told.turn_id, told.state, told.reason) == (turn.id, JudgementState.SKIPPED, reward_model.NONE_SERVES)
    await model(harness, RewardModelState.DISABLED, reason="it is odd")
    await replied(harness, PLEASES)
    await curate(harness.db, rank.house.settings)
    assert await rank.work() == 1
    assert {one.reason for one in await harness.all(Judgement)} == {
        reward_model.NONE_SERVES,
        "the reward model is silenced: it is odd",
    }


async def test_many_turns_are_scored_at_once_and_those_that_may_not_be_are_not(harness: Harness, rank: Rank) -> None:
    await model(harness)
    asked = answering(rank)
    async with harness.db.write() as session:
        policy = await harness.policy()
        key = ApiKey(id="key-1", project_id=policy.project_id, prefix="p", sha256="x", scopes=["chat"], train=False)
        session.add(key)
    turns = [await replied(harness, PLEASES) for _ in range(5)]
    silent = await replied(harness, PLEASES, key_id="key-1")
    unread = await replied(harness, PLEASES)
    own = await replied(harness, PLEASES)
    await curate(harness.db, rank.house.settings)
    async with harness.db.write() as session:
        (await session.get_one(Turn, unread.id)).output_ids = None
        (await session.get_one(Turn, own.id)).deleted_at = 1.0
    assert await rank.work() == 1
    assert asked == [5]
    told = {one.turn_id: (one.state, one.reason) for one in await harness.all(Judgement)}
    assert {told[turn.id] for turn in turns} == {("done", None)}
    assert told[silent.id] == ("skipped", "no consent to train")
    assert told[unread.id] == ("skipped", "there is no reply to judge")
    assert told[own.id] == ("skipped", "the turn is deleted")
    assert {one.turn_id for one in await harness.all(Reward)} == {turn.id for turn in turns}


async def test_a_person_who_says_the_contrary_is_the_one_who_counts(harness: Harness, rank: Rank) -> None:
    await model(harness)
    answering(rank, 0.9)
    turn = await replied(harness, PLEASES)
    assert (await harness.thumb(turn.id, "down")).status_code == 201
    await curate(harness.db, rank.house.settings)
    await rank.work()
    [sample] = await harness.all(Sample)
    assert sample.reward == -1.0
    assert (await harness.thumb(turn.id, "up")).status_code == 201
    await curate(harness.db, rank.house.settings)
    [sample] = await harness.all(Sample)
    assert 0.9 < sample.reward < 1.0


async def test_what_takes_the_trainer_down_is_taken_again_alone_and_given_up_in_the_end(
    harness: Harness, rank: Rank
) -> None:
    await model(harness)
    settings = rank.house.settings
    turns = [await replied(harness, PLEASES) for _ in range(3)]
    await curate(harness.db, settings)
    asked: list[int] = []

    def lead(order: dict[str, Any]) -> dict[str, Any]:
        replies = PreferenceDataset.from_bytes(order["replies"]).replies
        asked.append(len(replies))
        if any(reply.turn_id == turns[0].id for reply in replies):
            raise Broken("MemoryError: no more")
        return {"values": [0.5] * len(replies)}

    rank.group.lead = lead  # type: ignore[method-assign]
    for _ in range(3 * settings.max_attempts):
        try:
            await rank.work()
        except Broken:
            await due(harness)
    told = {one.turn_id: (one.state, one.reason) for one in await harness.all(Judgement)}
    assert told[turns[0].id] == ("failed", "the trainer did not live to score it, 3 times")
    assert {told[turn.id] for turn in turns[1:]} == {("done", None)}
    assert asked[0] == 3 and set(asked[1:]) == {1}


async def test_a_model_whose_files_are_gone_is_silenced_and_fitted_anew(harness: Harness, rank: Rank) -> None:
    row = await model(harness)
    turn = await replied(harness, PLEASES)
    await curate(harness.db, rank.house.settings)
    await rank.work()
    told = {one.number: (one.state, one.reason) for one in await harness.all(RewardModel)}
    assert told[row.number][0] == "disabled" and "manifest.json" in told[row.number][1]
    assert told[row.number + 1][0] == "refused", "nobody has said anything to learn from"
    [judgement] = await harness.all(Judgement)
    assert (judgement.turn_id, judgement.state) == (turn.id, JudgementState.SKIPPED)


async def test_of_two_trainers_the_late_one_s_score_is_not_kept(harness: Harness, rank: Rank) -> None:
    await model(harness)
    settings = rank.house.settings
    await replied(harness, PLEASES)
    await curate(harness.db, settings)
    late = await reward_model.claim(harness.db, "late", settings)
    assert late is not None and await reward_model.claim(harness.db, "second", settings) is None
    await due(harness)
    again = await reward_model.claim(harness.db, "second", settings)
    assert again is not None
    [turn_id] = set(again.turns.values())
    assert await reward_model.settle(harness.db, settings, again, {turn_id: 0.5}, 0.1) == 1
    assert await reward_model.settle(harness.db, settings, late, {turn_id: -0.5}, 0.1) == 0
    assert [one.value for one in await harness.all(Reward)] == [0.5]


async def test_a_model_that_was_silenced_while_it_spoke_is_not_listened_to(harness: Harness, rank: Rank) -> None:
    row = await model(harness)
    settings = rank.house.settings
    turn = await replied(harness, PLEASES)
    await curate(harness.db, settings)
    claimed = await reward_model.claim(harness.db, "me", settings)
    assert claimed is not None
    async with harness.db.write() as session:
        (await session.get_one(RewardModel, row.id)).state = RewardModelState.DISABLED
    await reward_model.settle(harness.db, settings, claimed, {turn.id: 0.5}, 0.1)
    [told] = await harness.all(Judgement)
    assert (told.state, told.reason) == (JudgementState.SKIPPED, reward_model.SILENCED)
    assert await harness.all(Reward) == []
