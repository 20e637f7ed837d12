"""Which samples are too old: the same as when each of them is looked at, and the others are not read."""

import random
import time
from collections.abc import Sequence

import pytest

from app.core.database import now
from app.core.settings import Settings
from app.models import Policy, Sample, SampleRule, SampleState, Version, VersionState
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.waiting_samples import add_samples, add_turns, analyze, forget_statistics
from workers.training import assemble as assemble_module

FEW, MANY = 300, 1500
DAY = 86400.0


async def drop_old(harness: Harness, settings: Settings) -> bool:
    async with harness.db.write() as session:
        policy = await session.get_one(Policy, (await harness.policy()).id)
        return await assemble_module._drop_old_samples(session, policy, settings)


@pytest.mark.parametrize("has_statistics", [True, False], ids=["statistics", "no statistics"])
@pytest.mark.parametrize("max_staleness", [None, 2])
async def test_samples_that_are_not_too_old_are_not_read(
    harness: Harness, max_staleness: int | None, has_statistics: bool
) -> None:
    """With automated rewards a limit applies without `max_staleness`."""
    settings = harness.settings.replace({"trainer.max_staleness": max_staleness})
    values = {"origin": "chat", "is_automated": max_staleness is None, "replied_at": time.time()}
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        await add_samples(harness, count, lambda number: 1.0, f"t{number}", **values)
        await analyze(harness)
        if not has_statistics:
            await forget_statistics(harness)
        async with count_work(harness.db) as work:
            assert not await drop_old(harness, settings)
        amounts.append(work.amount)
    assert amounts[1] < 1.2 * amounts[0] + 20


@pytest.mark.parametrize("has_statistics", [True, False], ids=["statistics", "no statistics"])
async def test_a_step_costs_the_samples_that_it_drops(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, has_statistics: bool
) -> None:
    monkeypatch.setattr(assemble_module, "STEP", 20)
    settings = harness.settings.replace({"trainer.max_staleness": 0})
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        await add_samples(harness, count, lambda number: 1.0, f"t{number}", replied_at=time.time())
        await harness.version(VersionState.LIVE)
        await analyze(harness)
        if not has_statistics:
            await forget_statistics(harness)
        async with count_work(harness.db) as work:
            assert await drop_old(harness, settings)
        amounts.append(work.amount)
    assert amounts[1] < 1.2 * amounts[0] + 20


@pytest.mark.parametrize(("seed", "step"), [(1, 500), (2, 3)])
async def test_the_samples_are_those_whose_version_or_age_is_beyond_a_limit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, seed: int, step: int
) -> None:
    """Random versions, branches and limits. A step has at most `step` samples for each limit."""
    rng = random.Random(seed)
    monkeypatch.setattr(assemble_module, "STEP", step)
    monkeypatch.setattr(assemble_module, "AUTOMATED_STALENESS", 2)
    versions = [await harness.serving()]
    for number in range(12):
        async with harness.db.write() as session:
            policy = await session.get_one(Policy, (await harness.policy()).id)
            policy.head_version_id = rng.choice(versions[-4:]).id
        if rng.random() < 0.8:
            head = await harness.version(VersionState.LIVE, number=len(versions), adapter_name=f"v{len(versions)}")
            versions.append(head)
        await add_random_samples(harness, rng, versions, f"s{number}")
        settings = harness.settings.replace({"trainer.max_staleness": rng.choice([None, 0, 1, 3])})
        before = await open_samples(harness)
        expected = await find_old(harness, versions, before, settings)
        while await drop_old(harness, settings):
            pass
        after = {sample.turn_id: sample for sample in await harness.all(Sample)}
        assert {id for id in before if after[id].state == SampleState.DROPPED} == expected.keys()
        assert {after[id].rule for id in expected} <= {SampleRule.TOO_OLD}
        if step == 500:
            assert {id: after[id].reason for id in expected} == expected


async def add_random_samples(harness: Harness, rng: random.Random, versions: Sequence[Version], prefix: str) -> None:
    turns = await add_turns(harness, 10, prefix)
    async with harness.db.write() as session:
        for turn in turns:
            version = rng.choice(versions)
            state = rng.choice([SampleState.OPEN, SampleState.OPEN, SampleState.OPEN, SampleState.TRAINED])
            values = {"replied_at": now() - rng.choice([1, 1, 1, 31]) * DAY, "is_automated": rng.random() < 0.5}
            owner = {"policy_id": turn.policy_id, "version_id": version.id}
            session.add(
                Sample(turn_id=turn.id, reward=1.0, state=state, origin="chat", ready_at=0.0, **owner, **values)
            )


async def open_samples(harness: Harness) -> dict[str, Sample]:
    return {sample.turn_id: sample for sample in await harness.all(Sample) if sample.state == SampleState.OPEN}


async def find_old(
    harness: Harness, versions: Sequence[Version], samples: dict[str, Sample], settings: Settings
) -> dict[str, str]:
    """Return why each of the samples is too old, by looking at each; those that are not are left out."""
    by_id = {version.id: version for version in versions}
    head = (await harness.policy()).head_version_id
    reasons: dict[str, str] = {}
    for id, sample in samples.items():
        limits = [2] if sample.is_automated else []
        limits += [] if settings.trainer.max_staleness is None else [settings.trainer.max_staleness]
        for limit in limits:
            line: list[Version] = []
            current: str | None = head
            while current is not None and len(line) <= limit:
                line.append(by_id[current])
                current = line[-1].parent_id
            if sample.version_id not in {version.id for version in line}:
                reason = f"its version is not v{line[0].number} or one of the {len(line) - 1} versions before it"
                reasons.setdefault(id, reason)
        if sample.replied_at < sample.changed_at - 30 * DAY:
            reasons[id] = "its reply is older than 30 days"
    return reasons
