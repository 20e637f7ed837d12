"""The reward model as a source: it scores replies without feedback. The trainer runs in this process."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
from tests.support.human_feedback import (
    PREFERRED_TOKEN,
    REJECTED_TOKEN,
    add_rating,
    create_rated_turns,
    create_reward_model,
    settings_with_reward_model,
)
from tests.support.judgements import make_judgements_due
from tests.workers.training.test_loop import Rank
from workers.context import WorkerContext
from workers.curate import curate
from workers.judging import reward_model_source
from workers.judging.judge import judge
from workers.reconcile import reconcile
from workers.training import batch_claims
from workers.training.commands import Command, ScoreReplies
from workers.training.loop import TrainingLoop
from workers.training.ranks import RankGroup, RankGroupFailed


@pytest.fixture
async def rank(harness: Harness) -> AsyncIterator[Rank]:
    settings = settings_with_reward_model(harness, window_seconds=3600, refit_after=1000)
    with ThreadPoolExecutor(1) as thread:
        group = await asyncio.get_running_loop().run_in_executor(thread, RankGroup, settings)
        rank = Rank(WorkerContext(settings), group, thread)
        yield rank
        thread.submit(lambda: rank.context.run(rank.context.db.close())).result()


async def create_turn(harness: Harness, last_token: int, **values: Any) -> Turn:
    return await harness.turn(own_prompt_ids=[310, 320, 330], output_ids=[340, last_token], **values)


def fake_scores(rank: Rank, value: float = 0.8) -> list[int]:
    """Score every reply with `value` instead of the model. Return a list that records the size of each forward pass."""
    batch_sizes: list[int] = []

    def run(command: ScoreReplies) -> list[float]:
        batch_sizes.append(len(command.replies))
        return [value] * len(command.replies)

    rank.group.run = run  # type: ignore[assignment, method-assign]
    return batch_sizes


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_model_is_fitted_and_gives_rewards_until_it_is_disabled(harness: Harness, rank: Rank) -> None:
    settings = rank.context.settings
    await create_rated_turns(harness, 160)
    await reconcile(harness.db, settings)
    assert await rank.work() == 1
    [row] = await harness.all(RewardModel)
    assert (row.state, row.reason) == ("serving", None)
    assert row.metrics["agreement"] > 0.8 and row.metrics["num_thumbs"] == 160
    directory = Path(row.path)
    assert directory.parent.parent == settings.reward_models_dir and directory.name == "rm-1.1"

    good, bad = await create_turn(harness, PREFERRED_TOKEN), await create_turn(harness, REJECTED_TOKEN)
    await curate(harness.db, settings)
    assert await judge(harness.db, settings, "judge") == 0, "the judge stage leaves them to the trainer"
    assert (
        await rank.work() == 1 + (reward_model_source.MAX_TURNS < 160) * 2
    )  # the turns with ratings are scored as well
    judgements = {one.turn_id: one for one in await harness.all(Judgement)}
    assert judgements[good.id].state == judgements[bad.id].state == JudgementState.DONE
    assert judgements[good.id].value > 0 > judgements[bad.id].value
    assert judgements[good.id].details["reward_model"] == row.id
    rewards = {one.turn_id: one for one in await harness.all(Reward) if one.reward_source == "learned"}
    weight = 2 * row.metrics["auc_low"] - 1
    assert (rewards[good.id].value, rewards[good.id].weight) == (judgements[good.id].value, pytest.approx(weight))
    assert rewards[good.id].rater is None
    samples = {one.turn_id: one for one in await harness.all(Sample)}
    assert samples[good.id].reward == pytest.approx(rewards[good.id].value)
    assert samples[good.id].state == SampleState.OPEN
    assert samples[good.id].ready_at < judgements[good.id].settled_at + 5, "every source has answered, so it is ready"

    # The raters' preferences change: the new ratings contradict the model.
    turns = [await create_turn(harness, PREFERRED_TOKEN if number % 2 else REJECTED_TOKEN) for number in range(40)]
    await curate(harness.db, settings)
    await rank.work()
    for number, turn in enumerate(turns):
        await add_rating(harness, turn, -1.0 if number % 2 else 1.0, f"later-{number}")
    await reconcile(harness.db, settings)
    states = {one.number: one.state for one in await harness.all(RewardModel)}
    assert states == {1: "disabled", 2: "open"}
    last = await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, settings)
    await rank.work()
    judgements = {one.turn_id: one for one in await harness.all(Judgement)}
    assert judgements[last.id].state == JudgementState.SKIPPED or judgements[last.id].details["number"] == 2


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_batch_does_not_wait_for_a_fit(harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_rated_turns(harness, 160)
    await reconcile(harness.db, rank.context.settings)
    commands: list[str] = []
    execute, row, policy = rank.group.execute, SimpleNamespace(id="batch-1"), SimpleNamespace(name="shop")
    batch = SimpleNamespace(adapter_name="shop-v1", row=row, policy=policy)

    def record_command(command: Command[Any]) -> Any:
        commands.append(type(command).__name__)
        return execute(command)

    async def claim(*args: Any) -> Any:  # a batch arrives after the first steps of the fit
        return batch if commands.count("AdvanceFit") == 1 and "batch" not in commands else None

    monkeypatch.setattr(rank.group, "execute", record_command)
    monkeypatch.setattr(batch_claims, "claim", claim)
    monkeypatch.setattr(TrainingLoop, "train_batch", lambda *args: commands.append("batch"))
    assert await rank.work() == 1
    assert commands[:4] == ["BeginFit", "AdvanceFit", "batch", "AdvanceFit"] and commands[-1] == "FinishFit"
    assert [row.state for row in await harness.all(RewardModel)] == ["serving"]


async def test_without_a_serving_model_judgements_are_skipped(harness: Harness, rank: Rank) -> None:
    turn = await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, rank.context.settings)
    assert await rank.work() == 1
    [judgement] = await harness.all(Judgement)
    assert (judgement.turn_id, judgement.state, judgement.reason) == (
        turn.id,
        JudgementState.SKIPPED,
        reward_model_source.NOT_SERVING,
    )
    await create_reward_model(harness, RewardModelState.DISABLED, reason="it is odd")
    await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, rank.context.settings)
    assert await rank.work() == 1
    assert {one.reason for one in await harness.all(Judgement)} == {
        reward_model_source.NOT_SERVING,
        "the reward model is disabled: it is odd",
    }


async def test_trainable_turns_are_scored_in_one_forward_pass_and_others_are_skipped(
    harness: Harness, rank: Rank
) -> None:
    await create_reward_model(harness)
    batch_sizes = fake_scores(rank)
    async with harness.db.write() as session:
        policy = await harness.policy()
        key = ApiKey(id="key-1", project_id=policy.project_id, prefix="p", sha256="x", scopes=["chat"], train=False)
        session.add(key)
    turns = [await create_turn(harness, PREFERRED_TOKEN) for _ in range(5)]
    no_consent = await create_turn(harness, PREFERRED_TOKEN, key_id="key-1")
    no_tokens = await create_turn(harness, PREFERRED_TOKEN)
    deleted = await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, rank.context.settings)
    async with harness.db.write() as session:
        (await session.get_one(Turn, no_tokens.id)).output_ids = None
        (await session.get_one(Turn, deleted.id)).deleted_at = 1.0
    assert await rank.work() == 1
    assert batch_sizes == [5]
    judgements = {one.turn_id: (one.state, one.reason) for one in await harness.all(Judgement)}
    assert {judgements[turn.id] for turn in turns} == {("done", None)}
    assert judgements[no_consent.id] == ("skipped", "no consent to train")
    assert judgements[no_tokens.id] == ("skipped", "there is no reply to judge")
    assert judgements[deleted.id] == ("skipped", "the turn is deleted")
    assert {one.turn_id for one in await harness.all(Reward)} == {turn.id for turn in turns}


async def test_human_feedback_overrides_the_model(harness: Harness, rank: Rank) -> None:
    await create_reward_model(harness)
    fake_scores(rank, 0.9)
    turn = await create_turn(harness, PREFERRED_TOKEN)
    assert (await harness.vote(turn.id, "down")).status_code == 201
    await curate(harness.db, rank.context.settings)
    await rank.work()
    [sample] = await harness.all(Sample)
    assert sample.reward == -1.0
    assert (await harness.vote(turn.id, "up")).status_code == 201
    await curate(harness.db, rank.context.settings)
    [sample] = await harness.all(Sample)
    assert sample.reward == 1.0, "a score does not lower a vote that it agrees with"


async def test_a_turn_that_crashes_the_trainer_is_retried_separately_and_fails(harness: Harness, rank: Rank) -> None:
    await create_reward_model(harness)
    settings = rank.context.settings
    turns = [await create_turn(harness, PREFERRED_TOKEN) for _ in range(3)]
    await curate(harness.db, settings)
    batch_sizes: list[int] = []

    def run(command: ScoreReplies) -> list[float]:
        batch_sizes.append(len(command.replies))
        if any(reply.turn_id == turns[0].id for reply in command.replies):
            raise RankGroupFailed("MemoryError: no more")
        return [0.5] * len(command.replies)

    rank.group.run = run  # type: ignore[assignment, method-assign]
    for _ in range(3 * settings.workers.max_attempts):
        try:
            await rank.work()
        except RankGroupFailed:
            await make_judgements_due(harness)
    judgements = {one.turn_id: (one.state, one.reason) for one in await harness.all(Judgement)}
    assert judgements[turns[0].id] == ("failed", "the trainer stopped before it scored the reply, 3 times")
    assert {judgements[turn.id] for turn in turns[1:]} == {("done", None)}
    assert batch_sizes[0] == 3 and set(batch_sizes[1:]) == {1}


async def test_a_model_without_files_is_disabled_and_fitted_again(harness: Harness, rank: Rank) -> None:
    row = await create_reward_model(harness)
    turn = await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, rank.context.settings)
    await rank.work()
    models = {one.number: (one.state, one.reason) for one in await harness.all(RewardModel)}
    assert models[row.number][0] == "disabled" and "manifest.json" in models[row.number][1]
    assert models[row.number + 1][0] == "refused", "there is no feedback to train on"
    [judgement] = await harness.all(Judgement)
    assert (judgement.turn_id, judgement.state) == (turn.id, JudgementState.SKIPPED)


async def test_scores_under_a_lost_lease_are_not_recorded(harness: Harness, rank: Rank) -> None:
    await create_reward_model(harness)
    settings = rank.context.settings
    await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, settings)
    first = await reward_model_source.claim_scoring_job(harness.db, "first", settings)
    assert first is not None and await reward_model_source.claim_scoring_job(harness.db, "second", settings) is None
    await make_judgements_due(harness)
    second = await reward_model_source.claim_scoring_job(harness.db, "second", settings)
    assert second is not None
    [turn_id] = {judgement.turn_id for judgement in second.judgements}
    assert await reward_model_source.record_scores(harness.db, settings, second, {turn_id: 0.5}, 0.1) == 1
    assert await reward_model_source.record_scores(harness.db, settings, first, {turn_id: -0.5}, 0.1) == 0
    assert [one.value for one in await harness.all(Reward)] == [0.5]


async def test_the_scores_of_a_model_disabled_meanwhile_are_not_used(harness: Harness, rank: Rank) -> None:
    row = await create_reward_model(harness)
    settings = rank.context.settings
    turn = await create_turn(harness, PREFERRED_TOKEN)
    await curate(harness.db, settings)
    job = await reward_model_source.claim_scoring_job(harness.db, "me", settings)
    assert job is not None
    async with harness.db.write() as session:
        (await session.get_one(RewardModel, row.id)).state = RewardModelState.DISABLED
    await reward_model_source.record_scores(harness.db, settings, job, {turn.id: 0.5}, 0.1)
    [judgement] = await harness.all(Judgement)
    assert (judgement.state, judgement.reason) == (JudgementState.SKIPPED, reward_model_source.DISABLED)
    assert await harness.all(Reward) == []
