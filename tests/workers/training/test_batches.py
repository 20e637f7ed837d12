"""Batches of the trainer: one owner at a time, one result, and no result after the lease is lost."""

import pytest
from sqlalchemy import select, update

from app.core.leases import LeaseLost
from app.models import (
    ApiKey,
    Audit,
    Batch,
    BatchState,
    LearningMode,
    Policy,
    Project,
    Sample,
    SampleRule,
    SampleState,
    Turn,
    Version,
    VersionState,
)
from app.policies.locks import lock_policy
from app.projects.service import create_project
from app.training import kl_guard
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.shared_histories import follow_up
from tests.support.updates import TRAINED, expire_leases, rate, release, roll_back, train, trained_without
from workers.curate import curate
from workers.training import batch_claims, batches
from workers.training.assemble import assemble


async def create_claimed_batch(harness: Harness) -> batch_claims.ClaimedBatch:
    await rate(harness, "+-+-+-+-")
    await assemble(harness.db, harness.settings)
    claimed = await batch_claims.claim(harness.db, "trainer-a", harness.settings)
    assert claimed is not None
    return claimed


async def test_claimed_batch_has_the_recorded_tokens(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    sample = claimed.batch.samples[0]
    assert (sample.prompt_ids, sample.output_ids, sample.logprobs) == ((1, 2, 3), (4, 5), (-0.5, -0.25))
    policy = await harness.policy()
    assert (claimed.number, claimed.adapter_name, claimed.parent.adapter_path) == (1, f"shop-{policy.id[-6:]}-v1", None)


async def test_claimed_batch_has_whole_prompts_of_turns_that_share_their_histories(harness: Harness) -> None:
    first = await harness.turn()
    second = await harness.turn(**follow_up(first))
    await rate(harness, "+-+-+-+-", **follow_up(second))
    await assemble(harness.db, harness.settings)
    claimed = await batch_claims.claim(harness.db, "trainer-a", harness.settings)
    assert claimed is not None
    assert {sample.prompt_ids for sample in claimed.batch.samples} == {(1, 2, 3, 4, 5, 7, 8, 4, 5, 7, 8)}
    assert {sample.turn_index for sample in claimed.batch.samples} == {5}


async def test_claimed_batch_knows_the_episodes_of_its_turns(harness: Harness) -> None:
    episode = await episodes.create(harness)
    await rate(harness, "+-", episode_id=episode["id"])
    await rate(harness, "+-+-+-")
    await assemble(harness.db, harness.settings)
    claimed = await batch_claims.claim(harness.db, "trainer-a", harness.settings)
    assert claimed is not None
    assert sorted(sample.episode or "" for sample in claimed.batch.samples) == [""] * 6 + [episode["id"]] * 2


async def test_a_batch_has_one_owner_while_its_lease_runs(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    assert await batch_claims.claim(harness.db, "trainer-b", harness.settings) is None
    await expire_leases(harness)
    again = await batch_claims.claim(harness.db, "trainer-b", harness.settings)
    assert again is not None and (again.batch, again.row.attempt, again.row.fence) == (claimed.batch, 2, 2)
    assert claimed.row.fence == 1


async def test_version_and_batch_are_committed_together(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    assert await batches.commit(harness.db, claimed, TRAINED)
    [batch] = await harness.all(Batch)
    version = await harness.get(Version, batch.version_id)
    policy = await harness.policy()
    assert (batch.state, version.state, version.number) == (BatchState.TRAINED, VersionState.TRAINED, 1)
    assert policy.head_version_id == version.id
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.TRAINED}


async def test_trainer_without_its_lease_writes_nothing(harness: Harness) -> None:
    late = await create_claimed_batch(harness)
    await expire_leases(harness)
    winner = await batch_claims.claim(harness.db, "trainer-b", harness.settings)
    assert winner is not None
    with pytest.raises(LeaseLost):
        await batches.commit(harness.db, late, TRAINED)
    assert [version.number for version in await harness.all(Version)] == [0]
    assert (await harness.policy()).head_version_id == winner.parent.id
    assert await batches.commit(harness.db, winner, TRAINED)
    assert len(await harness.all(Version)) == 2


async def test_update_fails_if_a_rollback_moved_the_head(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    other = await harness.version(VersionState.LIVE)
    assert not await batches.commit(harness.db, claimed, TRAINED)
    [batch] = await harness.all(Batch)
    assert batch.state == BatchState.FAILED and "head" in batch.reason
    assert (await harness.policy()).head_version_id == other.id


async def test_batch_that_crashes_the_trainer_is_quarantined_after_three_attempts(harness: Harness) -> None:
    await create_claimed_batch(harness)
    for _ in range(harness.settings.workers.max_attempts - 1):
        await expire_leases(harness)
        assert await batch_claims.claim(harness.db, "trainer-b", harness.settings) is not None
    await expire_leases(harness)
    assert await batch_claims.claim(harness.db, "trainer-b", harness.settings) is None
    assert await batches.quarantine_poisoned(harness.db, harness.settings) == 1
    [batch] = await harness.all(Batch)
    assert batch.state == BatchState.QUARANTINED
    await rate(harness, "+-+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1, "training continues"


async def test_refused_update_is_recorded_and_frees_the_policy(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    await batches.quarantine(harness.db, claimed, "NonFiniteUpdate: the gradient is not finite")
    [batch] = await harness.all(Batch)
    assert (batch.state, batch.reason) == (BatchState.QUARANTINED, "NonFiniteUpdate: the gradient is not finite")
    policy: Policy = await harness.policy()
    assert policy.head_version_id == claimed.parent.id


async def test_samples_that_the_algorithm_did_not_use_are_dropped(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    unused = claimed.batch.samples[0].turn_id
    assert await batches.commit(harness.db, claimed, trained_without(unused_turn_ids=[unused]))
    samples = {sample.turn_id: (sample.state, sample.reason) for sample in await harness.all(Sample)}
    assert samples.pop(unused) == (SampleState.DROPPED, batches.UNUSED_REASON)
    assert set(samples.values()) == {(SampleState.TRAINED, None)} and len(samples) == 7


async def test_foreign_turns_are_excluded_and_their_votes_say_why(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    foreign, other = (sample.turn_id for sample in claimed.batch.samples[:2])
    reason = "its recorded log-probs differ by 5 nats per token"
    assert await batches.commit(harness.db, claimed, trained_without(foreign_turns={foreign: reason}))
    samples = {sample.turn_id: (sample.state, sample.rule, sample.reason) for sample in await harness.all(Sample)}
    assert samples[foreign] == (SampleState.DROPPED, SampleRule.EXCLUDED, reason)
    assert samples[other] == (SampleState.TRAINED, None, None)
    assert (await harness.get(Turn, foreign)).exclusion_reason == reason
    [row] = (await harness.api.get("/v1/feedback", params={"completion_id": foreign})).json()["data"]
    assert (row["outcome"]["state"], row["outcome"]["rule"]) == ("not_learned", "excluded")
    assert reason in row["outcome"]["sentence"]


async def test_a_batch_without_contrast_but_for_foreign_turns_is_refused_without_them(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    foreign = claimed.batch.samples[0].turn_id
    await batches.refuse(harness.db, claimed, "ForeignSamples: nothing to compare", {foreign: "other weights"})
    states = {sample.turn_id: (sample.state, sample.rule) for sample in await harness.all(Sample)}
    assert states.pop(foreign) == (SampleState.DROPPED, SampleRule.EXCLUDED)
    assert set(states.values()) == {(SampleState.OPEN, None)}


async def test_projects_take_turns_at_the_trainer(harness: Harness) -> None:
    """A project's second batch waits for another project's first, although it was created earlier."""
    first = await create_claimed_batch(harness)
    assert await batches.commit(harness.db, first, TRAINED)
    async with harness.db.write() as session:
        shop = await session.get_one(Policy, (await harness.policy()).id)
        other, _ = await create_project(session, "bakery", "bread", harness.settings.model)
        bread = (await session.scalars(select(Policy).where(Policy.project_id == other.id))).one()
        for policy, at in ((shop, 1.0), (bread, 2.0)):
            parent = policy.head_version_id
            session.add(
                Batch(id=f"bat-{policy.name}", policy_id=policy.id, parent_id=parent, num_samples=2, created_at=at)
            )
    claimed = [await batch_claims.claim(harness.db, "trainer-a", harness.settings) for _ in range(2)]
    assert [batch.policy.name for batch in claimed if batch is not None] == ["bread", "shop"]


async def test_policy_on_another_base_model_is_not_claimed(harness: Harness) -> None:
    await rate(harness, "+-+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1
    other = harness.settings.replace({"model": "another/model"})
    assert await batch_claims.claim(harness.db, "trainer-b", other) is None
    assert await batch_claims.claim(harness.db, "trainer-a", harness.settings) is not None


async def test_damaged_parent_halts_training_and_reopens_samples(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    await batches.halt_on_damaged_parent(
        harness.db, claimed, "adapter.safetensors in /nowhere differs from its manifest."
    )
    [batch] = await harness.all(Batch)
    assert batch.state == BatchState.FAILED and "differs from its manifest" in batch.reason
    samples = await harness.all(Sample)
    assert {(sample.state, sample.batch_id) for sample in samples} == {(SampleState.OPEN, None)}
    policy = await harness.policy()
    assert policy.mode == LearningMode.HALTED and "is damaged" in (policy.mode_reason or "")
    halts = [row for row in await harness.all(Audit) if row.action == "training.halted"]
    assert [(row.actor, row.subject) for row in halts] == [("trainer", "shop")] and "is damaged" in (
        halts[0].reason or ""
    )
    assert await assemble(harness.db, harness.settings) == 0, "no batch is assembled while training is halted"

    async with harness.db.write() as session:  # an operator has restored the directory
        kl_guard.resume(await lock_policy(session, policy.id), actor="me", reason="restored")
    await curate(harness.db, harness.settings)  # feedback that came meanwhile counts
    assert await assemble(harness.db, harness.settings) == 1
    again = await batch_claims.claim(harness.db, "trainer-a", harness.settings)
    assert again is not None
    assert {sample.turn_id for sample in again.batch.samples} == {sample.turn_id for sample in claimed.batch.samples}


async def test_trainer_without_its_lease_halts_nothing(harness: Harness) -> None:
    claimed = await create_claimed_batch(harness)
    await expire_leases(harness)
    assert await batch_claims.claim(harness.db, "trainer-b", harness.settings) is not None
    with pytest.raises(LeaseLost):
        await batches.halt_on_damaged_parent(harness.db, claimed, "the parent is damaged")
    assert (await harness.policy()).mode == LearningMode.ASYNCHRONOUS


async def test_a_rollback_breaks_up_the_open_batch_before_it_is_trained(harness: Harness) -> None:
    """An update from the old head would be discarded, whether or not a trainer has claimed it already."""
    await rate(harness, "+-+-+-+-")
    await release(harness, await train(harness))
    turn_ids = await rate(harness, "+-+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1
    await roll_back(harness)
    failed = next(batch for batch in await harness.all(Batch) if batch.state != BatchState.TRAINED)
    assert (failed.state, failed.reason) == (BatchState.FAILED, "training returned to shop@v0")
    assert await batch_claims.claim(harness.db, "trainer", harness.settings) is None
    returned = {sample.turn_id for sample in await harness.all(Sample) if sample.state == SampleState.OPEN}
    assert returned == set(turn_ids)
    [audit] = [row for row in await harness.all(Audit) if row.action == "batch.failed"]
    assert (audit.subject, audit.reason) == (failed.id, failed.reason)


async def set_consent(harness: Harness, by: str, train: bool) -> None:
    async with harness.db.write() as session:
        await session.execute(update(Project if by == "project" else ApiKey).values(train=train))


async def rate_with_key(harness: Harness, thumbs: str) -> list[str]:
    """Create rated turns of the harness's API key."""
    [key] = await harness.all(ApiKey)
    return await rate(harness, thumbs, key_id=key.id)


@pytest.mark.parametrize("by", ["project", "key"])
async def test_samples_wait_while_consent_is_withdrawn(harness: Harness, by: str) -> None:
    await rate_with_key(harness, "+-+-+-+-")
    await set_consent(harness, by, False)
    assert await assemble(harness.db, harness.settings) == 0
    status = (await harness.api.get("/v1/policies/shop/training")).json()
    assert status["waiting_for"] == (
        "2 more ready samples. 8 others wait because their project or API key does not consent to training."
    )
    await set_consent(harness, by, True)
    assert await assemble(harness.db, harness.settings) == 1


async def test_consent_of_the_key_overrides_that_of_the_project(harness: Harness) -> None:
    others = await rate(harness, "+-")
    await rate_with_key(harness, "+-+-+-+-")
    await set_consent(harness, "project", False)
    await set_consent(harness, "key", True)
    assert await assemble(harness.db, harness.settings) == 1
    open_ids = {sample.turn_id for sample in await harness.all(Sample) if sample.state == SampleState.OPEN}
    assert open_ids == set(others), "they have no key"


async def test_a_batch_in_training_is_left_to_its_trainer(harness: Harness) -> None:
    """Consent is withdrawn after the claim, and another trainer looks for a batch."""
    await rate_with_key(harness, "+-+-+-+-")
    assert await assemble(harness.db, harness.settings) == 1
    claimed = await batch_claims.claim(harness.db, "trainer", harness.settings)
    assert claimed is not None
    async with harness.db.write() as session:
        (await session.scalars(select(Project))).one().train = False
    assert await batch_claims.claim(harness.db, "other", harness.settings) is None
    [batch] = await harness.all(Batch)
    assert (batch.state, batch.lease_owner, batch.fence) == (BatchState.OPEN, "trainer", claimed.row.fence)


@pytest.mark.parametrize("by", ["project", "key"])
async def test_a_batch_whose_consent_is_withdrawn_is_not_claimed(harness: Harness, by: str) -> None:
    turn_ids = await rate_with_key(harness, "+-+-+-+")
    async with harness.db.write() as session:  # the other reply has a consent of its own
        session.add(
            ApiKey(
                id="key_own",
                project_id=(await harness.policy()).project_id,
                prefix="p",
                sha256="s",
                scopes=[],
                train=True,
            )
        )
    [own] = await rate(harness, "-", key_id="key_own")
    assert await assemble(harness.db, harness.settings) == 1
    async with harness.db.write() as session:
        key_id = (await harness.get(Turn, turn_ids[0])).key_id
        row = await session.get_one(ApiKey, key_id) if by == "key" else (await session.scalars(select(Project))).one()
        row.train = False
    assert await batch_claims.claim(harness.db, "trainer", harness.settings) is None
    [batch] = await harness.all(Batch)
    reason = "its project or an API key no longer consents to training"
    assert (batch.state, batch.reason, batch.attempt) == (BatchState.REFUSED, reason, 0)
    assert [(row.action, row.subject, row.reason) for row in await harness.all(Audit) if row.subject == batch.id] == [
        ("batch.refused", batch.id, reason)
    ]
    samples = await harness.all(Sample)
    assert {(row.state, row.num_returns, row.batch_id) for row in samples} == {(SampleState.OPEN, 0, None)}
    assert {row.reason for row in samples} == {f"its batch was broken up: {reason}"}
    await curate(harness.db, harness.settings)
    small = harness.settings.replace(
        {"trainer.batch_size": 2, "trainer.max_batch_size": 2, "raters.max_rater_share": 1.0}
    )
    assert await assemble(harness.db, small) == 0, f"{own} alone may be learned from"
    async with harness.db.write() as session:
        await session.execute(update(ApiKey if by == "key" else Project).values(train=True))
    assert await assemble(harness.db, harness.settings) == 1


async def test_a_batch_handed_back_uses_up_no_attempt(harness: Harness) -> None:
    for _ in range(harness.settings.workers.max_attempts + 1):
        claimed = await batch_claims.claim(harness.db, "host:1", harness.settings) or await create_claimed_batch(
            harness
        )
        assert await batch_claims.hand_back(harness.db, ["host:9"]) == 0, "another trainer's"
        assert await batch_claims.hand_back(harness.db, ["trainer-a", "host:1"]) == 1
    [batch] = await harness.all(Batch)
    assert (batch.state, batch.attempt, batch.lease_owner, batch.lease_until) == (BatchState.OPEN, 0, None, None)
    assert await batch_claims.hand_back(harness.db, ["trainer-a", "host:1"]) == 0
    again = await batch_claims.claim(harness.db, "host:2", harness.settings)
    assert again is not None and again.batch == claimed.batch
    with pytest.raises(LeaseLost):
        await batches.commit(harness.db, claimed, TRAINED)
