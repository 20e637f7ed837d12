"""Raters are counted, weighted and quarantined, on both databases."""

import asyncio

import pytest
from sqlalchemy import func, literal, select, union_all, update

from alignment.signals.rater_trust import RaterSignal, rater_weight
from app.core.database import now
from app.models import Audit, Rater, RaterStanding, Sample, SampleState
from app.projects.service import create_project
from app.raters.allowance import is_within_allowance
from app.raters.service import ALL_RATERS
from tests.support.deployment import Harness
from tests.support.rater_trust import sample_quota
from tests.support.settings import by_path
from tests.support.updates import claim_next_batch
from workers.curate import curate
from workers.feedback import rater_trust, rewards
from workers.feedback.rater_trust import RaterTrust


async def update_trust(harness: Harness, values: dict[str, list[float]], **updates: object) -> dict[str, RaterTrust]:
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        return await rater_trust.update_trust(
            session, project_id, values, harness.settings.replace(by_path({"trust": True, **updates}))
        )


async def read_rater(harness: Harness, name: str) -> Rater:
    row: Rater = await harness.get(Rater, ((await harness.policy()).project_id, name))
    return row


async def set_standing(harness: Harness, name: str, standing: RaterStanding, reason: str | None = None) -> None:
    async with harness.db.write() as session:
        await session.execute(update(Rater).where(Rater.name == name).values(standing=standing, reason=reason))


async def test_ratings_are_counted_page_by_page(harness: Harness) -> None:
    first = await update_trust(harness, {"HUMAN/7": [1.0, -1.0], "HUMAN/8": [0.5, 0.0]})
    await update_trust(harness, {"HUMAN/7": [1.0]})
    assert first == {"HUMAN/7": RaterTrust(0.4), "HUMAN/8": RaterTrust(0.4)}
    seven, eight = await read_rater(harness, "HUMAN/7"), await read_rater(harness, "HUMAN/8")
    assert (seven.num_up, seven.num_down, seven.num_today) == (2, 1, 3)
    assert (eight.num_up, eight.num_down, eight.num_today) == (1, 0, 2), "0 is neither up nor down"
    everybody = await read_rater(harness, ALL_RATERS)
    assert (everybody.num_up, everybody.num_down) == (3, 1)


async def test_the_daily_count_uses_the_clock_of_the_database(harness: Harness) -> None:
    await update_trust(harness, {"HUMAN/7": [1.0] * 3})
    async with harness.db.write() as session:
        await session.execute(update(Rater).values(counted_day=Rater.counted_day - 1))
    await update_trust(harness, {"HUMAN/7": [1.0]})
    assert (await read_rater(harness, "HUMAN/7")).num_today == 1


async def test_a_rater_over_the_daily_limit_is_quarantined_and_audited(harness: Harness) -> None:
    await update_trust(harness, {"HUMAN/7": [1.0] * 4}, max_rater_day=5)
    trust = await update_trust(harness, {"HUMAN/7": [-1.0] * 2}, max_rater_day=5)
    assert trust["HUMAN/7"].quarantine_reason == "6 rewards in a day, more than the limit of 5"
    row = await read_rater(harness, "HUMAN/7")
    assert (row.standing, row.reason) == (RaterStanding.QUARANTINED, trust["HUMAN/7"].quarantine_reason)
    [audit] = [row for row in await harness.all(Audit) if row.action == "rater.quarantined"]
    assert (audit.subject, audit.reason) == ("HUMAN/7", row.reason)
    async with harness.db.write() as session:
        await session.execute(update(Rater).values(counted_day=Rater.counted_day - 1))
    later = await update_trust(harness, {"HUMAN/7": [1.0]}, max_rater_day=5)
    assert later["HUMAN/7"].quarantine_reason == row.reason, "only an admin ends the quarantine"


async def test_trusted_raters_are_never_quarantined_and_blocked_ones_have_no_weight(harness: Harness) -> None:
    await update_trust(harness, {"HUMAN/7": [1.0], "HUMAN/8": [1.0]})
    await set_standing(harness, "HUMAN/7", RaterStanding.TRUSTED)
    await set_standing(harness, "HUMAN/8", RaterStanding.BLOCKED)
    values = {"HUMAN/7": [1.0] * 9, "HUMAN/8": [1.0] * 9}
    assert await update_trust(harness, values, max_rater_day=5) == {
        "HUMAN/7": RaterTrust(1.0),
        "HUMAN/8": RaterTrust(0.0),
    }
    assert (await read_rater(harness, "HUMAN/7")).standing == RaterStanding.TRUSTED


async def test_without_trust_no_check_runs_and_the_standing_of_an_admin_holds(harness: Harness) -> None:
    await update_trust(harness, {"HUMAN/7": [1.0], "HUMAN/8": [1.0]})
    await set_standing(harness, "HUMAN/8", RaterStanding.QUARANTINED, "odd")
    values = {"HUMAN/7": [1.0] * 9, "HUMAN/8": [1.0]}
    trust = await update_trust(harness, values, max_rater_day=5, trust=False)
    assert trust == {"HUMAN/7": RaterTrust(1.0), "HUMAN/8": RaterTrust(1.0, "odd")}


async def test_programs_have_no_daily_limit(harness: Harness) -> None:
    assert (await update_trust(harness, {"CODE/tests": [1.0] * 9}, max_rater_day=5))[
        "CODE/tests"
    ].quarantine_reason is None
    everybody = [row for row in await harness.all(Rater) if row.name == ALL_RATERS]
    assert everybody == [], "programs do not count as people"


async def test_a_rater_who_dislikes_what_others_like_is_quarantined(harness: Harness) -> None:
    for page in range(10):
        values = {f"HUMAN/{number}": [1.0, 1.0, 1.0, -1.0] for number in range(page, page + 10)}
        trust = await update_trust(harness, values | {"HUMAN/troll": [-1.0] * 3})
    reason = trust["HUMAN/troll"].quarantine_reason
    assert reason is not None and reason.startswith("rates 0% of ")
    assert [row.name for row in await harness.all(Rater) if row.standing == RaterStanding.QUARANTINED] == [
        "HUMAN/troll"
    ]


async def test_a_burst_on_one_page_is_quarantined_immediately(harness: Harness) -> None:
    values = {f"HUMAN/{number}": [1.0] for number in range(12)} | {"HUMAN/prolific": [1.0] * 48}
    trust = await update_trust(harness, values)
    assert [name for name, rater in trust.items() if rater.quarantine_reason] == ["HUMAN/prolific"]
    assert (await read_rater(harness, ALL_RATERS)).num_up == 12, (
        "quarantined feedback does not count for the population"
    )


async def test_a_rater_accepted_by_an_admin_is_quarantined_for_a_burst_only(harness: Harness) -> None:
    for page in range(10):
        values = {f"HUMAN/{number}": [1.0, 1.0, 1.0, -1.0] for number in range(page, page + 10)}
        await update_trust(harness, values | {"HUMAN/grim": [-1.0] * 3})
    await set_standing(harness, "HUMAN/grim", RaterStanding.NORMAL, "hard to please, and right")
    assert (await update_trust(harness, {"HUMAN/grim": [-1.0]}))["HUMAN/grim"].quarantine_reason is None
    assert (await update_trust(harness, {"HUMAN/grim": [-1.0] * 9}, max_rater_day=5))[
        "HUMAN/grim"
    ].quarantine_reason is not None


async def test_agreement_changes_the_weight(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        turn = [RaterSignal("HUMAN/7", 1.0), RaterSignal("HUMAN/8", -1.0), RaterSignal(None, 1.0)]
        await rater_trust.record_agreement(session, project_id, [turn] * 6)
    trust = await update_trust(harness, {"HUMAN/7": [1.0], "HUMAN/8": [-1.0]})
    assert trust["HUMAN/7"].weight == rater_weight(3.0, 3.0), "each comparison is divided between the two others"
    assert trust["HUMAN/8"].weight == rater_weight(0.0, 6.0) == 0.0


async def test_the_trust_in_a_rater_is_the_weight_of_a_sample(harness: Harness) -> None:
    """It weighted votes on the same turn alone, so that it did nothing to a turn with one vote."""
    project_id = (await harness.policy()).project_id
    async with harness.db.write() as session:
        session.add(Rater(project_id=project_id, name="HUMAN/staff", standing=RaterStanding.TRUSTED))
        await rater_trust.record_agreement(
            session, project_id, [[RaterSignal("HUMAN/odd", 1.0), RaterSignal(None, -1.0)]]
        )
    settings = harness.settings.replace(by_path({"trust": True, "batch_size": 4}))
    turns = [(await harness.turn()).id for _ in range(4)]
    for turn_id, thumb, rater in zip(turns, ("up", "up", "down"), ("staff", "new", "odd"), strict=False):
        await harness.vote(turn_id, thumb, source={"kind": "HUMAN", "id": rater})
    await curate(harness.db, settings)
    async with harness.db.write() as session:
        await rewards.record_reward(session, turns[3], "explicit", -1.0)  # a machine's
        await rewards.update_turn_samples(session, {turns[3]}, settings)
    expected = dict(zip(turns, (1.0, 0.4, rater_weight(0.0, 1.0), 0.4), strict=True))
    samples = {sample.turn_id: sample for sample in await harness.all(Sample)}
    assert {id: sample.weight for id, sample in samples.items()} == pytest.approx(expected)
    assert {abs(sample.reward) for sample in samples.values()} == {1.0}
    claimed = await claim_next_batch(harness, trust=True, batch_size=4)
    assert {sample.turn_id: sample.weight for sample in claimed.batch.samples} == pytest.approx(expected)


async def test_a_batch_takes_more_samples_of_raters_with_more_weight(harness: Harness) -> None:
    project_id = (await harness.policy()).project_id
    known = {"HUMAN/poor": (0.0, 9.0), "HUMAN/new": (0.0, 0.0), "HUMAN/fair": (6.0, 1.0), "HUMAN/good": (90.0, 0.0)}
    async with harness.db.write() as session:
        for name, (agreed, disagreed) in known.items():
            session.add(Rater(project_id=project_id, name=name, agreement_weight=agreed, disagreement_weight=disagreed))
        session.add(Rater(project_id=project_id, name="HUMAN/staff", standing=RaterStanding.TRUSTED))
    expected = {name: sample_quota(8, rater_weight(*agreement)) for name, agreement in known.items()} | {
        "HUMAN/staff": 12
    }
    assert expected["HUMAN/new"] == 3 and expected["HUMAN/poor"] == 1
    positions = union_all(*[select(literal(number).label("position")) for number in range(1, 13)]).subquery()
    rows = (
        select(Rater.name, func.count())
        .join(positions, is_within_allowance(positions.c.position, 8))
        .group_by(Rater.name)
    )
    async with harness.db.read() as session:
        assert dict((await session.execute(rows)).tuples().all()) == expected
        unknown = select(func.count()).select_from(positions.outerjoin(Rater, Rater.name == "HUMAN/unknown"))
        assert await session.scalar(unknown.where(is_within_allowance(positions.c.position, 8))) == 3


async def test_a_rater_named_after_a_turn_has_no_row(harness: Harness) -> None:
    assert await update_trust(harness, {"turn/chatcmpl-1": [1.0]}) == {"turn/chatcmpl-1": RaterTrust(0.4)}
    assert {row.name for row in await harness.all(Rater)} == {ALL_RATERS}


async def test_two_workers_that_count_at_the_same_time_lose_no_count(harness: Harness) -> None:
    names = [f"HUMAN/{number}" for number in range(20)]
    pages = [{name: [1.0] for name in names}, {name: [-1.0] for name in reversed(names)}] * 5
    await asyncio.gather(*[update_trust(harness, page) for page in pages])
    rows = {row.name: row for row in await harness.all(Rater)}
    assert {(rows[name].num_up, rows[name].num_down) for name in names} == {(5, 5)}
    assert (rows[ALL_RATERS].num_up, rows[ALL_RATERS].num_down) == (100, 100)


async def test_raters_are_separate_in_each_project(harness: Harness) -> None:
    await update_trust(harness, {"HUMAN/7": [1.0]})
    async with harness.db.write() as session:
        other, _ = await create_project(session, "other", "shop", "model")
        await rater_trust.update_trust(session, other.id, {"HUMAN/7": [-1.0]}, harness.settings)
    rows = [row for row in await harness.all(Rater) if row.name == "HUMAN/7"]
    assert sorted((row.num_up, row.num_down) for row in rows) == [(0, 1), (1, 0)]


async def test_the_waiting_samples_of_a_quarantined_rater_are_quarantined(harness: Harness) -> None:
    settings = harness.settings.replace({"raters.trust": True, "raters.max_rater_day": 2})
    source = {"kind": "HUMAN", "id": "7"}
    for _ in range(2):
        await harness.vote((await harness.turn()).id, source=source)
    await harness.vote((await harness.turn()).id, source={"kind": "HUMAN", "id": "8"})
    await curate(harness.db, settings)
    assert {sample.state for sample in await harness.all(Sample)} == {SampleState.OPEN}
    await harness.vote((await harness.turn()).id, source=source)
    await curate(harness.db, settings)
    states = {(sample.rater, sample.state) for sample in await harness.all(Sample)}
    assert states == {("HUMAN/7", SampleState.QUARANTINED), ("HUMAN/8", SampleState.OPEN)}


async def test_near_duplicates_share_a_cluster_and_an_empty_reply_has_none() -> None:
    assert rater_trust.cluster_key([1, 2, 3], [4, 5]) == rater_trust.cluster_key([1, 2, 3], [4, 5])
    assert rater_trust.cluster_key([1, 2, 3], [4, 5]) != rater_trust.cluster_key([1, 2, 3], [4, 6])
    assert rater_trust.cluster_key([1, 2, 3], []) is None


async def test_a_row_is_created_on_the_clock_of_the_database(harness: Harness) -> None:
    async with harness.db.read() as session:
        before = await session.scalar(select(now()))
    await update_trust(harness, {"HUMAN/7": [1.0]})
    async with harness.db.read() as session:
        after = await session.scalar(select(now()))
    assert before is not None and after is not None
    assert before <= (await read_rater(harness, "HUMAN/7")).created_at <= after
