"""One trainer, several policies, and what an update that breaks costs them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

from alignment.artifacts.manifest import MANIFEST
from alignment.types import Batch as Lesson
from app.models import Audit, Batch, BatchState, LearningMode, Sample, SampleState, Version
from tests.support.deployment import Harness
from tests.support.frozen_batches import another_policy, freeze
from tests.workers.training.test_batches import expired
from workers.context import WorkerContext
from workers.release.verify_delivery import check
from workers.training import batches
from workers.training.loop import work
from workers.training.ranks import Broken, Group
from workers.training.trackers import Trackers


@dataclass
class Rank:
    """Rank 0 of a group of one, in a thread of its own as it has a process of its own elsewhere."""

    house: WorkerContext
    group: Group
    thread: ThreadPoolExecutor

    async def work(self) -> int:
        return await asyncio.get_running_loop().run_in_executor(
            self.thread, work, self.group, self.house, Trackers(self.house.settings)
        )


@pytest.fixture
async def rank(harness: Harness) -> AsyncIterator[Rank]:
    with ThreadPoolExecutor(1) as thread:
        group = await asyncio.get_running_loop().run_in_executor(thread, Group, harness.settings)
        rank = Rank(WorkerContext(harness.settings), group, thread)
        yield rank
        thread.submit(lambda: rank.house.run(rank.house.db.close())).result()


def sealed(directory: str | Path) -> dict[str, Any]:
    """The hashes of all that an update leaves behind: adapter, optimizer, baseline."""
    files: dict[str, Any] = json.loads((Path(directory) / MANIFEST).read_text())["files"]
    return files


async def test_policies_that_take_turns_get_bit_for_bit_what_each_gets_alone(
    harness: Harness, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = (await harness.policy()).id
    theirs = await another_policy(harness.db, "shop", harness.settings.model)
    orders: list[dict[str, Any]] = []
    lead = rank.group.lead
    monkeypatch.setattr(rank.group, "lead", lambda order: (orders.append(order), lead(order))[1])
    for turn in range(3):
        for number, policy in enumerate((ours, theirs)):
            await freeze(harness.db, policy, seed=10 * turn + number)
        assert await rank.work() == 2

    versions = {str(version.adapter_path): version for version in await harness.all(Version) if version.number}
    made = [versions[order["directory"]] for order in orders]
    assert [version.policy_id for version in made] == [ours, theirs] * 3
    assert len({sealed(order["directory"])["adapter_model.safetensors"]["sha256"] for order in orders}) == 6

    for policy in (ours, theirs):
        alone, parent = Group(harness.settings), None
        for number, order in enumerate(o for o, v in zip(orders, made, strict=True) if v.policy_id == policy):
            directory = tmp_path / f"{policy}-{number}"
            alone.update({**order, "parent": parent, "directory": str(directory)})
            assert sealed(directory) == sealed(order["directory"])
            parent = str(directory)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
async def test_an_update_out_of_memory_breaks_the_group_and_the_batch_is_taken_again(
    harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    batch_id = await freeze(harness.db, (await harness.policy()).id)
    monkeypatch.setattr(rank.group.learner, "update", failing(error, rank.group.learner.update, times=1))
    with pytest.raises(Broken, match=error.__name__):
        await rank.work()
    await expired(harness)
    assert await rank.work() == 1
    batch: Batch = await harness.get(Batch, batch_id)
    assert (batch.state, batch.attempt) == (BatchState.TRAINED, 2)
    [version] = [version for version in await harness.all(Version) if version.number]
    state = json.loads((Path(version.adapter_path) / "trainer" / "state.json").read_text())
    assert state["updates"] == 1, "what broke left nothing behind"
    async with harness.db.read() as session:
        [told] = await session.scalars(select(Audit).where(Audit.action == "attempt failed"))
    assert told.subject == batch_id and error.__name__ in told.reason and told.details == {"attempt": 1}


async def test_a_batch_that_is_always_out_of_memory_is_set_aside_and_learning_goes_on(
    harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = (await harness.policy()).id
    poisoned = await freeze(harness.db, policy, seed=1)
    update = rank.group.learner.update
    monkeypatch.setattr(rank.group.learner, "update", failing(MemoryError, update, only=poisoned))
    for _ in range(harness.settings.max_attempts):
        with pytest.raises(Broken):
            await rank.work()
        await expired(harness)
    assert await rank.work() == 0
    assert await batches.quarantine_poisoned(harness.db, harness.settings) == 1
    assert (await harness.get(Batch, poisoned)).state == BatchState.QUARANTINED
    good = await freeze(harness.db, policy, seed=2)
    assert await rank.work() == 1
    [version] = [version for version in await harness.all(Version) if version.number]
    assert (version.batch_id, version.number) == (good, 1)
    states = {(sample.batch_id, sample.state) for sample in await harness.all(Sample)}
    assert states == {(poisoned, SampleState.DROPPED), (good, SampleState.TRAINED)}


def failing(
    error: type[Exception], update: Callable[[Lesson], Any], times: int | None = None, only: str | None = None
) -> Callable[[Lesson], Any]:
    """An update that fails the first `times`, or for `only` one batch."""
    failed = 0

    def run(batch: Lesson) -> Any:
        nonlocal failed
        if (times is None or failed < times) and only in (None, batch.id):
            failed += 1
            raise error("there is no more memory")
        return update(batch)

    return run


async def test_a_policy_on_another_base_model_is_another_trainers(harness: Harness, rank: Rank) -> None:
    theirs = await another_policy(harness.db, "elsewhere", "someone/another-model")
    batch_id = await freeze(harness.db, theirs)
    assert await rank.work() == 0
    batch: Batch = await harness.get(Batch, batch_id)
    assert (batch.state, batch.attempt) == (BatchState.OPEN, 0)


async def test_a_damaged_parent_halts_learning_instead_of_eating_batch_after_batch(
    harness: Harness, rank: Rank
) -> None:
    policy_id = (await harness.policy()).id
    await freeze(harness.db, policy_id)
    assert await rank.work() == 1
    [version] = [row for row in await harness.all(Version) if row.adapter_path]
    weights = Path(version.adapter_path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    rank.group.at = "nowhere"  # as after a start: what stands in memory is not read from disk
    batch_id = await freeze(harness.db, policy_id)
    assert await rank.work() == 1
    assert (await harness.get(Batch, batch_id)).state == BatchState.FAILED
    policy = await harness.policy()
    assert policy.mode == LearningMode.HALTED and "is damaged" in policy.mode_reason
    states = [row.state for row in await harness.all(Sample)]
    assert states.count(SampleState.OPEN) == 8 and SampleState.DROPPED not in states
    assert [row.actor for row in await harness.all(Audit) if row.action == "learning halted"] == ["trainer"]


async def test_all_weights_are_trained_and_fit_for_an_engine(harness: Harness) -> None:
    """Two updates, the second on the first's own weights and optimizer; what an engine takes is nothing else."""
    settings = harness.settings.model_copy(update={"adaptation": "full"})
    with ThreadPoolExecutor(1) as thread:
        group = await asyncio.get_running_loop().run_in_executor(thread, Group, settings)
        rank = Rank(WorkerContext(settings), group, thread)
        for seed in (1, 2):
            await freeze(harness.db, (await harness.policy()).id, seed=seed)
            assert await rank.work() == 1
        thread.submit(lambda: rank.house.run(rank.house.db.close())).result()
    versions = [version for version in await harness.all(Version) if version.number]
    assert [version.full_weights for version in versions] == [True, True]
    for version in versions:
        check(version, settings)
        assert version.adapter is None and version.weights == version.adapter_name
    state = json.loads((Path(versions[1].adapter_path or "") / "trainer" / "state.json").read_text())
    assert state["updates"] == 2
