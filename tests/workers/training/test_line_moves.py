"""A rollback changes the head at once, and the samples follow in steps: in any order of acts, and after a crash."""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.deployments import service
from app.models import (
    BatchTurn,
    Deployment,
    Engine,
    Feedback,
    LineMove,
    Policy,
    Sample,
    SampleState,
    Version,
    VersionState,
)
from app.policies.locks import lock_policy
from app.training import batch_samples, line_moves
from tests.support.deployment import Harness
from tests.support.trained_versions import create_version
from tests.support.updates import (
    BY_TEST,
    PROGRAM,
    deploy,
    finish_moves,
    make_steps,
    rate,
    reject,
    roll_back,
    train_versions,
)
from workers.curate import curate
from workers.training import assemble as assembly
from workers.training.assemble import assemble
from workers.training.line_moves import finish_moves as run_moves

State = dict[str, list[tuple[Any, ...]]]
Act = tuple[str, int]  # "roll back" or "deploy", and the number of the version
COLUMNS = {
    "samples": select(
        *(Sample.turn_id, Sample.state, Sample.batch_id, Sample.rule, Sample.reason),
        *(Sample.num_returns, Sample.automated_batch_id),
    ).order_by(Sample.turn_id),
    "feedback": select(Feedback.seq, Feedback.batch_id, Feedback.processed).order_by(Feedback.seq),
    "versions": select(Version.id, Version.state).order_by(Version.id),
    "deployment": select(Deployment.version_id, Deployment.previous_version_id, Deployment.epoch),
    "head": select(Policy.head_version_id),
    "moves": select(LineMove.id),
}


class Crash(Exception):
    """The process ends within a transaction."""


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_moves, "STEP", 3)
    monkeypatch.setattr(line_moves, "MAX_VERSIONS_IN_ACT", 1)


async def read_state(session: AsyncSession) -> State:
    return {name: [tuple(row) for row in await session.execute(query)] for name, query in COLUMNS.items()}


async def read_committed(harness: Harness) -> State:
    async with harness.db.read() as session:
        return await read_state(session)


async def load_all(harness: Harness) -> None:
    """Let the engine have all versions loaded."""
    names = [version.adapter_name for version in await harness.all(Version) if version.adapter_name is not None]
    async with harness.db.write() as session:
        await session.execute(update(Engine).values(loaded=names))


async def create_lines(harness: Harness) -> None:
    """Create two lines, v1 … v4 and v1, v5 … v7, of which the second one serves.

    People have judged v3 and v6. v2 and v7 have learned from more samples than a step moves. Feedback on a conversation
    concerns v1, v2 and v3.
    """
    for count, base in ((4, None), (3, 1)):
        if base is not None:
            await load_all(harness)
            await roll_back(harness, base)
            await finish_moves(harness)
        for number in range(count):
            num_turns = 7 if (base, number) in ((None, 1), (1, 2)) else 2
            turns = [await harness.turn(conversation_id="c-1" if base is None and number < 3 else None)]
            turns += [await harness.turn() for _ in range(num_turns - 1)]
            for turn in turns:
                assert (await harness.vote(turn.id, source=PROGRAM)).status_code == 201
            if base is None and number == 2:
                body = {"target": {"conversation_id": "c-1"}, "kind": "binary", "value": "up", "source": PROGRAM}
                assert (await harness.api.post("/v1/feedback", json=body)).status_code == 201
            await curate(harness.db, harness.settings)
            await create_version(harness, *turns, number=len(await harness.all(Version)))
        versions = await harness.all(Version)
        await load_all(harness)
        await rate(harness, "-", versions[-2])
        async with harness.db.write() as session:
            locked = await lock_policy(session, (await harness.policy()).id)
            await service.set_live(locked, await session.get_one(Version, versions[-1].id), BY_TEST)


async def act(session: AsyncSession, policy_id: str, name: str, number: int) -> None:
    locked = await lock_policy(session, policy_id)
    await (service.roll_back if name == "roll back" else service.deploy)(locked, number, BY_TEST)


async def expect(harness: Harness, acts: Sequence[Act]) -> State:
    """Return the state after these acts, where all moves are finished after each of them. Changes nothing."""
    policy_id = (await harness.policy()).id
    state: State = {}
    try:
        async with harness.db.write() as session:
            for name, number in acts:
                await act(session, policy_id, name, number)
                await session.flush()
                locked = await lock_policy(session, policy_id)
                while (step := await line_moves.plan_step(session, policy_id)) is not None:
                    await line_moves.make_step(locked, step)
            state = await read_state(session)
            raise Crash
    except Crash:
        return state


async def check_preview(harness: Harness, number: int) -> None:
    """Check that the preview, also during a move, has the samples of the versions that leave or join as they end."""
    seen = (await harness.api.get("/v1/policies/shop/rollback", params={"version": number})).json()
    state = await expect(harness, [("roll back", number)])
    states = {turn_id: state for turn_id, state, *_ in state["samples"]}
    batch_of = {f"shop@v{version.number}": version.batch_id for version in await harness.all(Version)}
    turns_of: dict[str | None, list[str]] = {}
    for row in await harness.all(BatchTurn):
        turns_of.setdefault(row.batch_id, []).append(row.turn_id)
    left, joined = (
        [states[turn_id] for name in seen[side] for turn_id in turns_of.get(batch_of[name], [])]
        for side in ("leaving", "joining")
    )
    counts = [left.count(SampleState.OPEN), left.count(SampleState.DROPPED), joined.count(SampleState.TRAINED)]
    assert [seen[f"samples_{name}"] for name in ("returned", "dropped", "reclaimed")] == counts


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("seed", range(3))
async def test_any_acts_during_moves_end_like_acts_after_them(
    harness: Harness, small_steps: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(batch_samples, "MAX_RETURNS", 100)
    await create_lines(harness)
    choose = random.Random(seed)
    policy_id = (await harness.policy()).id
    num_waiting = 0
    for _ in range(3):
        acts = [(choose.choice(["roll back", "deploy"]), choose.randrange(8)) for _ in range(choose.randint(2, 4))]
        expected = await expect(harness, acts)
        for name, number in acts:
            if name == "roll back":
                await check_preview(harness, number)
            async with harness.db.write() as session:
                await act(session, policy_id, name, number)
            await make_steps(harness, choose.randrange(4))
        num_waiting = max(num_waiting, len(await harness.all(LineMove)))
        await finish_moves(harness)
        assert await read_committed(harness) == expected, acts
        await curate(harness.db, harness.settings)
    assert num_waiting > 1, "the acts came during moves"


async def crash_in_step(harness: Harness) -> None:
    """Make the next step, and crash before it is committed."""
    policy_id = (await harness.policy()).id
    async with harness.db.read() as session:
        step = await line_moves.plan_step(session, policy_id)
    with pytest.raises(Crash):
        async with harness.db.write() as session:
            if step is not None:
                await line_moves.make_step(await lock_policy(session, policy_id), step)
            raise Crash


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("acts", [(("roll back", 0), ("deploy", 2)), (("deploy", 2), ("roll back", 0))], ids=str)
async def test_crash_after_any_step_loses_nothing(
    harness: Harness, small_steps: None, monkeypatch: pytest.MonkeyPatch, acts: tuple[Act, Act]
) -> None:
    monkeypatch.setattr(batch_samples, "MAX_RETURNS", 100)
    monkeypatch.setattr(line_moves, "STEP", 1)
    await train_versions(harness, 2)
    if acts[0][0] == "deploy":
        await roll_back(harness, 0)
        await finish_moves(harness)
    policy_id = (await harness.policy()).id
    num_steps = 0
    for count in range(100):
        expected = await expect(harness, acts[:1])
        async with harness.db.write() as session:
            await act(session, policy_id, *acts[0])
        num_steps = await make_steps(harness, count)
        await crash_in_step(harness)
        assert await run_moves(harness.db, math.inf)
        assert await read_committed(harness) == expected, count
        async with harness.db.write() as session:
            await act(session, policy_id, *acts[1])
        await finish_moves(harness)
        await curate(harness.db, harness.settings)
        if num_steps < count:
            break
    assert num_steps == 3, "of four, of which the act makes the first one itself"


async def test_no_batch_is_assembled_during_a_move(
    harness: Harness, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_out_of_time(db: object, end: float) -> bool:
        return False

    settings = harness.settings.replace({"trainer.batch_size": 4, "trainer.min_batch_size": 2})
    versions = await train_versions(harness, 3)
    await roll_back(harness, 0)
    await rate(harness, "+-+-")
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "finish_moves", run_out_of_time)
        assert await assemble(harness.db, settings) == 0
    trained = {sample.batch_id for sample in await harness.all(Sample) if sample.state == SampleState.TRAINED}
    assert trained <= {version.batch_id for version in versions[:-1]} and trained
    assert await run_moves(harness.db, math.inf)
    assert await assemble(harness.db, settings) == 1
    assert not await harness.all(LineMove)
    assert SampleState.TRAINED not in {sample.state for sample in await harness.all(Sample)}


async def test_votes_of_versions_that_are_being_undone_say_so(harness: Harness, small_steps: None) -> None:
    versions = await train_versions(harness, 3)
    await roll_back(harness, 0)
    await finish_moves(harness)
    await deploy(harness, versions[-1].number)  # now the batches have the feedback behind their samples
    await finish_moves(harness)
    await roll_back(harness, 0)
    seen = (await harness.api.get("/v1/policies/shop/votes")).json()
    assert json.dumps(seen).count('"undone"') >= 1, seen
    undone = [row for row in await harness.all(Feedback) if row.batch_id == versions[0].batch_id]
    outcome = (await harness.api.get(f"/v1/feedback/{undone[0].id}")).json()["outcome"]
    assert (outcome["state"], outcome["waiting_for"], outcome["version"]) == ("waiting", "undone", "shop@v1")
    await finish_moves(harness)
    seen = (await harness.api.get("/v1/policies/shop/votes")).json()
    assert '"undone"' not in json.dumps(seen)
    await deploy(harness, versions[-1].number)
    await finish_moves(harness)
    outcome = (await harness.api.get(f"/v1/feedback/{undone[0].id}")).json()["outcome"]
    assert (outcome["state"], outcome["version"]) == ("learned", "shop@v1")


async def find_none(*args: object, **options: object) -> None:
    return None


async def test_version_that_is_rejected_during_a_move_returns_its_samples_once(
    harness: Harness, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train_versions(harness, 2)
    turns = [await harness.turn() for _ in range(2)]
    for turn in turns:
        await harness.vote(turn.id, source=PROGRAM)
    await curate(harness.db, harness.settings)
    newest = await create_version(harness, *turns, state=VersionState.TRAINED)
    with monkeypatch.context() as patch:
        patch.setattr(line_moves, "plan_step", find_none)
        await roll_back(harness, 0)
    await reject(harness, newest)
    assert len(await harness.all(LineMove)) == 2
    await finish_moves(harness)
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert {(samples[turn.id].reason, samples[turn.id].num_returns) for turn in turns} == {(batch_samples.UNDONE, 1)}
