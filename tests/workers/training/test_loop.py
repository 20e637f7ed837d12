"""The training loop: several policies on one trainer, and updates that fail."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

from alignment.artifacts.manifest import MANIFEST, write_manifest
from alignment.artifacts.specs import ADAPTER, TRAINER_STATE
from alignment.errors import NonFiniteUpdate, NothingToCompare, NoVariance
from alignment.types import Batch as TrainerBatch
from app.core.database import Database
from app.models import Audit, Batch, BatchState, LearningMode, Policy, Sample, SampleState, Version
from app.policies.locks import lock_policy
from app.policies.overrides import Own, set_own_values
from app.training import batch_samples
from tests.support.deployment import Harness
from tests.support.frozen_batches import create_batch, create_project_with_policy
from tests.support.updates import expire_leases
from workers.base_model import check_weights_files
from workers.context import WorkerContext
from workers.training import batches
from workers.training.commands import Update
from workers.training.loop import TrainingLoop
from workers.training.ranks import UNKNOWN, RankGroup, RankGroupFailed
from workers.training.results import TrainedVersion
from workers.training.trackers import Trackers


@dataclass
class Rank:
    """Rank 0 of a group of one rank, in a thread instead of a process."""

    context: WorkerContext
    group: RankGroup
    thread: ThreadPoolExecutor

    async def work(self) -> int:
        return await asyncio.get_running_loop().run_in_executor(
            self.thread, TrainingLoop(self.group, self.context, Trackers(self.context.settings)).run_pending_work
        )


@pytest.fixture
async def rank(harness: Harness) -> AsyncIterator[Rank]:
    with ThreadPoolExecutor(1) as thread:
        group = await asyncio.get_running_loop().run_in_executor(thread, RankGroup, harness.settings)
        rank = Rank(WorkerContext(harness.settings), group, thread)
        yield rank
        thread.submit(lambda: rank.context.run(rank.context.db.close())).result()


def sealed_files(directory: str | Path) -> dict[str, Any]:
    """Return the hashes of all files of an update: adapter, optimizer, baseline."""
    files: dict[str, Any] = json.loads((Path(directory) / MANIFEST).read_text())["files"]
    return files


WITH_CRITIC = {"algorithm": {"type": "ppo", "estimator": "gae", "kl_control": {"horizon": 10}}}
WITHOUT_CRITIC = {"algorithm": {"type": "kto", "beta": 0.3}, "trainer": {"optim": {"lr": 1e-3}, "kl_target": 0.002}}


@pytest.mark.parametrize("own", [({}, {}), (WITH_CRITIC, WITHOUT_CRITIC)], ids=["the deployment's", "their own"])
async def test_policies_that_share_a_trainer_get_bitwise_equal_results(
    harness: Harness, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[Own, Own]
) -> None:
    first = (await harness.policy()).id
    second = await create_project_with_policy(harness.db, "shop", harness.settings.model)
    async with harness.db.write() as session:
        for policy, values in zip((first, second), own, strict=True):
            set_own_values(await session.get_one(Policy, policy), values)
    commands: list[Update] = []
    run = rank.group.run

    def record_command(command: Update) -> TrainedVersion:
        commands.append(command)
        return run(command)

    monkeypatch.setattr(rank.group, "run", record_command)
    for step in range(3):
        for number, policy in enumerate((first, second)):
            await create_batch(harness.db, policy, seed=10 * step + number)
        assert await rank.work() == 2

    versions = {str(version.adapter_path): version for version in await harness.all(Version) if version.number}
    trained = [versions[str(command.directory)] for command in commands]
    assert [version.policy_id for version in trained] == [first, second] * 3
    assert len({sealed_files(command.directory)["adapter_model.safetensors"]["sha256"] for command in commands}) == 6
    has_critic = ["trainer/critic.safetensors" in sealed_files(command.directory) for command in commands]
    assert has_critic == [own[0] == WITH_CRITIC, False] * 3
    algorithms = [command.config.algorithm.type for command in commands]
    assert algorithms == ["ppo", "kto" if own[1] else "ppo"] * 3

    for policy in (first, second):
        separate_group, parent = RankGroup(harness.settings), None
        of_policy = [command for command, version in zip(commands, trained, strict=True) if version.policy_id == policy]
        for number, command in enumerate(of_policy):
            directory = tmp_path / f"{policy}-{number}"
            separate_group.update(replace(command, parent=parent, parent_sha256=None, directory=directory))
            assert sealed_files(directory) == sealed_files(command.directory)
            parent = directory


async def test_updates_become_smaller_after_alarms_of_the_kl_guard(harness: Harness, rank: Rank) -> None:
    policy_id = (await harness.policy()).id
    target = rank.context.settings.trainer.update_kl_target
    for alarms in (0, 2):
        async with harness.db.write() as session:
            (await session.get_one(Policy, policy_id)).kl_alarms = alarms
        await create_batch(harness.db, policy_id, seed=alarms)
        assert await rank.work() == 1
        newest = max(await harness.all(Version), key=lambda version: version.number)
        assert 0.1 * target * 0.5**alarms <= newest.metrics["guard/kl"] <= target * 0.5**alarms
        response = await harness.api.get(f"/v1/policies/{harness.settings.policy}")
        view = response.json()["last_step"]
        assert view["kl"] == newest.metrics["guard/kl"] and view["lr_scale"] == newest.metrics["actor/lr_scale"]


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
async def test_update_out_of_memory_fails_the_group_and_the_batch_is_retried(
    harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    batch_id = await create_batch(harness.db, (await harness.policy()).id)
    monkeypatch.setattr(rank.group.trainer, "update", failing_update(error, rank.group.trainer.update, times=1))
    with pytest.raises(RankGroupFailed, match=error.__name__):
        await rank.work()
    await expire_leases(harness)
    assert await rank.work() == 1
    batch: Batch = await harness.get(Batch, batch_id)
    assert (batch.state, batch.attempt) == (BatchState.TRAINED, 2)
    [version] = [version for version in await harness.all(Version) if version.number]
    state = json.loads((Path(version.adapter_path) / "trainer" / "state.json").read_text())
    assert state["updates"] == 1, "the failed attempt changed nothing"
    async with harness.db.read() as session:
        [audit] = await session.scalars(select(Audit).where(Audit.action == "batch.attempt_failed"))
    assert audit.subject == batch_id and error.__name__ in (audit.reason or "") and audit.details == {"attempt": 1}


async def test_batch_that_is_always_out_of_memory_is_quarantined(
    harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = (await harness.policy()).id
    poisoned = await create_batch(harness.db, policy, seed=1)
    update = rank.group.trainer.update
    monkeypatch.setattr(rank.group.trainer, "update", failing_update(MemoryError, update, only=poisoned))
    for _ in range(harness.settings.workers.max_attempts):
        with pytest.raises(RankGroupFailed):
            await rank.work()
        await expire_leases(harness)
    assert await rank.work() == 0
    assert await batches.quarantine_poisoned(harness.db, harness.settings) == 1
    assert (await harness.get(Batch, poisoned)).state == BatchState.QUARANTINED
    good = await create_batch(harness.db, policy, seed=2)
    assert await rank.work() == 1
    [version] = [version for version in await harness.all(Version) if version.number]
    assert (version.batch_id, version.number) == (good, 1)
    states = {(sample.batch_id, sample.state) for sample in await harness.all(Sample)}
    assert states == {(None, SampleState.OPEN), (good, SampleState.TRAINED)}


@pytest.mark.parametrize("error", [NothingToCompare, NoVariance])
async def test_batch_without_contrast_is_refused_and_its_samples_return(
    harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    batch_id = await create_batch(harness.db, (await harness.policy()).id)
    monkeypatch.setattr(rank.group.trainer, "update", failing_update(error, rank.group.trainer.update, times=1))
    assert await rank.work() == 1
    batch: Batch = await harness.get(Batch, batch_id)
    assert batch.state == BatchState.REFUSED and (batch.reason or "").startswith(error.__name__)
    assert {(row.state, row.num_returns) for row in await harness.all(Sample)} == {(SampleState.OPEN, 0)}


async def test_update_of_a_batch_that_was_broken_up_is_discarded(
    harness: Harness, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback during an update that fails must not stop the trainer."""
    policy_id = (await harness.policy()).id
    batch_id = await create_batch(harness.db, policy_id)
    update = failing_update(NonFiniteUpdate, rank.group.trainer.update, times=1)

    def break_up_and_fail(*arguments: Any, **options: Any) -> Any:
        rank.context.run(break_up(rank.context.db, batch_id))
        return update(*arguments, **options)

    monkeypatch.setattr(rank.group.trainer, "update", break_up_and_fail)
    assert await rank.work() == 1
    assert (await harness.get(Batch, batch_id)).state == BatchState.FAILED
    await create_batch(harness.db, policy_id, seed=1)
    monkeypatch.undo()
    assert await rank.work() == 1
    assert len([version for version in await harness.all(Version) if version.number]) == 1


async def break_up(db: Database, batch_id: str) -> None:
    async with db.write() as session:
        locked = await lock_policy(session, (await session.get_one(Batch, batch_id)).policy_id)
        await batch_samples.break_up_batches(locked, [batch_id], BatchState.FAILED, "the head moved")


def failing_update(
    error: type[Exception], update: Callable[..., Any], times: int | None = None, only: str | None = None
) -> Callable[..., Any]:
    """Return an update function that fails the first `times` calls, or for the batch `only`."""
    failed = 0

    def run(batch: TrainerBatch, kl_target_factor: float) -> Any:
        nonlocal failed
        if (times is None or failed < times) and only in (None, batch.id):
            failed += 1
            raise error("out of memory")
        return update(batch, kl_target_factor)

    return run


async def test_policy_on_another_base_model_is_not_trained(harness: Harness, rank: Rank) -> None:
    policy_id = await create_project_with_policy(harness.db, "elsewhere", "someone/another-model")
    batch_id = await create_batch(harness.db, policy_id)
    assert await rank.work() == 0
    batch: Batch = await harness.get(Batch, batch_id)
    assert (batch.state, batch.attempt) == (BatchState.OPEN, 0)


@pytest.mark.parametrize("is_sealed_again", [False, True])
@pytest.mark.parametrize(
    "file", [ADAPTER, f"{TRAINER_STATE}/optimizer.exp_avg_sq.safetensors", f"{TRAINER_STATE}/state.json"]
)
async def test_damaged_parent_halts_training_instead_of_failing_every_batch(
    harness: Harness, rank: Rank, file: str, is_sealed_again: bool
) -> None:
    """Also if the manifest lists the changed file, since the database has the hash of the manifest."""
    policy_id = (await harness.policy()).id
    await create_batch(harness.db, policy_id)
    assert await rank.work() == 1
    [version] = [row for row in await harness.all(Version) if row.adapter_path]
    damaged = Path(version.adapter_path) / file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    if is_sealed_again:
        write_manifest(Path(version.adapter_path), {})
    rank.group.loaded_version_dir = UNKNOWN  # as after a start: the next update reads the parent from disk
    batch_id = await create_batch(harness.db, policy_id)
    assert await rank.work() == 1
    assert (await harness.get(Batch, batch_id)).state == BatchState.FAILED
    policy = await harness.policy()
    assert policy.mode == LearningMode.HALTED and "is damaged" in (policy.mode_reason or "")
    states = [row.state for row in await harness.all(Sample)]
    assert states.count(SampleState.OPEN) == 8 and SampleState.DROPPED not in states
    assert [row.actor for row in await harness.all(Audit) if row.action == "training.halted"] == ["trainer"]


async def test_full_weights_are_trained_and_loadable(harness: Harness) -> None:
    """Run two updates, the second from the weights and optimizer of the first, and check the files for an engine."""
    settings = harness.settings.replace({"trainer.adaptation": "full"})
    with ThreadPoolExecutor(1) as thread:
        group = await asyncio.get_running_loop().run_in_executor(thread, RankGroup, settings)
        rank = Rank(WorkerContext(settings), group, thread)
        for seed in (1, 2):
            await create_batch(harness.db, (await harness.policy()).id, seed=seed)
            assert await rank.work() == 1
        thread.submit(lambda: rank.context.run(rank.context.db.close())).result()
    versions = sorted(await harness.all(Version), key=lambda version: version.number)[1:]
    assert [version.full_weights for version in versions] == [True, True]
    for version in versions:
        check_weights_files(settings, Path(version.adapter_path or ""), version.manifest_sha256 or "")
        assert version.adapter is None and version.weights == version.adapter_name
    state = json.loads((Path(versions[1].adapter_path or "") / "trainer" / "state.json").read_text())
    assert state["updates"] == 2
