"""Assemble: batch size, freshness, caps and contrast."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, ReinforcePlusPlusConfig
from alignment.config.preference_algorithms import DPOConfig, KTOConfig
from alignment.config.rollouts import GroupSamplingConfig, RolloutsConfig
from app.core.settings import Settings
from app.models import (
    Batch,
    BatchState,
    LearningMode,
    Origin,
    Policy,
    Reward,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    VersionState,
    new_id,
)
from app.policies.overrides import effective_settings
from app.projects.service import create_policy
from app.training import service
from app.training.sample_columns import fill_columns
from app.training.waits import explain_wait
from tests.support.deployment import Harness
from tests.support.settings import by_path
from tests.support.updates import rate
from workers.curate import curate
from workers.training import assemble as assemble_module
from workers.training.assemble import AUTOMATED_STALENESS, assemble


async def batched_turn_ids(harness: Harness) -> set[str]:
    return {sample.turn_id for sample in await harness.all(Sample) if sample.batch_id is not None}


def with_settings(harness: Harness, **settings: Any) -> Settings:
    return harness.settings.replace(by_path(settings))


async def test_too_few_samples_wait(harness: Harness) -> None:
    await rate(harness, "+-+-+-+")
    assert await assemble(harness.db, harness.settings) == 0
    assert await harness.all(Batch) == []


async def test_enough_samples_become_one_frozen_batch(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1
    [batch] = await harness.all(Batch)
    assert (batch.state, batch.num_samples, batch.parent_id) == (BatchState.OPEN, 8, (await harness.serving()).id)
    states = sorted(sample.state for sample in await harness.all(Sample))
    assert states == [SampleState.BATCHED] * 8 + [SampleState.OPEN] * 2


async def test_a_policy_that_fails_holds_up_no_other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await rate(harness, "+-+-+-+-")
    own = await harness.policy()
    async with harness.db.write() as session:
        for name in ("a", "b"):
            await create_policy(session, own.project_id, name, harness.settings.model)
    tried = set[str]()

    def fail_for_others(policy: Policy, settings: Settings) -> Settings:
        tried.add(policy.name)
        if policy.id != own.id:
            raise ValueError(f"the settings of {policy.name}")
        return effective_settings(policy, settings)

    monkeypatch.setattr(assemble_module, "effective_settings", fail_for_others)
    with pytest.raises(ExceptionGroup, match="2 failed"):
        await assemble(harness.db, harness.settings)
    assert tried == {"shop", "a", "b"} and len(await harness.all(Batch)) == 1


async def test_a_policy_with_many_samples_to_prepare_takes_turns_with_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven samples are prepared in steps of two. The other policy comes after the first step."""
    await rate(harness, "+-+-+-+")
    own = await harness.policy()
    async with harness.db.write() as session:
        await create_policy(session, own.project_id, "a", harness.settings.model)
    steps: list[str] = []
    step = assemble_module._assemble

    def own_first(pairs: Iterable[tuple[str, str]]) -> list[str]:
        return sorted((policy_id for _, policy_id in pairs), key=lambda policy_id: policy_id != own.id)

    async def record(session: AsyncSession, policy_id: str, settings: Settings) -> assemble_module.Outcome:
        steps.append("own" if policy_id == own.id else "other")
        return await step(session, policy_id, settings)

    monkeypatch.setattr(assemble_module, "STEP", 2)
    monkeypatch.setattr(assemble_module, "_assemble", record)
    monkeypatch.setattr(assemble_module, "take_turns", own_first)
    await assemble(harness.db, harness.settings)
    assert steps == ["own", "other", "own", "own", "own"]


async def test_the_rest_of_a_long_assembly_is_enqueued_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await rate(harness, "+-+-+-+-")
    monkeypatch.setattr(assemble_module, "RUN_SECONDS", -1.0)
    sent: list[str] = []
    monkeypatch.setattr(harness.db, "_enqueue", sent.extend)
    assert await assemble(harness.db, harness.settings) == 0
    assert sent == ["assemble"] and await harness.all(Batch) == []


async def test_a_policy_has_one_open_batch(harness: Harness) -> None:
    await rate(harness, "+-" * 8)
    await assemble(harness.db, harness.settings)
    await assemble(harness.db, harness.settings)
    assert len(await harness.all(Batch)) == 1


async def test_equal_rewards_wait_for_another_one(harness: Harness) -> None:
    await rate(harness, "+" * 12)
    assert await assemble(harness.db, harness.settings) == 0
    assert await harness.all(Batch) == []
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.OPEN}
    status = (await harness.api.get("/v1/policies/shop/training")).json()
    sentence = "All 12 ready samples have the reward 1: the next batch needs one with another reward."
    assert status["waiting_for"] == sentence
    [different] = await rate(harness, "-")
    assert await assemble(harness.db, harness.settings) == 1
    batched = await batched_turn_ids(harness)
    assert different in batched and len(batched) == 8


MEAN = (0.1 + 0.2 + 0.3) / 3  # 0.20000000000000004


async def set_rewards(harness: Harness, rewards: Mapping[str, float]) -> None:
    async with harness.db.write() as session:
        for turn_id, reward in rewards.items():
            await session.execute(update(Sample).where(Sample.turn_id == turn_id).values(reward=reward))


async def test_rewards_that_differ_by_rounding_are_no_contrast(harness: Harness) -> None:
    turn_ids = await rate(harness, "+" * 8)
    await set_rewards(harness, {turn_id: MEAN if index % 2 else 0.2 for index, turn_id in enumerate(turn_ids)})
    assert await assemble(harness.db, harness.settings) == 0
    assert (await waits_for(harness, harness.settings)).startswith("All 8 ready samples have the reward 0.2:")
    # The first group decides which rewards are others, so both floats come first in one of the two batches.
    approved = await rate(harness, "+" * 8)
    different = await rate(harness, "-")
    await set_rewards(harness, dict.fromkeys(approved, MEAN))
    assert await assemble(harness.db, harness.settings) == 1
    assert different[0] in await batched_turn_ids(harness)


@pytest.mark.parametrize("algorithm", [GRPOConfig(), DPOConfig(min_margin=0)])
async def test_groups_whose_rewards_differ_by_rounding_are_not_comparable(
    harness: Harness, algorithm: AlgorithmConfig
) -> None:
    grouping = with_settings(harness, algorithm=algorithm)
    for _ in range(4):
        first, second = await rate_group(harness, "++")
        await set_rewards(harness, {first: 0.2, second: MEAN})
    assert await assemble(harness.db, grouping) == 0
    assert (await waits_for(harness, grouping)).startswith("No two of the 8 ready samples")
    compared = await rate_group(harness, "+-")
    assert await assemble(harness.db, grouping) == 1
    assert await batched_turn_ids(harness) >= set(compared)


async def test_a_group_that_is_split_keeps_a_contrast_beyond_rounding(harness: Harness) -> None:
    group = sorted(await rate_group(harness, "+" * 10))
    rewards = {id: MEAN if index % 2 else 0.2 for index, id in enumerate(group)}
    await set_rewards(harness, rewards | {group[9]: -1.0})
    assert await assemble(harness.db, with_settings(harness, algorithm=GRPOConfig())) == 1
    assert await batched_turn_ids(harness) == {*group[:7], group[9]}


async def test_the_oldest_sample_with_another_reward_takes_the_last_place(harness: Harness) -> None:
    approved = await rate(harness, "+" * 8)
    disapproved = await rate(harness, "--")
    async with harness.db.write() as session:
        for age, turn_id in enumerate([*approved, *disapproved]):
            await session.execute(update(Sample).where(Sample.turn_id == turn_id).values(ready_at=1.0 + age))
    assert await assemble(harness.db, harness.settings) == 1
    assert await batched_turn_ids(harness) == {*approved[:7], disapproved[0]}


async def test_a_small_batch_without_contrast_waits(harness: Harness) -> None:
    small = with_settings(harness, min_batch_size=3, max_wait_seconds=0)
    await rate(harness, "+++")
    assert await assemble(harness.db, small) == 0
    await rate(harness, "-")
    assert await assemble(harness.db, small) == 1


async def test_another_reward_counts_beyond_the_cap_of_its_rater(harness: Harness) -> None:
    """Ada's older samples would fill her share of the batch, and only her latest one has another reward."""
    settings = with_settings(harness, max_rater_share=0.25)
    ada = await rate(harness, "+" * 6, rater="ada")
    ada += await rate(harness, "-", rater="ada")
    await rate(harness, "+" * 6)
    assert await assemble(harness.db, settings) == 1
    batched = await batched_turn_ids(harness)
    assert ada[-1] in batched and len(batched & set(ada)) == 2 and len(batched) == 8


async def test_a_group_that_is_split_keeps_its_contrast(harness: Harness) -> None:
    group = [f"chatcmpl-{index}" for index in range(10)]
    for index, id in enumerate(group):
        await harness.turn(id=id, completion_id=group[0], choice_index=index)
        body = {"completion_id": group[0], "choice_index": index, "kind": "binary", "value": index < 9}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, harness.settings) == 1
    assert await batched_turn_ids(harness) == {*group[:7], group[9]}


async def test_samples_of_any_version_are_learned_from(harness: Harness) -> None:
    """The update corrects for their distance; `max_staleness` limits it where an operator asks for that."""
    base = await harness.serving()
    await rate(harness, "+-")
    for _ in range(6):
        head = await harness.version(VersionState.LIVE)
    await rate(harness, "+-+-+-", head)
    assert await assemble(harness.db, harness.settings) == 1
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.BATCHED}
    assert {sample.version_id for sample in await harness.all(Sample)} == {base.id, head.id}


async def test_a_stale_sample_never_reaches_a_batch_with_max_staleness(harness: Harness) -> None:
    base = await harness.serving()
    await rate(harness, "+-")
    first = await harness.version(VersionState.LIVE)
    await rate(harness, "+-", first)
    second = await harness.version(VersionState.LIVE)
    await rate(harness, "+-+-+-+-", second)
    await assemble(harness.db, with_settings(harness, max_staleness=1))
    by_version = {(sample.version_id, sample.state, sample.rule) for sample in await harness.all(Sample)}
    assert (base.id, SampleState.DROPPED, SampleRule.TOO_OLD) in by_version, "two versions behind"
    assert (first.id, SampleState.BATCHED, None) in by_version, "one version behind"


async def test_a_sample_of_a_version_that_was_rolled_back_is_learned_from_by_default(harness: Harness) -> None:
    rolled_back = await harness.version(VersionState.ROLLED_BACK)
    await rate(harness, "+-+-+-+-", rolled_back)
    policy = await harness.policy()
    async with harness.db.write() as session:
        (await session.get_one(type(policy), policy.id)).head_version_id = rolled_back.parent_id
    settings = with_settings(harness, max_staleness=4)
    assert await assemble(harness.db, harness.settings) == 1
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(state=SampleState.OPEN, batch_id=None))
        await session.execute(update(Batch).values(state=BatchState.FAILED))
    assert await assemble(harness.db, settings) == 0
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.DROPPED}


async def test_a_sample_is_too_old_by_the_age_of_its_reply(harness: Harness) -> None:
    old = await rate(harness, "+-")
    async with harness.db.write() as session:
        day_ago = Turn.created_at - 86400
        await session.execute(update(Turn).where(Turn.id.in_(old)).values(created_at=day_ago))
    await rate(harness, "+-+-+-+-")
    assert await assemble(harness.db, with_settings(harness, max_sample_age_seconds=43200.0)) == 1
    dropped = [sample for sample in await harness.all(Sample) if sample.state == SampleState.DROPPED]
    assert {sample.turn_id for sample in dropped} == set(old)
    assert {(sample.rule, sample.reason) for sample in dropped} == {
        (SampleRule.TOO_OLD, "its reply is older than 0.5 days")
    }


async def test_samples_that_wait_are_taken_together(harness: Harness) -> None:
    """While an update runs, more than one batch may become ready: they wait for one update, not for several."""
    await rate(harness, "+-" * 10)
    assert await assemble(harness.db, with_settings(harness, max_batch_size=12)) == 1
    assert len(await batched_turn_ids(harness)) == 12
    async with harness.db.write() as session:
        await session.execute(update(Batch).values(state=BatchState.FAILED))
    assert await assemble(harness.db, with_settings(harness, max_batch_size=None)) == 1
    assert sorted(batch.num_samples for batch in await harness.all(Batch)) == [8, 12]


async def test_nothing_is_assembled_on_a_head_that_was_not_released(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    await harness.version(VersionState.TRAINED)
    assert await assemble(harness.db, harness.settings) == 0


async def test_rater_share_is_capped(harness: Harness) -> None:
    settings = with_settings(harness, max_rater_share=0.25)
    prolific = await rate(harness, "+-" * 10, rater="prolific")
    await rate(harness, "+-+-+")
    assert await assemble(harness.db, settings) == 0, "two samples of the prolific rater and five others make seven"
    await rate(harness, "-")
    assert await assemble(harness.db, settings) == 1
    batched = await batched_turn_ids(harness)
    assert len(batched & set(prolific)) == 2 and len(batched) == 8
    [batch] = await harness.all(Batch)
    assert batch.num_raters == 7


@pytest.mark.parametrize("capped", ["conversation", "cluster"])
async def test_conversation_and_cluster_shares_are_capped(harness: Harness, capped: str) -> None:
    shares = {"max_conversation_share": 0.25, "max_cluster_share": 0.25}
    limited = await rate(harness, "+-" * 5, conversation_id="c" if capped == "conversation" else None)
    async with harness.db.write() as session:
        if capped == "cluster":
            await session.execute(update(Sample).values(cluster="same"))
    others = await rate(harness, "+-+-+-")
    async with harness.db.write() as session:
        await session.execute(update(Sample).where(Sample.turn_id.in_(others)).values(cluster=None))
    assert await assemble(harness.db, with_settings(harness, **shares)) == 1
    assert len(await batched_turn_ids(harness) & set(limited)) == 2


async def test_programs_are_capped_as_people_are_until_an_admin_trusts_them(harness: Harness) -> None:
    settings = with_settings(harness, max_rater_share=0.05)
    for number in range(8):
        turn = await harness.turn()
        await harness.vote(turn.id, "up" if number % 2 else "down", source={"kind": "CODE", "id": "verifier"})
    await curate(harness.db, harness.settings)
    assert await assemble(harness.db, settings) == 0
    response = await harness.api.put("/v1/raters/CODE/verifier", json={"standing": "trusted"})
    assert response.status_code == 200, response.text
    assert await assemble(harness.db, settings) == 1


async def test_a_batch_must_have_enough_raters(harness: Harness) -> None:
    await rate(harness, "+-+-", rater="ada")
    await rate(harness, "+-+-", rater="bob")
    share = {"max_rater_share": 0.5}
    assert await assemble(harness.db, with_settings(harness, min_raters=3, **share)) == 0
    assert await assemble(harness.db, with_settings(harness, min_raters=2, **share)) == 1


async def test_a_small_batch_is_frozen_when_its_first_sample_has_waited_long_enough(harness: Harness) -> None:
    await rate(harness, "+-+")
    assert await assemble(harness.db, with_settings(harness, min_batch_size=3, max_wait_seconds=1000)) == 0
    assert await assemble(harness.db, with_settings(harness, min_batch_size=4, max_wait_seconds=0)) == 0
    assert await assemble(harness.db, with_settings(harness, min_batch_size=3, max_wait_seconds=0)) == 1
    [batch] = await harness.all(Batch)
    assert batch.num_samples == 3


async def test_caps_of_a_smaller_batch_are_lower(harness: Harness) -> None:
    """With a share of 0.25, one rater may have two of eight samples, and one of four."""
    await rate(harness, "+-", rater="ada")
    await rate(harness, "+-+")
    settings = with_settings(harness, min_batch_size=4, max_wait_seconds=0, max_rater_share=0.25)
    assert await assemble(harness.db, settings) == 1
    [batch] = await harness.all(Batch)
    assert (batch.num_samples, batch.num_raters) == (4, 4)


async def test_sample_that_is_not_ready_waits(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(ready_at=4e9))
    assert await assemble(harness.db, harness.settings) == 0
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(ready_at=1.0))
    assert await assemble(harness.db, harness.settings) == 1


async def test_replies_to_one_prompt_stay_together(harness: Harness) -> None:
    await rate(harness, "+-+-+-+")
    group: list[str] = []
    for index in range(4):
        choice: dict[str, Any] = {"completion_id": group[0], "choice_index": index} if group else {}
        turn = await harness.turn(**choice)
        group.append(turn.id)
        body = {"completion_id": group[0], "choice_index": index, "kind": "binary", "value": index % 2 == 0}
        await harness.api.post("/v1/feedback", json=body)
    await curate(harness.db, harness.settings)
    await rate(harness, "-")
    assert await assemble(harness.db, harness.settings) == 1
    batched = await batched_turn_ids(harness)
    assert len(batched) == 8 and not batched & set(group), "the batch has one free place, and the group needs four"


async def test_synchronous_mode_uses_samples_of_the_serving_version_only(harness: Harness) -> None:
    older = await rate(harness, "+-+-")
    live = await harness.version(VersionState.LIVE)
    await rate(harness, "+-+-", live)
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(mode=LearningMode.SYNCHRONOUS))
    assert await assemble(harness.db, harness.settings) == 0
    await rate(harness, "+-+-", live)
    assert await assemble(harness.db, harness.settings) == 1
    assert not await batched_turn_ids(harness) & set(older)


async def test_nothing_is_assembled_while_training_is_halted(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(mode=LearningMode.HALTED))
    assert await assemble(harness.db, harness.settings) == 0
    async with harness.db.write() as session:
        await session.execute(update(Policy).values(mode=LearningMode.ASYNCHRONOUS))
    assert await assemble(harness.db, harness.settings) == 1


async def test_single_rater_may_fill_a_batch_without_a_cap(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-", rater="ada")
    assert await assemble(harness.db, with_settings(harness, trust=True, max_rater_share=0.9)) == 0, (
        "the quota of a new rater is smaller"
    )
    assert await assemble(harness.db, with_settings(harness, trust=True)) == 1


async def test_comparison_by_a_new_rater_is_not_split(harness: Harness) -> None:
    a, b = await harness.turn(), await harness.turn()
    await harness.api.post("/v1/feedback", json={"kind": "comparison", "value": [a.id, b.id], "source": {"id": "ada"}})
    await rate(harness, "+-+-+-")
    assert await assemble(harness.db, with_settings(harness, trust=True, max_rater_share=0.2)) == 1
    assert {a.id, b.id} <= await batched_turn_ids(harness)


async def test_few_raters_may_each_give_an_even_share(harness: Harness) -> None:
    for rater in ("a", "b", "c", "d"):
        await rate(harness, "+-", rater=rater)
    few = with_settings(harness, trust=True, max_rater_share=0.05)
    assert await assemble(harness.db, few) == 0, "four raters are too few"
    await rate(harness, "+", rater="e")
    assert await assemble(harness.db, few) == 1


async def score(harness: Harness, turn_ids: Sequence[str]) -> None:
    """Give the turns rewards of a reward model, in place of those by people."""
    async with harness.db.write() as session:
        values: dict[str, Any] = {"reward_source": "learned", "source": "learned", "rater": None}
        await session.execute(update(Reward).where(Reward.turn_id.in_(turn_ids)).values(values))
        for age, turn_id in enumerate(turn_ids):
            await session.execute(
                update(Sample).where(Sample.turn_id == turn_id).values(rater=None, ready_at=1.0 + age)
            )


async def test_samples_with_feedback_come_first_then_the_newest_scored_ones(harness: Harness) -> None:
    scored = await rate(harness, "+-" * 8)
    await score(harness, scored)
    rated = await rate(harness, "+-+")
    assert await assemble(harness.db, harness.settings) == 1
    assert await batched_turn_ids(harness) == {*rated, *scored[-5:]}


async def test_scored_samples_are_dropped_after_a_few_versions(harness: Harness) -> None:
    scored = await rate(harness, "+-" * 6)
    rated = await rate(harness, "+-")
    await score(harness, scored)
    for _ in range(AUTOMATED_STALENESS):
        await harness.version(VersionState.LIVE)
    assert await assemble(harness.db, with_settings(harness, batch_size=24, min_batch_size=24, max_batch_size=24)) == 0
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.OPEN}
    await harness.version(VersionState.LIVE)
    assert await assemble(harness.db, with_settings(harness, batch_size=24, min_batch_size=24, max_batch_size=24)) == 0
    samples = await harness.all(Sample)
    assert {sample.turn_id for sample in samples if sample.state == SampleState.OPEN} == set(rated)
    assert {sample.rule for sample in samples if sample.turn_id in scored} == {SampleRule.TOO_OLD}

    await harness.vote(scored[0], "down")  # feedback brings a sample back
    await curate(harness.db, harness.settings)
    [voted] = [sample for sample in await harness.all(Sample) if sample.turn_id == scored[0]]
    assert (voted.state, voted.rule, voted.reward) == (SampleState.OPEN, None, -1.0)
    assert await assemble(harness.db, with_settings(harness, batch_size=24, min_batch_size=24, max_batch_size=24)) == 0
    assert sum(sample.state == SampleState.OPEN for sample in await harness.all(Sample)) == 3


async def waits_for(harness: Harness, settings: Settings) -> str:
    policy = await harness.policy()
    async with harness.db.write() as session:
        await fill_columns(session, policy.id, 1000)  # as the assembly does at once
    async with harness.db.read() as session:
        counts = await service.count_samples(session, policy, settings)
        return (await explain_wait(session, policy, counts, settings, triggered=False)).sentence


async def test_samples_within_each_cap_but_not_within_all_wait_and_status_says_so(harness: Harness) -> None:
    """Three raters, three conversations; a batch may have one sample of each."""
    first, second, third = (new_id("conv") for _ in range(3))
    for thumb, conversation, rater in (
        ("+", first, "ada"),
        ("-", second, "ada"),
        ("+", third, "ada"),
        ("-", first, "bob"),
        ("+", first, "eve"),
    ):
        await rate(harness, thumb, rater=rater, conversation_id=conversation)
    shares = {"max_rater_share": 0.125, "max_conversation_share": 0.125}
    settings = with_settings(harness, min_batch_size=3, max_wait_seconds=0.0, **shares)
    assert await assemble(harness.db, settings) == 0
    assert await waits_for(harness, settings) == (
        "At least 3 more ready samples of other raters, conversations or prompts: 0 of the 5 ready samples are within "
        "all caps together and can be compared. Raters of reduced trust (raters.trust) and prompt sets "
        "(rollouts.max_plan_share) have lower caps."
    )
    one_cap = with_settings(harness, min_batch_size=3, max_wait_seconds=0.0, max_rater_share=0.125)
    assert await waits_for(harness, one_cap) == "Nothing. 3 samples are about to be put into a batch."
    assert await assemble(harness.db, one_cap) == 1
    assert len(await batched_turn_ids(harness)) == 3


async def rate_group(harness: Harness, thumbs: str, **values: Any) -> list[str]:
    """Create rated replies to one prompt."""
    first = new_id("chatcmpl")
    ids = [first, *(new_id("chatcmpl") for _ in thumbs[1:])]
    for index, (id, thumb) in enumerate(zip(ids, thumbs, strict=True)):
        await harness.turn(id=id, completion_id=first, choice_index=index, **values)
        body = {"completion_id": first, "choice_index": index, "kind": "binary", "value": thumb == "+"}
        assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
    await curate(harness.db, harness.settings)
    return ids


@pytest.mark.parametrize("algorithm", [GRPOConfig(), DPOConfig(), ReinforcePlusPlusConfig(baseline="group")])
async def test_single_replies_are_no_batch_for_an_algorithm_that_compares_replies(
    harness: Harness, algorithm: AlgorithmConfig
) -> None:
    grouping = with_settings(harness, algorithm=algorithm)
    await rate(harness, "+-" * 21)
    assert await assemble(harness.db, grouping) == 0
    name = algorithm.type.upper()
    assert await waits_for(harness, grouping) == (
        f"42 samples wait: {name} compares replies to one prompt, and none of them has another reply. Turn on group "
        "sampling (ATTUNE_ROLLOUTS) or choose KTO (ATTUNE_ALGORITHM)."
    )
    rollouts = RolloutsConfig(group_sampling=GroupSamplingConfig(extra_replies=3))
    assert (await waits_for(harness, with_settings(harness, algorithm=algorithm, rollouts=rollouts))).endswith(
        "none of them has another reply. Group sampling is on: wait for new replies, or choose KTO (ATTUNE_ALGORITHM)."
    )
    assert await assemble(harness.db, with_settings(harness, algorithm=KTOConfig())) == 1


async def test_single_replies_neither_hold_up_groups_nor_enter_their_batch(harness: Harness) -> None:
    grouping = with_settings(harness, algorithm=GRPOConfig(), min_batch_size=4)
    singles = await rate(harness, "+-" * 8)
    group = await rate_group(harness, "+-")
    assert await waits_for(harness, grouping) == (
        "2 more ready samples that GRPO can compare: 2 of the 18 ready samples have another reply to their prompt."
    )
    group += await rate_group(harness, "++-") + await rate_group(harness, "---")
    assert await waits_for(harness, grouping) == "Nothing. 8 samples are about to be put into a batch."
    assert await assemble(harness.db, grouping) == 1
    assert await batched_turn_ids(harness) == set(group)
    assert {sample.state for sample in await harness.all(Sample) if sample.turn_id in singles} == {SampleState.OPEN}


async def test_groups_with_equal_rewards_wait_for_one_with_different_rewards(harness: Harness) -> None:
    grouping = with_settings(harness, algorithm=DPOConfig())
    for thumbs in ("++", "--", "++", "--"):
        await rate_group(harness, thumbs)
    assert await assemble(harness.db, grouping) == 0, "their rewards differ, but not within a group"
    assert await waits_for(harness, grouping) == (
        "No two of the 8 ready samples that answer one prompt have different rewards: DPO has nothing to compare."
    )
    compared = await rate_group(harness, "+-")
    assert await assemble(harness.db, grouping) == 1
    batched = await batched_turn_ids(harness)
    assert batched >= set(compared) and len(batched) == 8, "it takes the last place of older groups"


async def test_a_reply_of_a_prompt_set_is_learned_from_without_its_group(harness: Harness) -> None:
    """Its prompt gets no other reply, and a plan goes on only when its samples have been in a batch."""
    grouping = with_settings(harness, algorithm=GRPOConfig())
    await rate_group(harness, "+-+-+-+")
    alone = await harness.turn(origin=Origin.PROMPT_SET)
    async with harness.db.write() as session:
        same = {"policy_id": alone.policy_id, "version_id": alone.version_id}
        session.add(Sample(turn_id=alone.id, reward=1.0, ready_at=0.0, **same))
    assert await assemble(harness.db, grouping) == 1
    assert alone.id in await batched_turn_ids(harness)


async def test_a_policys_own_batch_size_and_algorithm_decide(harness: Harness) -> None:
    await rate(harness, "+-+-+")
    own = {"settings": {"trainer": {"batch_size": 4}, "algorithm": "dpo"}}
    view = (await harness.api.patch(f"/v1/policies/{harness.settings.policy}", json=own)).json()
    assert view["settings"]["trainer"]["batch_size"] == 4, view
    assert await assemble(harness.db, harness.settings) == 0, "no reply has another one to be compared with"
    training = await harness.api.get(f"/v1/policies/{harness.settings.policy}/training")
    assert "DPO" in training.json()["waiting_for"] and training.json()["batch_size"] == 4
    await harness.api.patch(f"/v1/policies/{harness.settings.policy}", json={"settings": {"algorithm": None}})
    assert await assemble(harness.db, harness.settings) == 1
    [batch] = await harness.all(Batch)
    assert batch.num_samples == 5
