"""The assembly, the measurement of feedback and canaries cost what is new. Work is counted, not time."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import func, text, update

from alignment.config.algorithm import UpdateConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from app.core.database import now
from app.deployments import comparison
from app.models import (
    ApiKey,
    AssemblyLook,
    Batch,
    Feedback,
    Policy,
    Project,
    Rater,
    RaterStanding,
    Reward,
    RouteReason,
    Sample,
    Turn,
    new_id,
)
from app.training import feedback_density, fruitless_looks, select_samples
from app.training.recomputation import request_recomputation
from app.training.refused_rewards import find_quarantined
from app.training.sample_columns import fill_columns
from tests.support.deployment import Harness
from tests.support.statement_work import count_work
from tests.support.waiting_samples import add_samples, add_turns, analyze
from workers.training.assemble import assemble

FEW, MANY = 500, 2000
HOUR = 3600.0  # no test takes that long: the work that it counts does not depend on a clock
LONG_AGO = {"changed_at": Sample.changed_at - 2 * HOUR, "compared_at": Sample.compared_at - 2 * HOUR}


@pytest.fixture(autouse=True)
def long_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMMIT_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(fruitless_looks, name, HOUR)


async def work_of(harness: Harness, act: Callable[[], Awaitable[object]]) -> int:
    async with count_work(harness.db) as work:
        await act()
    return work.amount


@pytest.mark.parametrize("position", ["among the first", "behind all others"])
async def test_a_batch_costs_the_same_however_many_samples_wait(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, position: str
) -> None:
    """Where the first rewards are all equal, the others are looked through for another one, and not ranked."""
    monkeypatch.setattr(select_samples, "MIN_FIRST_SAMPLES", 64)
    is_first = position == "among the first"

    def reward(number: int, count: int) -> float:
        return -1.0 if (number % 2 == 1 if is_first else number >= count - 2) else 1.0

    async def next_batch() -> None:
        assert await assemble(harness.db, harness.settings) == 1

    amounts = []
    for number, count in enumerate((FEW, MANY)):
        await add_samples(harness, count, lambda number, count=count: reward(number, count), prefix=f"t{number}")  # type: ignore[misc]
        await next_batch()  # which also fills the columns of the new samples
        async with harness.db.write() as session:
            await session.execute(update(Batch).values(state="trained"))
        amounts.append(await work_of(harness, next_batch))
        async with harness.db.write() as session:
            await session.execute(update(Batch).values(state="trained"))
            await session.execute(update(Sample).values(state="trained"))
    assert amounts[1] < (1.2 if is_first else 2.5) * amounts[0]


async def test_samples_are_filled_at_the_same_cost_however_many_are_left(harness: Harness) -> None:
    """Each step sorted all that were left, to take the first of them."""

    async def fill() -> None:
        async with harness.db.write() as session:
            assert await fill_columns(session, policy.id, 50) == 50

    policy = await harness.policy()
    amounts = []
    for number, count in enumerate((FEW, MANY)):
        await add_samples(harness, count, lambda number: 1.0, prefix=f"t{number}", origin=None)
        await analyze(harness)
        amounts.append(await work_of(harness, fill))
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(state="trained"))
    assert amounts[1] < 1.3 * amounts[0]


async def test_the_feedback_of_returned_samples_is_found_by_indexes(harness: Harness) -> None:
    """All feedback has other targets: on turns of other conversations, and on conversations without a turn."""
    amounts = []
    turn = await harness.turn(conversation_id="c")
    for number, count in enumerate((FEW, MANY - FEW)):
        others = await add_turns(harness, count, f"f{number}")
        rows = [Feedback(**feedback_row(other, {"turn_id": other.id, "target": other.id})) for other in others]
        about = [{"conversation_id": f"c-{other.id}", "target": f"c-{other.id}"} for other in others]
        rows += [Feedback(**feedback_row(other, target)) for other, target in zip(others, about, strict=True)]
        async with harness.db.write() as session:
            session.add_all(rows)
            await session.flush()
            await session.execute(text("ANALYZE"))

        async def request() -> None:
            async with harness.db.write() as session:
                await request_recomputation(session, [turn.id])

        amounts.append(await work_of(harness, request))
    assert amounts[1] < 1.2 * amounts[0] + 20  # to read all would be hundreds


async def test_quarantined_raters_of_an_episode_are_found_once_for_all_of_its_turns(harness: Harness) -> None:
    """Each of its samples has the rewards of all its turns: a look for each of them would read the square of them."""
    amounts = []
    for number, count in enumerate((FEW // 5, FEW)):
        episode_id = f"ep-{number}"
        await add_samples(harness, count, lambda number: 1.0, prefix=f"e{number}", episode_id=episode_id)
        turn_ids = [f"chatcmpl-e{number}-{place:06}" for place in range(count)]
        project_id = (await harness.policy()).project_id
        async with harness.db.write() as session:
            await session.execute(update(Turn).where(Turn.id.in_(turn_ids)).values(episode_id=episode_id))
            names = [f"HUMAN/{number}-{place}" for place in range(count)]
            standing = {"standing": RaterStanding.QUARANTINED, "reason": "a burst"}
            session.add_all(Rater(project_id=project_id, name=name, **standing) for name in names)
            rated = zip(turn_ids, names, strict=True)
            rewards = [{"turn_id": id, "rater": name, "source": name, "value": 1.0} for id, name in rated]
            session.add_all(Reward(id=new_id("rew"), **reward) for reward in rewards)
        await analyze(harness)

        async def find(turn_ids: list[str] = turn_ids) -> None:
            async with harness.db.read() as session:
                assert await find_quarantined(session, turn_ids) == dict.fromkeys(turn_ids, "a burst")

        amounts.append(await work_of(harness, find))
    assert amounts[1] < 10 * amounts[0]  # five times as many turns


def feedback_row(turn: Turn, target: dict[str, str]) -> dict[str, Any]:
    id = new_id("fb")
    values: dict[str, Any] = {"id": id, "project_id": turn.project_id, "idempotency_key": id, "kind": "binary"}
    values |= {
        "name": "default",
        "value": 1.0,
        "raw_value": "up",
        "source_kind": "HUMAN",
        "source_id": "ada",
        "fingerprint": "0" * 64,
    }
    return {**values, "request_metadata": {}, "processed": True, **target}


async def look(harness: Harness) -> int:
    async def find_nothing() -> None:
        assert await assemble(harness.db, harness.settings) == 0

    return await work_of(harness, find_nothing)


def require_raters(harness: Harness) -> None:
    """Let all samples that wait be read, and no batch be found."""
    harness.settings = harness.settings.replace({"raters.min_raters": 2 * FEW})


async def test_samples_without_a_batch_are_looked_at_again_when_something_has_changed(harness: Harness) -> None:
    require_raters(harness)
    await add_samples(harness, FEW, lambda number: (-1.0) ** number)
    first = await look(harness)
    assert await look(harness) > first / 4, "other transactions may commit what they changed before the look"
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(LONG_AGO))
    assert await look(harness) < first / 20
    await add_samples(harness, 1, lambda number: -1.0, prefix="other")
    assert await look(harness) > first / 4


@pytest.mark.parametrize("change", ["settings", "consent of a key", "time"])
async def test_samples_are_looked_at_again_when_the_conditions_have_changed(harness: Harness, change: str) -> None:
    require_raters(harness)
    await add_samples(harness, FEW, lambda number: (-1.0) ** number)
    await look(harness)
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(LONG_AGO))
    skipped = await look(harness)
    if change == "settings":
        harness.settings = harness.settings.replace({"trainer.max_wait_seconds": 1.0})
    async with harness.db.write() as session:
        if change == "consent of a key":
            await session.execute(update(ApiKey).values(train=True))
        if change == "time":
            await session.execute(text("UPDATE assembly_looks SET next_at = looked_at"))
    assert await look(harness) > 5 * skipped


@pytest.mark.parametrize("algorithm", [PPOConfig(), GRPOConfig()], ids=["ppo", "grpo"])
async def test_samples_whose_rewards_are_equal_cost_nothing(harness: Harness, algorithm: UpdateConfig) -> None:
    harness.settings = harness.settings.replace({"algorithm": algorithm})
    amounts = []
    for number, count in enumerate((FEW, MANY - FEW)):
        await add_samples(harness, count, lambda number: 1.0, prefix=f"t{number}")
        await look(harness)  # which fills the columns of the new samples, and reads all groups
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(LONG_AGO))
        await analyze(harness)
        await add_samples(harness, 1, lambda number: 1.0, prefix=f"new{number}")
        amounts.append(await look(harness))
    assert amounts[1] < 1.2 * amounts[0] + 20


async def test_a_group_gets_contrast_by_a_sample_that_changes(harness: Harness) -> None:
    harness.settings = harness.settings.replace({"algorithm": GRPOConfig()})
    await add_samples(harness, FEW, lambda number: 1.0)
    async with harness.db.write() as session:
        await session.execute(update(Sample).values(group_id=func.substr(Sample.turn_id, 1, 16), **LONG_AGO))
    for _ in range(2):
        await look(harness)
        async with harness.db.write() as session:
            await session.execute(update(Sample).values(LONG_AGO))
            await session.execute(update(AssemblyLook).values(next_at=0.0))
    async with harness.db.write() as session:
        await session.execute(update(Sample).where(Sample.turn_id == "chatcmpl-t-000007").values(reward=-1.0))
    assert await assemble(harness.db, harness.settings) == 1


async def test_samples_whose_project_does_not_consent_cost_nothing(harness: Harness) -> None:
    amounts = []
    async with harness.db.write() as session:
        await session.execute(update(Project).values(train=False))
    for number, count in enumerate((FEW, MANY - FEW)):
        await add_samples(harness, count, lambda number: (-1.0) ** number, prefix=f"t{number}")
        await look(harness)  # which fills the columns of the new samples
        await analyze(harness)  # the planner believed that they were not filled
        amounts.append(await look(harness))
    assert amounts[1] < 1.5 * amounts[0]


async def test_feedback_of_a_policy_without_traffic_is_measured_at_the_same_cost(harness: Harness) -> None:
    idle = Policy(id="pol-idle", project_id=(await harness.policy()).project_id)

    async def measure() -> None:
        async with harness.db.read() as session:
            assert await feedback_density._measure_share(session, idle) is None

    amounts = []
    for prefix, count in (("a", FEW), ("b", MANY - FEW)):
        await add_turns(harness, count, prefix)
        async with harness.db.write() as session:
            await session.execute(update(Turn).values(created_at=now() - 2 * feedback_density.MIN_AGE_SECONDS))
        await analyze(harness)
        amounts.append(await work_of(harness, measure))
    assert amounts[1] < 1.5 * amounts[0] + 10


async def test_turns_that_are_not_compared_are_read_up_to_a_bound(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MAX_READ_TURNS", 500)
    version, arms = await harness.serving(), []

    async def compare() -> None:
        async with harness.db.read() as session:
            arms.append(await comparison.read_arm(session, version.id, 0.0))

    amounts: list[int] = []
    for prefix, count in (("a", FEW), ("b", MANY - FEW)):
        turns = await add_turns(harness, count, prefix)
        async with harness.db.write() as session:
            times = [{"id": turn.id, "created_at": float(MANY * len(amounts) + n)} for n, turn in enumerate(turns)]
            await session.execute(update(Turn), times)
            await session.execute(update(Turn).values(route_reason=RouteReason.PINNED))
        await analyze(harness)
        amounts.append(await work_of(harness, compare))
    assert [arm.turns for arm in arms] == [0, 0] and amounts[1] < 1.5 * amounts[0]


async def test_the_comparison_of_a_canary_has_a_bound(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_ARM_TURNS", 500)
    monkeypatch.setattr(comparison, "MAX_READ_TURNS", 500)
    version, arms = await harness.serving(), []

    async def compare() -> None:
        async with harness.db.read() as session:
            arms.append(await comparison.read_arm(session, version.id, 0.0))

    amounts = []
    for prefix, count in (("a", FEW), ("b", MANY - FEW)):
        await add_turns(harness, count, prefix)
        await analyze(harness)
        amounts.append(await work_of(harness, compare))
    assert [arm.turns for arm in arms] == [500, 500] and amounts[1] < 1.5 * amounts[0]
